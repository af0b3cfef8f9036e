"""How many units a runner runs at once: places that can become more and fewer, and when they should.

`AdaptivePlaces` decides as TCP does about its window, by additive increase and multiplicative decrease. It is pure, and
has no clock: it counts units that finish, so it goes slowly where answers are long, whose KV cache fills late.
"""

from __future__ import annotations

import asyncio
from collections import deque

from trinity_es.actors.engines.interface import EngineLoad

__all__ = ["MOST", "START", "AdaptivePlaces", "Places"]

START = 64
"""Number of places that a runner begins with; one whose engine does not tell its load keeps to it."""
MOST = 256
"""Maximum number of places: a unit may hold a sandbox, connections and memory, which no engine knows of."""
STEP = 16
"""Maximum number of places that come at a time."""
STEP_SHARE = 0.25
"""That maximum as a share of the places there are."""
ROOM = 0.9
"""Share of an engine's KV cache, or of its running requests, from which on it has no room for more."""
LEAST_CUT, MOST_CUT = 0.9, 0.5
"""Share of the places that stays where there are too many: at most, and at least."""
PATIENCE_MOST = 256
"""Maximum number of rounds before as many places are tried again as once were too many."""


class AdaptivePlaces:
    """The number of places, as the engine's steps tell. Give it all of them, in order.

    A round is over when as many units have finished as there are places. After two in which the engine always had
    room there are more places, if all are taken. Where the engine is full, and more requests wait than run or some were
    put back, there are fewer at once, and at most once a round. A shorter queue is left alone: from it an engine goes
    on at once when a request ends, and without it was slower by a quarter (docs/DECISIONS.md, 81). So many places as
    were too many are tried again after pauses that double, so a load that stays the same is soon left alone.
    """

    def __init__(self, start: int = START, most: int = MOST) -> None:
        self.places, self.most = start, most
        self._peak, self._before = 0.0, 0.0
        """How full the engine was in this round, and in the one before."""
        self._begun = 0
        """Number of units that had finished when the round began."""
        self._cut: int | None = None
        """The same, when there were fewer places the last time."""
        self._ceiling: int | None = None
        """So many were too many."""
        self._pause, self._patience = 0, 1
        """Rounds until the ceiling is tried, and how many there will be the next time."""

    def after_step(self, load: EngineLoad, taken: int, finished: int) -> int:
        """Return the number of places after one more step of the engine.

        `taken`: places that are taken now; `finished`: units that have finished since the start.
        """
        self._peak = max(self._peak, load.share)
        if load.share >= ROOM and (load.preempted or load.waiting > load.running):
            if self._cut is None or finished - self._cut >= self.places:
                self._shrink(load, taken, finished)
        elif taken >= self.places and finished - self._begun >= self.places:
            self._grow(load, finished)
        return self.places

    def _shrink(self, load: EngineLoad, taken: int, finished: int) -> None:
        had = min(self.places, taken)  # the others did nothing
        stay = 2 * load.running / max(1, load.running + load.waiting)  # as many wait as run then
        self.places = max(1, int(had * min(LEAST_CUT, max(MOST_CUT, stay))))
        self._ceiling, self._pause = had, self._patience
        self._patience = min(2 * self._patience, PATIENCE_MOST)
        self._cut = self._begun = finished
        self._peak = 1.0  # what it was told by too many counts for two rounds: units that began together end together

    def _grow(self, load: EngineLoad, finished: int) -> None:
        peak = max(self._peak, self._before)
        self._before, self._peak, self._begun = self._peak, load.share, finished
        wanted = self.places + max(1, min(STEP, int(self.places * STEP_SHARE)))
        if self._ceiling is not None:
            if peak * self._ceiling < ROOM * self.places:  # so many would not be too many now: it is another load
                self._ceiling, self._pause, self._patience = None, 0, 1
            elif self._pause:
                self._pause -= 1
                wanted = min(wanted, self._ceiling - 1)
        if peak < ROOM:
            self.places = max(self.places, min(wanted, self.most))


class Places:
    """A semaphore whose size can change. Where it shrinks, whoever is in stays."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.taken < self.count:  # nobody waits then
            self.taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had come in
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.taken -= 1
        self._let_in()

    def resize(self, count: int) -> None:
        """Have so many places from now on."""
        self.count = count
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and self.taken < self.count:
            turn = self._queue.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
