"""Comparison of a client's message with a sampled answer, to see if it is that answer, whole and unchanged. Pure.

A client may send an answer back verbatim, stripped, with its reasoning separated or left out, or as the tool calls that
a parser found in it. Any other difference means that the answer was changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from enum import IntEnum
from typing import Any

__all__ = ["Fit", "fit"]

Call = tuple[str, str]
"""A tool call: its name, and its arguments as JSON with sorted keys."""


class Fit(IntEnum):
    """How far a client's message equals a sampled answer; higher is better."""

    NONE = 0
    """The message is another answer, or a changed one."""
    PART = 1
    """The message lacks the answer's reasoning, or the text before a tool call."""
    WHOLE = 2
    """The message has all of the answer, up to white space, or as tool calls."""
    VERBATIM = 3

_MARKS = re.compile(r"</?[^<>\s=\"]+>|\[/?[A-Z_]+\]|```(?:json)?|\bfunctions?\b|:\d+\b")
"""Marks around a tool call's JSON: `<tool_call>`, `[TOOL_CALLS]`, `functions.name:0`."""
_TAGGED = re.compile(r"(?:\s|\0|<[^<>\0\s=]+(?:(?:\s+\w+)?=\"?\0\"?)?\s*>)*")
"""Text of tool calls as tags (`<function=...><parameter=...>...</parameter>`), with NUL for each name and value."""
_PYTHONIC = re.compile(r"(?:[\s\[\](){},=:]|\"\0?\"|'\0?'|\0|<\|\w+\|>)*")
"""Text of tool calls as Python (`[weather(city="...")]`), with NUL for each name and value."""

_MAX_FAILURES = 1000
"""Maximum number of braces that begin no JSON object, since an untrained model may write nothing else."""


def fit(message: Mapping[str, Any], texts: Collection[str]) -> Fit:
    """Compare a client's message with an answer, whose `texts` are without and with special tokens."""
    calls = message.get("tool_calls")
    if not calls:
        return max((_text_fit(message, text) for text in texts), default=Fit.NONE)
    try:
        parsed = [_name_and_arguments(call.get("function") or call) for call in calls]
    except (AttributeError, TypeError, ValueError):  # a client's own form of calls
        return Fit.NONE
    return max((_calls_fit(message, parsed, text) for text in texts), default=Fit.NONE)


def _text_fit(message: Mapping[str, Any], text: str) -> Fit:
    """Compare a message without tool calls with an answer's text."""
    content = message.get("content")
    if not isinstance(content, str):
        return Fit.NONE
    if content == text:
        return Fit.VERBATIM
    if content.strip() == text.strip():
        return Fit.WHOLE
    _, mark, answer = text.rpartition("</think>")
    return _reasoning_fit(message, text) if mark and content.strip() == answer.strip() else Fit.NONE


def _calls_fit(message: Mapping[str, Any], calls: list[tuple[str, Any]], text: str) -> Fit:
    """Compare a message that has these tool calls with an answer's text."""
    answer = text.rpartition("</think>")[2]
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else ""
    objects, between = _json_objects(answer)
    expected = [(name, _json(arguments)) for name, arguments in calls]
    words: list[str] | None = None
    if [call for value in objects for call in _as_call(value)] == expected:
        words = _words(" ".join(between))
    elif [_json(value) for value in objects] == [arguments for _, arguments in expected]:
        words = _without_names(between, [name for name, _ in expected])
    if words is None:
        is_written = _is_written(answer.strip().removeprefix(content), calls)
        return _reasoning_fit(message, text) if is_written else Fit.NONE
    if words == _words(content):
        return _reasoning_fit(message, text)
    return Fit.NONE if content else min(Fit.PART, _reasoning_fit(message, text))


def _reasoning_fit(message: Mapping[str, Any], text: str) -> Fit:
    """Compare the reasoning of a message with that of the sampled `text`, when their other parts are equal already.

    PART means that the message has no reasoning.
    """
    thought, mark, _ = text.rpartition("</think>")
    sampled_reasoning = thought.strip().removeprefix("<think>").strip()
    reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "").strip()
    if reasoning == sampled_reasoning:
        return Fit.WHOLE
    return Fit.NONE if reasoning and mark else Fit.PART


# --- tool calls -------------------------------------------------------------------------------------------------------
def _name_and_arguments(function: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a tool call's name and arguments, which may be JSON text. Raises ValueError without a name."""
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise ValueError("a tool call has no function name")
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    return name, {} if arguments is None else arguments


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _as_call(value: Mapping[str, Any]) -> Iterator[Call]:
    """Yield a JSON object of an answer as a tool call; nothing if it is not one."""
    function = value.get("function")
    value = function if isinstance(function, Mapping) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(name, str) and ("arguments" in value or "parameters" in value):
        try:
            yield name, _json(_name_and_arguments({"name": name, "arguments": arguments})[1])
        except ValueError:
            yield name, _json(arguments)


def _json_objects(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the JSON objects in a text, and the texts before, between and after them."""
    objects, between = list[dict[str, Any]](), list[str]()
    last_end = failure_count = 0
    begin = text.find("{")
    while begin >= 0 and failure_count < _MAX_FAILURES:
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except RecursionError:  # the following braces would raise it too
            break
        except ValueError:
            failure_count += 1
            end = begin + 1
        else:
            objects.append(value)
            between.append(text[last_end:begin])
            last_end = end
        begin = text.find("{", end)
    return objects, [*between, text[last_end:]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", _MARKS.sub(" ", text))


def _without_names(between: list[str], names: list[str]) -> list[str] | None:
    """Return the words around the calls' arguments, without the calls' names; None if a name is missing."""
    other_words: list[str] = []
    for text, name in zip(between, names, strict=False):
        words = re.findall(r"[\w-]+", _MARKS.sub(" ", text))
        if not words or words[-1] not in (name, f"function{name}"):  # joined if a special token was between them
            return None
        other_words += words[:-1]
    return other_words + _words(between[-1])


def _is_written(text: str, calls: list[tuple[str, Any]]) -> bool:
    """Return True if a text consists of these calls, in order, written as tags or as Python."""
    if "\0" in text:
        return False
    parts, position = list[str](), 0
    for word in (word for name, arguments in calls for word in (name, *_scalars(arguments))):
        escaped = json.dumps(word, ensure_ascii=False)[1:-1]
        match = re.compile(rf"(?<!\w)(?:{re.escape(word)}|{re.escape(escaped)})(?!\w)").search(text, position)
        if match is None:
            return False
        parts.append(text[position : match.start()])
        position = match.end()
    skeleton = "\0".join([*parts, text[position:]])
    return _TAGGED.fullmatch(skeleton) is not None or _PYTHONIC.fullmatch(skeleton) is not None


def _scalars(value: Any) -> Iterator[str]:
    """Yield the names and scalar values in a call's arguments as texts, in order, without empty values."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _scalars(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _scalars(inner)
    elif value not in ("", None):
        yield value if isinstance(value, str) else json.dumps(value)
