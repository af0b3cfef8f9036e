"""HTTP server of an engine, on the engine's event loop.

It has vLLM's API: vLLM's own application if the engine is vLLM, for other engines the part in `small_api.py`. Before
a request reaches the application, and for its answer, this server adds:

- Every request needs the token, as `Authorization: Bearer <token>` or `x-api-key`, or gets 401. `GET /health` is free.
- `/s/{session}/...` are the same routes for the clients of one run. A session belongs to a `Model`, whose sampling is
  the default of its requests. The model counts tokens, and keeps every complete answer as an Experience with exact ids,
  logprobs and versions. Its requests end with the run. Answers have token ids (`return_token_ids`) unless the request
  declines them.
- Bodies, prompts, answers and tokens have limits.
- Each answer has the header `x-model-version`, the version served when the request arrived.
- A request is aborted in the engine when its client disconnects.
- The proxy of mode `serve` gets the record of an answer with it (`recorded_answer_frames.py`).

Starlette and uvicorn are imported in `start`, not here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from trinity_es.actors.engines.interface import Engine
from trinity_es.actors.engines.sampling_checks import excerpt
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving import small_api
from trinity_es.actors.serving.errors import ApiError, StreamPlace, as_api_error, error_body
from trinity_es.actors.serving.http_server import (
    Gone,
    bearer_header,
    json_response,
    listen,
    make_server,
    no_route_error,
    read_body,
    run_until_disconnect,
    start_serving,
    stop_serving,
    url_of,
)
from trinity_es.actors.serving.recorded_answer_frames import RECORD_HEADER, Framed, find_response_id
from trinity_es.actors.serving.request_limits import (
    CHATS,
    RESPONSES,
    ROUTES,
    check_recorded,
    checked_body,
    json_bytes,
    with_defaults,
)
from trinity_es.actors.serving.request_record import REQUEST, RequestRecord
from trinity_es.actors.serving.token_id_routes import JsonHandler, token_id_routes
from trinity_es.events.errors import EngineError
from trinity_es.events.experience import Experience

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["EngineServer"]

_log = logging.getLogger(__name__)
LEAVING_SECONDS = 0.2
"""How long the application may take to end a request whose client or run is gone; then the request is cancelled."""
_RUN_GONE = "the request was aborted: its run is gone"
_SESSION = re.compile(r"/s/([^/]*)(/.*)")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Session:
    """Open requests of one run, or of clients without a run."""

    model: Model
    exchanges: set[_Exchange] = field(default_factory=set)
    """Requests that the application is answering."""
    keeps_answers: bool = True
    """True if the model keeps the answers as experiences."""
    run_ended: bool = False

    def abort(self) -> None:
        """Abort all open requests. Any thread may call this."""
        for exchange in list(self.exchanges):
            exchange.loop.call_soon_threadsafe(exchange.abort)


class EngineServer:
    """HTTP server of an engine, used on the engine's loop; `open` and `url` may be used from any thread.

    `name`: the model's name for clients; `defaults`: sampling of requests without a session; `exact`: also serve
    `token_id_routes`, for an auxiliary model; `on_dead` is called with the reason when a request finds the engine dead.
    """

    def __init__(
        self, engine: Engine, *, name: str, token: str, address: str = "127.0.0.1",
        defaults: Mapping[str, Any] | None = None, on_dead: Callable[[str], None] | None = None, exact: bool = False,
    ) -> None:
        self.id_routes = token_id_routes(engine) if exact else {}
        self.load = 0
        """Number of open requests."""
        self.engine, self.name, self.token = engine, name, token
        self.address, self.on_dead = address, on_dead
        self.url = ""
        """URL such as `http://127.0.0.1:41234`; empty before the start."""
        self.no_session = _Session(Model(engine, defaults=defaults), keeps_answers=False)
        """Session of the requests that name none."""
        self.sessions: dict[str, _Session] = {}
        self._application: asyncio.Task[Any] | None = None
        self._exchange_count = 0
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------
    async def start(self) -> str:
        """Start serving and return the URL. Raises StartupError."""
        server = await asyncio.to_thread(make_server, self.answer)  # its imports take most of a second
        listening = listen(self.address, 0)
        self._server, self._serving = server, await start_serving(server, listening)
        self.url = url_of(listening)
        return self.url

    async def stop(self) -> None:
        """Abort open requests and stop serving. A second call does nothing."""
        for session_id in list(self.sessions):
            self.forget(session_id)
        self.no_session.abort()
        while self._exchange_count:  # until no request continues in the engine
            await asyncio.sleep(0.01)
        if self._serving is not None:
            stop_serving(self._server)
            await asyncio.wait({self._serving})
            self._serving = None

    def serves(self) -> bool:
        """Return False if the server's task has ended by itself."""
        return self._serving is None or not self._serving.done()

    # --- sessions ---------------------------------------------------------------------------------------------------
    def open(self, model: Model) -> str:
        """Open a session for a run's clients, and return its id. Answers at `{url}/s/{id}/v1` become experiences."""
        session_id = secrets.token_hex(8)
        self.sessions[session_id] = _Session(model)
        return session_id

    def forget(self, session_id: str) -> None:
        """Close the session of a run that is over, if it is open, and abort its requests."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.run_ended = True
            session.abort()

    # --- requests ---------------------------------------------------------------------------------------------------
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application. Errors have the form of the route's API."""
        from starlette.requests import Request

        request = Request(scope, receive)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        match = _SESSION.fullmatch(scope["path"])
        session_id, path = match.groups() if match else (None, scope["path"])
        exchange = _Exchange(receive, send, path, framed=_RECORD_HEADER in headers)
        self.load += 1
        try:
            if scope["path"] == "/health":
                await json_response({"status": "ok"})(scope, receive, send)
                return
            session = self._session_of(session_id, headers)
            if path in self.id_routes and request.method == "POST":
                await self._answer_with_ids(request, self.id_routes[path], send)
            else:
                await self._answer_by_application(request, session, path, exchange)
        except Exception as e:
            await exchange.answer_error(e)
        finally:
            self.load -= 1

    def _session_of(self, session_id: str | None, headers: Mapping[bytes, bytes]) -> _Session:
        """Return the session of a request. Raises ApiError for a wrong token or an unknown session."""
        if not hmac.compare_digest(bearer_header(headers), f"Bearer {self.token}".encode()):
            raise ApiError("the token is missing or wrong: give it as Authorization: Bearer <token>", status=401,
                           code="invalid_api_key")
        session = self.no_session if session_id is None else self.sessions.get(session_id)
        if session is None:
            raise ApiError(
                f"there is no session {session_id}: its run is over (a workflow that is reset gets another model: take "
                "the client of self.model again in each run)", status=404, code="session_not_found",
            )
        return session

    async def _answer_by_application(
        self, request: Request, session: _Session, path: str, exchange: _Exchange
    ) -> None:
        """Have the application answer a request; the session has its default sampling. Raises ApiError, EngineError."""
        if ROUTES.get(path) != ("GET" if request.method == "HEAD" else request.method):
            raise no_route_error(request.method, path, ROUTES)
        session.model.engine_error = None
        raw = await read_body(request)
        body, default_length, engine_only, adapter = dict[str, Any](), None, dict[str, Any](), ""
        keeps_answers = session.keeps_answers
        records_tokens = keeps_answers or exchange.framed
        if request.method == "POST":
            body, default_length, engine_only = with_defaults(
                path, checked_body(path, raw), session.model.defaults, with_ids=keeps_answers)
            if records_tokens:
                check_recorded(path, body, len(raw))
            adapter = session.model.sampling.adapter
            model_name = body.get("model")
            adapters = getattr(self.engine, "adapters", ())
            if isinstance(model_name, str) and model_name in adapters:
                adapter, body["model"] = model_name, self.name
            elif model_name not in (None, "", self.name):
                # vLLM would refuse it too, but hides a name that is a path
                served_models = ", ".join(map(repr, [self.name, *adapters]))
                raise ApiError(f"the model {excerpt(model_name)} does not exist; GET /v1/models lists those that do: "
                               f"{served_models}", status=404, param="model", code=404)
            raw = json_bytes(body)
        record = RequestRecord(
            model=session.model, body=body, default_length=default_length, engine_only=engine_only,
            failed_with=partial(self._fail, session), keeps_answers=keeps_answers, records_tokens=records_tokens,
            chat=path in CHATS, adapter=adapter,
        )
        if keeps_answers:
            record.number = session.model.next_number()
        headers = [(k, v) for k, v in request.scope["headers"] if k not in _NOT_PASSED_ON]
        headers.append((b"content-length", str(len(raw)).encode()))
        if key := os.environ.get("VLLM_API_KEY"):  # vLLM's server requires it by itself
            headers.append((b"authorization", f"Bearer {key}".encode()))
        scope = {**request.scope, "path": path, "raw_path": path.encode(), "headers": headers}
        application = await self._app()
        if session.run_ended:  # it may have ended while the application was made
            raise ApiError(_RUN_GONE, status=503)
        REQUEST.set(record)  # each request has a task of its own, and so a context of its own
        session.exchanges.add(exchange)
        self._exchange_count += 1
        try:
            await exchange.run(application, scope, raw, record)
        finally:
            session.exchanges.discard(exchange)
            self._exchange_count -= 1

    async def _answer_with_ids(self, request: Request, handle: JsonHandler, send: Send) -> None:
        """Answer a request to one of `token_id_routes`, with the served version and the number of open requests."""
        from starlette.responses import Response

        try:
            reply = await run_until_disconnect(request.receive, handle(json.loads(await read_body(request))))
        except EngineError as e:
            self._fail(self.no_session, e)
            raise
        reply |= {"model_version": self.engine.model_version, "load": self.load}
        # json, since orjson writes a logprob of -inf as null
        await Response(json.dumps(reply), media_type="application/json")(request.scope, request.receive, send)

    async def _app(self) -> Any:
        """Return the engine's own application, or that of `small_api`. The first request creates it."""
        task = self._application
        if task is None or (task.done() and task.exception() is not None):
            make_own = getattr(self.engine, "application", None)
            making = make_own(self.name, REQUEST.get) if make_own else small_api.application(self.engine, self.name)
            task = self._application = asyncio.ensure_future(making)
        return await asyncio.shield(task)  # other requests may wait for it too

    def _fail(self, session: _Session, error: EngineError) -> None:
        session.model.engine_error = error
        if error.details.get("dead") and self.on_dead is not None:
            self.on_dead(str(error))


_NOT_PASSED_ON = frozenset({b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", b"x-request-id"})
"""Headers that are not forwarded. The server makes request ids itself, so that no two answers share one."""
_RECORD_HEADER = RECORD_HEADER.encode()


class _Exchange:
    """One request and the application's answer, in the request's task.

    Generated tokens are kept as experiences before the end of the answer is sent. The status is sent with the first
    part of the body, so an engine that fails earlier still determines it. If the client leaves or `abort` is called,
    the application gets a disconnect, the only reason for which vLLM's server ends a request. If the request continues
    longer than LEAVING_SECONDS, it is cancelled.
    """

    def __init__(self, receive: Receive, send: Send, path: str, framed: bool) -> None:
        self.framed, self.loop = framed, asyncio.get_running_loop()
        self._receive, self._send = receive, Framed(send) if framed else send
        self._task = asyncio.current_task()
        self._body: bytes | None = None  # body of the request, until the application has received it
        self._record: RequestRecord | None = None
        self._version = 0  # the engine's version when the request arrived
        self._response_id, self._stream_place = "", StreamPlace(path)
        self._may_ask_again = path == RESPONSES  # the application may call the engine again after an answer
        self._start_message: Any = None  # status and headers, sent with the first part of the body
        self._held_part: Any = None  # newest part of the body, held while it may be followed by another answer
        self._status_sent = False
        self._end_sent = False
        self._is_stored = False
        self._client_left = False
        self._is_aborted = False
        self._past_deadline = False
        self._receiving_tasks: set[asyncio.Task[Any]] = set()  # tasks of the application that wait in `receive`
        self._deadline_timer: asyncio.TimerHandle | None = None

    async def run(self, application: Any, scope: Scope, body: bytes, record: RequestRecord) -> None:
        """Have the application answer the request. Raises ApiError if it was aborted, EngineError without an answer."""
        self._body, self._record, self._version = body, record, record.model.engine.model_version
        try:
            await application(scope, self.receive, self.send)
        except asyncio.CancelledError:
            assert self._task is not None
            if not self._past_deadline or self._task.uncancel():
                raise
        except Exception:
            if not self._client_left:
                raise
        finally:
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
        if self._is_aborted:
            raise ApiError(_RUN_GONE, status=503)
        if self._client_left:
            raise Gone("the request was aborted: its client is gone", status=503)
        if not self._status_sent:
            raise record.failed or EngineError("the engine's server gave no answer")

    async def receive(self) -> Any:
        """Return the body at the first call; later wait until the client leaves. The application's ASGI `receive`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._client_left:
            task = asyncio.current_task()
            assert task is not None
            self._receiving_tasks.add(task)
            try:
                while (await self._receive())["type"] != "http.disconnect":
                    pass
                self._note_disconnect()
            except asyncio.CancelledError:
                if not self._is_aborted or task.uncancel():
                    raise
            finally:
                self._receiving_tasks.discard(task)
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        """Abort the request because its run is over. The application gets a disconnect, and the client status 503."""
        if not self._is_aborted:
            self._is_aborted = True
            self._note_disconnect()
            for task in list(self._receiving_tasks):
                task.cancel()

    def _note_disconnect(self) -> None:
        """Note that the client left, and give the application LEAVING_SECONDS to end the request."""
        if not self._client_left:
            self._client_left = True
            self._deadline_timer = self.loop.call_later(LEAVING_SECONDS, self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None
        self._past_deadline = True
        self._task.cancel()

    async def send(self, message: Any) -> None:
        """Forward an application's message to the client; before the last one, store the answer. Raises EngineError."""
        assert self._record is not None
        if message["type"] == "http.response.start":
            self._start_message = message
            return
        if self._end_sent or self._client_left:
            return
        failed = self._record.failed
        if not self._status_sent and failed is not None:
            raise failed
        is_last = not message.get("more_body", False)
        self._response_id = self._response_id or find_response_id(message.get("body", b""))
        experiences = None
        is_complete = self._record.is_complete() and (is_last or not self._may_ask_again)
        if is_complete and not self._is_stored and self._start_message["status"] == 200:
            experiences = self._store_answer()
        frame = None
        if experiences is not None and self.framed:
            frame = Framed.record_data(self._record, experiences, self._response_id)
        if not self._status_sent:
            version = (b"x-model-version", str(self._version).encode())
            await self._send({**self._start_message, "headers": [*self._start_message.get("headers", ()), version]})
            self._status_sent = True  # not earlier, since a task that is cancelled while it waits has sent nothing
        if frame is not None and isinstance(self._send, Framed):
            await self._send.record(frame)
        if self._may_ask_again:  # the last part waits until it is recorded
            self._held_part, message = message, self._held_part
            if message is not None:
                self._stream_place.note_event_number(message.get("body", b""))
                await self._send({**message, "more_body": True})
            message = self._held_part if is_last else None
        self._end_sent = is_last
        if message is not None:
            await self._send(message)

    def _store_answer(self) -> list[Experience] | None:
        """Store and return the answer's experiences; None if none are to be recorded. Raises EngineError."""
        assert self._record is not None
        self._is_stored = True
        if not self._record.records_tokens:
            return None
        try:
            return self._record.experiences()
        except Exception as e:  # noted in the record, since the application turns errors of `send` into others
            failed = e if isinstance(e, EngineError) else EngineError(f"the answer can't be kept: {e}")
            self._record.fail(failed)
            raise failed from e

    async def answer_error(self, error: Exception) -> None:
        """Answer with an error: as its own response if nothing was sent, otherwise as the last event of a stream.

        If the answer is no stream, its rest is dropped. uvicorn then closes the connection, so the client notices it.
        """
        error = (self._record.failed if self._record is not None else None) or error
        refused = as_api_error(error)
        if refused.status == 500 and not isinstance(error, EngineError):
            _log.error("a request failed", exc_info=error)
        if self._end_sent:
            return
        if self._status_sent:
            headers: dict[bytes, bytes] = dict(self._start_message.get("headers", ()))
            if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                return
            self._end_sent = True
            body = self._stream_place.last_event(refused)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            return
        self._status_sent = self._end_sent = True
        response = json_response(error_body(refused, self._stream_place.path), refused.status)
        await response({"type": "http"}, None, self._send)  # type: ignore[arg-type]
