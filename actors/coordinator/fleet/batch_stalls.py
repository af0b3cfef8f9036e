"""Detection of stalls: open batches without a new event for too long. An event records what such a batch waits for.

`check` runs every few seconds and reads memory only. A new version of a batch's stream shows progress, so times are
late by one check at most. A stall is recorded once, and again when its cause changes. A batch that waits only for its
trainer is not stalled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.why.explain import why
from trinity_es.projections.why.system_state import BatchTimes, HostSnapshot, Key, RunnerSnapshot, SystemSnapshot

__all__ = ["StallDetector"]


@dataclass(slots=True)
class _Watched:
    """State of a batch at the last check."""

    submission: str
    version: int = 0
    """Version of the batch's stream."""
    moved_at: float = 0.0
    """Time of the batch's last progress, in unix seconds."""
    flying_since: dict[tuple[Key, int, str, int], float] = field(default_factory=dict)
    """(unit, attempt, runner, incarnation) -> unix seconds at which this was first seen."""
    cause: tuple[object, ...] | None = None
    """Cause of the stall that was last recorded since the batch's last progress."""


class StallDetector:
    def __init__(
        self, registry: RunnerRegistry, stall_seconds: float, *, attempt_timeout: float | None = None,
        sequential: bool = False,
    ) -> None:
        """Batches without a new event for `stall_seconds` are stalled. `attempt_timeout` is `explorer.max_timeout`;
        `sequential`: the runs of a unit run one after the other."""
        self.live, self.registry, self.stall_seconds = registry.live, registry, stall_seconds
        self.attempt_timeout, self.sequential = attempt_timeout, sequential
        self._watched: dict[BatchId, _Watched] = {}

    def check(self) -> None:
        """Record a StallDetected for each stalled batch whose cause is not recorded yet."""
        now = self.registry.clock()
        for batch in self.live.batches.values():
            self._note_changes(batch, now)
        for ended_id in self._watched.keys() - self.live.batches.keys():
            del self._watched[ended_id]
        stalled_ids = [i for i in self.live.batches if now - self._watched[i].moved_at > self.stall_seconds]
        if not stalled_ids:
            return
        snapshot = self._snapshot()
        for batch_id in stalled_ids:
            batch, watched = self.live.batches[batch_id], self._watched[batch_id]
            answer = why(snapshot, batch_id, now=now)
            cause = answer.waiting[0].key
            if answer.of_trainer or cause == watched.cause:
                continue
            self.live.record_batch(batch_id, [ev.StallDetected(waiting_on=answer.sentence, since=watched.moved_at)])
            watched.cause, watched.version = cause, batch.version  # this event is no progress

    def _note_changes(self, batch: BatchState, now: float) -> None:
        """If the batch has new events since the last check, note its progress and its units in flight."""
        watched = self._watched.get(batch.batch_id)
        if watched is None or watched.submission != batch.submission:
            watched = self._watched[batch.batch_id] = _Watched(batch.submission)
        if watched.version != batch.version:
            flying_before = watched.flying_since
            flights = [(unit, f.unit.attempt, f.runner, f.incarnation) for unit, f in batch.flights.items()]
            watched.flying_since = {flight: flying_before.get(flight, now) for flight in flights}
            watched.version, watched.moved_at, watched.cause = batch.version, now, None

    def _snapshot(self) -> SystemSnapshot:
        fleet = self.registry.runners.values()
        unit_seconds = [r.unit_seconds for r in fleet if r.unit_seconds is not None]
        batches = {
            batch_id: BatchTimes(
                state=self.live.batches[batch_id], moved_at=watched.moved_at,
                flying_since={unit: at for (unit, *_), at in watched.flying_since.items()}, durations=unit_seconds,
            )
            for batch_id, watched in self._watched.items()
        }
        urls = {s.runner: s.url for s in self.live.servers.values()}
        runners = {
            r.name: RunnerSnapshot(
                name=r.name, incarnation=r.incarnation, state=r.state, reason=r.life.reason, places=r.life.places,
                model_version=r.model_version, loading=r.loading, seen=r.seen or None,
                progressed=r.progressed or None, finished=r.finished or None, silent=r.silent, trouble=r.trouble,
                waits_for=r.waits_for, runs_wait=r.runs_wait, server=urls.get(r.name, ""),
                leaving=self.registry.is_leaving(r.name), model=r.life.model,
            )
            for r in fleet
        }
        hosts = {h.name: HostSnapshot(name=h.name, state=h.state, reason=h.reason) for h in self.live.hosts.values()}
        return SystemSnapshot(
            batches=batches, runners=runners, hosts=hosts, limit=self.attempt_timeout, sequential=self.sequential,
            of_servers=bool(urls),
        )
