"""The queue from which a trainer takes single experiences (`take_experiences`) instead of whole batches.

A priority function ranks the experiences in the queue (folded by `projections/experience_queue.py`). Each take is
recorded (ExperiencesTaken) before the client gets its answer. So even after a crash no experience is taken more than
`max_use_count` times, and a repeated request gets the same experiences.

Requests that can't be served yet wait in the order of arrival. A waiting client repeats its request every few seconds
(`connection.py`). A client that is silent for `SILENT_SECONDS` gets nothing.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from trinity_es.actors.commands import CommandRequest, PayloadPart, TakeExperiences, TakenExperiences
from trinity_es.actors.config.data_sections import QueueConfig
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.plugin_lookup import build
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import PayloadNotFound, PipelineError, TakeTimeout
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.experience_queue import QueueState, add_older, find_older, slice_refs

__all__ = [
    "PRIORITIES", "Candidate", "ExperienceQueue", "Fifo", "LinearDecay", "build_priority", "choose_experiences",
    "count_available",
]

SILENT_SECONDS = 15.0
"""Silence after which a client counts as dead; three times the interval at which it repeats its request."""
_LOG = logging.getLogger("trinity_es.queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Adjacent experiences of one delivered batch with equal properties, which a priority function ranks together."""

    batch_id: BatchId
    first: int
    """Number of the first of these `count` experiences among all that the batch delivered."""
    count: int
    model_version: int
    use_count: int
    """How often these experiences were taken so far."""
    age: int
    """Number of later deliveries in the queue; 0 for the newest."""


class Priority(Protocol):
    """Pure ranking function, built once with `priority_fn_args`."""

    def __call__(self, candidate: Candidate) -> float | None:
        """Return a rank, of which the highest is taken first; None if the candidate must not be taken."""


class LinearDecay:
    """`linear_decay`: model_version - decay * use_count. Source: Trinity-RFT's replay buffer."""

    def __init__(self, decay: float = 2.0) -> None:
        self.decay = decay

    def __call__(self, candidate: Candidate) -> float:
        return candidate.model_version - self.decay * candidate.use_count


class LimitedDecay(LinearDecay):
    """`decay_limit_randomization`: `linear_decay` plus normal noise with standard deviation `sigma`.

    After `use_count_limit` uses (0: no limit) a candidate is not taken. The noise is derived from a hash of the
    candidate, so it is always the same.
    """

    def __init__(self, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0) -> None:
        super().__init__(decay)
        self.use_count_limit, self.sigma = use_count_limit, sigma

    def __call__(self, candidate: Candidate) -> float | None:  # type: ignore[override]  # None: over the limit
        if 0 < self.use_count_limit <= candidate.use_count:
            return None
        seed = f"{candidate.batch_id!r}/{candidate.first}/{candidate.use_count}"
        return super().__call__(candidate) + random.Random(seed).gauss(0.0, 1.0) * self.sigma


class Fifo:
    """`fifo`: the oldest delivery first."""

    def __call__(self, candidate: Candidate) -> float:
        return float(candidate.age)


PRIORITIES: dict[str, Callable[..., Priority]] = {
    "decay_limit_randomization": LimitedDecay, "fifo": Fifo, "linear_decay": LinearDecay,
}
"""Priority functions by their name in the config. A config may also name a user's own, as "module:Class"."""


def build_priority(name: str, args: Mapping[str, Any]) -> Priority:
    """Build and return the priority function with this name, as in `buffer.queue`. Raises ConfigError."""
    requirement = "a class whose objects are called with a Candidate and return a number"
    return build("priority_fn", name, args, PRIORITIES, requirement, ["__call__"])  # type: ignore[no-any-return]


def choose_experiences(
    state: QueueState, n: int, now: float, *, priority: Priority, max_use_count: int, cooldown: float
) -> list[ev.TakenItem]:
    """Return the `n` experiences with the highest priority, or fewer if there are no more. Does not change the state.
    `now` is in unix seconds, `cooldown` in seconds. Raises PipelineError for a priority that is no number."""
    ranked = []
    newest = len(state.deliveries) - 1
    for number, delivery in enumerate(state.deliveries.values()):
        uses, versions = delivery.use_counts, delivery.model_versions
        ready = (uses < max_use_count) & (delivery.taken_at + cooldown <= now)
        if not ready.any():
            continue
        changes = (uses[1:] != uses[:-1]) | (versions[1:] != versions[:-1]) | (ready[1:] != ready[:-1])
        for first, end in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(uses)]):
            if ready[first]:
                candidate = Candidate(
                    batch_id=delivery.batch_id, first=first, count=end - first, model_version=int(versions[first]),
                    use_count=int(uses[first]), age=newest - number,
                )
                rank = _rank(priority, candidate)
                if rank is not None:
                    ranked.append(((-rank, number, first), candidate, delivery.version))
    items = []
    for _, candidate, version in sorted(ranked, key=lambda entry: entry[0]):
        if n <= 0:
            break
        items.append(ev.TakenItem(
            batch_id=candidate.batch_id, version=version, first=candidate.first, count=min(n, candidate.count),
            use_count=candidate.use_count + 1,
        ))
        n -= candidate.count
    return items


def _rank(priority: Priority, candidate: Candidate) -> float | None:
    """Return a candidate's rank; None if it must not be taken. Raises PipelineError if `priority` returns no number."""
    try:
        returned = priority(candidate)
        if returned is None:
            return None
        rank = float(returned)
    except Exception as e:  # priority functions are users' code
        raise PipelineError(f"priority_fn failed for {candidate}: {type(e).__name__}: {e}") from e
    if math.isnan(rank):
        raise PipelineError(f"priority_fn gave NaN for {candidate}: return a number, or None")
    return rank


def count_available(state: QueueState, now: float, *, max_use_count: int, cooldown: float) -> int:
    """Return the number of experiences that may be taken now: not taken too often, or too recently."""
    return sum(
        int(np.count_nonzero((d.use_counts < max_use_count) & (d.taken_at + cooldown <= now)))
        for d in state.deliveries.values()
    )


class ExperienceQueue:
    def __init__(self, config: QueueConfig, registry: RunnerRegistry, router: CommandRouter) -> None:
        self._priority = build_priority(config.priority_fn, config.priority_fn_args)
        self._limits: dict[str, Any] = {"max_use_count": config.max_use_count, "cooldown": config.reuse_cooldown_time}
        self._live, self._router, self._actor, self._clock = registry.live, router, registry.actor, registry.clock
        self._waiting_requests: dict[str, tuple[CommandRequest[TakeExperiences], float]] = {}
        """Request id -> waiting request, and unix seconds at which its client last sent it."""
        self._unused_count = 0
        """Number of experiences that had left the queue untaken when the last warning was logged."""

    def handlers(self) -> list[HandlerRow]:
        return [handler_row(TakeExperiences, self.take, again=self.on_repeated_request)]

    def take(self, request: CommandRequest[TakeExperiences]) -> None:
        """Answer with the requested number of experiences, now or when the queue has as many."""
        timeout = request.command.timeout
        items = self._live.queue.requests.get(request.id)
        if items is not None:  # an earlier coordinator did it, and its answer was lost
            self._answer_with_items(request, items)
            return
        queue, log = self._live.queue, self._live.log
        if queue.unread:
            unread, room = dict(queue.unread), queue.capacity - queue.size
            add_older(queue, self._live.fetch("older deliveries", lambda: find_older(log, unread, room)))
        if timeout is not None:
            self._actor.after(timeout, f"take:{request.id}", lambda: self._on_timeout(request))
        self._waiting_requests[request.id] = request, self._clock()
        self.serve_requests()

    def on_repeated_request(self, request_id: str) -> None:
        """Note that the client of a waiting request is alive."""
        if request_id in self._waiting_requests:
            request, _ = self._waiting_requests[request_id]
            self._waiting_requests[request_id] = request, self._clock()
            self.serve_requests()

    def serve_requests(self) -> None:
        """Serve the waiting requests for which the queue has enough. Warn of experiences that left it untaken."""
        now = self._clock()
        for request, heard_at in list(self._waiting_requests.values()):
            if now - heard_at > SILENT_SECONDS:
                continue
            n = request.command.n
            try:
                items = choose_experiences(self._live.queue, n, now, priority=self._priority, **self._limits)
            except PipelineError as e:
                self._forget(request)
                self._router.reply(request, error=e)
                continue
            if sum(item.count for item in items) == n:
                self._forget(request)
                taken = ev.ExperiencesTaken(items=items, at=now, step=request.command.step, request=request.id)
                self._live.record(taken)
                self._answer_with_items(request, items)
        if self._waiting_requests and self._limits["cooldown"] > 0:
            self._wait_for_cooldown(now)
        if self._live.queue.unused > self._unused_count:
            self._unused_count = self._live.queue.unused
            if self._live.queue.requests:  # the queue is in use
                _LOG.warning("%d experiences left the queue untaken: raise buffer.queue.capacity", self._unused_count)

    def _wait_for_cooldown(self, now: float) -> None:
        """Set a timer that calls `serve_requests` when the next cooldown of an experience ends."""
        cooldown, max_use_count = self._limits["cooldown"], self._limits["max_use_count"]
        pause = math.inf
        for delivery in self._live.queue.deliveries.values():
            is_cooling = (delivery.use_counts < max_use_count) & (delivery.taken_at + cooldown > now)
            if is_cooling.any():
                pause = min(pause, float(delivery.taken_at[is_cooling].min()) + cooldown - now)
        if math.isfinite(pause):
            self._actor.after(max(0.01, pause), "take:cooldown", self.serve_requests)

    def on_trainer_restarted(self, step: int) -> None:
        """Return the experiences taken for steps after `step` to the queue, since a trainer resumed from there."""
        takes = (take for delivery in self._live.queue.deliveries.values() for take in delivery.takes)
        if any(for_step is not None and for_step > step for _, _, for_step in takes):
            self._live.record(ev.ExperiencesReturned(step=step))
            self.serve_requests()

    def status(self) -> dict[str, int]:
        state = self._live.queue
        available_count = count_available(state, self._clock(), **self._limits)
        return {"experiences": state.size, "available": available_count, "waiting": len(self._waiting_requests)}

    def _forget(self, request: CommandRequest[TakeExperiences]) -> None:
        self._waiting_requests.pop(request.id, None)
        self._actor.cancel_timer(f"take:{request.id}")

    def _on_timeout(self, request: CommandRequest[TakeExperiences]) -> None:
        if request.id not in self._waiting_requests:
            return
        self._forget(request)
        n, timeout = request.command.n, request.command.timeout
        available_count = count_available(self._live.queue, self._clock(), **self._limits)
        self._router.reply(request, error=TakeTimeout(
            f"the queue has only {available_count} of {n} experiences after {timeout} s, so none were taken: take "
            "fewer, or try again",
            available=available_count, wanted=n,
        ))

    def _answer_with_items(self, request: CommandRequest[TakeExperiences], items: list[ev.TakenItem]) -> None:
        """Answer with the locations of the taken experiences, or with the error if their payloads were deleted."""
        try:
            self._router.reply(request, [self._item_location(item) for item in items])
        except PayloadNotFound as e:
            self._router.reply(request, error=e)

    def _item_location(self, item: ev.TakenItem) -> TakenExperiences:
        """Return the location of a taken item's experiences. If its batch has left the queue, read it from the log."""
        stream = batch_stream(item.batch_id)
        delivery = self._live.queue.deliveries.get((stream, item.version))
        refs = None if delivery is None else delivery.refs
        if refs is None:
            key, log = (stream, item.version), self._live.log
            refs = self._live.fetch(key, lambda: _delivered_refs(log, stream, item.version))
        parts = slice_refs(refs or [], item.first, item.count)
        return TakenExperiences(
            batch_id=item.batch_id, use_count=item.use_count,
            refs=[PayloadPart(digest=r.digest, first=r.first, count=r.count) for r in parts],
        )


def _delivered_refs(log: EventLog, stream: str, version: int) -> list[ev.PayloadRef]:
    """Return the payloads in the BatchFinalized at this version of a batch's stream; [] if there is none."""
    for recorded in log.read(stream=stream, types=["BatchFinalized"]):
        if recorded.version == version and isinstance(recorded.event, ev.BatchFinalized):
            return recorded.event.experiences
    return []
