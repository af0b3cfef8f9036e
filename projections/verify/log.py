"""Integrity check of a log, its read models and its payloads, for `Log.verify` and `trinity-es verify`.

One pass over the events checks the hash chain (events/store/checks/verify.py), recomputes every final result, and folds
the read models into a temporary SQLite database. Then one transaction compares each row of the log's read models with
the folded ones, and checks the checkpoints, leases and table definitions. Last, every payload is checked against its
digest, and missing payloads are reported. Nothing is changed. Memory does not grow with the events, because the folded
tables are in a temporary file. docs/OBSERVABILITY.md lists what this can't detect.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, Select, create_engine, delete, insert, select, text
from sqlalchemy.pool import StaticPool

from trinity_es.events import errors
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks.verify import Problems, check_pages, raw_text
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.retry import is_transient
from trinity_es.events.store.database.urls import file_of, masked
from trinity_es.events.store.log import EventLog, Head, Recorded
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import RESULT_FORMS, BatchState, batch_result, evolve
from trinity_es.projections.leases import OpenLeases, check_attachment, evolve_leases
from trinity_es.projections.tables import host_work, read_models, runner_history
from trinity_es.projections.verify import remembered_log_end
from trinity_es.projections.verify.payloads import Needs, Payloads
from trinity_es.projections.verify.tables import NEWER, REBUILD, UNREADABLE, compare_tables, short

__all__ = ["Verification", "canonical", "recomputed_result", "verify_log", "verify_open"]

Progress = Callable[[int, int], None]

_SPACE = re.compile(r"[ \t\n]+")
_DEFINITIONS = "SELECT type, name, tbl_name, sql FROM sqlite_master"

# The trigger must be enabled and unconditional, fire before each UPDATE, DELETE and TRUNCATE, and call our function.
_TRIGGER_REFUSES = text(
    "SELECT tgenabled IN ('O', 'A') AND tgtype = 58 AND tgqual IS NULL AND prosrc = :body "
    "FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid "
    "WHERE tgname = 'es_event_no_change' AND tgrelid = to_regclass('es_event')"
)
_VALID_INDEXES = text(
    "SELECT index.relname FROM pg_index JOIN pg_class AS index ON index.oid = indexrelid "
    "JOIN pg_class AS of ON of.oid = indrelid WHERE of.relname = ANY(:names) AND indisvalid"
)
_REQUIRED_INDEXES = {
    "es_event_pkey", "es_event_stream_version_key", "es_event_commit", "es_event_rare", "es_stream_pkey",
    "es_lease_pkey", "es_checkpoint_pkey", "es_log_head_pkey",
}


@dataclass(slots=True, kw_only=True)
class Verification:
    url: str
    """URL of the log, without a password."""
    problems: list[str] = field(default_factory=list)
    """Problems, each naming a position, stream or row; [] if the log is sound."""
    notes: list[str] = field(default_factory=list)
    """Observations that are no problems, such as payloads to which no event refers."""
    events: int = 0
    """Last checked position."""
    batches: int = 0
    payloads: int = 0


def canonical(value: Any) -> bytes:
    """Serialize a JSON value so that equal values, and only these, give equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def recomputed_result(state: BatchState, finalized: ev.BatchFinalized | ev.BatchAborted) -> dict[str, Any]:
    """Recompute a batch's final result from the state before `finalized`.

    Earlier releases stored results with other fields. Return the form that equals the stored result; if there is none,
    return the present form.
    """
    metrics = finalized.pipeline_metrics if isinstance(finalized, ev.BatchFinalized) else {}
    stored = canonical(finalized.result)
    results = (batch_result(state, metrics, form=form) for form in range(RESULT_FORMS, 0, -1))
    return next((r for r in results if canonical(r) == stored), None) or batch_result(state, metrics)


def verify_log(
    url: str, progress: Progress | None = None, payload_progress: Progress | None = None, folder: str = "",
) -> Verification:
    """Check the log at a URL or file path. Its run may continue meanwhile.

    `progress(done, total)` counts events, `payload_progress` counts payloads. `folder`: folder of this host's
    `MemoryFile`, if it is neither in the folders of the log's config nor beside the log. Raises LogNotFound, NotALog
    for a file that never was a log, and LogUnavailable for a database that can't be reached.
    """
    try:
        log = EventLog.open(url, read_only=True)
    except (errors.NotALog, errors.LogCorrupt, errors.LogTooNew) as e:
        if isinstance(e, errors.NotALog) and not _was_log(url):
            raise
        return Verification(url=masked(url), problems=[e.message, *_damaged_pages(url)])
    except UNREADABLE as e:  # a schema that SQLite can't read
        problem = f"{masked(url)} can't be read: {getattr(e, 'orig', e)}"
        return Verification(url=masked(url), problems=[problem, *_damaged_pages(url)])
    with log:
        return verify_open(log, url, progress, payload_progress, folder)


def _was_log(url: str) -> bool:
    """Return True if an unreadable file was a log, because its first MiB has a name of a log's table."""
    path = file_of(url)
    if path is None or not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(1024 * 1024)
    return b"es_log_head" in beginning or b"es_event" in beginning


def _damaged_pages(url: str) -> list[str]:
    """Check the pages of a SQLite file that can't be opened as a log, and return SQLite's problems."""
    path = file_of(url)
    if path is None or not path.is_file():
        return []
    with (suppress(*UNREADABLE), closing(Database(url, read_only=True)) as database,
          database.engine.connect() as connection):
        return check_pages(connection)
    return []


def verify_open(
    log: EventLog, url: str, progress: Progress | None = None, payload_progress: Progress | None = None,
    folder: str = "",
) -> Verification:
    """Check an open log as `verify_log` does. `url`: its URL, to open the payload store."""
    report = Verification(url=log.url)
    claims = remembered_log_end.read_claims(log, url, folder)  # read first, since the log may grow meanwhile
    with closing(_Fold(log)) as fold:
        report.problems += log.verify(progress, fold)
        report.problems += fold.problems.texts()
        report.notes += fold.notes
        if loss := remembered_log_end.loss_text(log, claims):
            report.problems.append(loss)
        report.events, report.batches = fold.last, len(fold.batches)
        payloads = Payloads(log, url, fold.needs)
        payloads.check(payload_progress)
        report.problems += payloads.problems.texts()
        report.notes += payloads.notes
        report.payloads = payloads.read_count
    return report


# --- one pass over the events -----------------------------------------------------------------------------------------
class _Fold:
    """Fold of all events into the expected read models and the needed payloads, a Watcher of `EventLog.verify`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.problems, self.notes = Problems(), list[str]()
        self.last = 0
        self.batches: dict[str, tuple[str, int]] = {}
        """Stream -> (state, number of tasks) of each batch."""
        self._read_models = read_models.ReadModels()
        self._open_batches: dict[str, BatchState] = {}
        self._broken_streams: set[str] = set()
        """Streams with an event that could not be folded."""
        self._tables_are_folded = True
        """False if a projector failed to fold some events."""
        self._last_epochs: dict[str, int] = {}
        """Name of a lease -> epoch of its last holder that wrote events."""
        self._open_leases: OpenLeases = {}
        self._last_start: ev.CoordinatorStarted | None = None
        self._starts: list[tuple[int, str]] = []
        """(position, commit id) of each CoordinatorStarted in this page of events, and of the last one before."""
        # The name "" makes a temporary database that spills to disk and that SQLite deletes on close.
        self.scratch = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-65536"):
            self.scratch.execute(f"PRAGMA {pragma}")
        self._engine = create_engine("sqlite://", creator=lambda: self.scratch, poolclass=StaticPool)
        self._scratch_connection = self._engine.connect()
        schema.tables.create_all(self._scratch_connection)
        schema.create_triggers(self._scratch_connection)
        self._read_models.create(self._scratch_connection)
        self._expected_definitions = {row[1]: _definition(row) for row in self.scratch.execute(_DEFINITIONS)}
        schema.drop_triggers(self._scratch_connection)
        self._has_hosts = False
        """True after a host has joined. Before that, all tasks finish on the head's own runners."""
        self.needs = Needs(self.scratch)
        self.scratch.execute("BEGIN")  # never committed

    def close(self) -> None:
        self._scratch_connection.close()
        self._engine.dispose()

    def check_events(self, recorded: Sequence[Recorded]) -> None:
        """Fold the next events. Report batch and lease events that can't follow the earlier ones."""
        self.last = recorded[-1].position
        for item in recorded:
            if "lease" in item.metadata:
                self._last_epochs[str(item.metadata["lease"])] = int(item.metadata.get("epoch", 0))
            if item.stream.startswith("batch/"):
                self._fold_batch_event(item)
            elif isinstance(item.event, ev.CoordinatorStarted):
                self._last_start = item.event
                self._starts.append((item.position, item.commit_id))
            elif item.stream == ev.LeaseTaken.stream:
                self._fold_lease_event(item)
        self.needs.note_events(recorded)
        if self._tables_are_folded:
            self._project(recorded)
        del self._starts[:-1]

    def _project(self, recorded: Sequence[Recorded]) -> None:
        """Fold these events into the expected read models. If a projector fails, report that and stop folding."""
        try:
            self._copy_events_for_projectors(recorded)
            self._read_models.apply(self._scratch_connection, recorded)
            self._scratch_connection.execute(delete(schema.events))
        except errors.LogUnavailable:  # an unreachable database is no problem of the log
            raise
        except Exception as e:  # changed events may raise anything
            self._tables_are_folded = False
            self.problems.add(
                f"positions {recorded[0].position} to {recorded[-1].position}: the read models can't be folded from "
                f"them, and are not compared: {type(e).__name__}: {e}"
            )

    def _copy_events_for_projectors(self, recorded: Sequence[Recorded]) -> None:
        """Copy earlier events that projectors query (dispatches, starts, ends of tasks) into the scratch database."""
        types_by_stream: dict[str, set[str]] = {}
        queries: list[Select[Any]] = []
        for item in recorded:
            match item.event:
                case ev.AttemptFailed() if item.event.kind == "runner_lost":
                    types_by_stream.setdefault(item.stream, set()).add("TasksDispatched")
                    if not queries:
                        column = schema.events.c.position
                        queries = [select(schema.events).where(column == position) for position, _ in self._starts]
                        queries += [runner_history.before_start(*start) for start in self._starts]
                case ev.HostJoined():
                    self._has_hosts = True
                case ev.BatchSubmitted() | ev.TaskReopened() if self._has_hosts and item.version > 1:
                    types_by_stream.setdefault(item.stream, set()).update(host_work.FORGET_TYPES)
        queries += [
            select(schema.events).where(
                schema.events.c.stream == stream, schema.events.c.type.in_(sorted(types)),
                recorded[-1].position >= schema.POSITION_IN_STREAM,
            )
            for stream, types in types_by_stream.items()
        ]
        events: dict[int, dict[str, Any]] = {}
        for query in queries:
            rows = self._log.query(lambda c, query=query: [dict(row) for row in c.execute(query).mappings()])  # type: ignore[misc]  # mypy can't infer a lambda with defaults
            events |= {row["position"]: row for row in rows}
        if events:
            self._scratch_connection.execute(insert(schema.events), list(events.values()))

    def _fold_batch_event(self, item: Recorded) -> None:
        """Fold one event of a batch. If it can't follow earlier ones, report that and skip the batch's later events."""
        if isinstance(item.event, ev.BatchSubmitted):
            self._broken_streams.discard(item.stream)
        if item.stream in self._broken_streams:
            return
        try:
            self._evolve_batch(item)
        except Exception as e:  # changed events may raise anything
            self._broken_streams.add(item.stream)
            self._open_batches.pop(item.stream, None)
            self.problems.add(f"position {item.position} ({item.stream} {item.version}, {item.type}): it can't follow "
                              f"what came before it: {type(e).__name__}: {e}")

    def _fold_lease_event(self, item: Recorded) -> None:
        """Fold one lease event. Report it if it can't follow, or if the attempt that took the lease was not running."""
        where = f"position {item.position} (leases {item.version}, {item.type})"
        try:
            evolve_leases(self._open_leases, item.event)
            check_attachment(self._open_leases, item.event)
        except errors.LogCorrupt as e:
            self.problems.add(f"{where}: it can't follow what came before it: {e.message}")
            return
        if isinstance(lease := item.event, ev.LeaseTaken):
            stream, unit = batch_stream(lease.batch_id), lease.unit
            batch = self._open_batches.get(stream)
            flight = None if batch is None else batch.flights.get((unit.task, unit.run_id_base))
            is_running = flight is not None and (flight.runner, flight.incarnation, flight.unit) == (
                lease.runner, lease.incarnation, unit)
            if not is_running and stream not in self._broken_streams:
                self.problems.add(f"{where}: the attempt that took it was not running on that runner")

    def _evolve_batch(self, item: Recorded) -> None:
        """Fold one event of a batch, and compare its final result. Skip events after the batch's end."""
        event, stream = item.event, item.stream
        state = self._open_batches.get(stream)
        if state is None and stream in self.batches and not isinstance(event, ev.BatchSubmitted):
            return
        if (
            isinstance(event, ev.BatchFinalized | ev.BatchAborted) and state is not None
            and canonical(event.result) != canonical(recomputed_result(state, event))
        ):
            self.problems.add(f"position {item.position}: batch {state.batch_id!r}: its stored result differs from the "
                              "one recomputed")
        state = evolve(state, event)
        self.batches[stream] = (state.state.value, state.expected_task_count)
        if state.state.ended:
            self._open_batches.pop(stream, None)
        else:
            self._open_batches[stream] = state

    # --- comparison with the tables ---------------------------------------------------------------------------------
    def finish(self, connection: Connection, head: Head, is_complete: bool) -> None:
        """Do the checks that need the whole log. Compare the read models only if all events were folded."""
        if connection.dialect.name == "sqlite":
            for problem in check_pages(connection):
                self.problems.add(problem)
        models = self._read_models
        query = text("SELECT version FROM es_checkpoint WHERE name = :name")
        older = connection.execute(query, {"name": models.name}).scalar()
        if type(older) is int and 0 < older < models.version:
            self.problems.add(f"checkpoint {models.name}: it has version {older}, expected {models.version}: an older "
                              f"release wrote the tables. End its run if it goes on, then {REBUILD}")
            self._check_leases(connection, head)
            return
        checks = {"definitions": self._check_definitions, "checkpoints": self._check_checkpoints,
                  "leases": self._check_leases}
        for subject, check in checks.items():
            try:
                check(connection, head)
            except UNREADABLE as e:
                if is_transient(e):
                    raise
                self.problems.add(f"the log's {subject} can't be read: {getattr(e, 'orig', e)}")
        if not is_complete or not self._tables_are_folded:
            self.notes.append("the read models were not compared: not every event could be read")
            return
        self._check_batches()
        compare_tables(connection, self.scratch, self.problems)

    def _check_batches(self) -> None:
        """Compare state and number of tasks of each batch in the folded read model with those of a replay."""
        rows = {stream: (state, tasks) for stream, state, tasks in self.scratch.execute(
            "SELECT stream, state, tasks FROM rm_batch")}
        for stream, replayed in self.batches.items():
            if stream not in self._broken_streams and rows.get(stream) != replayed:
                self.problems.add(f"{stream}: the read model folds its events to {rows.get(stream)}, a replay to "
                                  f"{replayed}")

    def _check_definitions(self, connection: Connection, head: Head) -> None:
        """Compare the definitions of the log's tables, indexes and triggers with the expected ones."""
        if connection.dialect.name == "postgresql":
            if not connection.execute(_TRIGGER_REFUSES, {"body": schema.REFUSAL}).scalar():
                self.problems.add("trigger es_event_no_change, which refuses changes of events, is missing, disabled "
                                  "or changed")
            tables = [table.name for table in schema.tables.sorted_tables]
            valid_indexes = set(connection.execute(_VALID_INDEXES, {"names": tables}).scalars())
            for name in sorted(_REQUIRED_INDEXES - valid_indexes):
                self.problems.add(f"index {name} is missing or not valid")
            return
        with raw_text(connection):
            stored = {row[1]: _definition(row) for row in connection.execute(text(_DEFINITIONS))}
        expected = self._expected_definitions
        for name in sorted(expected, key=str):
            kind, table, _ = expected[name]
            if name not in stored:
                if table in NEWER and self.scratch.execute(f"SELECT 1 FROM {table}").fetchone() is None:
                    continue  # a log of an older release may lack a table that would be empty
                if name == table or table in stored:  # otherwise only the missing table is reported
                    self.problems.add(f"{kind} {name} is missing")
            elif stored[name] != expected[name]:
                self.problems.add(f"{kind} {name} is defined as {short(stored[name], 300)}, expected "
                                  f"{short(expected[name], 300)}")
        for name in stored.keys() - expected.keys():
            if not str(name).startswith("sqlite_stat") and stored[name][1] != schema.payload_place.name:
                self.notes.append(f"{stored[name][0]} {name} is in the database but does not belong to the log")

    def _check_checkpoints(self, connection: Connection, head: Head) -> None:
        """Compare version, position, hash and generation of each read model's checkpoint with the log."""
        with raw_text(connection):
            rows = connection.execute(text("SELECT name, version, position, hash, generation FROM es_checkpoint")).all()
            hash_query = text("SELECT hash FROM es_event WHERE position = :p")
            hashes = {position: connection.execute(hash_query, {"p": position}).scalar()
                      for _, _, position, _, _ in rows if type(position) is int}
        models = self._read_models
        for name, version, position, stored_hash, generation in rows:
            checkpoint = f"checkpoint {short(name)}"
            is_known = name == models.name
            expected = models.version if is_known else 0
            if generation != head.generation:
                self.problems.add(f"{checkpoint}: it has generation {short(generation)}, the log has {head.generation}")
            if version != expected:
                self.problems.add(f"{checkpoint}: it has version {short(version)}, expected {expected}"
                                  + (f": {REBUILD}" if is_known else ""))
            if is_known and position != head.position:
                self.problems.add(f"{checkpoint}: it stands at position {short(position)}, the log at {head.position}: "
                                  f"{REBUILD}")
            elif type(position) is not int or not 0 <= position <= head.position:
                self.problems.add(f"{checkpoint}: it stands at position {short(position)}, the log ends at "
                                  f"{head.position}")
            elif bytes(hashes.get(position) or schema.GENESIS) != stored_hash:
                self.problems.add(f"{checkpoint}: its hash is not that of position {position}")
            if not is_known:
                self.problems.add(f"{checkpoint}: no read model has this name")
        if models.name not in [row[0] for row in rows]:
            self.problems.add(f"checkpoint {models.name!r} is missing: {REBUILD}")

    def _check_leases(self, connection: Connection, head: Head) -> None:
        """Compare epoch and owner of each lease with the events that the lease's holders wrote."""
        with raw_text(connection):
            rows = connection.execute(text("SELECT name, epoch, owner FROM es_lease")).all()
        for name, epoch, owner in rows:
            lease = f"lease {short(name)}"
            last_epoch = self._last_epochs.get(name, 0)
            if type(epoch) is not int or epoch < last_epoch:
                self.problems.add(f"{lease}: it is at epoch {short(epoch)}, but a holder of epoch {last_epoch} wrote "
                                  "events")
            elif epoch > last_epoch:
                self.notes.append(f"{lease}: it is at epoch {epoch}, and the last that wrote events is {last_epoch}: "
                                  "its holder has written nothing, or it was changed")
            stored = orjson.loads(owner)
            if not isinstance(stored, dict):
                self.problems.add(f"{lease}: its owner is a {type(stored).__name__}, not an object")
            elif stored and name == "coordinator" and self._last_start is not None and self._last_start.epoch == epoch:
                recorded = {"pid": self._last_start.pid, "host": self._last_start.host}
                if differences := {k: stored.get(k) for k, v in recorded.items() if stored.get(k) != v}:
                    self.problems.add(f"{lease}: its owner is {short(differences)}, by the events {short(recorded)}")
        for name in self._last_epochs.keys() - {row[0] for row in rows}:
            last_epoch = self._last_epochs[name]
            self.problems.add(f"lease {name!r} is missing, and its holder of epoch {last_epoch} wrote events")


def _definition(row: Sequence[Any]) -> tuple[str, str, str]:
    return str(row[0]), str(row[2]), _SPACE.sub(" ", str(row[3]))
