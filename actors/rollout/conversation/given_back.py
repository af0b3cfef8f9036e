"""Messages as what their clients made of sampled answers: is this message that answer, whole and unchanged?

A client gives an answer back as it got it, without the white space around it, with its reasoning apart or left out, or
as the tool calls that a parser found in it. What a message lacks besides, or has besides, somebody changed. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from enum import IntEnum
from typing import Any

__all__ = ["Fit", "fit"]

Call = tuple[str, str]
"""A tool call: its name, and its arguments as JSON with sorted names."""


class Fit(IntEnum):
    """How well a message fits an answer: the more, the likelier it is that one."""

    NONE = 0
    """It is another answer, or a changed one."""
    PART = 1
    """What it has is the answer's, and only reasoning, or text before a tool call, is left out."""
    WHOLE = 2
    """It has all that the answer says: up to white space, or as tool calls."""
    VERBATIM = 3
    """It has the very text."""


_MARKS = re.compile(r"</?[^<>\s=\"]+>|\[/?[A-Z_]+\]|```(?:json)?|\bfunctions?\b|:\d+\b")
"""What models write around a tool call's JSON: `<tool_call>`, `[TOOL_CALLS]`, `functions.name:0`."""
_TAGGED = re.compile(r"(?:\s|\0|<[^<>\0\s=]+(?:(?:\s+\w+)?=\"?\0\"?)?\s*>)*")
"""Tool calls written with tags, each name and value a NUL: `<function=...><parameter=...>...</parameter>`."""
_PYTHONIC = re.compile(r"(?:[\s\[\](){},=:]|\"\0?\"|'\0?'|\0|<\|\w+\|>)*")
"""Tool calls written as Python has them, each name and value a NUL: `[weather(city="...")]`."""

_TRIES = 1000
"""Maximum of braces in an answer that begin no JSON: an untrained model may write nothing else."""


def fit(message: Mapping[str, Any], texts: Collection[str]) -> Fit:
    """Return how well a message fits an answer that has these texts: without special tokens, and with them."""
    calls = message.get("tool_calls")
    if not calls:
        return max((_plain(message, text) for text in texts), default=Fit.NONE)
    try:
        said = [_call(call.get("function") or call) for call in calls]
    except (AttributeError, TypeError, ValueError):  # a client's own form of calls, which no answer is compared with
        return Fit.NONE
    return max((_called(message, said, text) for text in texts), default=Fit.NONE)


def _plain(message: Mapping[str, Any], text: str) -> Fit:
    content = message.get("content")
    if not isinstance(content, str):
        return Fit.NONE
    if content == text:
        return Fit.VERBATIM
    if content.strip() == text.strip():
        return Fit.WHOLE
    _, mark, rest = text.rpartition("</think>")
    return _reasoned(message, text) if mark and content.strip() == rest.strip() else Fit.NONE


def _called(message: Mapping[str, Any], said: list[tuple[str, Any]], text: str) -> Fit:
    rest = text.rpartition("</think>")[2]
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else ""
    found, between = _objects(rest)
    wanted = [(name, _json(arguments)) for name, arguments in said]
    left: list[str] | None = None
    if [call for value in found for call in _as_call(value)] == wanted:
        left = _words(" ".join(between))
    elif [_json(value) for value in found] == [arguments for _, arguments in wanted]:
        left = _without_names(between, [name for name, _ in wanted])
    if left is None:
        whole = _is_written(rest.strip().removeprefix(content), said)
        return _reasoned(message, text) if whole else Fit.NONE
    if left == _words(content):
        return _reasoned(message, text)
    return Fit.NONE if content else min(Fit.PART, _reasoned(message, text))


def _reasoned(message: Mapping[str, Any], text: str) -> Fit:
    """Return how well a message fits whose reasoning alone is still to be compared."""
    thought, mark, _ = text.rpartition("</think>")
    own = thought.strip().removeprefix("<think>").strip()
    given = str(message.get("reasoning_content") or message.get("reasoning") or "").strip()
    if given == own:
        return Fit.WHOLE
    return Fit.NONE if given and mark else Fit.PART


# --- tool calls -------------------------------------------------------------------------------------------------------
def _call(function: Mapping[str, Any]) -> tuple[str, Any]:
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise ValueError("a tool call without a name")
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    return name, {} if arguments is None else arguments


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _as_call(value: Mapping[str, Any]) -> Iterator[Call]:
    function = value.get("function")
    value = function if isinstance(function, Mapping) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(name, str) and ("arguments" in value or "parameters" in value):
        try:
            yield name, _json(_call({"name": name, "arguments": arguments})[1])
        except ValueError:
            yield name, _json(arguments)


def _objects(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the JSON objects in a text, and what stands before, between and behind them."""
    found, between, done, failed, at = list[dict[str, Any]](), list[str](), 0, 0, text.find("{")
    while at >= 0 and failed < _TRIES:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except RecursionError:  # and so it would be at each of the braces behind this one
            break
        except ValueError:
            failed, end = failed + 1, at + 1
        else:
            found.append(value)
            between.append(text[done:at])
            done = end
        at = text.find("{", end)
    return found, [*between, text[done:]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", _MARKS.sub(" ", text))


def _without_names(between: list[str], names: list[str]) -> list[str] | None:
    """Return the words around arguments without the calls' names; None where one has not its name before it."""
    left: list[str] = []
    for text, name in zip(between, names, strict=False):
        words = re.findall(r"[\w-]+", _MARKS.sub(" ", text))
        if not words or words[-1] not in (name, f"function{name}"):  # with a special token between that no text has
            return None
        left += words[:-1]
    return left + _words(between[-1])


def _is_written(text: str, said: list[tuple[str, Any]]) -> bool:
    """Return True if a text is nothing but these calls, in order, in a form with tags or in Python's."""
    if "\0" in text:
        return False
    parts, at = list[str](), 0
    for word in (word for name, arguments in said for word in (name, *_scalars(arguments))):
        escaped = json.dumps(word, ensure_ascii=False)[1:-1]
        found = re.compile(rf"(?<!\w)(?:{re.escape(word)}|{re.escape(escaped)})(?!\w)").search(text, at)
        if found is None:
            return False
        parts.append(text[at : found.start()])
        at = found.end()
    skeleton = "\0".join([*parts, text[at:]])
    return _TAGGED.fullmatch(skeleton) is not None or _PYTHONIC.fullmatch(skeleton) is not None


def _scalars(value: Any) -> Iterator[str]:
    """Yield the names and values in arguments, in order; no empty ones."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _scalars(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _scalars(inner)
    elif value not in ("", None):
        yield value if isinstance(value, str) else json.dumps(value)
