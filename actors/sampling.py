"""Sampling as users give it: names and values checked, laid over a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import orjson

from actors.engines import Sampling
from events.errors import TrinityError

__all__ = ["MOST_TOP_LOGPROBS", "merged"]

MOST_TOP_LOGPROBS = 20
"""Maximum of `top_logprobs`: vLLM's own, and OpenAI's."""
_KNOWN = tuple(f.name for f in fields(Sampling))


def _number(low: float, high: float = float("inf"), above: bool = False) -> Callable[[Any], bool]:
    def fits(v: Any) -> bool:
        return isinstance(v, int | float) and not isinstance(v, bool) and (low < v if above else low <= v) and v <= high

    return fits


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _is_schema(value: Any) -> bool:
    try:
        return isinstance(value, str) and (not value or isinstance(orjson.loads(value), dict))
    except orjson.JSONDecodeError:
        return False


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_number(0.0), "a number, 0 (greedy) or more"),
    "top_p": (_number(0.0, 1.0, above=True), "a number above 0, at most 1"),
    "top_k": (_integer(-1), "an integer, -1 for all tokens"),
    "max_tokens": (_integer(1), "an integer, 1 or more"),
    "logprobs": (lambda v: isinstance(v, bool), "true or false"),
    "seed": (lambda v: v is None or _integer(0)(v), "an integer, 0 or more, or null"),
    "n": (_integer(1), "an integer, 1 or more"),
    "stop": (lambda v: isinstance(v, tuple) and all(isinstance(s, str) and s for s in v), "a text or a list of texts"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "min_tokens": (_integer(0), "an integer, 0 or more"),
    "min_p": (_number(0.0, 1.0), "a number from 0 to 1"),
    "presence_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "frequency_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "repetition_penalty": (_number(0.0, above=True), "a number above 0"),
    "json_schema": (_is_schema, "a JSON schema, as text or as a mapping, or an empty text"),
    "top_logprobs": (lambda v: _integer(0)(v) and v <= MOST_TOP_LOGPROBS, f"an integer, 0 to {MOST_TOP_LOGPROBS}"),
}


def merged(base: Sampling, given: Mapping[str, Any], error: type[TrinityError], where: str) -> Sampling:
    """`base` with what is given. Raises `error` for an unknown name or a value that can't be."""
    unknown = sorted(set(given) - set(_KNOWN))
    if unknown:
        raise error(f"{where}: no sampling is called {', '.join(unknown)}; known are {', '.join(_KNOWN)}")
    values: dict[str, Any] = {name: getattr(base, name) for name in _KNOWN}
    for name, value in given.items():
        if name == "stop":
            value = () if value is None else (value,) if isinstance(value, str) else value
            value = tuple(value) if isinstance(value, list) else value
        if name == "json_schema" and isinstance(value, dict):
            value = orjson.dumps(value).decode()
        if name == "logprobs" and (value is None or (type(value) is int and value >= 0)):
            value = value is not None  # vLLM's own way: 0 is the sampled token's, null none
        fits, what = _RULES[name]
        if value is None and not fits(None):
            continue  # nothing was said
        if not fits(value):
            raise error(f"{where}: {name} is {value!r}: give {what}")
        values[name] = value
    return Sampling(**values)
