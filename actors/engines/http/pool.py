"""Engines that are asked over HTTP: which one gets a request, and which one gets it when that one fails.

The least loaded engine does. Requests of one task or conversation share their prompt, which an engine keeps (its prefix
cache) and another would compute again, so all of them go to one engine, their home, unless that has `SLACK_REQUESTS`
requests more than the least loaded one, and more than twice as many.
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
"""Requests that an engine may have more than the least loaded one before a task leaves it."""
REPORT_SECONDS = 5.0
"""How long a reported load is trusted. An engine that was busy once would else get no request, and never report."""
AGAIN_SECONDS = 0.5
"""How long an unreachable engine is left alone before it is tried again; a new URL for it resets this."""
REMEMBERED = 16384
"""Maximum number of tasks and conversations whose home is known."""
MOST_LOST = 2
"""Maximum of engines that may be lost with one request: it may be what ends them."""

T = TypeVar("T")


class EngineFailed(Exception):
    """An engine could not answer; another may. `lost`: it ended, perhaps of this request."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class NoEngine(Exception):
    """No engine of a pool could answer. `lost`: how many ended while they answered."""

    def __init__(self, message: str, lost: int) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(slots=True)
class Backend:
    """One life of a runner's engine."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int = 0
    serving: bool = True
    busy: int = 0
    """Requests that this pool's owner has there now."""
    others: int = 0
    """Requests of others, as it said last, and when."""
    told: float = -math.inf
    away_until: float = -math.inf
    """It could not be reached: not before then."""
    answered: int = 0
    failed: int = 0

    def load(self, now: float) -> int:
        return self.busy + (self.others if now - self.told < REPORT_SECONDS else 0)


class EnginePool:
    """The engines of one model. Not thread-safe: for one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, Backend] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()

    def update(self, table: Iterable[Mapping[str, Any]]) -> None:
        """Take the engines as they are now. One that is not in the table does not serve, for now or for ever."""
        for engine in self._engines.values():
            engine.serving = False
        for row in table:
            new = Backend(**row)
            known = self._engines.setdefault(new.runner, new)
            if (known.incarnation, known.endpoint) != (new.incarnation, new.endpoint):
                known = self._engines[new.runner] = new
            known.model_version, known.serving = new.model_version, new.serving
        self._changed.set()
        self._changed = asyncio.Event()

    def all(self) -> list[Backend]:
        return [self._engines[name] for name in sorted(self._engines)]

    def choose(self, keys: Iterable[str] = (), avoid: Container[str] = ()) -> Backend | None:
        """Return the engine for a request; None while there is none.

        `keys`: what its task or conversation may be known by; `avoid`: runners that are asked only if there is no
        other. Of equally loaded engines a key gets its own, the same by every caller; a request without one takes
        the engine that has answered least, so that they take turns.
        """
        now = self._clock()
        fit = [e for e in self._engines.values() if e.serving and e.endpoint and e.away_until <= now]
        fit = [e for e in fit if e.runner not in avoid] or fit
        if not fit:
            return None
        least, keys = min(e.load(now) for e in fit), list(keys)
        home = next((self._homes[key] for key in keys if key in self._homes), None)
        for engine in fit:
            if engine.runner == home and engine.load(now) <= least + max(SLACK_REQUESTS, least):
                return engine
        free = [e for e in fit if e.load(now) == least]
        if not keys:
            return min(free, key=lambda e: (e.answered, e.runner))
        return max(free, key=lambda e: hashlib.blake2b(f"{keys[0]}\0{e.runner}".encode(), digest_size=8).digest())

    def remember(self, keys: Iterable[str], engine: Backend) -> None:
        for key in keys:
            self._homes[key] = engine.runner
            self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def shun(self, engine: Backend, seconds: float = AGAIN_SECONDS) -> None:
        """Leave an engine alone for a while that did not answer."""
        engine.away_until = self._clock() + seconds

    async def wait(self, keys: Iterable[str], seconds: float, avoid: Container[str] = ()) -> Backend | None:
        """`choose`, waiting for an engine up to `seconds`."""
        keys, until = list(keys), self._clock() + seconds
        while (chosen := self.choose(keys, avoid)) is None and (left := until - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, AGAIN_SECONDS / 2))  # a shunned one comes back
        return chosen

    async def ask(
        self, call: Callable[[Backend], Coroutine[Any, Any, T]], keys: Iterable[str] = (), *,
        seconds: float = math.inf, attempts: float = math.inf,
    ) -> T:
        """Return what `call` makes of an engine's answer; another engine is asked when one fails.

        `call` raises httpx's TransportError, EOFError or EngineFailed for an engine that could not answer. Raises
        NoEngine after `attempts` of them, after MOST_LOST that ended, and after `seconds` without an engine.
        """
        import httpx

        until, last, lost = self._clock() + seconds, "no engine serves", 0
        tried: list[str] = []
        while lost < MOST_LOST and len(tried) < attempts:
            engine = await self.wait(keys, until - self._clock(), tried)
            if engine is None:
                break
            engine.busy += 1
            try:
                return await call(engine)
            except (httpx.TransportError, EngineFailed, EOFError) as e:
                last = f"{engine.runner}: {str(e) or type(e).__name__}"
                engine.failed += 1
                if isinstance(e, httpx.TransportError) or getattr(e, "lost", False):
                    self.shun(engine)
                if not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout):  # else it has not seen this request
                    tried.append(engine.runner)
                    lost += getattr(e, "lost", True)
            finally:
                engine.busy -= 1
        raise NoEngine(f"no engine could answer ({len(tried)} attempts): {last}" if lost < MOST_LOST else last, lost)
