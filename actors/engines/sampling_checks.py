"""Checks of the sampling settings and prompts that users send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import orjson

from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.schema_limits import exceeded_limit
from trinity_es.events.errors import EngineError, TrinityError

__all__ = [
    "MOST_ANSWERS", "MOST_PROMPTS", "MOST_TOKENS", "MOST_TOP_LOGPROBS", "SHARED_FIELDS", "checked_prompt", "excerpt",
    "logprob_at_temperature", "needs_whole_distribution", "with_options",
]

SHARED_FIELDS = ("temperature", "top_p", "n", "seed", "ignore_eos", "min_tokens", "min_p", "presence_penalty",
                 "frequency_penalty", "repetition_penalty")
"""Fields with the same name and meaning in `Sampling`, in vLLM's SamplingParams and in its HTTP API."""

MOST_TOKENS = 10_000_000
"""Maximum of `max_tokens` and of tokens in a prompt: more than any model's context, but harmless to an engine."""
MOST_ANSWERS = 4096
"""Maximum of `n`, the number of answers to one prompt."""
MOST_PROMPTS = 65_536
MOST_CHARACTERS = 8 * MOST_TOKENS
MOST_TOP_LOGPROBS = 20
"""Maximum of `top_logprobs`, as in vLLM and OpenAI's API."""
_OPTIONS = tuple(f.name for f in fields(Sampling))
_values_of = attrgetter(*_OPTIONS)


def _number(low: float, high: float = float("inf"), above: bool = False) -> Callable[[Any], bool]:
    """Return a check that a value is a number from `low` to `high`; if `above`, `low` itself is excluded."""

    def fits(v: Any) -> bool:
        return isinstance(v, int | float) and not isinstance(v, bool) and (low < v if above else low <= v) and v <= high

    return fits


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _is_schema(value: Any) -> bool:
    try:
        return isinstance(value, str) and (not value or isinstance(orjson.loads(value), dict))
    except orjson.JSONDecodeError:
        return False


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_number(0.0, 1e6), "a number, 0 (greedy) or more"),
    "top_p": (_number(0.0, 1.0, above=True), "a number above 0, at most 1"),
    "top_k": (_integer(-1, 2**31 - 1), "an integer, -1 for all tokens"),
    "max_tokens": (_integer(1, MOST_TOKENS), f"an integer, 1 to {MOST_TOKENS:,}"),
    "logprobs": (lambda v: isinstance(v, bool), "true or false"),
    "seed": (lambda v: v is None or _integer(0, 2**63 - 1)(v), "an integer, 0 or more, of 63 bits, or null"),
    "n": (_integer(1, MOST_ANSWERS), f"an integer, 1 to {MOST_ANSWERS:,}"),
    "stop": (
        lambda v: isinstance(v, tuple) and len(v) <= 1000 and all(isinstance(s, str) and 0 < len(s) <= 9999 for s in v),
        "a text or a list of texts, 1,000 of 9,999 characters at most",
    ),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "min_tokens": (_integer(0, MOST_TOKENS), f"an integer, 0 to {MOST_TOKENS:,}"),
    "min_p": (_number(0.0, 1.0), "a number from 0 to 1"),
    "presence_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "frequency_penalty": (_number(-2.0, 2.0), "a number from -2 to 2"),
    "repetition_penalty": (_number(0.0, 1e6, above=True), "a number above 0"),
    "json_schema": (_is_schema, "a JSON schema, as text or as a mapping, or an empty text"),
    "adapter": (lambda v: isinstance(v, str) and len(v) <= 100, "the name of a LoRA adapter, or an empty text"),
    "top_logprobs": (_integer(0, MOST_TOP_LOGPROBS), f"an integer, 0 to {MOST_TOP_LOGPROBS}"),
}


def with_options(base: Sampling, options: Mapping[str, Any], error: type[TrinityError], where: str) -> Sampling:
    """Return `base` with these options changed. Raises `error` for an unknown name or an invalid value.

    `where` says where the options come from; error messages begin with it.
    """
    unknown = sorted(name for name in options if name not in _RULES)
    if unknown:
        raise error(f"{where}: no sampling option is called {', '.join(unknown)}; known are {', '.join(_OPTIONS)}")
    values: dict[str, Any] = dict(zip(_OPTIONS, _values_of(base), strict=True))
    for name, value in options.items():
        if name == "stop":
            value = [] if value is None else [value] if isinstance(value, str) else value
            value = tuple(value) if isinstance(value, list) else value
        if name == "json_schema" and isinstance(value, dict):
            value = orjson.dumps(value).decode()
        if name == "logprobs" and (value is None or (type(value) is int and value >= 0)):
            value = value is not None  # as in vLLM: 0 means the sampled token's logprob alone, null none
        fits, allowed = _RULES[name]
        if value is None and not fits(None):  # null keeps the value of `base`
            continue
        if not fits(value):
            raise error(f"{where}: {name} is {excerpt(value)}: give {allowed}")
        if name == "json_schema" and value and (excess := exceeded_limit(orjson.loads(value))):
            raise error(f"{where}: {name}: {excess}")
        values[name] = value
    return Sampling(**values)


def checked_prompt(prompt: Any, error: Callable[[str], Exception]) -> Any:
    """Return the prompt (text or token ids) unchanged. Raises `error` if it is too long for any engine."""
    if isinstance(prompt, str):
        if len(prompt) > MOST_CHARACTERS:
            raise error(f"the prompt has {len(prompt):,} characters: the limit is {MOST_CHARACTERS:,}, so shorten it")
    elif len(prompt) > MOST_TOKENS:
        raise error(f"the prompt has {len(prompt):,} tokens: the limit is {MOST_TOKENS:,}, so shorten it")
    return prompt


def excerpt(value: Any) -> str:
    """Return a value's repr for an error message, at most 80 characters long."""
    text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**128 else repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def needs_whole_distribution(tokens: int, vocabulary: int, temperature: float, max_values: int) -> bool:
    """Return True if the logprobs of a text at this temperature need the whole distribution at each of its tokens.

    Raises EngineError if that is more than `max_values` values, or if the temperature is not above 0.
    """
    if not temperature > 0.0:
        raise EngineError(f"the temperature is {temperature}: give logprobs one above 0", refused=True)
    if temperature != 1.0 and vocabulary * tokens > max_values:
        raise EngineError(
            f"logprobs of {tokens} tokens at temperature {temperature} would fetch {vocabulary:,} values per token: "
            "ask for temperature 1, or for fewer tokens at a time", refused=True,
        )
    return temperature != 1.0


def logprob_at_temperature(logprob: float, row: Iterable[float], temperature: float) -> float:
    """Return a token's logprob at temperature T, log softmax(z / T) = l / T - logsumexp(l / T).

    `logprob` is the token's l = log softmax(z), its logprob at temperature 1; `row` has the l of all tokens.
    """
    import numpy as np

    scaled = np.array(list(row), dtype=np.float64) / temperature
    largest = scaled.max()  # subtracted so that exp can't overflow
    return float(logprob / temperature - largest - np.log(np.exp(scaled - largest).sum()))
