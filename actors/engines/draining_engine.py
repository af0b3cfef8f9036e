"""Engine wrapper that lets open requests end before the weights change (`synchronizer.in_flight: finish`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

from trinity_es.actors.engines.interface import Completion, Engine, ReceivesWeights, Recording, Sampling

__all__ = ["FinishingEngine"]


class FinishingEngine:
    """Wrapper of an `Engine`. Before a change of weights it waits until all open requests have ended.

    New requests wait until the weights are loaded. After `seconds` the weights are loaded anyway, and the wrapped
    engine decides what happens to requests that are still open. All other attributes are the wrapped engine's.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._open_count = 0
        self._idle = asyncio.Event()  # set while no request is open
        self._gate = asyncio.Event()  # set while requests may begin
        self._idle.set()
        self._gate.set()
        self._change_lock = asyncio.Lock()
        if hasattr(engine, "application"):
            self.application = self._application

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # --- requests ---------------------------------------------------------------------------------------------------
    async def generate(self, prompt: str | list[int], sampling: Sampling, **more: Any) -> list[Completion]:
        """Generate once requests may begin. If the weights did not change meanwhile, answers have version spans."""
        async with self._open_request() as version:
            answers = await self._engine.generate(prompt, sampling, **more)
            return [self._with_version_span(answer, version, len(answer.token_ids)) for answer in answers]

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """Yield the parts of an answer. The last part has version spans as in `generate`."""
        count = 0
        async with self._open_request() as version, contextlib.aclosing(self._engine.stream(prompt, sampling)) as parts:
            async for part in parts:
                count += len(part.token_ids)
                yield self._with_version_span(part, version, count) if part.finish_reason else part

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0, **more: Any) -> list[float]:
        async with self._open_request():
            return await self._engine.logprobs(token_ids, temperature, **more)

    async def _application(self, name: str, recording: Callable[[], Recording | None]) -> Any:
        """Return the engine's own HTTP application, in which each POST counts as an open request."""
        application = await cast(Any, self._engine).application(name, recording)

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async with self._open_request() if scope.get("method") == "POST" else contextlib.nullcontext():
                await application(scope, receive, send)

        return answer

    # --- weights ----------------------------------------------------------------------------------------------------
    async def load_weights(self, version: int, path: str) -> None:
        async with self._without_requests():
            await self._engine.load_weights(version, path)

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        async with self._without_requests():
            await cast(ReceivesWeights, self._engine).receive_weights(version, path, timeout)

    @contextlib.asynccontextmanager
    async def _open_request(self) -> AsyncIterator[int]:
        """Wait until requests may begin, then count one as open. The context's value is the current model version."""
        while not self._gate.is_set():  # the next change may close it again at once
            await self._gate.wait()
        self._open_count += 1
        self._idle.clear()
        try:
            yield self._engine.model_version
        finally:
            self._open_count -= 1
            if not self._open_count:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def _without_requests(self) -> AsyncIterator[None]:
        """Hold new requests back, and enter the context when no request is open or `seconds` have passed."""
        async with self._change_lock:
            self._gate.clear()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds):
                        await self._idle.wait()
                yield
            finally:
                self._gate.set()

    def _with_version_span(self, answer: Completion, version: int, count: int) -> Completion:
        """Return an answer with `version` for its `count` tokens, unless it has spans or the version has changed."""
        if answer.version_spans or self._engine.model_version != version:
            return answer
        return replace(answer, version_spans=((version, 0, count),))
