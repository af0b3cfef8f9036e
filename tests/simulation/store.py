"""The log and the payload store in memory, with the guarantees of `events.store.log.EventLog`, and faults on demand.

A `Store` is the database, and a `LogDouble` is one process's access to it. An append is atomic. It checks commit id,
lease and versions in this order, as the real one does, and calls `listener` with each committed event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import CommitMismatch, ConcurrencyError, Fenced, LogUnavailable, PayloadNotFound
from trinity_es.events.store.checks.log_end import Claim, Mark
from trinity_es.events.store.log import Committed, Head, Lease, Recorded, Write
from trinity_es.events.values import BatchId
from trinity_es.projections.leases import OpenLeases, evolve_leases
from trinity_es.projections.runner import Lives, Weights, evolve_lives, newest_life

ENDED = frozenset({"FINALIZED", "ABORTED"})


@dataclass(slots=True)
class BatchRow:
    """Row of a batch, with fields of the read model."""

    stream: str
    batch_id: BatchId
    state: str
    first_position: int
    batch_type: str


class Store:
    """The database. `now` returns unix seconds."""

    checks_epoch = True

    def __init__(self, now: Callable[[], float], listener: Callable[[Recorded], None]) -> None:
        self.now, self.listener = now, listener
        self.rows: list[Recorded] = []
        self.streams: dict[str, list[Recorded]] = {}
        self.commits: dict[str, list[Recorded]] = {}
        self.payloads: dict[str, bytes] = {}
        self.epoch = 0
        self.owner: dict[str, Any] = {}
        self.batches: dict[str, BatchRow] = {}
        self.lives: Lives = {}
        self.away = False
        self.faults: list[str] = []
        """Faults of the next appends, one each: `error`, `fail`, `error_after`, `fail_after`."""

    # --- writing ----------------------------------------------------------------------------------------------------
    def append(
        self, writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None
    ) -> Committed:
        self.require()
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("error", "fail"):
            raise unavailable(passing=fault == "error")
        done = self._append(writes, commit_id, lease, metadata)
        if fault:
            raise unavailable(passing=fault == "error_after")
        return done

    def _append(
        self, writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None
    ) -> Committed:
        checked = [(w.stream, *codec.check(event), event) for w in writes for event in w.events]
        earlier = self.commits.get(commit_id)
        if earlier is not None:
            if [(r.stream, r.data) for r in earlier] != [(stream, data) for stream, data, _, _ in checked]:
                raise CommitMismatch(f"commit {commit_id} is in the log with other events")
            return Committed(
                first_position=earlier[0].position, last_position=earlier[-1].position, recorded=earlier, duplicate=True
            )
        if lease is not None and self.checks_epoch and lease.epoch != self.epoch:
            raise Fenced(f"lease is at epoch {self.epoch}, this writer holds {lease.epoch}")
        actual: dict[str, int] = {}
        for w in writes:
            version = actual.get(w.stream, self.version(w.stream))
            if version != w.expected_version:
                raise ConcurrencyError(f"stream {w.stream} is at version {version}, not {w.expected_version}")
            actual[w.stream] = version + len(w.events)
        about = dict(metadata or {}) | ({} if lease is None else {"epoch": lease.epoch})
        recorded = []
        for stream, data, decoded, event in checked:
            row = Recorded(
                position=len(self.rows) + 1,
                stream=stream,
                version=self.version(stream) + 1,
                type=type(event).__name__,
                schema_version=event.schema_version,
                data=data,
                metadata=about,
                recorded_at=self.now(),
                commit_id=commit_id,
                hash=b"",
                _event=decoded,
            )
            self.rows.append(row)
            self.streams.setdefault(stream, []).append(row)
            self._project(row)
            recorded.append(row)
        self.commits[commit_id] = recorded
        for row in recorded:
            self.listener(row)
        return Committed(
            first_position=recorded[0].position, last_position=recorded[-1].position, recorded=recorded, duplicate=False
        )

    def acquire(self, name: str, owner: Mapping[str, Any]) -> Lease:
        self.require()
        self.epoch += 1
        self.owner = dict(owner)
        return Lease(name=name, epoch=self.epoch, owner=dict(owner))

    def require(self) -> None:
        if self.away:
            raise unavailable(passing=True)

    # --- reading ----------------------------------------------------------------------------------------------------
    def version(self, stream: str) -> int:
        return len(self.streams.get(stream, ()))

    def last_incarnation(self) -> int:
        return max((incarnation for _, incarnation in self.lives), default=0)

    # --- read models: the parts of projections/tables/read_models.py that the coordinator reads ---------------------
    def _project(self, row: Recorded) -> None:
        event = row.event
        if row.stream.startswith("batch/"):
            if isinstance(event, ev.BatchSubmitted):
                state = "RUNNING" if event.repeat_times else "PENDING"
                self.batches.pop(row.stream, None)
                self.batches[row.stream] = BatchRow(row.stream, event.batch_id, state, row.position, event.batch_type)
                return
            batch = self.batches[row.stream]
            match event:
                case ev.BatchFinalizing():
                    batch.state = "FINALIZING"
                case ev.FinalizeFailed() | ev.GroupsMissing():
                    batch.state = "RUNNING"
                case ev.BatchFinalized():
                    batch.state = "FINALIZED"
                case ev.BatchAborted():
                    batch.state = "ABORTED"
        elif row.stream.startswith("runner/"):
            evolve_lives(self.lives, event, Weights())


def unavailable(*, passing: bool) -> LogUnavailable:
    return LogUnavailable("the simulated database is away", passing=passing)


class LogDouble:
    """Double of EventLog on a Store. `alive` returns False if its process is dead, which then takes no lease."""

    def __init__(self, store: Store, alive: Callable[[], bool]) -> None:
        self.store, self.alive = store, alive
        self.acknowledged: Mark | None = None
        self.memory: Any = None
        self.engine = self  # for `engine.connect()`; `open_batches` and others below read the read models
        self.url = "memory"

    @contextmanager
    def connect(self) -> Iterator[LogDouble]:
        self.store.require()
        yield self

    def append(
        self, writes: Sequence[Write], *, commit_id: str, lease: Lease | None = None,
        metadata: Mapping[str, Any] | None = None, patience: float | None = None,
    ) -> Committed:
        done = self.store.append(writes, commit_id, lease, metadata)
        self.acknowledged = Mark("simulated", done.last_position, b"")
        return done

    def require(self, claims: Sequence[Claim]) -> None:
        """Require that no claimed event is lost, and advance the acknowledged mark."""
        assert not self.lost_claims(claims)[1]
        marks = [mark for mark, _ in claims] + ([] if self.acknowledged is None else [self.acknowledged])
        self.acknowledged = max(marks, key=lambda mark: mark.position, default=None)

    def lost_claims(self, claims: Sequence[Claim]) -> tuple[Head, list[Claim]]:
        self.store.require()
        head = Head(position=len(self.store.rows), generation="simulated", hash=b"")
        return head, [c for c in claims if c.mark.position > head.position]

    def read(
        self, *, stream: str | None = None, after: int = 0, until: int | None = None,
        types: Sequence[str] | None = None, limit: int | None = None,
    ) -> Iterator[Recorded]:
        self.store.require()
        rows = self.store.rows[after:] if stream is None else self.store.streams.get(stream, [])
        found = [
            r for r in rows
            if r.position > after and (until is None or r.position <= until) and (types is None or r.type in types)
        ]
        return iter(found[:limit])

    def query(self, work: Callable[[LogDouble], Any]) -> Any:
        self.store.require()
        return work(self)

    def read_rare(
        self, types: Sequence[str] | None = None, *, after: int = 0, before: int | None = None,
        limit: int | None = None, descending: bool = False,
    ) -> Iterator[Recorded]:
        found = list(self.read(types=types, after=after, until=None if before is None else before - 1))
        return iter((found[::-1] if descending else found)[:limit])

    def last(self, stream: str, type_name: str, *, after: int = 0) -> Recorded | None:
        *_, last = [None, *self.read(stream=stream, types=[type_name], after=after)]
        return last

    def acquire_lease(self, name: str, owner: Mapping[str, Any]) -> Lease:
        if not self.alive():
            return Lease(name=name, epoch=-1, owner={})
        return self.store.acquire(name, owner)

    def read_lease(self, name: str) -> Lease | None:
        self.store.require()
        return Lease(name=name, epoch=self.store.epoch, owner=self.store.owner) if self.store.epoch else None

    def release_lease(self, lease: Lease) -> None:
        self.store.require()
        if self.alive() and lease.epoch == self.store.epoch:
            self.store.owner = {}

    def is_reachable(self) -> bool:
        return not self.store.away

    def close(self) -> None:
        """Do nothing."""


def open_batches(log: LogDouble) -> list[tuple[str, BatchId]]:
    """Double of `projections.tables.read_models.open_batches`."""
    rows = sorted(log.store.batches.values(), key=lambda b: b.first_position)
    return [(b.stream, b.batch_id) for b in rows if b.state not in ENDED]


def delivered_batches(log: LogDouble, limit: int) -> list[tuple[str, int]]:
    """Double of `read_models.delivered_batches`, in the order of submission instead of ends."""
    rows = [b for b in log.store.batches.values() if b.state == "FINALIZED" and b.batch_type == "train"]
    return [(b.stream, b.first_position) for b in sorted(rows, key=lambda b: -b.first_position)[:limit]]


def other_streams(log: LogDouble) -> dict[str, int]:
    """Double of `projections.tables.stream_queries.other_streams`."""
    log.store.require()
    return {name: len(rows) for name, rows in log.store.streams.items() if not name.startswith("batch/")}


def greatest_batch_id(log: LogDouble) -> int:
    """Double of `projections.tables.stream_queries.greatest_batch_id`."""
    log.store.require()
    names = [name.removeprefix("batch/") for name in log.store.streams if name.startswith("batch/")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def next_delivered(log: LogDouble, after: int) -> tuple[BatchId, int] | None:
    """Double of `projections.tables.experience_usage.next_delivered`."""
    for row in log.read(types=["BatchFinalized"], after=after):
        if isinstance(row.event, ev.BatchFinalized) and row.event.result["batch_type"] == "train":
            return row.event.result["batch_id"], row.position
    return None


def read_open(log: LogDouble) -> OpenLeases:
    """Double of `projections.tables.open_leases.read_open`."""
    leases: OpenLeases = {}
    for row in log.read(stream="leases"):
        evolve_leases(leases, row.event)
    return leases


def runner_states(log: LogDouble) -> dict[str, tuple[int, str]]:
    """Double of `projections.tables.runner_history.runner_states`, made from the fold in `projections.runner`."""
    lives = log.store.lives
    newest = [newest_life(lives, name) for name in {name for name, _ in lives}]
    return {life.name: (life.incarnation, life.state) for life in newest if life is not None}


class PayloadDouble:
    """Double of PayloadStore on a Store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, data: bytes) -> str:
        self.store.require()
        digest = hashlib.sha256(data).hexdigest()
        self.store.payloads[digest] = data
        return digest

    def get(self, digest: str) -> bytes:
        self.store.require()
        if digest not in self.store.payloads:
            raise PayloadNotFound(f"no payload {digest}")
        return self.store.payloads[digest]

    def close(self) -> None:
        """Do nothing."""
