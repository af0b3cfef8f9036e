"""The event log: appends and reads of events, in SQLite or PostgreSQL.

Its guarantees, each with a test in tests/main/test_log_contract.py or tests/full/events:

- An append is one transaction over several streams. When `append` returns, its events are durable and written once.
- Positions are 1, 2, 3, ... in commit order without a gap, so no new event ever appears before a reader's position.
  Versions of a stream are 1, 2, 3, ...
- An append that is repeated with its commit id returns the first result. With other events it raises CommitMismatch.
- A writer whose lease another took gets Fenced. A writer with a stale version of a stream gets ConcurrencyError. A
  writer whose earlier events are missing (restored from a copy, a standby that was behind) gets LogRewound.
- Events never change: the database refuses it, and a chain of hashes proves it (`verify`).
- Read models (`Projector`) change in the transaction of the append, or not at all.

Durability: commits with "process" survive the death of every process, with "power" also the loss of power (an fsync per
commit). On PostgreSQL both mean "power", if the server's `fsync` is on.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self

import orjson
from sqlalchemy import Connection, Engine, func, select, update
from sqlalchemy.exc import IntegrityError

from trinity_es.events.errors import CommitMismatch, ConcurrencyError, LogCorrupt, LogUnavailable
from trinity_es.events.store import writer_lease
from trinity_es.events.store.checks.log_end import Claim, Mark, MemoryFile, find_lost, require_known, rewound_error
from trinity_es.events.store.database import schema, statements
from trinity_es.events.store.database.database import Database, Durability, T
from trinity_es.events.store.database.log_opening import open_schema
from trinity_es.events.store.database.statements import PAGE, LockedHead, lock_head
from trinity_es.events.store.database.store_identity import identity_of
from trinity_es.events.store.projectors import ReadModels
from trinity_es.events.store.records import clock
from trinity_es.events.store.records.clock import Reading, monotonic
from trinity_es.events.store.records.event_queries import position_at, rare_page, require_rare
from trinity_es.events.store.records.log_values import (
    Committed,
    Draft,
    Head,
    Lease,
    Projector,
    Recorded,
    Write,
    draft,
    from_row,
)
from trinity_es.events.vocabulary import ClockStepped

if TYPE_CHECKING:
    from trinity_es.events.store.checks.verify import Watcher

__all__ = ["Committed", "EventLog", "Head", "Lease", "Projector", "Recorded", "Write"]

CLOCK = "clock"

_E = schema.events.c


class EventLog:
    """One process's access to a log. Safe for threads and for concurrent processes."""

    def __init__(self, database: Database, projectors: Sequence[Projector]) -> None:
        self._db = database
        self._read_models = ReadModels(database, projectors)
        self.acknowledged: Mark | None = None
        """Last event that this object wrote, or that `require` found in the log."""
        self._generation = ""
        """Generation of the log at this object's last append."""
        self._mark_lock = threading.Lock()
        self.memory: MemoryFile | None = None
        """File of this host that gets the position of each append before `append` returns."""
        self._last_reading: Reading | None = None

    @classmethod
    def open(
        cls, url: str, *, create: bool = False, durability: Durability = "power",
        projectors: Sequence[Projector] = (), read_only: bool = False, patience: float = 20.0,
    ) -> Self:
        """Open the log at `url`: a path, `sqlite:///path` or `postgresql://...`.

        With `create`, a missing log is made. Tables of projectors that are new, changed or behind are updated first.
        `patience`: seconds for which each call retries after a lost connection or a held lock (this call at most 5 s).
        Raises LogNotFound, NotALog, LogTooNew, LogUnavailable, LogCorrupt or ConfigError.
        """
        database = Database(url, durability=durability, read_only=read_only, patience=patience)
        log = cls(database, projectors)
        try:
            open_schema(database, create, log._read_models.prepare if projectors else None)
        except BaseException:
            database.close()
            raise
        return log

    @property
    def url(self) -> str:
        """The log's URL, without a password."""
        return self._db.shown

    @property
    def engine(self) -> Engine:
        """SQLAlchemy engine, to read the projectors' tables. Only this class writes the log's own tables."""
        return self._db.engine

    def query(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a reading transaction, with retries of passing errors. Raises LogUnavailable, DBAPIError."""
        return self._db.read(work)

    @property
    def dialect(self) -> Literal["sqlite", "postgresql"]:
        return self._db.dialect

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing ----------------------------------------------------------------------------------------------------
    def append(
        self, writes: Sequence[Write], *, commit_id: str, lease: Lease | None = None,
        metadata: Mapping[str, Any] | None = None, patience: float | None = None, generation: str | None = None,
    ) -> Committed:
        """Write all of `writes`, or nothing. When this returns, they are durable.

        Every retry of a decision must pass the same `commit_id`, and no other decision may. A write without events only
        checks its stream's version. `patience` replaces the log's own; 0 means a single try. A given `generation`
        becomes the log's new one. Raises ConcurrencyError(stream, expected, actual), Fenced, CommitMismatch,
        LogRewound, InvalidEvent, errors of projectors, and LogUnavailable (nothing was acknowledged; the same commit
        may be tried again).
        """
        own_draft = draft(writes, commit_id, lease, metadata)
        size = 32768 + sum(len(r.data) + len(own_draft.metadata) + 400 for r in own_draft.recorded)
        committed = self._db.write(
            lambda c: self._append(c, writes, own_draft, commit_id, lease, generation), size=size, patience=patience
        )
        if committed.recorded:
            mark = Mark(self._generation, committed.last_position, committed.recorded[-1].hash)
            if self._acknowledge(mark) and self.memory is not None:
                self.memory.note(mark)
        return committed

    def _acknowledge(self, mark: Mark) -> bool:
        """Set `acknowledged` to this mark if it is newer. Return True if it is."""
        with self._mark_lock:
            is_newer = self.acknowledged is None or mark.position > self.acknowledged.position
            if is_newer:
                self.acknowledged = mark
            return is_newer

    def _append(
        self, connection: Connection, writes: Sequence[Write], own_draft: Draft, commit_id: str, lease: Lease | None,
        generation: str | None,
    ) -> Committed:
        """Do the work of `append` in this transaction, under the lock of the log's head row."""
        before_lock = monotonic()
        head = lock_head(connection, self._db)
        self._generation = generation or head.generation
        clock_reading = head.now, before_lock, monotonic()  # the clock's time, and the monotonic one around it
        require_known(connection, head, self.url, self.acknowledged)
        values = {"commit": commit_id, "lease": "" if lease is None else lease.name}
        earlier_position, epoch = statements.COMMIT_AND_EPOCH.rows(connection, values)[0]
        if earlier_position is not None:
            return self._earlier_result(connection, earlier_position, commit_id, own_draft)
        if lease is not None:
            writer_lease.check(lease, epoch)
        self._check_versions(connection, writes)
        clock_step = self._clock_step(connection, head, clock_reading)
        drafts = [own_draft] if clock_step is None else [clock_step, own_draft]
        self._assign_positions(head, drafts)
        recorded = [item for commit in drafts for item in commit.recorded]
        last = recorded[-1]
        try:
            statements.EVENTS.insert(connection, [row for commit in drafts for row in commit.rows()])
        except IntegrityError as e:
            raise LogCorrupt(
                f"{self.url}: the log's head or streams do not agree with its events near position {last.position} "
                f"({e.orig}); run `trinity-es verify`"
            ) from e
        statements.set_versions(connection, {item.stream: item.version for item in recorded})
        statements.MOVE_HEAD.change(connection, {"p": last.position, "h": last.hash, "t": last.recorded_at})
        self._read_models.apply(connection, head, recorded)
        if generation is not None:
            connection.execute(update(schema.heads).values(generation=generation))
            self._read_models.begin_generation(connection, generation)
        self._last_reading = clock_reading
        return Committed(
            first_position=own_draft.recorded[0].position, last_position=last.position, recorded=own_draft.recorded,
            duplicate=False,
        )

    def _clock_step(self, connection: Connection, head: LockedHead, clock_reading: Reading) -> Draft | None:
        """Return a draft of a ClockStepped event if the clock was set since the last append, else None."""
        slack = clock.STEP_SECONDS
        if self._last_reading is None and head.last_position:
            slack = clock.FIRST_SECONDS
            data = connection.execute(select(_E.metadata).where(_E.position == head.last_position)).scalar()
            metadata = orjson.loads(data or b"{}")
            if metadata.get("boot") == clock.boot() != "" and "mono" in metadata:
                self._last_reading = head.recorded_at, metadata["mono"], metadata["mono"]
        seconds = clock.seconds_set(self._last_reading, clock_reading, head.recorded_at, slack)
        if not seconds:
            return None
        version = statements.versions(connection, [CLOCK]).get(CLOCK, 0)
        event = ClockStepped(seconds=round(seconds, 3), before=head.recorded_at)
        write = Write(stream=CLOCK, expected_version=version, events=[event])
        return draft([write], f"clock:{uuid.uuid4().hex}", None, None)

    def _assign_positions(self, head: LockedHead, drafts: Sequence[Draft]) -> None:
        # Whole microseconds, as in a datetime, so that a query with the displayed time finds the event.
        recorded_at = round(head.now, 6)
        if drafts[0].recorded[0].stream != CLOCK:  # without a step, recorded times never go back
            recorded_at = max(recorded_at, head.recorded_at)
        position, previous = head.last_position, head.last_hash
        for commit in drafts:
            position, previous = commit.place(position, previous, repeat(recorded_at))

    def lost_claims(self, claims: Sequence[Claim]) -> tuple[Head, list[Claim]]:
        """Return the end of the log, and the claims that are false: the log lacks their event."""
        return self._db.read(lambda c: find_lost(c, claims))

    def require(self, claims: Sequence[Claim]) -> None:
        """Raise LogRewound if the log lacks a claimed event. Later appends check the newest claim again."""
        head, lost_claims = self.lost_claims(claims)
        if lost_claims:
            raise rewound_error(self.url, head, lost_claims)
        for mark, _ in claims:
            if mark.generation == head.generation:
                self._acknowledge(mark)

    def _earlier_result(self, connection: Connection, first: int, commit_id: str, own_draft: Draft) -> Committed:
        """Return the result of the earlier append with this commit id, which begins at position `first`.

        Raises CommitMismatch if it had other events.
        """
        # Read one event more than this commit has, since the earlier one may be longer.
        values = {"after": first - 1, "until": statements.MAX_POSITION, "limit": len(own_draft.recorded) + 1}
        rows = statements.NEXT_PAGE.rows(connection, values)
        earlier_events = [item for item in map(from_row, rows) if item.commit_id == commit_id]
        content = attrgetter("stream", "type", "schema_version", "data")
        if [*map(content, earlier_events)] != [*map(content, own_draft.recorded)]:
            raise CommitMismatch(
                f"commit {commit_id} is in the log at position {first} with other events; a new decision needs a new "
                "commit id", commit_id=commit_id, position=first,
            )
        return Committed(
            first_position=first, last_position=earlier_events[-1].position, recorded=earlier_events, duplicate=True)

    def _check_versions(self, connection: Connection, writes: Sequence[Write]) -> None:
        """Raise ConcurrencyError if a stream is not at the version that its write expects."""
        versions = statements.versions(connection, dict.fromkeys(write.stream for write in writes))
        for write in writes:
            version = versions.get(write.stream, 0)
            if version != write.expected_version:
                raise ConcurrencyError(
                    f"stream {write.stream} is at version {version}, the writer expected {write.expected_version}; "
                    "load it again and decide again",
                    stream=write.stream, expected=write.expected_version, actual=version,
                )
            versions[write.stream] = version + len(write.events)

    def remembered_claims(self, memory: MemoryFile) -> list[Claim]:
        """Return this host's claims about the log, read from `memory`. First set the store's key there."""
        memory.key = self._db.read(lambda c: identity_of(self._db, c)).key
        return memory.claims(self.head().generation)

    # --- leases -----------------------------------------------------------------------------------------------------
    def acquire_lease(self, name: str, owner: Mapping[str, Any]) -> Lease:
        """Take the lease from any holder, which can no longer append. `owner` describes the new holder, as JSON."""
        return writer_lease.acquire(self._db, name, owner)

    def read_lease(self, name: str) -> Lease | None:
        """Return the lease, or None if it was never taken. `owner` is empty after a release and in a copied store."""
        return writer_lease.read(self._db, name)

    def release_lease(self, lease: Lease) -> None:
        """Remove the owner from the lease, unless another writer took it meanwhile. The epoch stays."""
        writer_lease.release(self._db, lease)

    # --- reading ----------------------------------------------------------------------------------------------------
    def read(
        self, *, stream: str | None = None, after: int = 0, until: int | None = None,
        types: Sequence[str] | None = None, limit: int | None = None,
    ) -> Iterator[Recorded]:
        """Yield events of one stream or all, with `after` < position <= `until`, in order, at most `limit`.

        Each page is read in its own transaction, up to the end of the log at that moment. Raises LogCorrupt for a
        missing position, or for a missing version of the stream.
        """
        query = statements.NEXT_PAGE if stream is None else statements.STREAM_PAGE
        if types is not None:
            query = statements.page_of(stream is not None, tuple(types))
        values = {"stream": stream, "until": statements.MAX_POSITION if until is None else until}
        remaining, version = math.inf if limit is None else limit, 0
        while remaining > 0:
            size = int(min(PAGE, remaining))
            values |= {"after": after, "version": version, "limit": size}
            page = self._db.read(partial(query.rows, values=values))
            for row in page:
                position, row_version = row[0], row[2]
                if types is None:
                    if stream is None and position != after + 1:
                        raise LogCorrupt(
                            f"{self.url}: positions {after + 1} to {position - 1} are missing; run `trinity-es verify`",
                            position=after + 1,
                        )
                    if stream is not None and version and row_version != version + 1:
                        raise LogCorrupt(
                            f"{self.url}: {stream} has no version {version + 1}; run `trinity-es verify`",
                            position=position
                        )
                after, version = position, row_version
                yield from_row(row)
            remaining -= len(page)
            if len(page) < size:
                return

    def read_rare(
        self, types: Sequence[str] | None = None, *, after: int = 0, before: int | None = None,
        limit: int | None = None, descending: bool = False,
    ) -> Iterator[Recorded]:
        """Yield at most `limit` events of these rare types (all but `schema.BULK`), with `after` < position < `before`.

        They come in order of position, or with `descending` the newest first. An index finds them, so the cost does not
        grow with the log. Raises ValueError for a bulk type.
        """
        rare_types = require_rare(types)
        remaining = math.inf if limit is None else limit
        while remaining > 0:
            size = int(min(PAGE, remaining))
            query = partial(rare_page, types=rare_types, after=after, before=before, size=size, descending=descending)
            page = self._db.read(query)
            yield from map(from_row, page)
            if len(page) < size:
                return
            if descending:
                before = page[-1].position
            else:
                after = page[-1].position
            remaining -= len(page)

    def last(self, stream: str, type_name: str, *, after: int = 0) -> Recorded | None:
        """Return the last event of this type in a stream, or None if none has a position greater than `after`."""
        # Not `type = ...`: PostgreSQL assumes that stream and type are independent and expects few rows, even if every
        # event of the stream has this type. It would read and sort them all instead of the index from its end.
        query = select(schema.events).where(
            _E.stream == stream, func.coalesce(_E.type, "") == type_name, _E.position > after
        )
        row = self._db.read(lambda c: c.execute(query.order_by(_E.version.desc()).limit(1)).one_or_none())
        return None if row is None else from_row(row)

    def stream_version(self, stream: str) -> int:
        """Return the version of the stream's last event; 0 if the stream does not exist."""
        query = select(schema.streams.c.version).where(schema.streams.c.stream == stream)
        return self._db.read(lambda c: c.execute(query).scalar_one_or_none() or 0)

    def streams(self, prefix: str = "") -> list[tuple[str, int]]:
        """Return (stream, version) of the streams whose names begin with `prefix`, by name."""
        columns = schema.streams.c
        query = select(columns.stream, columns.version).where(func.substr(columns.stream, 1, len(prefix)) == prefix)
        return sorted(self._db.read(lambda c: [(r.stream, r.version) for r in c.execute(query)]))

    def is_reachable(self) -> bool:
        """Return True if the database answers at the first try. Raises LogRewound if acknowledged events are gone."""
        mark = self.acknowledged  # before the read, since a commit may follow meanwhile
        try:
            heads = select(schema.heads)
            self._db.read(lambda c: require_known(c, c.execute(heads).one(), self.url, mark), patience=0.0)
        except LogUnavailable:
            return False
        return True

    def require_place(self) -> None:
        """Check that the open SQLite file is still at its path: commits to a moved or deleted file would be lost.

        If only the file of its write-ahead log was moved or deleted, move the content into the database first. Costs
        some calls of `stat`. Raises LogReplaced, LogCorrupt, LogUnavailable.
        """
        self._db.require_place()

    def is_replaced(self) -> bool:
        """Return True if another file is now at the path of the open SQLite file."""
        return self._db.is_replaced()

    def head(self) -> Head:
        row = self._db.read(lambda c: c.execute(select(schema.heads)).one())
        return Head(position=row.last_position, generation=row.generation, hash=bytes(row.last_hash))

    def clock_steps(self) -> list[Recorded]:
        """Return the `ClockStepped` events in order. Between two of them `recorded_at` never goes back."""
        return list(self.read_rare(["ClockStepped"]))

    def position_at(self, time: float) -> int:
        """Return the position of the last event recorded at or before `time` (unix seconds), or 0.

        If the clock was stepped, the search is in the last stretch between two steps that began by then.
        """
        return self._db.read(lambda c: position_at(c, self.url, time, self.clock_steps()))

    # --- read models ------------------------------------------------------------------------------------------------
    def rebuild(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Rebuild every read model from the log in one transaction, while writers wait. Return the applied events."""
        return self._db.write(lambda c: self._read_models.rebuild(c, progress), size=64 * 1024 * 1024)

    def verify(self, progress: Callable[[int, int], None] | None = None, watcher: Watcher | None = None) -> list[str]:
        """Check the whole log, and return its problems, each naming a position or stream; [] if it is sound.

        Reads every event once, and calls `progress(position, last position)` after each page. A `watcher` gets the
        events for checks of its own. Writers continue meanwhile, and their appends are checked too.
        """
        from trinity_es.events.store.checks.verify import verify  # local, since it is seldom used

        return verify(self._db, progress, watcher)
