"""Checks of requests to an engine's server, for every API: routes, upper limits, default sampling. Pure.

The application behind it interprets a request. This module knows only which fields have the sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from trinity_es.actors.engines.sampling_checks import MOST_ANSWERS, MOST_PROMPTS, MOST_TOKENS, checked_prompt, excerpt
from trinity_es.actors.engines.schema_limits import exceeded_limit
from trinity_es.actors.serving.errors import ApiError, json_object
from trinity_es.events.json_values import NotPlain, plain

__all__ = [
    "CHAT", "CHATS", "COMPLETIONS", "GENERATE", "RESPONSES", "ROUTES", "check_recorded", "checked_body", "json_bytes",
    "with_defaults",
]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, BATCH = "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"
CHATS = frozenset({CHAT, RESPONSES, MESSAGES})
"""Routes whose prompt is rendered from messages."""
MOST_RECORDED_BYTES = 2**27
"""Maximum of a request's bytes times its `n`, since each answer is recorded with the prompt, as text and as ids."""
ROUTES = {
    **dict.fromkeys(("/v1/models", "/version", "/load", "/ping"), "GET"),
    **dict.fromkeys((
        CHAT, COMPLETIONS, GENERATE, BATCH, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/tokenize",
        "/detokenize", "/v1/chat/completions/render", "/v1/completions/render",
    ), "POST"),
}
"""Routes of an engine's server that clients may use (path -> method). None changes the engine or others' requests."""


def checked_body(path: str, raw: bytes) -> dict[str, Any]:
    """Return a request's JSON object. Raises ApiError for a value above its limit or an unsupported option."""
    body = json_object(raw)
    body.pop("request_id", None)  # the request's id is made here, so that no two answers share one
    sampling = _sampling_of(path, body)
    for name, limit in _LIMITS.items():
        value = sampling.get(name)
        if _number(value) > limit:
            raise ApiError(f"{name} is {excerpt(value)}: the limit is {limit:,}", param=name, code="invalid_value")
    for part in (body, sampling):
        for name in _SCHEMAS & part.keys():
            if problem := exceeded_limit({name: part[name]}):
                raise ApiError(f"{name}: {problem}", param=name, code="invalid_value")
    if sampling.get("use_beam_search"):
        raise ApiError("use_beam_search: beams are not sampled, so they can't be trained on: leave it out",
                       param="use_beam_search", code="unsupported_value")
    adapter = sampling.get("adapter", body.get("adapter"))
    if adapter is not None:  # vLLM would ignore it, and the wrong model would answer
        raise ApiError(f'adapter is {excerpt(adapter)}: name an adapter as the model ("model": "NAME")',
                       param="adapter", code="unsupported_value")
    for name in ("background", "previous_response_id"):
        if path == RESPONSES and body.get(name):
            raise ApiError(f"{name}: leave this field out, as no answer is kept after its request", param=name,
                           code="unsupported_value")
    field = {COMPLETIONS: "prompt", BATCH: "messages"}.get(path, "")
    prompts = body.get(field)
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        answers = int(len(prompts) * max(_number(sampling.get("n", 1)), 1))
        if answers > MOST_PROMPTS:
            raise ApiError(f"{field}: one request may have {MOST_PROMPTS:,} answers, not {answers:,}",
                           param=field, code="invalid_value")
    for name in ("messages", "tools"):
        try:
            plain(body.get(name))  # recorded with the answer, so it must be plain JSON
        except NotPlain as e:
            raise ApiError(f"{name}: {e.problem}", param=name, code="invalid_value") from e
    prompts = prompts if path == COMPLETIONS else None
    for name, prompt in (("prompt", prompts), ("token_ids", body.get("token_ids"))):
        if isinstance(prompt, str | list):
            checked_prompt(prompt, partial(ApiError, param=name, code="invalid_value"))
    return body


def check_recorded(path: str, body: dict[str, Any], size: int) -> None:
    """Raise ApiError if the records of all answers to a request of `size` bytes would be too large."""
    answers = _number(_sampling_of(path, body).get("n")) if path in _SAMPLED else 0
    if answers * size > MOST_RECORDED_BYTES:
        raise ApiError(
            f"n: {answers:,.0f} answers would each be recorded with this request of {size:,} bytes, and together they "
            f"may take at most {MOST_RECORDED_BYTES:,} bytes. Ask for fewer answers at a time", param="n",
            code="invalid_value",
        )


def _number(value: Any) -> float:
    """Return a field's value as a number, as vLLM reads it (from a text too); 0 if it is no number."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
    except OverflowError:
        return math.inf


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Return a request's body as JSON. Raises ApiError if it is nested too deeply."""
    try:
        return orjson.dumps(body)
    except TypeError as e:
        raise ApiError(f"the body can't be passed on as JSON: {e}") from e


def with_defaults(
    path: str, body: dict[str, Any], defaults: Mapping[str, Any], *, with_ids: bool
) -> tuple[dict[str, Any], int | None, dict[str, Any]]:
    """Apply the run's sampling (`defaults`) to a request. Return its body, default length, and inexpressible sampling.

    The default length is None if the request has its own. It is not written into the body, where it would be an error
    if the context has less room. Sampling that the route's API can't express goes to the engine directly. `with_ids`:
    request token ids in the answer, unless the request says otherwise.
    """
    engine_only: dict[str, Any] = {}
    if path not in _SAMPLED:
        return body, None, engine_only
    sampling = _sampling_of(path, body)
    for name, value in defaults.items():
        name = _OTHER_NAMES.get(path, {}).get(name, name)
        if value is None or name in _NEVER_DEFAULTS or (name == "n" and path in _ONE_ANSWER):
            continue
        if name in _NO_FIELD.get(path, ()) or (name == "json_schema" and path not in (CHAT, COMPLETIONS)):
            engine_only[name] = value
        elif name == "json_schema":
            if value and sampling.get("response_format") is None:
                schema = orjson.loads(value) if isinstance(value, str) else value
                named_schema = {"name": "answer", "schema": schema}
                sampling["response_format"] = {"type": "json_schema", "json_schema": named_schema}
        elif sampling.get(name) is None:
            sampling[name] = list(value) if isinstance(value, tuple) else value
    if with_ids and path in (CHAT, COMPLETIONS) and body.get("return_token_ids") is None:
        body["return_token_ids"] = True
    has_length = any(sampling.get(name) is not None for name in _LENGTHS)
    return body, None if has_length else defaults.get("max_tokens"), engine_only


_NEVER_DEFAULTS = frozenset({"logprobs", "top_logprobs", "max_tokens", "adapter"})
"""Defaults that a request never gets: the client chooses what is shown, the server sets length and adapter."""
_OTHER_NAMES = {MESSAGES: {"stop": "stop_sequences"}}
"""Names of sampling fields in an API, if they differ from those of `Sampling`."""
_NO_FIELD = {
    RESPONSES: frozenset({"min_tokens"}),
    MESSAGES: frozenset({"seed", "min_p", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
                         "repetition_penalty"}),
}
"""Sampling fields that an API lacks, so that the engine gets them directly."""
_ONE_ANSWER = frozenset({RESPONSES, MESSAGES, BATCH})
"""Routes without `n`."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIMITS = {"n": MOST_ANSWERS, "best_of": MOST_ANSWERS, **dict.fromkeys((*_LENGTHS, "min_tokens"), MOST_TOKENS)}
_SCHEMAS = frozenset({
    "response_format", "structured_outputs", "structural_tag", "text", "tools", "functions", "output_format",
    "output_config",
})
"""Fields of any API that may hold a schema or grammar."""
_SAMPLED = frozenset({CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, BATCH})
"""Routes that sample."""


def _sampling_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the dict in a request's body that has its sampling fields. Raises ApiError."""
    if path != GENERATE:
        return body
    sampling = body.setdefault("sampling_params", {})
    if not isinstance(sampling, dict):
        raise ApiError(f"sampling_params is {excerpt(sampling)}: give an object", param="sampling_params")
    return sampling
