"""The workflow `openenv`: an episode with an OpenEnv server (0.10), over its WebSocket.

Each run opens its own session, and closes it however the run ends. Observations are user messages, the model's answers
are the actions, and the reward is the sum of the steps' rewards. A server error fails the run and never becomes a
reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from trinity_es.actors.plugin_lookup import resolve
from trinity_es.events.errors import DataError, EnvironmentFailed, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.workflows.row_prompts import chat_of
from trinity_es.workflows.workflow import Workflow

__all__ = ["OpenEnvSession", "OpenEnvWorkflow", "action_of", "is_about_action", "shown"]

MAX_TURNS = 32
"""Default maximum number of actions in an episode."""
ANSWER_SECONDS = 60.0
"""Default time limit for a server's answer."""
CONNECT_SECONDS = 60.0
"""Default time to wait for a server that is full or unreachable: it may be restarting."""
TELL_SECONDS = 5.0
"""Time that a server may be unreachable before the run reports it, since the server may be starting."""
CLOSE_SECONDS = 2.0
MESSAGE_BYTES = 100 * 1024 * 1024
_ENVIRONMENT_ERRORS = frozenset({"EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"})
_NOT_IN_ACTION = object()
_TOOL_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of action schemas whose actions are tool calls; the environment lists its tools."""
_TOOL_CALL = {"type": "object", "required": ["type", "tool_name", "arguments"], "properties": {
    "type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}


class OpenEnvWorkflow(Workflow):
    """Episode with the OpenEnv server at `workflow_args.url`. The reward is the sum over its steps.

    `workflow_args`: `url` of the server; `reset`, arguments of its reset, which the row's `reset` overrides;
    `max_turns` (32); `answer_timeout` (60 s); `connect_timeout` (60 s), for a server that is full or unreachable;
    `headers` of the connection; `parser`, "module:function" that turns the model's text and the action's JSON schema
    into an action (a dict), or raises ValueError; `observe`, "module:function" that turns an observation and the schema
    into a user message; `invalid_reward`, the reward for an answer that is not a valid action, which ends the episode
    (by default the run fails).
    """

    is_async = True
    ARGS = frozenset({
        "url", "reset", "max_turns", "answer_timeout", "connect_timeout", "headers", "parser", "observe",
        "invalid_reward",
    })
    FUNCTION_ARGS = frozenset({"parser", "observe"})

    async def run_async(self) -> list[Experience]:
        """Play until the environment ends the episode, `max_turns` is reached, or an answer is not a valid action."""
        args = self.task.workflow_args
        parse = _load_function(args.get("parser"), action_of)
        observe = _load_function(args.get("observe"), shown)
        messages = self.opening()
        rewards: list[float] = []
        counts = {"turns": 0.0, "invalid_actions": 0.0}
        async with session(args, lambda reason: self.model.set_workflow_state({"waits_for": reason})) as env:
            schema = await env.action_schema()
            state = await env.reset({**(args.get("reset") or {}), **((self.task.raw_task or {}).get("reset") or {})})
            for _ in range(args.get("max_turns", MAX_TURNS)):
                if state["done"]:
                    break
                messages.append({"role": "user", "content": observe(state["observation"], schema)})
                [answer] = await self.model.chat_async(messages)
                messages.append({"role": "assistant", "content": answer.response_text})
                counts["turns"] += 1
                try:
                    state = await env.step(parse(answer.response_text or "", schema))
                except (ValueError, _NoAction) as e:
                    if "invalid_reward" not in args:
                        raise EnvironmentFailed("the model's answer is not a valid action: "
                                                f"{e}", kind="workflow") from e
                    rewards.append(float(args["invalid_reward"]))
                    counts["invalid_actions"] += 1
                    break
                if state["reward"] is not None:
                    rewards.append(float(state["reward"]))
        return self._experiences(rewards, counts)

    def opening(self) -> list[dict[str, Any]]:
        """Return the messages before the first observation: the system prompt and the row's prompt, if any.

        Without a system prompt, a text prompt of the row is the system message.
        """
        prompt, system = self.task.task_desc, self.task.format_args.get("system_prompt")
        if isinstance(prompt, list):
            return chat_of(prompt, system)
        texts = [text for text in (system, prompt) if text]
        return [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=False)]

    def _experiences(self, rewards: list[float], metrics: dict[str, float]) -> list[Experience]:
        """Return the episode's experiences, each with the sum of `rewards`. Raises WorkflowError if there are none."""
        if not rewards:
            raise WorkflowError("the environment gave no reward in any step, so the episode has none: have its server "
                                "set `reward`")
        reward = math.fsum(rewards)
        if not math.isfinite(reward):
            raise WorkflowError(f"the environment gave the rewards {rewards}: numbers are expected")
        experiences: list[Experience] = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics = {**metrics, "reward": reward}
        return experiences


class _NoAction(Exception):
    """The server rejected the action as invalid."""


class OpenEnvSession:
    """Connection of one episode to a server. Methods raise EnvironmentFailed if the server fails or dies."""

    def __init__(self, http: aiohttp.ClientSession, socket: Any, url: str, timeout: float) -> None:
        self._http, self._socket, self._url, self._timeout = http, socket, url, timeout
        # Always have a read pending: aiohttp answers the server's pings only during a read, and the model may be slow.
        self._next_message = asyncio.create_task(socket.receive())

    async def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode; return `observation`, `reward` and `done`."""
        return _step_result(await self.ask({"type": "reset", "data": arguments}), self._url)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return _step_result(await self.ask({"type": "step", "data": action}), self._url)

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the environment's actions; for tool calls with the available tools."""
        async with _translated_errors(self._url), self._http.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            schema: dict[str, Any] = json.loads(await _body(response))["action"]
        if schema.get("title") in _TOOL_ACTIONS:
            result = await self.step({"type": "list_tools"})
            return {**_TOOL_CALL, "available_tools": result["observation"].get("tools")}
        return schema

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of the server's answer. Raises _NoAction for an invalid action."""
        request = json.dumps(message)
        async with _translated_errors(self._url):
            with suppress(aiohttp.ClientError, ConnectionError):  # a closing server may have sent the reason
                await self._socket.send_str(request)
            answer = await asyncio.wait_for(asyncio.shield(self._next_message), self._timeout)
            self._next_message = asyncio.create_task(self._socket.receive())
            if answer.type is not aiohttp.WSMsgType.TEXT:
                raise EnvironmentFailed(f"the OpenEnv server {self._url} closed the session ({answer.type.name})")
            reply = json.loads(answer.data)
            data: dict[str, Any] = reply["data"]
        if reply["type"] == "error":
            code, text = data.get("code"), f"{data.get('message')} {data.get('errors') or ''}".strip()
            if code == "VALIDATION_ERROR" and message["type"] == "step":
                if is_about_action(json.loads(request)["data"], data.get("errors")):
                    raise _NoAction(f"{code}: {text[:500]}")
                text = f"in its own code, the action is not at fault: {text}"
            if code == "CAPACITY_REACHED":
                raise _Full(f"the OpenEnv server {self._url} has no room for another episode: {text}")
            kind = "workflow" if code in _ENVIRONMENT_ERRORS else "infra"
            raise EnvironmentFailed(f"the OpenEnv server {self._url} failed: {code}: {text[:500]}", kind=kind)
        return data

    async def close(self) -> None:
        """Close the connection, which ends the session on the server."""
        self._next_message.cancel()
        with suppress(Exception):  # the server may be gone
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Return a response's body. Raises EnvironmentFailed if it is larger than `MESSAGE_BYTES`."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MESSAGE_BYTES:
            raise EnvironmentFailed(
                f"{response.url} answers with more than {MESSAGE_BYTES:,} bytes: check that an OpenEnv server is there"
            )
    return bytes(body)


def _step_result(data: dict[str, Any], url: str) -> dict[str, Any]:
    """Return `observation`, `reward` and `done` of an answer. Raises EnvironmentFailed if the answer is malformed."""
    observation, reward = data.get("observation"), data.get("reward")
    if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
        raise EnvironmentFailed(f"the OpenEnv server {url} answered {str(data)[:200]}: an observation is expected")
    return {"observation": observation, "reward": reward, "done": bool(data.get("done"))}


class _Unavailable(EnvironmentFailed):
    """The server is full or unreachable."""


class _Full(_Unavailable):
    """The server is full, so waiting is normal."""


@asynccontextmanager
async def session(args: dict[str, Any], tell: Callable[[str], Awaitable[None]]) -> AsyncIterator[OpenEnvSession]:
    """Open a session with the server that `args` (`workflow_args`) name, for `async with`.

    Waits while the server is full or unreachable. While it is unreachable, `tell` is called with the reason, and with
    an empty text when the wait is over.
    """
    url, timeout = args.get("url"), float(args.get("answer_timeout", ANSWER_SECONDS))
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise DataError(f"workflow_args.url is {url!r}: give the OpenEnv server's URL, http://HOST:PORT")
    url = url.rstrip("/")
    async with aiohttp.ClientSession(headers=args.get("headers"), timeout=aiohttp.ClientTimeout(timeout)) as http:
        env = await _connect(http, url, timeout, float(args.get("connect_timeout", CONNECT_SECONDS)), tell)
        try:
            yield env
        finally:
            await env.close()


async def _connect(
    http: aiohttp.ClientSession, url: str, timeout: float, patience: float, tell: Callable[[str], Awaitable[None]]
) -> OpenEnvSession:
    """Return a new session. Retries for `patience` seconds, and then raises the last error."""
    clock = asyncio.get_running_loop().time
    started_at = clock()
    has_reported = False
    while True:
        try:
            async with _translated_errors(url):
                socket = await http.ws_connect(f"{url}/ws", max_msg_size=MESSAGE_BYTES)
            env = OpenEnvSession(http, socket, url, timeout)
            try:
                await env.ask({"type": "state"})
            except BaseException:
                await env.close()
                raise
            if has_reported:
                await tell("")  # else the run counts as waiting until it ends
            return env
        except _Unavailable as e:
            waited_seconds = clock() - started_at
            if waited_seconds >= patience:
                raise
            if not isinstance(e, _Full) and waited_seconds >= TELL_SECONDS:
                has_reported = True
                problem = f"{e.__cause__ or e.message}, for {waited_seconds:.0f} s"
                await tell(f"the OpenEnv server {url}: {problem}; it gives up in {patience - waited_seconds:.0f} s")
            await asyncio.sleep(random.uniform(0.1, 1.0))


@asynccontextmanager
async def _translated_errors(url: str) -> AsyncIterator[None]:
    """Turn errors of the connection into EnvironmentFailed: kind `timeout`, or `infra` for an unreachable server."""
    try:
        yield
    except TimeoutError as e:
        raise EnvironmentFailed(f"the OpenEnv server {url} did not answer in time", kind="timeout") from e
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as e:
        raise _Unavailable(f"the OpenEnv server {url} can't be reached: {type(e).__name__}: {e}") from e


def action_of(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a text's action: a JSON object, fenced or not, or the only required field's value. Raises ValueError."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if isinstance(value, dict):
        return value
    required_fields = schema.get("required") or []
    if len(required_fields) != 1:
        raise ValueError(f"{text[:80]!r} is not a JSON object, but an action needs the fields {required_fields}")
    [field] = required_fields
    field_type = (schema.get("properties") or {}).get(field, {}).get("type")
    return {field: text if field_type == "string" else value}


def shown(observation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return an observation and the action schema as JSON, for the user message."""
    return json.dumps({"observation": observation, "action_schema": schema}, ensure_ascii=False)


def is_about_action(action: Any, errors: Any) -> bool:
    """Return whether each of pydantic's errors is about a value of the action.

    The server uses the same error code if its own code made an invalid value.
    """
    def value_at(loc: list[Any]) -> Any:
        """Return the action's value at this location of a pydantic error, or _NOT_IN_ACTION."""
        value = action
        for depth, key in enumerate(loc):
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                if depth == 0:  # deeper, the path also contains the names of union members
                    return _NOT_IN_ACTION
        return value

    if not isinstance(action, dict):
        return True
    try:
        return bool(errors) and all(
            value_at(e["loc"][:-1] if e["type"] == "missing" else e["loc"]) == e.get("input") for e in errors)
    except (KeyError, TypeError):
        return False


def _load_function(name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
    return default if name is None else resolve(name, {}, "function")
