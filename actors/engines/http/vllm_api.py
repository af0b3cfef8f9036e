"""Client of the HTTP API of an external, unmodified `vllm serve`. Tried with vLLM 0.32."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_es.actors.engines.http.client import MAX_BYTES, http_client, size_limit
from trinity_es.events.errors import EngineError
from trinity_es.events.values import local_time

if TYPE_CHECKING:
    import httpx

__all__ = [
    "BUSY", "BUSY_SECONDS", "DEV_MODE", "TOKEN_ROUTES", "UNLABELLED", "ServerFacts", "ServerGone", "VLLMServer",
    "is_refused",
]

_T = TypeVar("_T")

CONNECT_SECONDS = 5.0
KEEP_SECONDS = 2.0
"""How long an idle connection is kept: less than five seconds, after which a server may close it under a request."""
STATUS_SECONDS = 10.0
"""Timeout of requests for the server's status."""
UNANSWERED_SECONDS = 10.0
"""Time after which unanswered requests for tokens are reported. The server may still be fine."""
BUSY = 429, 503
"""HTTP statuses of a server that accepts no requests now."""
BUSY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before a request that the server did not accept is sent again."""
UNLABELLED = "default"
"""vLLM's label of weights that were never labelled."""
DEV_MODE = "VLLM_SERVER_DEV_MODE=1"

TOKEN_ROUTES = "/inference/v1/generate", "/v1/completions"
"""Routes that generate tokens: the one that takes token ids, and the one that every version has."""


class ServerGone(EngineError):
    """The server is gone or unreachable, or accepts no requests now (status 429)."""


def is_refused(error: BaseException) -> bool:
    """Return True if an error means that the connection was refused; False for a silent or busy server."""
    import httpx

    return isinstance(error, ServerGone) and isinstance(error.__cause__, httpx.ConnectError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Facts that a server reports at the first contact."""

    model: str
    root: str
    """Folder or hub id that the server was started with; empty if it does not report it."""
    max_model_len: int
    version: str
    """Version of vLLM; empty if the server does not report it."""
    labels_tokens: bool
    """True if answers say which weights generated which token (`/inference/v1/generate` with `--enable-scale-out`)."""
    loads_weights: bool
    """True if the server loads weights from a path and labels them (`VLLM_SERVER_DEV_MODE=1`)."""
    has_extension: bool
    """True if the server's workers have trinity_es's `WorkerExtension`."""
    on_cpu: bool


class VLLMServer:
    """Client of the server at `url`, for one event loop. `key`: its `--api-key`, from the variable `key_variable`.

    Methods raise ServerGone if the server can't be reached, and EngineError for an error status (in details `status`;
    with `refused=True` if vLLM itself rejects a request for tokens as wrong).
    """

    def __init__(
        self, url: str, *, key: str = "", key_variable: str = "", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url, self._key, self._key_variable, self._transport = url.rstrip("/"), key, key_variable, transport
        self._http: httpx.AsyncClient | None = None
        self._closed = False
        self._start_times: dict[object, float] = {}
        """Monotonic start time of each open request for tokens; the key is an object made for the request."""

    def _client(self) -> httpx.AsyncClient:
        """Return the HTTP client, made at the first request. Raises ServerGone after `close`."""
        if self._closed:
            raise ServerGone(f"the connection to {self.url} was closed: its engine was stopped")
        if self._http is None:
            self._http = http_client(
                base_url=self.url, headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                connect=CONNECT_SECONDS, keep=KEEP_SECONDS, trust_env=True, transport=self._transport,
            )
        return self._http

    async def close(self) -> None:
        """Close the connections; every later request raises ServerGone."""
        self._closed = True
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    # --- requests ---------------------------------------------------------------------------------------------------
    async def request(
        self, method: str, path: str, body: Any = None, *, seconds: float | None = None, max_bytes: int = MAX_BYTES,
        **params: str,
    ) -> httpx.Response:
        """Send a request and return the answer, whatever its status; retry once if the connection was lost."""
        import httpx

        # A server closes the connection after its own error, which only the next request notices.
        connection_lost = httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError
        for may_retry in (True, False):
            try:
                async with asyncio.timeout(seconds):
                    return await self._client().request(
                        method, path, json=body, params=params, extensions=size_limit(max_bytes)
                    )
            except (httpx.HTTPError, TimeoutError) as e:
                if not (may_retry and isinstance(e, connection_lost)):
                    raise ServerGone(f"{self.url} does not answer ({self._without_key(_error_text(e))})") from e
        raise AssertionError

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Send a request and return its answer's JSON. `more`: as for `request`. Raises EngineError for an error."""
        answer = await self.request(method, path, body, **more)
        self._raise_for_status(answer, path)
        value = self._parse(answer, lambda value: value) if answer.content else None
        # The body of a status 200 may still report a failure, of the request or of a worker.
        results = value.get("results") if isinstance(value, dict) else None
        for part in (value, *(results if isinstance(results, list) else ())):
            if isinstance(part, dict) and (part.get("error") or part.get("success") is False):
                raise EngineError(f"{self.url}{path} failed with status {answer.status_code}, see the server's log: "
                                  f"{self._without_key(_short_message(answer.text))}")
        return value

    async def tokens(self, path: str, body: Any, max_bytes: int) -> Any:
        """Send a request for tokens and return the JSON of its answer. While the server is busy, send it again."""
        pauses = iter(BUSY_SECONDS)
        while True:
            try:
                with self._count_open():
                    return await self.ask("POST", path, body, max_bytes=max_bytes)
            except ServerGone as e:
                await self._wait_out(e, pauses)

    @contextlib.contextmanager
    def _count_open(self) -> Iterator[None]:
        request = object()
        self._start_times[request] = time.monotonic()
        try:
            yield
        finally:
            del self._start_times[request]

    def has_request_since(self, moment: float) -> bool:
        """Return True if a request for tokens is open since before `moment`; a busy server would reject it."""
        return any(start_time < moment for start_time in self._start_times.values())

    def unanswered(self, last_answer_at: float) -> str:
        """Return a message if requests for tokens were unanswered for UNANSWERED_SECONDS; else an empty text."""
        silent_since = max(last_answer_at, min(self._start_times.values(), default=math.inf))
        silent_seconds = time.monotonic() - silent_since
        if silent_seconds < UNANSWERED_SECONDS:
            return ""
        count, since = len(self._start_times), local_time(time.time() - silent_seconds)
        return f"an answer of {self.url}: it has {count} request{'s'[: count - 1]}, and has answered none since {since}"

    async def events(self, path: str, body: Any, max_bytes: int) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a streamed answer. Closing the generator aborts the request. Raises like `ask`."""
        pauses = iter(BUSY_SECONDS)
        while True:
            try:
                with self._count_open():
                    async with contextlib.aclosing(self._stream_events(path, body, max_bytes)) as events:
                        async for event in events:
                            yield event
                return
            except ServerGone as e:  # a busy server rejects the request before the first event
                await self._wait_out(e, pauses)

    async def _wait_out(self, error: ServerGone, pauses: Iterator[float]) -> None:
        """Wait until a rejected request may be sent again. Raises `error` if it must not, or no pause is left."""
        if error.details.get("status") not in BUSY:
            raise error
        if await self.reports_pause():
            while await self.reports_pause():
                await asyncio.sleep(BUSY_SECONDS[0])
            return
        pause = next(pauses, None)
        if pause is None:
            raise error
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _stream_events(self, path: str, body: Any, max_bytes: int) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a streamed answer to one request, without retries. Raises like `ask`."""
        import httpx

        try:
            async with self._client().stream("POST", path, json=body, extensions=size_limit(max_bytes)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._raise_for_status(answer, path)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event: dict[str, Any] = json.loads(line[6:])
                    if "error" in event:
                        problem = self._without_key(str(event["error"])[:300])
                        raise EngineError(f"{self.url}{path} broke off its answer: {problem}. See the server's log")
                    yield event
        except (ValueError, TypeError, RecursionError) as e:
            raise EngineError(f"{self.url}{path} sent no stream of vLLM's: check that it is a vLLM server") from e
        except httpx.HTTPError as e:
            raise ServerGone(f"{self.url} does not answer ({self._without_key(_error_text(e))})") from e

    def _parse(self, answer: httpx.Response, pick: Callable[[Any], _T]) -> _T:
        """Return `pick(body)` for the answer's JSON body. Raises EngineError if it is not JSON or `pick` fails."""
        try:
            return pick(json.loads(answer.content))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            text = self._without_key(_short_message(answer.text))
            raise EngineError(f"{answer.request.url} gave an answer that is not in the format of vLLM: {text!r}") from e

    def _raise_for_status(self, answer: httpx.Response, path: str) -> None:
        """Raise ServerGone or EngineError if the answer's status is an error. `path`: that of the request."""
        status = answer.status_code
        if status < 300:
            return
        detail = self._without_key(_short_message(answer.text))
        if status == 401:
            variable = self._key_variable or "that explorer.rollout_model.servers.key_variable names"
            refusal = f"refuses the key in {variable} (401): put the right one there" if self._key else (
                f"wants a key (401), and there is none: put it into the environment variable {variable}")
            raise EngineError(f"{self.url} {refusal}, and start the system again", status=status)
        error_class = ServerGone if status in (429, 502, 503, 504) else EngineError
        by_vllm = path in TOKEN_ROUTES and status in (400, 413, 422) and _vllm_message(answer.text) is not None
        details = {"refused": True} if by_vllm else {}
        target = self._without_key(answer.headers.get("location", "")[:300])
        if target:
            detail = f", which redirects to {target}: give the URL of the server itself"
        elif detail:
            detail = f": {detail}"
        raise error_class(f"{self.url}{path} answered {status}{detail}", status=status, **details)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    # --- identity and abilities -------------------------------------------------------------------------------------
    async def unhealthy(self) -> str:
        """Return why the server can't serve, such as a dead engine; empty if it can. Raises ServerGone."""
        answer = await self.request("GET", "/health", seconds=STATUS_SECONDS)
        try:
            self._raise_for_status(answer, "/health")
        except EngineError as e:
            return str(e)
        return ""

    async def facts(self) -> ServerFacts:
        """Return the facts that the server reports. Raises EngineError if it is not a vLLM server."""
        models = await self.ask("GET", "/v1/models", seconds=STATUS_SECONDS)
        try:
            [first, *_] = [m for m in models["data"] if not m.get("parent")]  # LoRA adapters have a parent
            model, max_model_len = str(first["id"]), int(first["max_model_len"])
        except (KeyError, TypeError, ValueError) as e:
            raise EngineError(f"/v1/models of {self.url} has no max_model_len: give the URL of a vLLM server") from e
        version = ""
        with contextlib.suppress(EngineError, KeyError, TypeError):
            version = str((await self.ask("GET", "/version", seconds=STATUS_SECONDS))["version"])
        # The route answers an invalid body with 400; 403 means that the route is disabled, 404 an older version.
        probe = await self.request("POST", TOKEN_ROUTES[0], {}, seconds=STATUS_SECONDS)
        label = await self.label()
        config: dict[str, Any] = {}
        if label is not None:
            with contextlib.suppress(EngineError, AttributeError):
                info = await self.ask("GET", "/server_info", config_format="json", seconds=60.0)
                config = info.get("vllm_config") or {}
        extension = (config.get("parallel_config") or {}).get("worker_extension_cls") or ""
        device = (config.get("device_config") or {}).get("device") or ""
        return ServerFacts(
            model=model, root=str(first.get("root") or ""), max_model_len=max_model_len, version=version,
            labels_tokens=label is not None and probe.status_code in (400, 422), loads_weights=label is not None,
            has_extension=extension.startswith("trinity_es."), on_cpu="cpu" in str(device),
        )

    async def label(self) -> str | None:
        """Return the label of the server's weights, which its process keeps in memory; None without labels."""
        answer = await self.request("GET", "/weight_info", seconds=STATUS_SECONDS)
        if answer.status_code in (404, 405):
            return None
        self._raise_for_status(answer, "/weight_info")
        return self._parse(answer, lambda body: str(body["weight_version"]))

    async def start_time(self) -> str:
        """Return the server process's start time (Unix), from its metrics; empty if missing (`--api-server-count`)."""
        for line in (await self.metrics()).splitlines():
            if line.startswith("process_start_time_seconds "):
                return line.split()[1]
        return ""

    async def metrics(self, seconds: float = STATUS_SECONDS) -> str:
        """Return the server's metrics as Prometheus text; empty if it has none."""
        answer = await self.request("GET", "/metrics", seconds=seconds)
        return answer.text if answer.status_code == 200 else ""

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids of a text by the server's tokenizer; None if it refuses to tokenize."""
        answer = await self.request("POST", "/tokenize", {"prompt": text}, seconds=STATUS_SECONDS)
        if answer.status_code != 200:
            return None
        return self._parse(answer, lambda body: [int(token) for token in body["tokens"]])

    # --- weights ----------------------------------------------------------------------------------------------------
    async def set_label(self, label: str) -> None:
        await self.ask("POST", "/update_weight_version", {"new_version": label}, seconds=STATUS_SECONDS)

    async def pause(self) -> None:
        """Pause generation until `resume`. Open requests are kept, and their KV cache is recomputed then."""
        await self.ask("POST", "/pause", mode="keep", clear_cache="true")

    async def resume(self) -> None:
        await self.ask("POST", "/resume")

    async def is_paused(self) -> bool:
        """Return True if the server's generation is paused. Raises EngineError if the server does not report it."""
        answer = await self.request("GET", "/is_paused", seconds=STATUS_SECONDS)
        self._raise_for_status(answer, "/is_paused")
        return self._parse(answer, lambda body: bool(body["is_paused"]))

    async def reports_pause(self) -> bool:
        """Return True if the server reports a pause; False if it reports none, or can't be asked.

        In a pause of mode abort or wait vLLM 0.33 answers requests with 503; older releases hold them back.
        """
        with contextlib.suppress(EngineError):
            return await self.is_paused()
        return False

    async def in_workers(self, method: str, **kwargs: str) -> list[Any]:
        """Call a method in every worker and return the results; numbers and booleans come as text."""
        answer = await self.ask("POST", "/collective_rpc", {"method": method, "kwargs": kwargs})
        return list((answer or {}).get("results") or [])


def _error_text(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _vllm_message(text: str) -> str | None:
    """Return the message in an error's body if vLLM wrote that body; None if a proxy wrote it."""
    try:
        message = json.loads(text)["error"]["message"]
        return message if isinstance(message, str) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _short_message(text: str) -> str:
    """Return the message in an error's body, or else the body itself, as one line of at most 300 characters."""
    return " ".join((_vllm_message(text) or text).split())[:300]
