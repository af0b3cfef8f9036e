"""Proxy of mode `serve`: an OpenAI-compatible API in front of the engines. Each answer becomes an experience.

docs/SERVING.md lists the routes. Clients send `Proxy.api_key` as `Authorization: Bearer <key>` or `x-api-key`. With
`explorer.proxy_without_key` no key is needed, but requests from pages of other sites are refused. The id of a response
(`chatcmpl-...`) is its message id. An answer is recorded before its client gets the end of the answer, so rewards can
be posted even after a crash.

A request goes to the least busy engine. A later request of a conversation (with the same header `X-Session-Id`, else
with the same earlier messages) goes to the same engine. An engine that is loading weights gets no new requests. If an
engine dies before the first byte of an answer, a second engine gets the request, but never a third. While no engine
serves, requests wait.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_es.actors.commands import CountAnswers, DeliverAnswers, GetRoutes, RewardAnswers
from trinity_es.actors.commands.fields import NAME_LENGTH
from trinity_es.actors.engines.http.client import http_client, size_limit
from trinity_es.actors.engines.http.pool import MAX_LOST, Backend, EngineFailed, EnginePool, NoEngine
from trinity_es.actors.requests import LIMIT
from trinity_es.actors.serving import http_server
from trinity_es.actors.serving.errors import ApiError, StreamPlace, invalid_field
from trinity_es.actors.serving.recorded_answer_frames import RECORD_HEADER, parse_record, read_frames
from trinity_es.actors.serving.request_limits import ROUTES, json_bytes
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import EngineError, NotRunning, TrinityError
from trinity_es.events.experience import LARGEST_REWARD
from trinity_es.serve import http_messages
from trinity_es.serve.recorder import CompletionRecorder, recorded_completion
from trinity_es.system import running_system

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["Proxy", "api_key"]

CONNECT_SECONDS = 5.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


def api_key(config: Config) -> str:
    """Return the API key for clients of the proxy, derived one-way from the system's key. Raises WrongKey."""
    return "sk-" + hmac.digest(read_key(running_system.key_file(config)), b"trinity-es proxy", "sha256").hex()


class Proxy:
    """HTTP proxy in front of the engines of a running system. It runs on the event loop that starts it.

    The constructor raises WrongKey if there is no system key, or if another user could have read the key.
    """

    def __init__(self, config: Config, client: RolloutClient) -> None:
        self.config, self.api_key = config, api_key(config)
        self.base_url = ""
        """Base URL for clients, such as `http://127.0.0.1:41234/v1`; empty before `start`."""
        self.engines = EnginePool()
        self.requests = 0
        """Number of requests for answers. Those neither `answered` nor `failed` are in flight."""
        self.answered = 0
        """Number of requests whose answer was sent completely."""
        self.failed = self.commits = 0
        self._recorder = CompletionRecorder(client)
        self._name = uuid.uuid4().hex
        """Unique name of this proxy for the coordinator."""
        self._headers = {"authorization": f"Bearer {engine_token(read_key(running_system.key_file(config)))}"}
        self._patience = config.explorer.max_timeout
        """How long a request may wait for an engine, and then for each part of the answer, in seconds."""
        self._attempts = 1 + config.explorer.max_retry_times
        self._background_tasks: set[asyncio.Task[Any]] = set()
        self._requests_in_flight: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self._http: httpx.AsyncClient
        self._server: Any = None

    # --- life -------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the HTTP server and the background tasks. Raises StartupError."""
        explorer = self.config.explorer
        tls = http_server.tls_options(explorer.proxy_tls.cert, explorer.proxy_tls.key)
        self._http = http_client(connect=CONNECT_SECONDS, read=self._patience)
        listening = http_server.listen(explorer.listen_address, explorer.proxy_port, "the proxy",
                                       ": change explorer.listen_address or explorer.proxy_port")
        self._start_task(self._recorder.run())
        stop_seconds = http_server.STOP_SECONDS + 3  # `stop` ends requests earlier
        self._server = http_server.make_server(http_server.make_app(self._routes()), stop_seconds, **tls)
        self._serving = await http_server.start_serving(self._server, listening)
        self.base_url = f"{http_server.url_of(listening, bool(tls))}/v1"
        self._start_task(self._follow_engines())

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background until it ends or `stop` cancels it."""
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    async def wait_finished(self) -> None:
        await asyncio.wait({self._serving})

    async def stop(self) -> None:
        """Stop the proxy. Requests in flight may end within STOP_SECONDS; then they are cancelled. Idempotent."""
        if self._server is not None:
            http_server.stop_serving(self._server)
            _, pending = await asyncio.wait({self._serving}, timeout=http_server.STOP_SECONDS)
            if pending:
                self._is_ending = True  # so each client gets an error, as a response or at the end of its stream
                for request in self._requests_in_flight:
                    request.cancel()
                if self._requests_in_flight:
                    _log.warning("the proxy ends: %d requests in flight were cut off after %d s",
                                 len(self._requests_in_flight), http_server.STOP_SECONDS)
                await asyncio.wait(pending, timeout=5)
            self._server = None
            await self._http.aclose()
        for task in list(self._background_tasks):
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        self._recorder.close()

    def _cut_off_error(self, error: asyncio.CancelledError) -> ApiError:
        """Return the error for the client of a request that `stop` cancelled. Raises any other cancellation again."""
        task = asyncio.current_task()
        if not self._is_ending or task is None:
            raise error
        task.uncancel()
        return ApiError("the request was cut off: trinity-es serve ends", status=503, code="proxy_ends")

    async def _follow_engines(self) -> None:
        """Update the table of engines whenever the coordinator's changes; while no coordinator answers, keep it."""
        table_version = -1
        while True:
            try:
                routes = await self._recorder.ask(GetRoutes(proxy=self._name, url=self.base_url, knows=table_version))
            except Exception as e:
                if isinstance(e, NotRunning):
                    self.engines.update([])
                _log.warning("the coordinator does not say which engines serve: %s", e)
                await asyncio.sleep(1.0)
                continue
            table_version = routes["number"]
            self.engines.update(routes["engines"])

    # --- routes -----------------------------------------------------------------------------------------------------
    def _routes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (path, method, handler) of each route. All routes but /health check the key."""
        yield "/health", "GET", self._health
        for path, method, handler in (
            *((path, method, self._generate if method == "POST" else self._forward_get)
              for path, method in ROUTES.items()),
            ("/feedback", "POST", self._feedback), ("/commit", "POST", self._commit), ("/stats", "GET", self._stats),
            ("/metrics", "GET", self._metrics),
        ):
            yield path, method, self._with_key_check(handler)

    def _with_key_check(self, handler: Callable[[Request], Coroutine[Any, Any, Response]]) -> Any:
        """Wrap a handler: check the key before it, and turn its errors into responses of the route's API."""
        expected = f"Bearer {self.api_key}".encode()

        async def handle(request: Request) -> Response:
            try:
                if self.config.explorer.proxy_without_key:
                    http_messages.require_local(request)
                elif not hmac.compare_digest(http_server.bearer_header(dict(request.scope["headers"])), expected):
                    raise ApiError("the API key is missing or wrong: send the key that trinity-es serve printed, as "
                                   "Authorization: Bearer <key> or x-api-key: <key>", status=401,
                                   code="invalid_api_key")
                return await handler(request)
            except asyncio.CancelledError as e:
                return http_messages.error_response(self._cut_off_error(e), request.url.path)
            except Exception as e:
                return http_messages.error_response(http_messages.api_error(e), request.url.path)

        return handle

    async def _health(self, request: Request) -> Response:
        engine_count = sum(engine.serving for engine in self.engines.all())
        server = self._server
        if not engine_count:
            status = "no engine serves"
        elif server.connection_count >= server.limit:
            status = f"full: new clients wait, as {server.files} open files allow no more"
        else:
            status = "ok"
        health = {"status": status, "engines": engine_count, "connections": server.connection_count,
                  "most_connections": server.limit}
        return http_server.json_response(health, 200 if engine_count else 503)

    async def _stats(self, request: Request) -> Response:
        engines = [
            {"runner": engine.runner, "incarnation": engine.incarnation, "model_version": engine.model_version,
             "serving": engine.serving, "busy": engine.open_count,
             "answered": engine.answer_count, "failed": engine.failure_count}
            for engine in self.engines.all()
        ]
        answers = await self._recorder.ask(CountAnswers())
        return http_server.json_response({
            "engines": engines, "requests": self.requests, "answered": self.answered, "failed": self.failed,
            "open": self.requests - self.answered - self.failed, "answers": answers,
        })

    async def _metrics(self, request: Request) -> Response:
        """Answer with the metrics of Trinity-RFT's proxy, under its names."""
        counts = await self._recorder.ask(CountAnswers())
        metrics: dict[str, Any] = {
            "rollout/total_experience_count": sum(counts.values()),
            "rollout/ready_experience_count": counts["rewarded"] + counts["delivered"],
            "explore_step_num": self.commits,
        }
        for i, engine in enumerate(self.engines.all()):
            count = engine.answer_count + engine.failure_count + engine.open_count
            metrics[f"rollout/model_{i}/total_request_count"] = count
            metrics[f"rollout/model_{i}/model_version"] = engine.model_version
        return http_server.json_response(metrics)

    async def _feedback(self, request: Request) -> Response:
        raw = await http_server.read_body(request)
        body = http_messages.read_object(raw, {"msg_ids", "reward", "task_id", "run_id"})
        messages, reward = body.get("msg_ids"), body.get("reward")
        task, run = body.get("task_id"), body.get("run_id")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, str) for m in messages):
            raise invalid_field("msg_ids", messages, "a list of message ids (the `id` of a response)")
        if (longest := max(map(len, messages))) > NAME_LENGTH:
            raise ApiError(f"msg_ids has an id of {longest:,} characters: an id has {NAME_LENGTH} at most",
                           param="msg_ids", code="invalid_value")
        if sum(map(len, messages)) > LIMIT // 2:
            raise ApiError(f"msg_ids has {len(messages)} ids, which are too long for one request: post them in several",
                           param="msg_ids")
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not abs(reward) <= LARGEST_REWARD:
            raise invalid_field("reward", reward, "a finite number, of 1e30 at most")
        if task is not None and not (isinstance(task, str | int) and 0 < len(str(task)) <= NAME_LENGTH):
            raise invalid_field("task_id", task, f"a text of {NAME_LENGTH} characters at most, or null")
        for name, texts in (("msg_ids", messages), ("task_id", [str(task)])):
            if any("\0" in value for value in texts):  # PostgreSQL can't store NUL in a text
                raise invalid_field(name, texts, "text without NUL")
        if run is not None and not (type(run) is int and 0 <= run < 2**31):
            raise invalid_field("run_id", run, f"a whole number from 0 to {2**31 - 1}, or null")
        count = await self._recorder.ask(RewardAnswers(
            messages=messages, reward=float(reward), task=None if task is None else str(task), run=run))
        return http_server.json_response({"status": "success", "count": count})

    async def _commit(self, request: Request) -> Response:
        delivered = await self._recorder.ask(DeliverAnswers())
        self.commits += 1
        return http_server.json_response({"status": "success", **delivered})

    async def _forward_get(self, request: Request) -> Response:
        async def ask(engine: Backend) -> Response:
            response = await self._http.get(engine.endpoint + request.url.path, headers=self._headers)
            if _is_engine_failure(response.status_code):
                raise EngineFailed(http_messages.error_message(response.content))
            return _make_response(response.content, response.status_code, {"content-type": "application/json"})

        return await self._ask_an_engine(ask, [])

    async def _generate(self, request: Request) -> Response:
        try:
            raw = await http_server.read_body(request)
        except http_server.Gone:
            self.requests += 1
            self.failed += 1
            raise
        path = request.url.path
        body = http_messages.read_object(raw)
        json_bytes(body)
        earlier_keys, own_keys = http_messages.conversation_keys(body, request.headers.get("x-session-id"))
        headers = {**self._headers, "content-type": "application/json", RECORD_HEADER: "1"}

        async def ask(engine: Backend) -> Response:
            # No limit on the answer's size, because the runner has limited it.
            sent = self._http.build_request(
                "POST", engine.endpoint + path, content=raw, headers=headers, extensions=size_limit(sys.maxsize)
            )
            response = await self._http.send(sent, stream=True)
            streaming = False
            try:
                answer, status = read_frames(response.aiter_raw()), response.status_code
                if RECORD_HEADER not in response.headers:
                    raise EngineFailed("the engine's server did not answer like a runner's: it may be another program")
                if _is_engine_failure(status):
                    data = b"".join([part async for kind, part in answer if kind == "b"])
                    raise EngineFailed(http_messages.error_message(data))
                passed = {name: value for name, value in response.headers.items() if name in _FORWARDED_HEADERS}
                if status < 400:
                    self.engines.remember(own_keys, engine)
                if passed.get("content-type", "").startswith("text/event-stream") and status == 200:
                    stream = await self._start_stream(response, answer, passed, engine, path)
                    streaming = True
                    return stream
                received = [frame async for frame in answer]
                parts = [data for kind, data in received if kind == "b"]
                if not parts:
                    raise EngineFailed("the engine's answer has no body")
                for kind, data in received:  # only a complete answer, so that a retried request is recorded once
                    if kind == "r":
                        await self._record(data, engine)
                engine.answer_count += 1
                return _make_response(b"".join(parts), status, passed)
            finally:
                if not streaming:
                    await response.aclose()

        self.requests += 1
        if (task := asyncio.current_task()) is not None:
            self._requests_in_flight.add(task)
            task.add_done_callback(self._requests_in_flight.discard)  # when the whole answer is sent
        try:
            answer = await http_server.run_until_disconnect(request.receive, self._ask_an_engine(ask, earlier_keys))
        except BaseException:
            self.failed += 1
            raise
        self.answered += not hasattr(answer, "body_iterator")  # a stream counts at its end
        return answer

    async def _record(self, data: bytes, engine: Backend) -> None:
        try:
            answer = recorded_completion(*parse_record(data), engine)
        except (LookupError, TypeError, ValueError) as e:
            raise EngineError(f"the answer of {engine.runner} can't be recorded: {type(e).__name__}: {e}") from e
        await self._recorder.record(answer)

    # --- engines ----------------------------------------------------------------------------------------------------
    async def _ask_an_engine(self, ask: Callable[[Backend], Coroutine[Any, Any, T]], keys: list[str]) -> T:
        """Call `ask` for an engine, and for another one if that engine fails; return the result. Raises ApiError."""
        try:
            return await self.engines.ask(ask, keys, seconds=self._patience, attempts=self._attempts)
        except NoEngine as e:
            if e.lost < MAX_LOST:
                raise ApiError(str(e), status=503, code="no_engine") from e
            raise ApiError(
                f"{e.lost} engines were lost while they answered this request ({e}), so it may be the cause, and no "
                "other engine gets it: see `trinity-es runners`", status=500, code="engines_lost",
            ) from e

    async def _start_stream(
        self, response: httpx.Response, answer: AsyncGenerator[tuple[str, bytes]], headers: dict[str, str],
        engine: Backend, path: str,
    ) -> Response:
        """Wait for the first part of an engine's answer, and return the stream to the client. Counts it at its end."""
        from starlette.responses import StreamingResponse

        parts = self._record_before_end(answer, engine)
        try:
            first = await anext(parts)
        except StopAsyncIteration:
            raise EngineFailed("the engine's answer was an empty stream") from None
        proxy, place = self, StreamPlace(path)
        is_whole = asyncio.Event()

        class Stream(StreamingResponse):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                try:
                    await super().__call__(scope, receive, send)
                except asyncio.CancelledError as e:
                    await send({"type": "http.response.body", "body": place.last_event(proxy._cut_off_error(e))})
                finally:  # not in the generator, whose `finally` does not run if it was never started
                    engine.open_count -= 1
                    proxy.answered += is_whole.is_set()
                    proxy.failed += not is_whole.is_set()
                    proxy._start_task(response.aclose())  # not awaited: a cancellation by the client would break it off

        engine.open_count += 1
        return Stream(self._stream_parts(first, parts, engine, place, is_whole), headers=headers)

    async def _record_before_end(
        self, answer: AsyncGenerator[tuple[str, bytes]], engine: Backend
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of an answer's body. The answer is recorded before its last part."""
        async for kind, data in answer:
            if kind == "r":
                await self._record(data, engine)
            elif data:
                yield data

    async def _stream_parts(
        self, first: bytes, parts: AsyncGenerator[bytes], engine: Backend, place: StreamPlace, is_whole: asyncio.Event
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of a stream and set `is_whole` at its end. If the engine fails, yield an error event."""
        import httpx

        place.note_event_number(first)
        try:
            yield first
            async for part in parts:
                place.note_event_number(part)
                yield part
            engine.answer_count += 1
            is_whole.set()
        except (TrinityError, httpx.TransportError, EOFError) as e:
            if not isinstance(e, TrinityError):
                e = EngineError(f"{engine.runner} ended in the middle of this stream ({str(e) or type(e).__name__}): "
                                "send the request again")
            yield place.last_event(http_messages.api_error(e))


def _is_engine_failure(status: int) -> bool:
    """Return True if another engine may be tried after this status: 5xx, or 401 (the engine has another key)."""
    return status >= 500 or status == 401


_FORWARDED_HEADERS = frozenset({"content-type", "cache-control", "x-model-version"})
"""Headers of an engine's answer that the client gets."""


def _make_response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    from starlette.responses import Response

    return Response(body, status_code=status, headers=headers)
