"""Group commit: one thread appends to the log, so that no handler waits for a disk.

The coordinator decides and folds at once. It hands over a turn: the events of one message, with the calls to make when
they are durable (`durable_calls`). The thread puts all waiting turns into one transaction; then the actor's loop makes
their calls in order.

After transient trouble (a database restart, a lock) the thread retries the append under the same commit id. If the
first try was written after all, the log recognizes the id and writes nothing twice. Meanwhile new turns queue up.

If an append fails for good, the writer calls `on_failure` for its group and the queue behind it, and the log's session
folds the state in memory again from the log. If only the content of one turn can't be stored, the thread writes the
turns of the group one by one. That turn gets its error; the turns behind it get Undone, and the router handles their
requests again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trinity_es.events.errors import DataError, InvalidEvent, LogError
from trinity_es.events.store.database.retry import patiently
from trinity_es.events.store.log import EventLog, Lease, Write
from trinity_es.events.values import BatchId

__all__ = ["LogWriter", "Undone", "UnitOfWork"]

STOP_SECONDS = 10.0
"""Maximum duration of the last append once the writer is stopped."""
LOOK_SECONDS = 1.0
"""Interval between two checks of the log's file while there is nothing to write."""


class Undone(LogError):
    """A sound turn was undone, since it builds on an earlier turn that could not be written."""


@dataclass(slots=True)
class UnitOfWork:
    """Result of one turn of the coordinator."""

    writes: list[Write] = field(default_factory=list)
    batches: dict[BatchId, None] = field(default_factory=dict)
    """Batches that the turn changed."""
    durable_calls: list[Callable[[], None]] = field(default_factory=list)
    """Actions for when the turn is written."""
    failure_calls: list[Callable[[Exception], None]] = field(default_factory=list)
    """Actions for when the turn can't be written; each gets the error."""
    follow_up_seconds: float = 0.0
    """How long the writer waits for a next turn, to write both in one transaction."""


class LogWriter:
    """Writer thread, which appends turns in the order of `submit`; `post` runs a callable in the actor's loop."""

    def __init__(
        self, log: EventLog, lease: Lease, post: Callable[[Callable[[], None]], None],
        on_failure: Callable[[Exception, Sequence[UnitOfWork]], None], metadata: dict[str, Any],
        commit_numbers: Iterator[int], *, retry_for: float = 300.0, now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start the thread. `commit_numbers` are the numbers in commit ids, never used before under this lease. An
        append is retried for `retry_for` seconds before it fails. `metadata` is stored with each append."""
        self._log, self._lease, self._post, self._on_failure = log, lease, post, on_failure
        self._metadata, self._commit_numbers = metadata, commit_numbers
        self._text_log = logging.getLogger("trinity_es.writer")  # Thespian silences loggers made at import
        self._retry_for, self._now, self._chance = retry_for, now, chance
        self._queue: list[UnitOfWork] = []
        self._wake = threading.Condition()
        self._stopped = False
        self._fatal_error: Exception | None = None
        """Error after which nothing more is written, since all later turns build on the one that failed."""
        self._trouble: tuple[float, str] | None = None
        """When the current append first failed, and its last error."""
        self.in_flight = 0
        """Number of submitted turns whose actions are still to run; for the actor's loop only."""
        self.written = 0
        """Number of successful appends."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Message about the append that is failing, and since when; None if none is. For any thread."""
        trouble = self._trouble
        if trouble is None:
            return None
        return f"the log could not be written for {self._now() - trouble[0]:.0f} s, trying again: {trouble[1]}"

    def submit(self, turn: UnitOfWork) -> None:
        self.in_flight += 1
        with self._wake:
            self._queue.append(turn)
            self._wake.notify()

    def abandon(self, error: Exception) -> None:
        """Write nothing more, and fail the queue with this error."""
        self._fatal_error = self._fatal_error or error

    def stop(self) -> None:
        """Write the queue, then end; a write that fails at the first try is not retried."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=STOP_SECONDS)

    def _run(self) -> None:
        """Append what is queued, group by group, until the writer is stopped and the queue is empty."""
        while True:
            with self._wake:
                is_idle = not self._wake.wait_for(lambda: self._queue or self._stopped, LOOK_SECONDS)
                if self._queue and self._queue[-1].follow_up_seconds:
                    self._wait_for_follow_up(len(self._queue), self._queue[-1].follow_up_seconds)
                group, self._queue = self._queue, []
            if is_idle:
                self._check_log_file()
                continue
            if not group:  # stopped
                return
            if self._fatal_error is not None:  # the group builds on a state that was never written
                self._post_failure(group, self._fatal_error)
                continue
            try:
                self._append_turns(group)
            except Exception as e:
                if is_content_error(e):
                    self._append_one_by_one(group, e)
                else:
                    self._fatal_error = e
                    self._post_failure(group, e)
                continue
            self._post(partial(self._call_durable, group))

    def _wait_for_follow_up(self, turn_count: int, seconds: float) -> None:
        """Wait until the queue has more turns than `turn_count`, for `seconds` at most."""
        self._wake.wait_for(lambda: len(self._queue) > turn_count or self._stopped, seconds)

    def _check_log_file(self) -> None:
        """Report a failure if the log's file was deleted or renamed, before a request meets it."""
        if self._fatal_error is None:
            try:
                self._log.require_place()
            except Exception as e:
                self._fatal_error = e
                self._post(lambda error=e: self._report_failure(error, []))  # type: ignore[misc]  # binds the error

    def _append_turns(self, turns: Sequence[UnitOfWork]) -> None:
        """Append the events of these turns in one transaction, if they have any."""
        writes = [w for turn in turns for w in turn.writes]
        if writes:
            self._append(writes)

    def _append_one_by_one(self, group: list[UnitOfWork], error: Exception) -> None:
        """Write the turns singly until one fails. That turn gets its error, and the later ones get Undone. `error` is
        why the log refused the content of the group."""
        for index, turn in enumerate(group):
            try:
                if len(group) > 1:
                    self._append_turns([turn])
                else:
                    raise error
            except Exception as e:
                turn_error: Exception = e
                self._fatal_error = e
                if is_content_error(e):
                    message = f"this can't be recorded: {type(e).__name__}: {e}"
                    turn_error = e if isinstance(e, LogError) else DataError(message)
                    self._fatal_error = Undone(f"undone, since another request could not be recorded: {e}")
                self._post_failure([turn], turn_error)
                self._post_failure(group[index + 1 :], self._fatal_error)
                return
            self._post(partial(self._call_durable, [turn]))

    def _post_failure(self, turns: Sequence[UnitOfWork], error: Exception) -> None:
        """Have the actor's loop report that these turns can't be written."""
        if turns:
            self._post(lambda: self._report_failure(error, turns))

    def _append(self, writes: list[Write]) -> None:
        """Append the writes; retry after transient errors. Raises what EventLog.append does."""
        commit_id = f"{self._lease.name}:{self._lease.epoch}:{next(self._commit_numbers)}"  # the same for every try
        try:
            patiently(
                lambda: self._log.append(
                    writes, commit_id=commit_id, lease=self._lease, metadata=self._metadata, patience=0.0
                ),
                seconds=self._retry_for, wait=self._pause, now=self._now, chance=self._chance, tell=self._log_retry,
            )
            self.written += 1
            if self._trouble is not None:
                self._text_log.warning("the log is written again, after %.1f s", self._now() - self._trouble[0])
        finally:
            self._trouble = None

    def _log_retry(self, error: Exception) -> None:
        """Keep the error of a failed attempt for `trouble`, and log it unless the previous attempt had the same."""
        if self._trouble is None or self._trouble[1] != str(error):
            self._text_log.warning("the log can't be written, trying again: %s", error)
        since = self._now() if self._trouble is None else self._trouble[0]
        self._trouble = (since, str(error))

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt. Return True, at once, if the writer is stopped."""
        with self._wake:
            return self._stopped or bool(self._wake.wait_for(lambda: self._stopped, seconds))

    # --- the actor's loop -------------------------------------------------------------------------------------------
    def _report_failure(self, error: Exception, turns: Sequence[UnitOfWork]) -> None:
        """Give the session the error of turns that can't be written."""
        self.in_flight -= len(turns)
        self._on_failure(error, turns)

    def _call_durable(self, turns: Sequence[UnitOfWork]) -> None:
        """Call the `durable_calls` of turns that are in the log now."""
        for turn in turns:
            self.in_flight -= 1
            for call in turn.durable_calls:
                call()


def is_content_error(error: Exception) -> bool:
    """Return True if the log refused the content of a write and is itself well."""
    return isinstance(error, InvalidEvent) or not isinstance(error, LogError)
