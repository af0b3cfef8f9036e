"""The part of vLLM's HTTP API that any `Engine` can answer: for those that bring no server of their own.

| route | |
|---|---|
| `GET /v1/models` | the one model, with `max_model_len`, and its adapters |
| `POST /v1/chat/completions`, `/v1/completions` | whole or streamed; several prompts, token ids, n, logprobs |
| `POST /inference/v1/generate` | token ids in, token ids out |
| `POST /tokenize`, `/detokenize` | by the engine's tokenizer |
| `GET /version`, `/load`, `/ping` | |

Sampling is that of `Sampling`, and a `response_format` of JSON binds the engine to it. Other fields are ignored, as
vLLM ignores what it does not know, but for those of vLLM's that would change an answer: they are refused by name.
Logprobs are of the distribution that was sampled from. Starlette is imported in `application`.
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
from trinity_es.actors.serving.errors import event, refusal, wrong
from trinity_es.actors.serving.http_server import json_response, make_app, while_listening
from trinity_es.actors.serving.request_limits import CHAT, COMPLETIONS, GENERATE
from trinity_es.actors.serving.request_record import REQUEST, RequestRecord
from trinity_es.actors.serving.small_api_requests import (
    check_fields,
    ids_of,
    merged_into,
    messages_of,
    prompts_of,
    sampling_of,
    template_of,
    tools_of,
)
from trinity_es.events.errors import EngineError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["application"]

_LEAST = -9999.0
"""OpenAI's logprob for a token that could not occur; JSON can't express infinity."""


async def application(engine: Engine, name: str) -> Any:
    """Return the ASGI application of an engine whose model has this `name` for clients."""
    server = _SmallServer(engine, name)
    return make_app([
        ("/v1/models", "GET", server.models), ("/version", "GET", server.version), ("/ping", "GET", server.nothing),
        ("/load", "GET", server.nothing), (CHAT, "POST", server.told(server.chat)),
        (COMPLETIONS, "POST", server.told(server.completions)), (GENERATE, "POST", server.told(server.generate)),
        ("/tokenize", "POST", server.told(server.tokenize)), ("/detokenize", "POST", server.told(server.detokenize)),
    ])


class _SmallServer:
    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self._created = engine, name, int(time.time())

    def told(self, handler: Callable[[dict[str, Any], RequestRecord], Coroutine[Any, Any, Response]]) -> Any:
        """Return a handler of a request's body and record; its errors are answers in OpenAI's form."""

        async def answered(request: Request) -> Response:
            record = REQUEST.get()
            assert record is not None  # the server sets it
            try:
                return await while_listening(request.receive, handler(dict(record.body), record))
            except Exception as e:
                refused = refusal(e)
                return json_response(refused.body(), refused.status)

        return answered

    # --- what needs no engine -----------------------------------------------------------------------------------------
    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "trinity-es",
                 "root": self.name, "parent": None, "max_model_len": getattr(self.engine, "max_model_len", None)}
        names = sorted(getattr(self.engine, "adapters", ()))
        adapters = [{**model, "id": name, "root": name, "parent": self.name} for name in names]
        return json_response({"object": "list", "data": [model, *adapters]})

    async def version(self, request: Request) -> Response:
        return json_response({"version": getattr(self.engine, "version", "")})

    async def nothing(self, request: Request) -> Response:
        return json_response({})

    async def tokenize(self, body: dict[str, Any], record: RequestRecord) -> Response:
        if "messages" in body:
            given = messages_of(body["messages"]), tools_of(body), template_of(body)
            ids = await off_the_loop(is_large([*given]), lambda: record.model.render(*given))
        elif isinstance(prompt := body.get("prompt"), str):
            ids = await off_the_loop(is_large(prompt), lambda: self.engine.tokenizer.encode(prompt))
        else:
            raise wrong("prompt", body.get("prompt"), "a text, or messages")
        longest = getattr(self.engine, "max_model_len", None)
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None})

    async def detokenize(self, body: dict[str, Any], record: RequestRecord) -> Response:
        ids = ids_of("tokens", body.get("tokens"))
        text = await off_the_loop(len(ids) > LARGE, lambda: self.engine.tokenizer.decode(ids))
        return json_response({"prompt": text})

    # --- what asks it -------------------------------------------------------------------------------------------------
    async def chat(self, body: dict[str, Any], record: RequestRecord) -> Response:
        logprobs = body.get("logprobs") or False
        if logprobs not in (True, False):
            raise wrong("logprobs", logprobs, "true or false")
        top = body.get("top_logprobs") or 0
        if top and not logprobs:
            raise wrong("top_logprobs", top, "logprobs: true as well")
        messages = messages_of(body.get("messages"))
        asked = self._asked(body, record, chat=True, shown=bool(logprobs), top=top)
        prompt, _ = await record.model.prompt_of(messages, tools_of(body), template_of(body), record.exact)
        return await self._answer(record, [prompt], asked)

    async def completions(self, body: dict[str, Any], record: RequestRecord) -> Response:
        logprobs = body.get("logprobs")
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= MOST_TOP_LOGPROBS):
            raise wrong("logprobs", logprobs, f"a whole number, 0 to {MOST_TOP_LOGPROBS}: so many of the likeliest "
                         "tokens beside each sampled one")
        asked = self._asked(body, record, chat=False, shown=logprobs is not None, top=logprobs or 0)
        return await self._answer(record, prompts_of(body.get("prompt")), asked)

    async def generate(self, body: dict[str, Any], record: RequestRecord) -> Response:
        params = body.get("sampling_params") or {}
        check_fields(params)
        ids, sampling = ids_of("token_ids", body.get("token_ids")), sampling_of(params, record.sampling, "max_tokens")
        shown = params.get("logprobs")
        if shown:
            sampling = merged_into(sampling, {"top_logprobs": shown}, "logprobs")
        if body.get("stream"):
            raise wrong("stream", True, "false: token ids are answered whole here")
        [completions] = await self._generated(record, [ids], sampling)
        choices = [
            {"index": i, "finish_reason": c.finish_reason, "token_ids": c.token_ids,
             "logprobs": None if shown is None else {"content": [
                 {**_entry(t, p), "top_logprobs": [_entry(*other) for other in row]} for t, p, row in _rows(c)]}}
            for i, c in enumerate(completions)
        ]
        return json_response({
            "request_id": f"generate-tokens-{uuid4().hex}", "model": self.name, "created": int(time.time()),
            "prompt_token_ids": ids if body.get("return_token_ids") else None, "choices": choices,
            "usage": _usage(len(ids), sum(len(c.token_ids) for c in completions)),
        })

    def _asked(self, body: dict[str, Any], record: RequestRecord, *, chat: bool, shown: bool, top: int) -> _Answer:
        check_fields(body)
        stream, options = body.get("stream") or False, body.get("stream_options")
        if not isinstance(stream, bool):
            raise wrong("stream", stream, "true or false")
        if not isinstance(options, dict | None):
            raise wrong("stream_options", options, "an object")
        lengths = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
        sampling = sampling_of(body, record.sampling, *lengths)
        if shown:
            sampling = merged_into(sampling, {"top_logprobs": top}, "top_logprobs")
        return _Answer(
            self.name, self.engine.tokenizer, chat=chat, sampling=sampling, shown=shown, stream=stream,
            ids=bool(body.get("return_token_ids")), named_by_id=bool(body.get("return_tokens_as_token_ids")),
            usage=options is not None and options.get("include_usage") is True,
        )

    async def _answer(self, record: RequestRecord, prompts: list[str | list[int]], answer: _Answer) -> Response:
        if answer.stream:
            return await _streamed(self._chunks(record, prompts, answer))
        return json_response(answer.whole(await self._generated(record, prompts, answer.sampling)))

    async def _generated(
        self, record: RequestRecord, prompts: list[str | list[int]] | list[list[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        async def one(prompt: str | list[int]) -> list[Completion]:
            generation = record.begin(sampling, {}, prompt if isinstance(prompt, str) else None)
            try:
                generation.completions = await record.model.completions(prompt, sampling)
            except EngineError as e:
                record.fail(e)
                raise
            return generation.completions

        asking = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*asking))
        finally:
            for task in asking:  # gather leaves the others running, with their requests
                task.cancel()

    async def _chunks(
        self, record: RequestRecord, prompts: list[str | list[int]], answer: _Answer
    ) -> AsyncGenerator[bytes]:
        sampling = answer.sampling
        if len(prompts) * sampling.n > 1 or record.model.journal is not None:  # each in one piece, when all are there
            groups = await self._generated(record, prompts, sampling)
            for i, completion in enumerate(c for group in groups for c in group):
                yield answer.chunk(completion, i, new_prompt=i % sampling.n == 0)
        else:
            [prompt] = prompts
            generation = record.begin(sampling, {}, prompt if isinstance(prompt, str) else None)
            parts: list[Completion] = []
            try:
                async with aclosing(self.engine.stream(prompt, sampling)) as stream:
                    async for new in stream:
                        parts.append(new)
                        if not new.finish_reason:
                            yield answer.chunk(new, 0)
                if not parts or not parts[-1].finish_reason:
                    raise EngineError("the stream ended without an end of its answer")
                generation.completions = [Completion.joined(parts)]
            except EngineError as e:
                record.fail(e)
                raise
            yield answer.chunk(parts[-1], 0)
        yield answer.end()


# --- answers --------------------------------------------------------------------------------------------------------
class _Answer:
    """The answer to a chat or completions request, whole or in chunks.

    `shown`: with logprobs; `ids`: with token ids; `named_by_id`: tokens are called `token_id:N` in logprobs; `usage`: a
    stream reports it at its end.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, chat: bool, sampling: Sampling, shown: bool, ids: bool,
        named_by_id: bool, stream: bool, usage: bool,
    ) -> None:
        self.chat, self.sampling, self.stream, self._tokenizer = chat, sampling, stream, tokenizer
        self._shown, self._ids, self._named_by_id, self._usage = shown, ids, named_by_id, usage
        what = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}", "object": what, "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()
        self._offsets, self._used = dict[int, int](), (0, 0)

    def whole(self, groups: list[list[Completion]]) -> dict[str, Any]:
        """Return the answers to all prompts as one response."""
        choices: list[dict[str, Any]] = []
        for group in groups:
            self._count(len(group[0].prompt_token_ids), sum(len(c.token_ids) for c in group))
            for c in group:
                said = {"message": {"role": "assistant", "content": c.text}} if self.chat else {"text": c.text}
                prompt = {"prompt_token_ids": c.prompt_token_ids} if self._ids and not self.chat else {}
                choices.append({"index": len(choices), **said, **self._choice(c, 0), **prompt})
        head = dict(self._head)
        if self._ids and self.chat:
            head["prompt_token_ids"] = groups[0][0].prompt_token_ids
        return {**head, "choices": choices, "usage": _usage(*self._used)}

    def chunk(self, new: Completion, index: int, new_prompt: bool = True) -> bytes:
        """Return the new part of an answer in a stream."""
        said: dict[str, Any] = {"delta": {"content": new.text}} if self.chat else {"text": new.text}
        body, choice = dict(self._head), {"index": index, **said, **self._choice(new, self._offsets.get(index, 0))}
        if index not in self._begun:
            self._begun.add(index)
            self._count(len(new.prompt_token_ids) if new_prompt else 0, 0)
            if self.chat:
                choice["delta"]["role"] = "assistant"
            if self._ids:
                (body if self.chat else choice)["prompt_token_ids"] = new.prompt_token_ids
        self._offsets[index] = self._offsets.get(index, 0) + len(new.text)
        self._count(0, len(new.token_ids))
        if self._usage:
            body["usage"] = None
        return event({**body, "choices": [choice]})

    def end(self) -> bytes:
        """Return the end of a stream, after its last chunk."""
        usage = {**self._head, "choices": [], "usage": _usage(*self._used)}
        return (event(usage) if self._usage else b"") + b"data: [DONE]\n\n"

    def _count(self, prompt: int, response: int) -> None:
        self._used = (self._used[0] + prompt, self._used[1] + response)

    def _choice(self, c: Completion, offset: int) -> dict[str, Any]:
        shown = self._logprobs(c, offset) if self._shown else None
        ids = {"token_ids": c.token_ids} if self._ids else {}
        return {"finish_reason": c.finish_reason or None, "logprobs": shown, **ids}

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._named_by_id else self._tokenizer.decode([token])

    def _logprobs(self, c: Completion, offset: int) -> dict[str, Any]:
        if self.chat:
            return {"refusal": None, "content": [
                {**self._token(t, p), "top_logprobs": [self._token(*other) for other in row]} for t, p, row in _rows(c)
            ]}
        offsets = []
        for t in c.token_ids:
            offsets.append(offset)
            offset += len(self._tokenizer.decode([t]))
        top = None
        if c.top_logprobs is not None:
            top = [{self._named(t): max(p, _LEAST) for t, p in reversed(row)} for row in c.top_logprobs]
        return {"tokens": [self._named(t) for t in c.token_ids], "token_logprobs": c.logprobs or [],
                "top_logprobs": top, "text_offset": offsets}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": self._named(token), "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token, "token": f"token_id:{token}", "logprob": max(logprob, _LEAST)}


def _rows(c: Completion) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Return each token with its logprob and the likeliest alternatives."""
    return list(zip(c.token_ids, c.logprobs or [], c.top_logprobs or [[] for _ in c.token_ids], strict=True))


def _usage(prompt: int, response: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}


async def _streamed(chunks: AsyncGenerator[bytes]) -> Response:
    """Return server-sent events, once the first exists: an earlier failure has its status, a later one is the last
    event.
    """
    from starlette.responses import StreamingResponse

    first = await anext(chunks)

    async def every() -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            yield first
            try:
                async for chunk in chunks:
                    yield chunk
            except EngineError as e:
                yield event(refusal(e).body())

    return StreamingResponse(every(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
