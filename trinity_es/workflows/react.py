"""A loop of reasoning and tools: the model calls Python functions until it answers without a call.

A tool is a function with type hints, named "module:name". Its schema comes from its signature, its description from its
docstring. The model sees its results and errors. Calls have the form that the chat templates of Qwen, Hermes and others
use: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The whole conversation becomes one experience with the
tokens that were sampled, and only the model's own tokens are trained on.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import pydantic

from trinity_es.actors.plugin_lookup import resolve
from trinity_es.events.errors import DataError, EngineError
from trinity_es.events.experience import Experience
from trinity_es.workflows.rewards import answer_values, value_of
from trinity_es.workflows.workflow import KNOWN, MultiTurnWorkflow

__all__ = ["ReActWorkflow", "Tool", "tool_of"]

MOST_CHARACTERS = 8000
"""Maximum number of characters of a tool's result that the model sees."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]
    """Schema, in the form of chat templates and OpenAI's API."""
    call: Callable[..., Any]
    """The function, which checks its arguments by their type hints."""

    def result_text(self, arguments: Any) -> str:
        """Return the function's result as a text. Raises the function's errors."""
        if not isinstance(arguments, dict):
            raise TypeError("arguments must be an object")
        value = value_of(self.call(**arguments))
        encoder = json.JSONEncoder(default=str, ensure_ascii=False, separators=(",", ":"))
        text = value if isinstance(value, str) else encoder.encode(value)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... (cut)"


@functools.cache
def tool_of(path: str) -> Tool:
    """Return the tool for "module:name". Raises UnknownWorkflow, or DataError if its hints give no JSON schema."""
    function: Any = resolve(path, {}, "tool")
    try:
        parameters = pydantic.TypeAdapter(function).json_schema()
        checking_function = pydantic.validate_call(function)
    except (pydantic.errors.PydanticUserError, TypeError) as e:
        raise DataError(f"the parameters of tool {path} can't be described by a JSON schema: {e}") from e
    description = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return Tool(name=function.__name__, schema={"type": "function", "function": description}, call=checking_function)


class ReActWorkflow(MultiTurnWorkflow):
    """Turns with tools, until the model answers without a call. `reward_fn` rewards the last answer.

    `workflow_args`: `tools` (a list of "module:name"), `max_turns` (8: answers of the model), `idempotent` (false: a
    run that was lost during a tool call starts over; true: it repeats the call and goes on). Metrics: `turns`,
    `tool_calls`, `tool_errors`, `unfinished` (1 if the last answer still calls a tool, because no turn was left or the
    model's context was full).
    """

    ARGS = frozenset({"tools", "max_turns", "idempotent"})
    FUNCTION_ARGS = frozenset({"tools"})
    KNOWN_TO_REWARDS = KNOWN

    def run(self) -> list[Experience]:
        """Play turns until an answer calls no tool, or turns or context are used up; reward the last answer."""
        tools = {tool.name: tool for tool in map(tool_of, self.task.workflow_args.get("tools", ()))}
        schemas = [tool.schema for tool in tools.values()] or None
        messages, counts = self.prompt_messages(), {"turns": 0, "tool_calls": 0, "tool_errors": 0}
        while True:
            try:
                [answer] = self.model.chat(messages, tools=schemas, n=1)
            except EngineError as e:
                if counts["turns"] and e.details.get("refused"):  # the tools' results leave no room for an answer
                    break
                raise
            messages.append({"role": "assistant", "content": answer.response_text})
            counts["turns"] += 1
            calls = _CALL.findall(answer.response_text)
            if not calls or counts["turns"] >= self.task.workflow_args.get("max_turns", 8) or answer.truncate_status:
                break
            for call in calls:
                result, has_failed = self.step(
                    "tool call", functools.partial(_call_result, tools), call,
                    idempotent=self.task.workflow_args.get("idempotent", False),
                )
                messages.append({"role": "tool", "content": result})
                counts["tool_calls"] += 1
                counts["tool_errors"] += has_failed
        parts = self.reward(**answer_values(answer))
        experience: Experience = self.model.experience_from_messages(messages, tools=schemas)
        info = {**parts, **counts, "unfinished": int(bool(calls))}
        return [self._with_reward(experience, sum(parts.values()), info, None)]


def _call_result(tools: dict[str, Tool], call: str) -> tuple[str, bool]:
    """Run a tool call (JSON), and return the text for the model and whether the call failed."""
    try:
        request = orjson.loads(call)
        tool = tools.get(request["name"])
        if tool is None:
            return f"error: there is no tool {request['name']!r}, but {', '.join(tools) or 'none'}", True
        return tool.result_text(request.get("arguments") or {}), False
    except Exception as e:  # malformed call, or the tool raised: the model may try again
        return f"error: {type(e).__name__}: {e}", True
