"""Read-only access to the log of a live or dead run, in its present or any earlier state."""

from __future__ import annotations

import socket
import threading
import time as _time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AnswerNotFound, BatchNotFound, LogError, LogNotFound, LogReplaced, NotALog
from trinity_es.events.processes import is_visible_here, process_lives
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import BatchId, batch_stream, local_time
from trinity_es.projections.batch import BatchState, evolve, fold
from trinity_es.projections.freed_payloads import EXPERIENCES, freed_positions
from trinity_es.projections.host_states import HostLife, host_lives
from trinity_es.projections.leases import OpenLease
from trinity_es.projections.reading.log_events import LogEvents
from trinity_es.projections.reading.overview import Distributions, Overview, distributions, summarize
from trinity_es.projections.tables import host_work, open_leases, read_models, runner_history, serve_answers
from trinity_es.projections.tables.batch_queries import SORTS, BatchRow, count_batches, read_batches
from trinity_es.projections.tables.experience_usage import Usage, read_usage
from trinity_es.projections.tables.read_models import Totals
from trinity_es.projections.tables.runner_history import RunnerIncarnation, WeightsVersion
from trinity_es.projections.verify.log import canonical, recomputed_result, verify_open
from trinity_es.projections.why.answer import Why
from trinity_es.projections.why.explain import why
from trinity_es.projections.why.system_state import Followed, read_snapshot

if TYPE_CHECKING:
    from trinity_es.events.experience import Experience

__all__ = ["Log", "canonical", "open_log", "read_repeatedly", "recomputed_result"]

T = TypeVar("T")


def open_log(url: str) -> Log:
    """Open the log at a URL or file path for reading. Raises LogNotFound, NotALog, LogTooNew, LogUnavailable."""
    return Log(EventLog.open(url, read_only=True), url)


class Log(LogEvents):
    """Reader of a log's events, tables and folds."""

    def _read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on the read models' tables. Raises LogError if they are missing or of another version."""
        try:
            return self._events.query(work)
        except DBAPIError as e:  # passing errors were retried, so a table or column is missing
            is_older = read_models.stored_version(self._events) < read_models.ReadModels.version
            raise LogError(
                f"the tables of {self.url} were written by an older release ({e.orig}): end its run if it goes on, "
                "then run `trinity-es rebuild`" if is_older else
                f"the tables of {self.url} can't be read ({e.orig}): run `trinity-es rebuild`"
            ) from e

    def batches(
        self, *, state: str | None = None, batch_type: str | None = None, sort: str = "position",
        descending: bool = False, limit: int | None = None, offset: int = 0,
    ) -> list[BatchRow]:
        """Return the rows of batches, sorted by a key in `SORTS`: by default by first position. Raises ValueError."""
        if sort not in SORTS:
            raise ValueError(f"unknown sort {sort!r}: use one of {', '.join(sorted(SORTS))}")
        return self._read(lambda c: read_batches(c, state=state, batch_type=batch_type, sort=sort,
                                                 descending=descending, limit=limit, offset=offset))

    def count_batches(self, *, state: str | None = None, batch_type: str | None = None) -> int:
        return self._read(lambda c: count_batches(c, state=state, batch_type=batch_type))

    def batch_row(self, batch_id: BatchId) -> BatchRow:
        """Return the row of one batch. Raises BatchNotFound."""
        self._require_batch(batch_id)
        rows = self._read(lambda c: read_batches(c, stream=batch_stream(batch_id)))
        if not rows:
            raise LogError(f"the tables of {self.url} lack batch {batch_id!r}: run `trinity-es rebuild`")
        return rows[0]

    def runner_lives(self) -> list[RunnerIncarnation]:
        return self._read(runner_history.read_lives)

    def weights(self, *, version: int | None = None, limit: int | None = None, offset: int = 0) -> list[WeightsVersion]:
        """Return published weights versions in order, with their loads: one `version`, or the newest `limit`."""
        return self._read(lambda c: runner_history.read_weights(c, version=version, limit=limit, offset=offset))

    def count_weights(self) -> int:
        return self._read(runner_history.count_weights)

    def deliveries_by_version(self) -> dict[int, int]:
        """Return {weights version: number of delivered experiences that it made}."""
        return self._read(runner_history.read_deliveries_by_version)

    def batches_made_by(self, version: int, limit: int) -> list[tuple[str, int]]:
        """Return (batch stream, number of delivered experiences that this version made), newest batch first."""
        return self._read(lambda c: runner_history.batches_made_by(c, version, limit))

    def leases(self) -> list[OpenLease]:
        """Return the leases that are not released, oldest first."""
        return list(self._read(open_leases.read_open).values())

    def usage(self) -> Usage:
        """Return counts of how often trainers used the delivered experiences."""
        return self._read(read_usage)

    def totals(self) -> list[Totals]:
        return self._read(read_models.read_totals)

    def model_version(self) -> int:
        """Return the current weights version; 0 if none was published."""
        return self._read(runner_history.current_version)

    def hosts(self) -> list[HostLife]:
        """Return the lives of all hosts that joined, in the order in which they began."""
        return host_lives(self.read(stream=ev.HostJoined.stream))

    def finished_elsewhere(self) -> dict[str, int]:
        """Return {joined host: number of tasks that finished on it}. Other tasks finished on the head's own runners."""
        return self._read(host_work.read_finished) if self.streams(ev.HostJoined.stream) else {}

    def losses(self, batch_id: BatchId | None = None) -> dict[tuple[str, str], int]:
        """Return loss counts, of one batch or all, by (`attempt`, kind), (`task`, reason), (`experience`, operator)."""
        return self._read(lambda c: read_models.read_losses(c, None if batch_id is None else batch_stream(batch_id)))

    def overview(self, recent: int = 20) -> Overview:
        """Return a summary of the run, with its last `recent` rare events and stalls."""
        head = self.head().position  # read first, since the log may grow meanwhile
        return summarize(self, head, recent, self.batches(), self.runner_lives(), self.model_version(), self.losses())

    def distributions(self, batch_ids: Sequence[BatchId] | None = None, last: int = 20) -> Distributions:
        """Return durations, rewards, response lengths and failures in these batches. Raises BatchNotFound.

        None: in the `last` batches that ended.
        """
        if batch_ids is None:
            batch_ids = [row.batch_id for row in self.batches(sort="ended", descending=True, limit=last)
                         if row.ended_at is not None]
        return distributions(self, {batch_id: self.batch_row(batch_id).first_position for batch_id in batch_ids})

    def freed(self) -> dict[str, int]:
        """Return {batch stream: position at which the batch's experiences were last freed}."""
        return freed_positions(self.read(stream=EXPERIENCES, types=["PayloadsFreed"]))

    def was_freed(self, batch_id: BatchId) -> bool:
        """Return True if the experiences of the batch's last submission were freed."""
        stream = batch_stream(batch_id)
        submitted = [r.position for r in self.read(stream=stream, types=["BatchSubmitted"])]
        return self.freed().get(stream, 0) > max(submitted, default=0)

    def replay(self, batch_id: BatchId, at: int | float | datetime | None = None) -> BatchState:
        """Return the batch's state now, at a position (int) or at a time (datetime, or float of unix seconds).

        Raises BatchNotFound, also if the batch was not submitted by then.
        """
        self._require_batch(batch_id)
        state = fold(r.event for r in self._events.read(stream=batch_stream(batch_id), until=self.position_of(at)))
        if state is None:
            first = next(self._events.read(stream=batch_stream(batch_id), limit=1))
            raise BatchNotFound(
                f"batch {batch_id!r} was not submitted yet at {at}: its submission is at position {first.position}, "
                f"{local_time(first.recorded_at, 'milliseconds')}"
            )
        return state

    def without_coordinator(self, since: int = 0) -> list[tuple[float, float]]:
        """Return the intervals without a coordinator after position `since`, in unix seconds.

        Each is (time of a coordinator's last event, start of the next coordinator).
        """
        intervals = []
        for start in self.read_rare(["CoordinatorStarted"], after=since):
            query = runner_history.before_start(start.position, start.commit_id)
            for before in self._read(lambda c, query=query: list(c.execute(query))):  # type: ignore[misc]  # mypy can't infer a lambda with defaults
                intervals.append((float(before.recorded_at), start.recorded_at))
        return intervals

    def current(self, batch_id: BatchId) -> BatchState | None:
        """Return the current state of the batch's last submission, or None if there is no such batch."""
        stream = batch_stream(batch_id)
        rows = self._read(lambda c: read_batches(c, stream=stream))
        first = rows[0].first_position if rows else self.head().position + 1
        return fold(r.event for r in self._events.read(stream=stream, after=first - 1))

    def why(
        self, batch_id: BatchId, now: float | None = None, *, live: Mapping[str, Any] | None = None,
        system: Mapping[str, Any] | None = None, followed: Followed | None = None
    ) -> Why:
        """Explain what a batch waits for, on which runner or host and since when, at `now` (unix seconds).

        `str()` of the result is a text for people. Without `live` and `system` it comes from the log alone, so it also
        works if the system is dead. `live` is the running system's answer to `status`, `system` are facts on its
        processes (see `why.explain.why`); `RolloutClient.why` passes both. For repeated calls pass the same `followed`,
        so that each call reads only new events. Raises BatchNotFound.
        """
        self._require_batch(batch_id)
        return self._explain([batch_id], now, live, system, followed)[0]

    def why_open(
        self, now: float | None = None, *, live: Mapping[str, Any] | None = None,
        system: Mapping[str, Any] | None = None, followed: Followed | None = None
    ) -> list[Why]:
        """Explain every open batch as `why` does, in the order of submission."""
        return self._explain([], now, live, system, followed)

    def _explain(
        self, batch_ids: Sequence[BatchId], now: float | None, live: Mapping[str, Any] | None,
        system: Mapping[str, Any] | None, followed: Followed | None,
    ) -> list[Why]:
        """Explain these batches, or all open batches if `batch_ids` is empty; see `why`."""
        open_ids = [batch_id for _, batch_id in self._read(read_models.open_batches)]
        # If the caller did not ask the system for its status, a missing answer means nothing.
        facts = {**self.processes(), "asked": live is not None or system is not None, **(system or {})}
        at = _time.time() if now is None else now
        followed = followed or Followed()
        with followed.lock:
            snapshot = read_snapshot(self._events, dict.fromkeys([*open_ids, *batch_ids]), followed)
            return [why(snapshot, b, now=at, live=live, system=facts)
                    for b in batch_ids or open_ids if b in snapshot.batches]

    def processes(self) -> dict[str, Any]:
        """Return facts on the processes of the system that last held the coordinator's lease.

        `up`: True if they live, None if this machine can't see them, as on another host. `released`: True if the system
        ended in order. `copied_from`: host and path of the original, if this store is a copy. `pid`, `host`: those of
        the coordinator.
        """
        lease = self._events.read_lease("coordinator")
        if lease is None:
            return {"up": False, "released": False, "copied_from": ""}
        if not lease.owner:
            return {"up": False, "released": not lease.copied_from, "copied_from": lease.copied_from}
        owner, admin = lease.owner, lease.owner.get("admin", {})
        facts: dict[str, Any] = {"up": None, "pid": owner.get("pid"), "host": owner.get("host")}
        if owner.get("host") == socket.gethostname():
            started = admin.get("started")
            is_visible = is_visible_here(started)
            if is_visible is not None:
                facts["up"] = is_visible and process_lives(admin.get("pid", 0), started)
        return facts

    def check_result(self, batch_id: BatchId) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the stored and the recomputed final result of a batch; both None before it ends."""
        self._require_batch(batch_id)
        state: BatchState | None = None
        results: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
        for recorded in self._events.read(stream=batch_stream(batch_id)):
            event = recorded.event
            if isinstance(event, ev.BatchSubmitted):
                results = (None, None)
            if state is not None and isinstance(event, ev.BatchFinalized | ev.BatchAborted):
                results = (event.result, recomputed_result(state, event))
            state = evolve(state, event)
        return results

    def answers(self) -> dict[str, serve_answers.AnswerState]:
        """Return the answers of the proxy (mode `serve`) by message id, each with its reward and delivery."""
        return self._read(serve_answers.read_all)

    def experiences_of_answer(self, message: str) -> list[Experience]:
        """Return the experiences of an answer of the proxy, without reward: one for each choice with tokens.

        Raises AnswerNotFound, LogNotFound.
        """
        # Imported here, because readers of events need no numpy.
        from trinity_es.events.store.payloads.experiences import read_experiences

        answer = self._read(lambda connection: serve_answers.find(connection, [message])).get(message)
        if answer is None:
            raise AnswerNotFound(f"no answer has the message id {message!r}: give the `id` of a response of the proxy")
        if answer.payload is None:
            return []
        with closing(self.payloads()) as payloads:
            return read_experiences(payloads, [answer.payload])

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Check this log and return its problems. `progress(done, total)` counts events. See also `verify_log`."""
        return verify_open(self._events, self._url, progress).problems


def read_repeatedly(
    url: str, look: Callable[[Log], None], stop: threading.Event, seconds: float, complain: Callable[[Exception], None]
) -> None:
    """Call `look(log)` with the log at `url` every `seconds` until `stop` is set, and then once more.

    While the log does not exist, wait for it; if it was replaced, open it again. Pass other errors to `complain`.
    """
    is_last = False
    while True:
        try:
            with open_log(url) as log:
                while True:
                    look(log)
                    if is_last:
                        return
                    is_last = stop.wait(seconds)
        except (LogNotFound, LogReplaced, NotALog):
            pass
        except Exception as e:  # for example, the database is unreachable
            complain(e)
        if is_last:
            return
        is_last = stop.wait(seconds)
