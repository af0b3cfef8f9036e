"""An engine as an OpenAI-compatible HTTP endpoint, on the event loop that the engine runs on.

| route | |
|---|---|
| `GET /health` | `{"status": "ok"}`; the only one without a token |
| `GET /v1/models` | the one model |
| `POST /v1/chat/completions`, `POST /v1/completions` | whole or streamed; fields and extensions: `openai_api.py` |
| `/s/{session}/v1/...` | the same three, for the clients of one run |

Every request has the header `Authorization: Bearer <token>`, else it is 401. Errors are OpenAI's JSON: 400 names the
field, 404 an unknown session, 500 and 503 are the engine's. A request whose client goes away is aborted in the engine.

A session belongs to a `Model` (of one run): its sampling holds where a request says nothing, it counts the tokens, and
the model keeps every answer that was complete as an Experience.

Starlette and uvicorn are imported in `start`, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trinity_es.actors.engines.interface import Completion, Engine
from trinity_es.actors.engines.sampling import checked_prompt
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.http_server import (
    begin,
    json_response,
    listen,
    make_server,
    read_body,
    url_of,
    while_listening,
)
from trinity_es.actors.serving.openai_api import (
    ApiError,
    GenerationRequest,
    ResponseBuilder,
    event,
    read_chat,
    read_completion,
    refusal,
)
from trinity_es.events.errors import DataError, EngineError, StartupError, WorkflowError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["EngineServer"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Session:
    model: Model
    working: set[asyncio.Future[Any]] = field(default_factory=set)
    kept: bool = True
    """The model keeps the answers."""


class EngineServer:
    """See the module. `name` is the model's, for clients; `defaults` the sampling outside of sessions. `routes` are
    further POST routes: path -> handler, which is called for requests that have the token.

    `on_dead` is told why when a request finds that the engine will never answer again.
    Everything is called on the engine's loop; `open` and `url` may be used from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        token: str,
        address: str = "127.0.0.1",
        port: int = 0,
        defaults: Mapping[str, Any] | None = None,
        on_dead: Callable[[str], None] | None = None,
        routes: Mapping[str, Callable[[Request], Coroutine[Any, Any, Response]]] | None = None,
    ) -> None:
        self.routes = dict(routes or {})
        self.engine, self.name, self.token = engine, name, token
        self.address, self.port, self.on_dead = address, port, on_dead
        self.url = ""
        """Such as `http://127.0.0.1:41234`, once it is started."""
        self.plain = _Session(Model(engine, defaults=defaults), kept=False)
        self.sessions: dict[str, _Session] = {}
        self._created = int(time.time())
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------
    async def start(self) -> str:
        """Serve; returns the URL. Raises StartupError where it can't."""
        server = await asyncio.to_thread(lambda: make_server(self._routes()))  # its imports take most of a second
        try:
            listening = listen(self.address, self.port)
        except OSError as e:
            raise StartupError(
                f"the OpenAI endpoint can't listen on {self.address}, port {self.port or '(any)'} ({e.strerror})"
            ) from e
        self._server, self._serving = server, await begin(server, listening)
        self.url = url_of(listening)
        return self.url

    async def stop(self) -> None:
        """Serve nothing any more; requests in flight are aborted. Idempotent."""
        for session in list(self.sessions):
            self.forget(session)
        _abort(self.plain)
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving})
            self._serving = None

    def serves(self) -> bool:
        """Return True if its task still runs, once it was started."""
        return self._serving is None or not self._serving.done()

    # --- sessions ---------------------------------------------------------------------------------------------------
    def open(self, model: Model) -> str:
        """Return a session for the clients of this run: requests to `{url}/s/{session}/v1` are kept as experiences."""
        session = secrets.token_hex(8)
        self.sessions[session] = _Session(model)
        return session

    def forget(self, session: str) -> None:
        """Abort the requests of a run that is over. Fine where there is no such session."""
        found = self.sessions.pop(session, None)
        if found is not None:
            _abort(found)

    def _session(self, session: str | None) -> _Session:
        if session is None:
            return self.plain
        found = self.sessions.get(session)
        if found is None:
            raise WorkflowError(
                f"there is no session {session}: its run is over (a workflow that is reset gets another model: take "
                "the client of self.model anew in each run)"
            )
        return found

    # --- routes -----------------------------------------------------------------------------------------------------
    def _routes(self) -> Iterator[tuple[str, str, Any]]:
        async def health(request: Request) -> Response:
            return json_response({"status": "ok"})

        yield "/health", "GET", health
        for prefix in ("/v1", "/s/{session}/v1"):
            yield f"{prefix}/models", "GET", self._guarded(self._models)
            yield f"{prefix}/chat/completions", "POST", self._guarded(partial(self._asked, read_chat))
            yield f"{prefix}/completions", "POST", self._guarded(partial(self._asked, read_completion))
        for path, handler in self.routes.items():
            yield path, "POST", self._guarded(lambda request, _, handler=handler: handler(request))

    def _guarded(self, handler: Callable[..., Coroutine[Any, Any, Response]]) -> Any:
        """Return a handler for requests that have the token; what it raises is an answer in OpenAI's form."""

        async def answered(request: Request) -> Response:
            try:
                return await handler(request, self._admitted(request))
            except Exception as e:
                return _error(e)

        return answered

    def _admitted(self, request: Request) -> _Session:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise ApiError("the token is missing or wrong: give it as Authorization: Bearer <token>", status=401,
                          code="invalid_api_key")
        try:
            return self._session(request.path_params.get("session"))
        except WorkflowError as e:
            raise ApiError(str(e), status=404, code="session_not_found") from e

    async def _models(self, request: Request, session: _Session) -> Response:
        model = {
            "id": self.name, "object": "model", "created": self._created, "owned_by": "trinity-es",
            "model_version": self.engine.model_version,
        }
        return json_response({"object": "list", "data": [model]})

    async def _asked(self, read: Any, request: Request, session: _Session) -> Response:
        session.model.failed = None
        ask = read(await read_body(request), (self.name,), session.model.sampling)
        number = session.model.numbered()
        answer = ResponseBuilder(ask, self.name, self.engine.model_version, self.engine.tokenizer)
        prompt: str | list[int] = ask.prompt
        if ask.messages is not None:
            prompt = session.model.render(ask.messages, ask.tools, ask.template)
        checked_prompt(prompt, DataError)
        if ask.stream:
            return await _streamed(session, request, self._chunks(session, number, ask, prompt, answer))
        return await while_listening(
            request.receive, self._whole(session, number, ask, prompt, answer), session.working
        )

    async def _whole(
        self, session: _Session, number: int, ask: GenerationRequest, prompt: str | list[int], answer: ResponseBuilder
    ) -> Response:
        before = self.engine.model_version
        with self._noticed(session):
            completions = await self.engine.generate(prompt, ask.sampling)
            answers = _took(session, number, ask, completions, before)
        return json_response(answer.whole(answers))

    async def _chunks(
        self, session: _Session, number: int, ask: GenerationRequest, prompt: str | list[int], answer: ResponseBuilder
    ) -> AsyncGenerator[bytes]:
        before = self.engine.model_version
        parts: list[Completion] = []
        with self._noticed(session):
            async with aclosing(self.engine.stream(prompt, ask.sampling)) as stream:
                async for new in stream:
                    parts.append(new)
                    if not new.finish_reason:
                        yield answer.chunk(new)
            [(_, spans)] = _took(session, number, ask, [_joined(parts)], before)
        yield answer.chunk(parts[-1], spans)
        yield answer.end()

    @contextlib.contextmanager
    def _noticed(self, session: _Session) -> Iterator[None]:
        try:
            yield
        except EngineError as e:
            session.model.failed = e
            if e.details.get("dead") and self.on_dead is not None:
                self.on_dead(str(e))
            raise


def _took(
    session: _Session, number: int, ask: GenerationRequest, completions: list[Completion], before: int
) -> list[tuple[Completion, list[list[int]]]]:
    """Count complete answers, and keep them as experiences where they are to be; each with its version spans."""
    text = ask.prompt if isinstance(ask.prompt, str) and ask.messages is None else None
    taken = session.model.took(completions, before, text, ask.sampling)
    found = []
    for completion, experience in taken:
        found.append((completion, experience.info.get("version_spans", [])))
        experience.info["model_version"] = before
        experience.eid.step = number
        if ask.messages is not None:
            experience.messages = [*ask.messages, {"role": "assistant", "content": completion.text}]
            experience.tools = ask.tools
    if session.kept:
        session.model.keep(number, taken)
    return found


def _joined(parts: list[Completion]) -> Completion:
    """Return the whole answer of a stream."""
    if not parts or not parts[-1].finish_reason:
        raise EngineError("the stream ended without an end of its answer")
    known = [p.logprobs for p in parts if p.logprobs is not None]
    return replace(
        parts[-1],
        token_ids=[t for p in parts for t in p.token_ids],
        logprobs=[lp for part in known for lp in part] if known else None,
        text="".join(p.text for p in parts),
        top_logprobs=[row for p in parts for row in p.top_logprobs or []] if parts[-1].top_logprobs else None,
    )


# --- responses ---------------------------------------------------------------------------------------
def _abort(session: _Session) -> None:
    for working in list(session.working):
        working.get_loop().call_soon_threadsafe(working.cancel)


async def _streamed(session: _Session, request: Request, chunks: AsyncGenerator[bytes]) -> Response:
    """Return server-sent events, once the first is there: what fails before has its status, else it is the last one."""
    from starlette.responses import StreamingResponse

    async def all_of(first: bytes) -> AsyncGenerator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    class Stream(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async with aclosing(chunks):
                try:
                    await while_listening(receive, self.stream_response(send), session.working)
                except Exception as e:
                    await send({"type": "http.response.body", "body": event(refusal(e).body()), "more_body": False})

    first = await while_listening(request.receive, chunks.asend(None), session.working)
    return Stream(all_of(first), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _error(error: Exception) -> Response:
    refused = refusal(error)
    if refused.status == 500 and not isinstance(error, EngineError):
        _log.error("a request failed", exc_info=error)
    return json_response(refused.body(), refused.status)
