"""What OpenAI clients say and hear: requests checked, answers built. Pure; `engine_server.py` is the server.

What is not honoured is refused with the name of the field, unless it changes nothing. Beyond OpenAI's own fields,
those of vLLM may be given that `Sampling` has (`top_k`, `ignore_eos`, `min_tokens`, `min_p`, `repetition_penalty`), and
`chat_template_kwargs`, variables of the chat template. A `response_format` of JSON binds the engine to it. Logprobs are
of the distribution that was sampled from, so after penalties and format. Every answer has, always:

- `model_version`: the version that was served when the request came;
- `prompt_token_ids`: what the model read;
- in each choice `token_ids`, what it wrote, and `version_spans`, `[[model_version, start, end], ...]` over them; both
  also in a completion's choices of text.

In a stream each chunk has `model_version` and its choice's new `token_ids`; the first has `prompt_token_ids`, the last
with a choice has the `version_spans` of the whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson

from trinity_es.actors.engines.interface import Completion, Sampling, Tokenizer
from trinity_es.actors.engines.sampling import MOST_TOP_LOGPROBS, brief, merged
from trinity_es.events.errors import DataError, EngineError, TrinityError, WorkflowError

__all__ = ["ApiError", "GenerationRequest", "ResponseBuilder", "event", "read_chat", "read_completion", "refusal"]

_SAMPLING = (
    "temperature", "top_p", "top_k", "n", "stop", "seed", "ignore_eos", "min_tokens", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)
_SILENT = frozenset({
    "cache_salt", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id", "return_token_ids",
    "safety_identifier", "service_tier", "store", "user",
})
"""Fields that change no answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "use_beam_search": (False,),
}
"""Fields that are honoured in no other way than by these values."""


_LEAST = -9999.0
"""The logprob that OpenAI gives for a token that could not come; JSON has no infinity."""


class ApiError(Exception):
    """A request that gets an error: OpenAI's status, type, `param` and `code`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(error: Exception) -> ApiError:
    """Return the answer to a client for an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkflowError | DataError):
        return ApiError(str(error))
    if isinstance(error, EngineError):
        if error.details.get("refused"):
            return ApiError(str(error), code="engine_refused")
        return ApiError(str(error), status=503 if error.details.get("dead") else 500, code="engine_failed")
    what = str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
    return ApiError(what, status=500)


# --- requests -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that can be honoured."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | list[int] = ""
    """Where there are no messages."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    sampling: Sampling = field(default_factory=Sampling)
    show_logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False


def read_chat(body: bytes, names: tuple[str, ...], base: Sampling) -> GenerationRequest:
    """Return a request to /chat/completions; `base` is the sampling where it says nothing. Raises Refused."""
    given = _fields(body, names, {"messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"})
    logprobs = given.get("logprobs", False)
    if logprobs not in (True, False):  # vLLM takes 0 and 1 for them, and so do we
        raise _wrong("logprobs", logprobs, "true or false")
    top = given.get("top_logprobs", 0)
    if top and not logprobs:
        raise _wrong("top_logprobs", top, "logprobs: true as well")
    tools = given.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise _wrong("tools", tools, "a list of tools")
    stream, usage = _streaming(given)
    return GenerationRequest(
        messages=_messages(given.get("messages")),
        tools=None if given.get("tool_choice") == "none" else tools or None,
        template=_template(given.get("chat_template_kwargs", {})),
        sampling=_sampling(given, base, bool(logprobs), top),
        show_logprobs=bool(logprobs),
        stream=stream,
        stream_usage=usage,
    )


def read_completion(body: bytes, names: tuple[str, ...], base: Sampling) -> GenerationRequest:
    """Return a request to /completions: one prompt, a text or token ids. Raises Refused."""
    given = _fields(body, names, {"prompt"})
    logprobs = given.get("logprobs")
    if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= MOST_TOP_LOGPROBS):
        raise _wrong("logprobs", logprobs, f"a whole number, 0 to {MOST_TOP_LOGPROBS}: so many of the likeliest tokens "
                     "beside each sampled one")
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    ids = isinstance(prompt, list) and all(type(t) is int and 0 <= t < 2**31 for t in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise _wrong("prompt", prompt, "one prompt, a text or a list of token ids")
    stream, usage = _streaming(given)
    return GenerationRequest(
        prompt=prompt,
        sampling=_sampling(given, base, logprobs is not None, logprobs or 0),
        show_logprobs=logprobs is not None,
        stream=stream,
        stream_usage=usage,
    )


def _fields(body: bytes, names: tuple[str, ...], own: set[str]) -> dict[str, Any]:
    """Return what a request gives; nulls are as good as nothing."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise ApiError(f"the body is no JSON: {e}") from e
    if not isinstance(found, dict):
        raise ApiError(f"the body is a JSON {type(found).__name__}: give an object")
    given = {name: value for name, value in found.items() if value is not None and name not in _SILENT}
    known = own | {"model", "logprobs", "max_tokens", "response_format", "stream", "stream_options"} | set(_SAMPLING)
    for name, value in given.items():
        if name in known:
            continue
        if name not in _NEUTRAL:
            raise ApiError(f"{name}: no such field is known here", param=name, code="unknown_parameter")
        if value not in _NEUTRAL[name]:
            raise ApiError(f"{name}: {brief(value)} is not supported", param=name, code="unsupported_value")
    model = given.get("model", names[0])
    if model not in names:
        raise ApiError(
            f"model: {brief(model)} is not served here, {names[0]!r} is", status=404, param="model",
            code="model_not_found",
        )
    return given


def _sampling(given: Mapping[str, Any], base: Sampling, logprobs: bool, top: Any) -> Sampling:
    chosen = {name: given[name] for name in _SAMPLING if name in given}
    if "response_format" in given:
        chosen["json_schema"] = _schema(given["response_format"])
    if top:
        chosen["top_logprobs"] = top
    for name in ("max_tokens", "max_completion_tokens"):  # the new name goes first
        if name in given:
            chosen["max_tokens"] = given[name]
            _merged(base, {"max_tokens": given[name]}, name)
    for name, value in chosen.items():
        _merged(base, {name: value}, name)
    return _merged(base, {**chosen, "logprobs": True} if logprobs else chosen, None)


def _schema(given: Any) -> str:
    """Return a `response_format` as `Sampling.json_schema`."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return "{}"
    schema: Any = given.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not schema:
        raise _wrong("response_format", given, "type text, json_object, or json_schema with json_schema.schema")
    return orjson.dumps(schema).decode()


def _template(given: Any) -> dict[str, Any]:
    """`chat_template_kwargs`: what the server itself says to the template is not among them."""
    if not isinstance(given, dict):
        raise _wrong("chat_template_kwargs", given, "an object of the chat template's variables")
    for name in given:
        if name in _RESERVED:
            raise ApiError(f"chat_template_kwargs: {name} is not a variable of the template here",
                          param="chat_template_kwargs", code="invalid_value")
    return given


_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})


def _merged(base: Sampling, chosen: dict[str, Any], name: str | None) -> Sampling:
    try:
        return merged(base, chosen, DataError, "the request")
    except DataError as e:
        raise ApiError(str(e) if name in (None, *chosen) else f"{name}: {e}", param=name, code="invalid_value") from e


def _streaming(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether to stream, and whether to tell the usage at its end."""
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise _wrong("stream", stream, "true or false")
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    if stream and given.get("n", 1) != 1:
        raise _wrong("n", given["n"], "1 with stream: ask for each answer by a request of its own")
    return stream, options.get("include_usage") is True


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, "a list of one message or more")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    """Return a message as chat templates expect it: its content a text, the arguments of tool calls an object."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _wrong(where, given, "an object with a role and a content", param="messages")
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise _wrong(f"{where}.content", content, "parts of type text: no others are understood", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", content, "a text", param="messages")
    message["content"] = content
    if "tool_calls" in message:
        try:
            message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        except (AttributeError, KeyError, TypeError) as e:
            raise _wrong(f"{where}.tool_calls", message["tool_calls"], "a list of calls", param="messages") from e
    return message


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(orjson.JSONDecodeError):  # what a model wrote need not be JSON: it stays as it is then
            function["arguments"] = orjson.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _wrong(name: str, value: Any, wanted: str, param: str | None = None) -> ApiError:
    return ApiError(f"{name}: {brief(value)} was given: give {wanted}", param=param or name, code="invalid_value")


# --- answers --------------------------------------------------------------------------------------------------------
class ResponseBuilder:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, ask: GenerationRequest, model: str, version: int, tokenizer: Tokenizer) -> None:
        self.ask, self.tokenizer = ask, tokenizer
        self.chat = ask.messages is not None
        what = "chat.completion" if self.chat else "text_completion"
        chunk = "chat.completion.chunk" if self.chat else what
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}",
            "object": chunk if ask.stream else what,
            "created": int(time.time()),
            "model": model,
            "model_version": version,
        }
        self._first, self._offset, self._usage = True, 0, (0, 0)

    def whole(self, answers: list[tuple[Completion, list[list[int]]]]) -> dict[str, Any]:
        """Return all answers with their version spans, as one response."""
        choices = []
        for index, (c, spans) in enumerate(answers):
            said = {"message": {"role": "assistant", "content": c.text}} if self.chat else {"text": c.text}
            choices.append({**self._choice(c, 0), **said, "index": index, "version_spans": spans})
        prompt = answers[0][0].prompt_token_ids
        self._usage = (len(prompt), sum(len(c.token_ids) for c, _ in answers))
        return {**self._head, "prompt_token_ids": prompt, "choices": choices, "usage": self._used()}

    def chunk(self, new: Completion, spans: list[list[int]] | None = None) -> bytes:
        """Return what is new in a stream; `spans` with the last of it."""
        said: dict[str, Any] = {"delta": {"content": new.text}} if self.chat else {"text": new.text}
        body = dict(self._head)
        if self._first:
            self._first = False
            body["prompt_token_ids"] = new.prompt_token_ids
            self._usage = (len(new.prompt_token_ids), 0)
            if self.chat:
                said["delta"]["role"] = "assistant"
        choice = {**self._choice(new, self._offset), **said, "index": 0}
        if spans is not None:
            choice["version_spans"] = spans
        self._offset += len(new.text)
        self._usage = (self._usage[0], self._usage[1] + len(new.token_ids))
        if self.ask.stream_usage:
            body["usage"] = None
        return event({**body, "choices": [choice]})

    def end(self) -> bytes:
        """Return the end of a stream, after its last chunk."""
        usage = event({**self._head, "choices": [], "usage": self._used()}) if self.ask.stream_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _choice(self, c: Completion, offset: int) -> dict[str, Any]:
        logprobs = self._logprobs(c, offset) if self.ask.show_logprobs else None
        return {"finish_reason": c.finish_reason or None, "logprobs": logprobs, "token_ids": c.token_ids}

    def _logprobs(self, c: Completion, offset: int) -> dict[str, Any]:
        texts = [self.tokenizer.decode([t]) for t in c.token_ids]
        found = c.logprobs or []
        rows = c.top_logprobs or [[] for _ in texts]
        if self.chat:
            content = [
                {**_token(text, logprob), "top_logprobs": [_token(self.tokenizer.decode([t]), p) for t, p in row]}
                for text, logprob, row in zip(texts, found, rows, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = None
        if c.top_logprobs is not None:
            top = [{self.tokenizer.decode([t]): max(p, _LEAST) for t, p in reversed(row)} for row in rows]
        return {"tokens": texts, "token_logprobs": found, "top_logprobs": top, "text_offset": offsets}

    def _used(self) -> dict[str, int]:
        prompt, response = self._usage
        return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
