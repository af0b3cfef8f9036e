"""A loop of reasoning and tools: the model calls Python functions until it answers without a call.

A tool is a function with type hints, named "module:name". Its schema comes from its signature, its description from its
docstring. The model sees its result, and also its errors. Calls are read as the chat templates of Qwen, Hermes and
others write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Messages stay as they were sampled, so
the whole conversation is one experience, token by token, and only the model's own tokens are trained on.
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

from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import DataError, EngineError
from trinity_es.events.experience import Experience
from trinity_es.workflows.rewards import known_of, value_of
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

    def told(self, arguments: Any) -> str:
        """Return the function's result for these arguments, as a text. Raises the function's errors."""
        if not isinstance(arguments, dict):
            raise TypeError("arguments must be an object")
        value = value_of(self.call(**arguments))
        compact = json.JSONEncoder(default=str, ensure_ascii=False, separators=(",", ":"))
        text = value if isinstance(value, str) else compact.encode(value)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... (cut)"


@functools.cache
def tool_of(path: str) -> Tool:
    """Return the tool named by "module:name".

    Raises UnknownWorkflow, and DataError if its hints give no schema.
    """
    function: Any = resolve(path, {}, "tool")
    try:
        parameters = pydantic.TypeAdapter(function).json_schema()
        called = pydantic.validate_call(function)
    except (pydantic.errors.PydanticUserError, TypeError) as e:
        raise DataError(f"tool {path} has parameters that JSON has no form for: {e}") from e
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return Tool(name=function.__name__, schema={"type": "function", "function": described}, call=called)


class ReActWorkflow(MultiTurnWorkflow):
    """Turns with tools until an answer without a call; the reward is that of this answer (`reward_fn`).

    `workflow_args`: `tools` (a list of "module:name"), `max_turns` (8: answers of the model). Metrics: `turns`,
    `tool_calls`, `tool_errors`, `unfinished` (1 if the last answer still calls a tool: it was the last turn, or the
    model's context has no room for another).
    """

    ARGS = frozenset({"tools", "max_turns"})
    FUNCTION_ARGS = frozenset({"tools"})
    KNOWN_TO_REWARDS = KNOWN

    def run(self) -> list[Experience]:
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
                told, failed = _told(tools, call)
                messages.append({"role": "tool", "content": told})
                counts["tool_calls"] += 1
                counts["tool_errors"] += failed
        parts = self.reward(**known_of(answer))
        experience: Experience = self.model.experience_from_messages(messages, tools=schemas)
        info = {**parts, **counts, "unfinished": int(bool(calls))}
        return [self._finished(experience, sum(parts.values()), info, None)]


def _told(tools: dict[str, Tool], call: str) -> tuple[str, bool]:
    """Return a call's result as the model sees it, and whether it failed."""
    try:
        asked = orjson.loads(call)
        tool = tools.get(asked["name"])
        if tool is None:
            return f"error: there is no tool {asked['name']!r}, but {', '.join(tools) or 'none'}", True
        return tool.told(asked.get("arguments") or {}), False
    except Exception as e:  # the model wrote no call, or a user's tool raised: it may try again
        return f"error: {type(e).__name__}: {e}", True
