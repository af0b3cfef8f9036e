"""Number of units (runs of one task) that a runner runs at once, adjusted to the load of its engine.

`AdaptivePlaces` adjusts it as TCP adjusts its window: it doubles while there is room, then grows slightly, and shrinks
by a factor. It is pure and reads no clock. It counts finished units, so it changes slowly while answers are long,
because their KV cache fills late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trinity_es.actors.engines.interface import Engine, EngineLoad
from trinity_es.actors.rollout.workers.pool import WorkerPool

__all__ = ["MOST", "START", "AdaptivePlaces", "Places"]

START = 64
"""Places (units that may run at once) at the start, and for an engine that does not report its load."""
MOST = 256
"""Maximum number of places: a unit may hold a sandbox, connections and memory that the engine does not see."""
MOST_GROWTH, STEP_SHARE = 2.0, 0.125
"""Growth of the places in one period: the maximum factor, and the minimum share that is added."""
ROOM = 0.9
"""Share of the KV cache, or of the maximum number of running requests, from which an engine counts as full."""
QUEUE_FOR_MORE, QUEUE_AFTER, QUEUE_MOST = 1.0, 3.0, 4.0
"""Waiting requests per running one. Above the first value places don't grow; above the third they are cut, which aims
at the second."""
AGAIN_FOR_MORE, AGAIN_MOST = 0.1, 0.5
"""Recomputed tokens per generated one. Above the first value places don't grow; above the second they are cut."""
CUT = 0.75
"""Factor by which places are cut if too many tokens are recomputed."""
MOST_CUT = 0.5
"""Smallest factor by which places are cut for a long queue."""


@dataclass(slots=True)
class _Period:
    """Sums over the engine's steps in one period of `AdaptivePlaces`. Steps without requests add nothing."""

    finished_before: int = 0
    """Number of units that had finished before the period."""
    running: float = 0.0
    """Sum of running requests. It equals the generated tokens: one per running request in each step."""
    waiting: float = 0.0
    fill: float = 0.0
    """Sum of the steps' fill levels, weighted by generated tokens, so that a batch's last few requests count little."""
    recomputed: float = 0.0
    all_taken: bool = False
    """True if all places were in use during at least one step."""

    def add(self, load: EngineLoad, *, all_taken: bool) -> None:
        self.running += load.running
        self.waiting += load.waiting
        self.fill += load.share * load.running
        if load.kv_share >= ROOM:  # with a free cache, a change of weights is why the engine recomputes
            self.recomputed += load.recomputed
        self.all_taken |= all_taken


class AdaptivePlaces:
    """Rule that sets the number of units that may run at once (`places`) from the load in each step of the engine.

    A period ends when as many units have finished as there are places. Then the number changes at most once.
    - It grows if all places were used, the queue was shorter than the running set, and few tokens were recomputed. It
      grows to what the KV cache would hold, at most to twice as many; if the cache is full, by an eighth.
    - It shrinks if preempted requests cost too many recomputed tokens, or if the queue is long: a queued request can't
      move to another engine while its task's timeout runs. A short queue costs nothing, since the next request starts
      as soon as one ends (docs/DECISIONS.md, 84).
    - A number that was too large is tried again once the KV cache would hold it.
    """

    def __init__(self, start: int = START, most: int = MOST) -> None:
        self.places, self.most = start, most
        self._period = _Period()
        self._too_many: int | None = None
        """Number of places at which the engine last recomputed too much."""

    def after_step(self, load: EngineLoad, taken: int, finished: int) -> int:
        """Add one step of the engine, and return the number of places, which changes only at the end of a period.

        `taken`: places in use now; `finished`: units finished since the start.
        """
        self._period.add(load, all_taken=taken >= self.places)
        if finished - self._period.finished_before >= self.places and self._period.running:
            self.places = self._places_after(self._period)
            self._period = _Period(finished)
        return self.places

    def _places_after(self, past: _Period) -> int:
        fill = past.fill / past.running
        queue = past.waiting / past.running
        recomputed = past.recomputed / past.running
        if recomputed > AGAIN_MOST:
            self._too_many = self.places
            return max(1, int(self.places * CUT))
        if queue > QUEUE_MOST:
            return max(1, int(self.places * max(MOST_CUT, (1 + QUEUE_AFTER) / (1 + queue))))
        if not past.all_taken or queue > QUEUE_FOR_MORE or recomputed > AGAIN_FOR_MORE:
            return self.places
        growth = min(MOST_GROWTH, ROOM / fill) if fill else MOST_GROWTH
        target = max(int(self.places * growth), self.places + max(1, int(self.places * STEP_SHARE)))
        if self._too_many is not None and fill * self._too_many < ROOM * self.places:
            self._too_many = None  # the load has changed: the cache would hold that number now
        most = self.most if self._too_many is None else min(self.most, self._too_many - 1)
        return max(self.places, min(target, most))


class Places:
    """Semaphore for units (runs of one task). If `max_concurrency` is auto, its size follows the engine's load.

    Units that hold a place keep it when the size shrinks.
    """

    def __init__(self, max_concurrency: int | Literal["auto"]) -> None:
        self.adaptive = max_concurrency == "auto"
        self.count = START if max_concurrency == "auto" else max_concurrency
        self.taken = 0
        self.finished = 0
        """Number of units that gave their place back without an error."""
        self.kv_share, self.waiting = 0.0, 0
        """The engine's load when the count last changed: fill of its KV cache (0 to 1), and its waiting requests."""
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Take a place, behind the units that already wait for one."""
        if self.taken < self.count:  # no unit waits then
            self.taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was given before the cancellation
                self._leave()
            raise

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.finished += error is None
        self._leave()

    def watch(self, engine: Engine, on_change: Callable[[], None], workers: WorkerPool | None) -> None:
        """Let an adaptive number of places follow the engine's load from now on; call `on_change` after each change.

        The number does not grow while units wait for a process of `workers`.
        """
        decide = AdaptivePlaces(self.count)

        def follow(load: EngineLoad) -> None:
            taken = 0 if workers is not None and workers.full else self.taken
            count = decide.after_step(load, taken, self.finished)
            if count != self.count:
                self.kv_share, self.waiting = load.kv_share, load.waiting
                self.resize(count)
                on_change()

        if self.adaptive and hasattr(engine, "on_load"):
            engine.on_load = follow

    def resize(self, count: int) -> None:
        self.count = count
        self._let_in()

    def _leave(self) -> None:
        self.taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and self.taken < self.count:
            turn = self._queue.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
