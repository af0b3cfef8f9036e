"""Number of units that a runner runs at once, and its adjustment to the engine's load.

`AdaptivePlaces` decides as TCP does about its window: twice as many while there is room, then slightly more, and fewer
by a share. It is pure and reads no clock. It counts finished units, so it changes slowly if answers are long, because
their KV cache fills late.
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
"""Number of places that a runner begins with, and keeps if its engine does not report its load."""
MOST = 256
"""Maximum number of places: a unit may hold a sandbox, connections and memory that the engine does not see."""
MOST_GROWTH, STEP_SHARE = 2.0, 0.125
"""Growth after a round, as a factor: while the KV cache has room, and otherwise."""
ROOM = 0.9
"""Share of an engine's KV cache, or of its running requests, at which it counts as full."""
QUEUE_FOR_MORE, QUEUE_AFTER, QUEUE_MOST = 1.0, 3.0, 4.0
"""Waiting requests for each running one: maximum for growth, aim of a cut, and the value above which places are cut."""
AGAIN_FOR_MORE, AGAIN_MOST = 0.1, 0.5
"""Recomputed tokens for each generated one: maximum for growth, and the value above which places are cut."""
CUT = 0.75
"""Factor for the number of places if too much is recomputed."""
MOST_CUT = 0.5
"""Smallest factor for the number of places after a round with a long queue."""


@dataclass(slots=True)
class _Round:
    """Sums over the steps of an engine. Steps without requests count nothing."""

    finished_before: int = 0
    """Number of units that had finished before the round."""
    running: float = 0.0
    """Sum of running requests, and so of generated tokens: one for each running request in each step."""
    waiting: float = 0.0
    """Sum of waiting requests."""
    fill: float = 0.0
    """Sum of fill levels, each weighted by the generated tokens, so a batch's last few requests count little."""
    recomputed: float = 0.0
    """Sum of recomputed tokens."""
    all_taken: bool = False
    """True if all places were in use in any step."""

    def add(self, load: EngineLoad, *, all_taken: bool) -> None:
        """Add one step."""
        self.running += load.running
        self.waiting += load.waiting
        self.fill += load.share * load.running
        if load.kv_share >= ROOM:  # otherwise it is a change of weights, after which an engine reads all requests again
            self.recomputed += load.again
        self.all_taken |= all_taken


class AdaptivePlaces:
    """Number of places, derived from the engine's steps, all of them in order.

    A round ends when as many units have finished as there are places, and after it the places change at most once. They
    grow after a round in which all were used, the queue was shorter than the running set, and few tokens were
    recomputed: to as many as the KV cache would hold, at most twice; if it is full, by an eighth. They shrink if
    requests that were put back for lack of room cost too much, or if the queue is long: a queued request can go to no
    other engine while the time limit of its task runs. A short queue costs an engine nothing, since the next request
    starts at once when one ends (docs/DECISIONS.md, 84). A number that was too large is tried again when the KV cache
    would hold it.
    """

    def __init__(self, start: int = START, most: int = MOST) -> None:
        self.places, self.most = start, most
        self._round = _Round()
        self._too_many: int | None = None
        """Number of places at which the engine last recomputed too much."""

    def after_step(self, load: EngineLoad, taken: int, finished: int) -> int:
        """Return the number of places after one more step of the engine; it changes only at the end of a round.

        `taken`: places in use now; `finished`: units finished since the start.
        """
        self._round.add(load, all_taken=taken >= self.places)
        if finished - self._round.finished_before >= self.places and self._round.running:
            self.places = self._places_after(self._round)
            self._round = _Round(finished)
        return self.places

    def _places_after(self, past: _Round) -> int:
        """Return the number of places after a round, by the rules in the class's documentation."""
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
            self._too_many = None  # the cache would hold them: the load has changed
        most = self.most if self._too_many is None else min(self.most, self._too_many - 1)
        return max(self.places, min(target, most))


class Places:
    """A semaphore for units, whose size follows the engine's load if `max_concurrency` is auto.

    Units that have a place keep it when the size shrinks.
    """

    def __init__(self, max_concurrency: int | Literal["auto"]) -> None:
        self.adaptive = max_concurrency == "auto"
        self.count = START if max_concurrency == "auto" else max_concurrency
        self.taken = 0
        self.finished = 0
        """Number of units that left without an error."""
        self.kv_share, self.waiting = 0.0, 0
        """The engine's load when the count last changed: fill of its KV cache (0 to 1), and its waiting requests."""
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Take a place, after the units that wait already."""
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

    def watch(self, engine: Engine, tell: Callable[[], None], workers: WorkerPool | None) -> None:
        """If the number of places is adaptive and the engine reports load, follow it; call `tell` after each change.

        The number does not grow while units wait for a process of `workers`.
        """
        decide = AdaptivePlaces(self.count)

        def follow(load: EngineLoad) -> None:
            taken = 0 if workers is not None and workers.full else self.taken
            count = decide.after_step(load, taken, self.finished)
            if count != self.count:
                self.kv_share, self.waiting = load.kv_share, load.waiting
                self.resize(count)
                tell()

        if self.adaptive and hasattr(engine, "on_load"):
            engine.on_load = follow

    def resize(self, count: int) -> None:
        """Set the number of places, and let waiting units in if it grew."""
        self.count = count
        self._let_in()

    def _leave(self) -> None:
        self.taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        """Give free places to the units that wait longest."""
        while self._queue and self.taken < self.count:
            turn = self._queue.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
