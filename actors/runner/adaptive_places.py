"""How many units a runner runs at once: places that can become more and fewer, and when they should.

`AdaptivePlaces` decides as TCP does about its window: twice as many while there is room, then more by a little, and
fewer by a share. It is pure, and has no clock: it counts units that finish, so it goes slowly where answers are long,
whose KV cache fills late.
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
"""Number of places that a runner begins with; one whose engine does not tell its load keeps to it."""
MOST = 256
"""Maximum number of places: a unit may hold a sandbox, connections and memory, which no engine knows of."""
MOST_GROWTH, STEP_SHARE = 2.0, 0.125
"""The places that come after a round, as a share of those there are: while the KV cache would hold them, and else."""
ROOM = 0.9
"""Share of an engine's KV cache, or of its running requests, from which on it is full."""
QUEUE_FOR_MORE, QUEUE_AFTER, QUEUE_MOST = 1.0, 3.0, 4.0
"""Requests that wait in the engine for each that runs: at most, for more places; after a cut; and that bring a cut."""
AGAIN_FOR_MORE, AGAIN_MOST = 0.1, 0.5
"""Tokens computed again for each that is made: at most, for more places; and from which on there are fewer."""
CUT = 0.75
"""Share of the places that stays where too much is computed again."""
MOST_CUT = 0.5
"""Least share of the places that stays after a round."""


@dataclass(slots=True)
class _Round:
    """Sums over the steps of an engine; what is of no step with requests weighs nothing."""

    begun: int = 0
    """Number of units that had finished before."""
    running: float = 0.0
    """Of all steps; each makes a token for each request that runs."""
    waiting: float = 0.0
    full: float = 0.0
    """How full it was, for each token made: a batch's last requests, for which there is room, are few."""
    again: float = 0.0
    taken: bool = False
    """Whether all places were taken in any step."""

    def add(self, load: EngineLoad, all_taken: bool) -> None:
        self.running += load.running
        self.waiting += load.waiting
        self.full += load.share * load.running
        if load.kv_share >= ROOM:  # else it is a change of weights, after which an engine reads all requests again
            self.again += load.again
        self.taken |= all_taken


class AdaptivePlaces:
    """The number of places, as the engine's steps tell. Give it all of them, in order.

    A round is over when as many units have finished as there are places, and after each the places change once at most.
    They become more where all were taken, the engine's queue was shorter than what ran, and little was computed again:
    as many as its KV cache would hold, twice as many at most; or, where it is full, an eighth. They become fewer where
    requests that were put back for want of room cost it too much, or where its queue is long: whoever waits there can
    go to no other engine, and the time limit of its task runs. A queue itself costs an engine nothing: from it, it goes
    on at once when a request ends (docs/DECISIONS.md, 84). So many places as were too many are tried again when the KV
    cache would hold them.
    """

    def __init__(self, start: int = START, most: int = MOST) -> None:
        self.places, self.most = start, most
        self._round = _Round()
        self._too_many: int | None = None

    def after_step(self, load: EngineLoad, taken: int, finished: int) -> int:
        """Return the number of places after one more step of the engine.

        `taken`: places that are taken now; `finished`: units that have finished since the start.
        """
        self._round.add(load, taken >= self.places)
        if finished - self._round.begun >= self.places and self._round.running:
            self.places = self._after(self._round)
            self._round = _Round(finished)
        return self.places

    def _after(self, had: _Round) -> int:
        full, queue, again = (total / had.running for total in (had.full, had.waiting, had.again))
        if again > AGAIN_MOST:
            self._too_many = self.places
            return max(1, int(self.places * CUT))
        if queue > QUEUE_MOST:
            return max(1, int(self.places * max(MOST_CUT, (1 + QUEUE_AFTER) / (1 + queue))))
        if not had.taken or queue > QUEUE_FOR_MORE or again > AGAIN_FOR_MORE:
            return self.places
        growth = min(MOST_GROWTH, ROOM / full if full else MOST_GROWTH)
        wanted = max(int(self.places * growth), self.places + max(1, int(self.places * STEP_SHARE)))
        if self._too_many is not None and full * self._too_many < ROOM * self.places:
            self._too_many = None  # it would hold them: it is another load
        most = self.most if self._too_many is None else min(self.most, self._too_many - 1)
        return max(self.places, min(wanted, most))


class Places:
    """A semaphore whose size can change: it follows the engine's load where `given` is auto.

    Where it shrinks, whoever is in stays.
    """

    def __init__(self, given: int | Literal["auto"]) -> None:
        self.adaptive = given == "auto"
        self.count, self.taken = START if given == "auto" else given, 0
        self.finished = 0
        """Number of units that went out by themselves."""
        self.kv_share, self.waiting = 0.0, 0
        """The engine's, when the count changed last."""
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
                self._leave()
            raise

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.finished += error is None
        self._leave()

    def watch(self, engine: Engine, tell: Callable[[], None], workers: WorkerPool | None) -> None:
        """Follow the load of an engine that tells it; `tell` is called when there are more places now, or fewer.

        There are no more of them while units wait for a process of `workers`.
        """
        decide = AdaptivePlaces(self.count)

        def follow(load: EngineLoad) -> None:
            count = decide.after_step(load, 0 if workers is not None and workers.full else self.taken, self.finished)
            if count != self.count:
                self.kv_share, self.waiting = load.kv_share, load.waiting
                self.resize(count)
                tell()

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
