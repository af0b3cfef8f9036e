"""Pool of one model's engines that are called over HTTP: routing of requests, and retries on another engine.

A request goes to the least loaded engine. But requests of one task or conversation share a prompt, so they stay on the
engine whose prefix cache has it. They leave it if it has over `SLACK_REQUESTS` requests more than the least loaded
engine, and more than twice as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Backend", "EngineFailed", "EnginePool", "NoEngine"]

SLACK_REQUESTS = 8
"""Number of requests that an engine may have more than the least loaded one before a task leaves it."""
REPORT_SECONDS = 5.0
"""How long a reported load counts. Engines report it with answers, so without a limit a busy one would stay unused."""
SHUN_SECONDS = 0.5
"""How long an engine that did not answer gets no requests."""
MAX_KEYS = 16384
MAX_LOST = 2
"""Maximum number of engines that may end during one request, since the request itself may kill them."""

T = TypeVar("T")


class EngineFailed(Exception):
    """An engine could not answer a request; another engine may. `lost`: the engine ended, perhaps by this request."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class NoEngine(Exception):
    """No engine of a pool could answer a request. `lost`: number of engines that ended during it."""

    def __init__(self, message: str, lost: int) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(slots=True)
class Backend:
    """Engine of one incarnation of a runner, with its endpoint and load."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int = 0
    serving: bool = True
    open_count: int = 0
    """Number of open requests of this pool."""
    other_count: int = 0
    """Number of other callers' open requests, as the engine reported it at the time `reported_at`."""
    reported_at: float = -math.inf
    shunned_until: float = -math.inf
    answer_count: int = 0
    failure_count: int = 0

    def load(self, now: float) -> int:
        return self.open_count + (self.other_count if now - self.reported_at < REPORT_SECONDS else 0)


class EnginePool:
    """Engines of one model, for use on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, Backend] = {}  # by runner
        self._runner_by_key: OrderedDict[str, str] = OrderedDict()  # by key of a task or conversation
        self._changed = asyncio.Event()  # set, and replaced by a new one, at each `update`

    def update(self, table: Iterable[Mapping[str, Any]]) -> None:
        """Replace the table of engines; each row has fields of Backend. Engines that are not in it get no requests."""
        for engine in self._engines.values():
            engine.serving = False
        for row in table:
            listed = Backend(**row)
            engine = self._engines.setdefault(listed.runner, listed)
            if (engine.incarnation, engine.endpoint) != (listed.incarnation, listed.endpoint):
                engine = self._engines[listed.runner] = listed
            engine.model_version, engine.serving = listed.model_version, listed.serving
        self._changed.set()
        self._changed = asyncio.Event()

    def all(self) -> list[Backend]:
        return [self._engines[name] for name in sorted(self._engines)]

    def choose(self, keys: Iterable[str] = (), avoid: Container[str] = ()) -> Backend | None:
        """Return the engine for a request; None while there is none.

        `keys`: names of the request's task or conversation; `avoid`: runners to use only if there is no other. Among
        equally loaded engines a hash of the first key decides, the same for every caller. Without a key it is the
        engine with the fewest answers, so that they take turns.
        """
        keys, now = list(keys), self._clock()
        candidates = [e for e in self._engines.values() if e.serving and e.endpoint and e.shunned_until <= now]
        candidates = [e for e in candidates if e.runner not in avoid] or candidates
        if not candidates:
            return None
        least_load = min(e.load(now) for e in candidates)
        earlier_runner = next((self._runner_by_key[key] for key in keys if key in self._runner_by_key), None)
        for engine in candidates:
            if engine.runner == earlier_runner and engine.load(now) <= least_load + max(SLACK_REQUESTS, least_load):
                return engine
        least_loaded = [e for e in candidates if e.load(now) == least_load]
        if not keys:
            return min(least_loaded, key=lambda e: (e.answer_count, e.runner))
        return max(
            least_loaded, key=lambda e: hashlib.blake2b(f"{keys[0]}\0{e.runner}".encode(), digest_size=8).digest()
        )

    def remember(self, keys: Iterable[str], engine: Backend) -> None:
        """Note that requests with these keys go to this engine. Beyond MAX_KEYS, drop the least recently used keys."""
        for key in keys:
            self._runner_by_key[key] = engine.runner
            self._runner_by_key.move_to_end(key)
        while len(self._runner_by_key) > MAX_KEYS:
            self._runner_by_key.popitem(last=False)

    def shun(self, engine: Backend, seconds: float = SHUN_SECONDS) -> None:
        """Send no requests to an engine for `seconds`, because it did not answer."""
        engine.shunned_until = self._clock() + seconds

    async def wait(self, keys: Iterable[str], seconds: float, avoid: Container[str] = ()) -> Backend | None:
        """Wait until `choose` returns an engine, and return it; None if there is none within `seconds`."""
        keys, until = list(keys), self._clock() + seconds
        while (engine := self.choose(keys, avoid)) is None:
            seconds_left = until - self._clock()
            if seconds_left <= 0:
                return None
            with contextlib.suppress(TimeoutError):  # nothing sets `_changed` when a shunned engine may be used again
                await asyncio.wait_for(self._changed.wait(), min(seconds_left, SHUN_SECONDS / 2))
        return engine

    async def ask(
        self, call: Callable[[Backend], Coroutine[Any, Any, T]], keys: Iterable[str] = (), *,
        seconds: float = math.inf, attempts: float = math.inf,
    ) -> T:
        """Return the result of `call(engine)`. If the engine could not answer, call it with another one.

        `call` raises httpx's TransportError, EOFError or EngineFailed if the engine could not answer. Raises NoEngine
        after `attempts` failures, after MAX_LOST engines ended, or after `seconds` without an engine.
        """
        import httpx

        until, problem = self._clock() + seconds, "no engine serves"
        tried_runners: list[str] = []
        lost_count = 0
        while lost_count < MAX_LOST and len(tried_runners) < attempts:
            engine = await self.wait(keys, until - self._clock(), tried_runners)
            if engine is None:
                break
            engine.open_count += 1
            try:
                return await call(engine)
            except (httpx.TransportError, EngineFailed, EOFError) as e:
                problem = f"{engine.runner}: {str(e) or type(e).__name__}"
                engine.failure_count += 1
                if isinstance(e, httpx.TransportError) or getattr(e, "lost", False):
                    self.shun(engine)
                if not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout):  # after those it got no request
                    tried_runners.append(engine.runner)
                    lost_count += getattr(e, "lost", True)
            finally:
                engine.open_count -= 1
        if lost_count < MAX_LOST:
            problem = f"no engine could answer ({len(tried_runners)} attempts): {problem}"
        raise NoEngine(problem, lost_count)
