"""The part of vLLM's HTTP API that any `Engine` can answer, for engines without an HTTP server of their own.

| route | |
|---|---|
| `GET /v1/models` | the model, with `max_model_len`, and its adapters |
| `POST /v1/chat/completions`, `/v1/completions` | whole or streamed; several prompts, token ids, n, logprobs |
| `POST /inference/v1/generate` | token ids in, token ids out |
| `POST /tokenize`, `/detokenize` | by the engine's tokenizer |
| `GET /version`, `/load`, `/ping` | |

Requests may have the fields of `Sampling`, and a `response_format` of JSON, which the engine obeys. Fields of vLLM's
that would change an answer are refused by name. Other fields are ignored, as vLLM ignores unknown ones. Logprobs are
those of the sampled distribution. Starlette is imported in `application`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trinity_es.actors.engines.interface import Completion, Engine, Sampling, Tokenizer
from trinity_es.actors.engines.long_text_tokenization import LARGE, is_large, off_the_loop
from trinity_es.actors.engines.sampling_checks import MOST_TOP_LOGPROBS
from trinity_es.actors.serving.errors import as_api_error, invalid_field, sse_event
from trinity_es.actors.serving.http_server import json_response, make_app, run_until_disconnect
from trinity_es.actors.serving.request_limits import CHAT, COMPLETIONS, GENERATE
from trinity_es.actors.serving.request_record import REQUEST, RequestRecord
from trinity_es.actors.serving.small_api_requests import (
    check_fields,
    parse_ids,
    parse_messages,
    parse_prompts,
    parse_sampling,
    parse_tools,
    template_variables,
    with_values,
)
from trinity_es.events.errors import EngineError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["application"]

_LEAST_LOGPROB = -9999.0
"""OpenAI's logprob for an impossible token, since JSON can't express minus infinity."""


async def application(engine: Engine, name: str) -> Any:
    """Return the ASGI application of an engine. Clients call its model `name`."""
    server = _SmallServer(engine, name)
    return make_app([
        ("/v1/models", "GET", server.models), ("/version", "GET", server.version),
        ("/ping", "GET", server.empty_object),
        ("/load", "GET", server.empty_object), (CHAT, "POST", server.route(server.chat)),
        (COMPLETIONS, "POST", server.route(server.completions)), (GENERATE, "POST", server.route(server.generate)),
        ("/tokenize", "POST", server.route(server.tokenize)), ("/detokenize", "POST", server.route(server.detokenize)),
    ])


class _SmallServer:
    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self._created = engine, name, int(time.time())

    def route(self, handler: Callable[[dict[str, Any], RequestRecord], Coroutine[Any, Any, Response]]) -> Any:
        """Return a Starlette handler that calls `handler(body, record)` and answers its errors as responses."""

        async def handle(request: Request) -> Response:
            record = REQUEST.get()
            assert record is not None  # `EngineServer` sets it
            try:
                return await run_until_disconnect(request.receive, handler(dict(record.body), record))
            except Exception as e:
                refused = as_api_error(e)
                return json_response(refused.body(), refused.status)

        return handle

    # --- routes that need no engine -----------------------------------------------------------------------------------
    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "trinity-es",
                 "root": self.name, "parent": None, "max_model_len": getattr(self.engine, "max_model_len", None)}
        names = sorted(getattr(self.engine, "adapters", ()))
        adapters = [{**model, "id": name, "root": name, "parent": self.name} for name in names]
        return json_response({"object": "list", "data": [model, *adapters]})

    async def version(self, request: Request) -> Response:
        return json_response({"version": getattr(self.engine, "version", "")})

    async def empty_object(self, request: Request) -> Response:
        return json_response({})

    async def tokenize(self, body: dict[str, Any], record: RequestRecord) -> Response:
        if "messages" in body:
            chat = parse_messages(body["messages"]), parse_tools(body), template_variables(body)
            ids = await off_the_loop(is_large([*chat]), lambda: record.model.render(*chat))
        elif isinstance(prompt := body.get("prompt"), str):
            ids = await off_the_loop(is_large(prompt), lambda: self.engine.tokenizer.encode(prompt))
        else:
            raise invalid_field("prompt", body.get("prompt"), "a text, or messages")
        max_length = getattr(self.engine, "max_model_len", None)
        return json_response({"count": len(ids), "max_model_len": max_length, "tokens": ids, "token_strs": None})

    async def detokenize(self, body: dict[str, Any], record: RequestRecord) -> Response:
        ids = parse_ids("tokens", body.get("tokens"))
        text = await off_the_loop(len(ids) > LARGE, lambda: self.engine.tokenizer.decode(ids))
        return json_response({"prompt": text})

    # --- routes that call the engine ----------------------------------------------------------------------------------
    async def chat(self, body: dict[str, Any], record: RequestRecord) -> Response:
        logprobs = body.get("logprobs") or False
        if logprobs not in (True, False):
            raise invalid_field("logprobs", logprobs, "true or false")
        top_count = body.get("top_logprobs") or 0
        if top_count and not logprobs:
            raise invalid_field("top_logprobs", top_count, "logprobs: true as well")
        messages = parse_messages(body.get("messages"))
        answer = self._empty_answer(body, record, is_chat=True, with_logprobs=bool(logprobs), top_count=top_count)
        tools, template = parse_tools(body), template_variables(body)
        prompt, _ = await record.model.prompt_of(messages, tools, template, record.exact_ids)
        return await self._respond(record, [prompt], answer)

    async def completions(self, body: dict[str, Any], record: RequestRecord) -> Response:
        logprobs = body.get("logprobs")
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= MOST_TOP_LOGPROBS):
            raise invalid_field("logprobs", logprobs, f"a whole number, 0 to {MOST_TOP_LOGPROBS}: how many of the "
                                "likeliest tokens to return with each sampled one")
        with_logprobs, top_count = logprobs is not None, logprobs or 0
        answer = self._empty_answer(body, record, is_chat=False, with_logprobs=with_logprobs, top_count=top_count)
        return await self._respond(record, parse_prompts(body.get("prompt")), answer)

    async def generate(self, body: dict[str, Any], record: RequestRecord) -> Response:
        params = body.get("sampling_params") or {}
        check_fields(params)
        ids = parse_ids("token_ids", body.get("token_ids"))
        sampling = parse_sampling(params, record.sampling, "max_tokens")
        top_count = params.get("logprobs")
        if top_count:
            sampling = with_values(sampling, {"top_logprobs": top_count}, "logprobs")
        if body.get("stream"):
            raise invalid_field("stream", True, "false: this route does not stream")
        [completions] = await self._generate_all(record, [ids], sampling)
        choices = [
            {"index": i, "finish_reason": c.finish_reason, "token_ids": c.token_ids,
             "logprobs": None if top_count is None else {"content": [
                 {**_entry(t, p), "top_logprobs": [_entry(*other) for other in row]} for t, p, row in _rows(c)]}}
            for i, c in enumerate(completions)
        ]
        return json_response({
            "request_id": f"generate-tokens-{uuid4().hex}", "model": self.name, "created": int(time.time()),
            "prompt_token_ids": ids if body.get("return_token_ids") else None, "choices": choices,
            "usage": _usage(len(ids), sum(len(c.token_ids) for c in completions)),
        })

    def _empty_answer(
        self, body: dict[str, Any], record: RequestRecord, *, is_chat: bool, with_logprobs: bool, top_count: int
    ) -> _Answer:
        """Return an `_Answer` with the options of a request, before any completion. Raises ApiError."""
        check_fields(body)
        stream, options = body.get("stream") or False, body.get("stream_options")
        if not isinstance(stream, bool):
            raise invalid_field("stream", stream, "true or false")
        if not isinstance(options, dict | None):
            raise invalid_field("stream_options", options, "an object")
        lengths = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
        sampling = parse_sampling(body, record.sampling, *lengths)
        if with_logprobs:
            sampling = with_values(sampling, {"top_logprobs": top_count}, "top_logprobs")
        return _Answer(
            self.name, self.engine.tokenizer, is_chat=is_chat, sampling=sampling, with_logprobs=with_logprobs,
            stream=stream, with_ids=bool(body.get("return_token_ids")),
            named_by_id=bool(body.get("return_tokens_as_token_ids")),
            with_usage=options is not None and options.get("include_usage") is True,
        )

    async def _respond(self, record: RequestRecord, prompts: list[str | list[int]], answer: _Answer) -> Response:
        if answer.stream:
            return await _streaming_response(self._chunks(record, prompts, answer))
        return json_response(answer.whole(await self._generate_all(record, prompts, answer.sampling)))

    async def _generate_all(
        self, record: RequestRecord, prompts: list[str | list[int]] | list[list[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Generate completions for all prompts at once, record them, and return them by prompt. Raises EngineError."""

        async def complete(prompt: str | list[int]) -> list[Completion]:
            generation = record.begin(sampling, {}, prompt if isinstance(prompt, str) else None)
            try:
                generation.completions = await record.model.completions(prompt, sampling)
            except EngineError as e:
                record.fail(e)
                raise
            return generation.completions

        tasks = [asyncio.ensure_future(complete(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # after an error, gather leaves the others running
                task.cancel()

    async def _chunks(
        self, record: RequestRecord, prompts: list[str | list[int]], answer: _Answer
    ) -> AsyncGenerator[bytes]:
        """Yield a stream's events: one completion's as it is generated; if several or with a journal, at the end."""
        sampling = answer.sampling
        if len(prompts) * sampling.n > 1 or record.model.journal is not None:
            groups = await self._generate_all(record, prompts, sampling)
            for i, completion in enumerate(c for group in groups for c in group):
                yield answer.chunk(completion, i, new_prompt=i % sampling.n == 0)
        else:
            [prompt] = prompts
            generation = record.begin(sampling, {}, prompt if isinstance(prompt, str) else None)
            parts: list[Completion] = []
            try:
                async with aclosing(self.engine.stream(prompt, sampling)) as stream:
                    async for part in stream:
                        parts.append(part)
                        if not part.finish_reason:  # the last part waits until the completion is recorded
                            yield answer.chunk(part, 0)
                if not parts or not parts[-1].finish_reason:
                    raise EngineError("the stream ended before the answer was complete")
                generation.completions = [Completion.joined(parts)]
            except EngineError as e:
                record.fail(e)
                raise
            yield answer.chunk(parts[-1], 0)
        yield answer.end()


# --- answers --------------------------------------------------------------------------------------------------------
class _Answer:
    """Answer to a chat or completions request, whole or in chunks.

    `named_by_id`: logprobs name tokens `token_id:N`; `with_usage`: a stream ends with its token counts.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, is_chat: bool, sampling: Sampling, with_logprobs: bool,
        with_ids: bool, named_by_id: bool, stream: bool, with_usage: bool,
    ) -> None:
        self.sampling, self.stream, self._is_chat, self._tokenizer = sampling, stream, is_chat, tokenizer
        self._with_logprobs, self._with_ids, self._with_usage = with_logprobs, with_ids, with_usage
        self._named_by_id = named_by_id
        object_type = "text_completion"
        if is_chat:
            object_type = "chat.completion.chunk" if stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}", "object": object_type,
            "created": int(time.time()), "model": model,
        }
        self._text_lengths: dict[int, int] = {}
        """Number of characters sent of each completion, by its index in the stream."""
        self._prompt_tokens = self._response_tokens = 0

    def whole(self, groups: list[list[Completion]]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for group in groups:
            self._prompt_tokens += len(group[0].prompt_token_ids)
            for c in group:
                self._response_tokens += len(c.token_ids)
                text = {"message": {"role": "assistant", "content": c.text}} if self._is_chat else {"text": c.text}
                prompt = {"prompt_token_ids": c.prompt_token_ids} if self._with_ids and not self._is_chat else {}
                choices.append({"index": len(choices), **text, **self._common_fields(c, 0), **prompt})
        head = dict(self._head)
        if self._with_ids and self._is_chat:
            head["prompt_token_ids"] = groups[0][0].prompt_token_ids
        return {**head, "choices": choices, "usage": _usage(self._prompt_tokens, self._response_tokens)}

    def chunk(self, part: Completion, index: int, new_prompt: bool = True) -> bytes:
        """Return an event with the next part of completion `index`. `new_prompt`: count the tokens of its prompt."""
        text: dict[str, Any] = {"delta": {"content": part.text}} if self._is_chat else {"text": part.text}
        body, offset = dict(self._head), self._text_lengths.get(index, 0)
        choice = {"index": index, **text, **self._common_fields(part, offset)}
        if index not in self._text_lengths:
            self._prompt_tokens += len(part.prompt_token_ids) if new_prompt else 0
            if self._is_chat:
                choice["delta"]["role"] = "assistant"
            if self._with_ids:
                (body if self._is_chat else choice)["prompt_token_ids"] = part.prompt_token_ids
        self._text_lengths[index] = offset + len(part.text)
        self._response_tokens += len(part.token_ids)
        if self._with_usage:
            body["usage"] = None
        return sse_event({**body, "choices": [choice]})

    def end(self) -> bytes:
        usage = {**self._head, "choices": [], "usage": _usage(self._prompt_tokens, self._response_tokens)}
        return (sse_event(usage) if self._with_usage else b"") + b"data: [DONE]\n\n"

    def _common_fields(self, c: Completion, offset: int) -> dict[str, Any]:
        """Return the fields of a choice or chunk that both routes share. `offset`: characters before the chunk."""
        logprobs = self._logprobs(c, offset) if self._with_logprobs else None
        ids = {"token_ids": c.token_ids} if self._with_ids else {}
        return {"finish_reason": c.finish_reason or None, "logprobs": logprobs, **ids}

    def _token_name(self, token: int) -> str:
        return f"token_id:{token}" if self._named_by_id else self._tokenizer.decode([token])

    def _logprobs(self, c: Completion, offset: int) -> dict[str, Any]:
        if self._is_chat:
            return {"refusal": None, "content": [
                {**self._token(t, p), "top_logprobs": [self._token(*other) for other in row]} for t, p, row in _rows(c)
            ]}
        offsets = []
        for t in c.token_ids:
            offsets.append(offset)
            offset += len(self._tokenizer.decode([t]))
        top = None
        if c.top_logprobs is not None:
            top = [{self._token_name(t): max(p, _LEAST_LOGPROB) for t, p in reversed(row)} for row in c.top_logprobs]
        return {"tokens": [self._token_name(t) for t in c.token_ids], "token_logprobs": c.logprobs or [],
                "top_logprobs": top, "text_offset": offsets}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": self._token_name(token), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}


def _entry(token: int, logprob: float) -> dict[str, Any]:
    """Return a token with its logprob, in the form of the route `/inference/v1/generate`."""
    return {"token_id": token, "token": f"token_id:{token}", "logprob": max(logprob, _LEAST_LOGPROB)}


def _rows(c: Completion) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Return `(token, logprob, likeliest tokens)` for each sampled token; the likeliest have their logprobs."""
    return list(zip(c.token_ids, c.logprobs or [], c.top_logprobs or [[] for _ in c.token_ids], strict=True))


def _usage(prompt: int, response: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


async def _streaming_response(chunks: AsyncGenerator[bytes]) -> Response:
    """Wait for the first event, and return a streaming response. Later errors become the stream's last event."""
    from starlette.responses import StreamingResponse

    first = await anext(chunks)

    async def all_events() -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield first
            try:
                async for chunk in chunks:
                    yield chunk
            except EngineError as e:
                yield sse_event(as_api_error(e).body())

    return StreamingResponse(all_events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
