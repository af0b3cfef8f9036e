"""Group commit: one thread appends to the log, so that no handler waits for a disk.

The coordinator decides and folds at once. It hands over the events with the actions to take when they are durable
(`then`). The thread puts all waiting turns into one transaction; then the actor's loop calls their actions in order.

After transient trouble (a database restart, a lock) the thread retries the append under the same commit id. If the
first try was written after all, the log recognizes the id and writes nothing twice. Meanwhile new turns queue up.

If an append fails for good, the writer calls `on_failure` for its group and the queue behind it, and the session reads
the state in memory again. If only the content of one turn can't be stored, the thread writes the turns of the group one
by one. That turn gets its error; the turns behind it get Undone, and the router handles their requests again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    then: list[Callable[[], None]] = field(default_factory=list)
    failed: list[Callable[[Exception], None]] = field(default_factory=list)
    """Callbacks of the turn's callers, for when it can't be written."""


class LogWriter:
    """Writer thread, which appends turns in the order of `submit`; `post` runs a callable in the actor's loop."""

    def __init__(
        self,
        log: EventLog,
        lease: Lease,
        post: Callable[[Callable[[], None]], None],
        on_failure: Callable[[Exception, Sequence[UnitOfWork]], None],
        metadata: dict[str, Any],
        numbers: Iterator[int],
        *,
        retry_for: float = 300.0,
        now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start the thread.

        `numbers` makes commit ids, and continues those of the previous writer under the same lease. An append is
        retried for `retry_for` seconds before it fails.
        """
        self._log, self._lease, self._post, self._on_failure = log, lease, post, on_failure
        self._metadata, self._numbers = metadata, numbers
        self._text_log = logging.getLogger("trinity_es.writer")  # Thespian silences loggers made at import
        self._retry_for, self._now, self._chance = retry_for, now, chance
        self._queue: list[UnitOfWork] = []
        self._wake = threading.Condition()
        self._stopped = False
        self._broken: Exception | None = None
        self._trouble: tuple[float, str] | None = None
        self.in_flight = 0
        """Number of submitted turns whose actions have not run; for the actor's loop only."""
        self.written = 0
        """Number of successful appends."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Message about the failing append, with its duration; None while all is well. For any thread."""
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
        self._broken = self._broken or error

    def stop(self) -> None:
        """Write the queue, then end; a write that fails at the first try is not retried."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=STOP_SECONDS)

    def _run(self) -> None:
        while True:
            with self._wake:
                idle = not self._wake.wait_for(lambda: self._queue or self._stopped, LOOK_SECONDS)
                group, self._queue = self._queue, []
            if idle:
                self._check_place()
                continue
            if not group:
                return
            if self._broken is not None:  # the group builds on a state that was never written
                self._post_failure(group, self._broken)
                continue
            try:
                self._append_all(group)
            except Exception as e:
                if not is_of_content(e):
                    self._broken = e
                    self._post_failure(group, e)
                    continue
                self._one_by_one(group, e)
                continue
            self._post(lambda done=group: self._act(done))  # type: ignore[misc]  # binds the loop's value

    def _check_place(self) -> None:
        """Report a log file that lost its name before a request has to fail because of it."""
        if self._broken is None:
            try:
                self._log.require_place()
            except Exception as e:
                self._broken = e
                self._post(lambda error=e: self._fail(error, []))  # type: ignore[misc]  # binds the error

    def _append_all(self, group: Sequence[UnitOfWork]) -> None:
        writes = [w for turn in group for w in turn.writes]
        if writes:
            self._append(writes)

    def _one_by_one(self, group: list[UnitOfWork], error: Exception) -> None:
        """Write turns up to the one that fails; it gets its error, and the turns behind it get Undone."""
        for number, turn in enumerate(group):
            try:
                if len(group) > 1:
                    self._append_all([turn])
                else:
                    raise error
            except Exception as e:
                own: Exception = e
                self._broken = e
                if is_of_content(e):
                    message = f"this can't be recorded: {type(e).__name__}: {e}"
                    own = e if isinstance(e, LogError) else DataError(message)
                    self._broken = Undone(f"undone, since another request could not be recorded: {e}")
                self._post_failure([turn], own)
                self._post_failure(group[number + 1 :], self._broken)
                return
            self._post(lambda done=turn: self._act([done]))  # type: ignore[misc]  # binds the loop's value

    def _post_failure(self, lost: Sequence[UnitOfWork], error: Exception) -> None:
        if lost:
            self._post(lambda: self._fail(error, lost))

    def _append(self, writes: list[Write]) -> None:
        commit_id = f"{self._lease.name}:{self._lease.epoch}:{next(self._numbers)}"  # the same for every try
        try:
            patiently(
                lambda: self._log.append(
                    writes, commit_id=commit_id, lease=self._lease, metadata=self._metadata, patience=0.0
                ),
                seconds=self._retry_for,
                wait=self._pause,
                now=self._now,
                chance=self._chance,
                tell=self._log_retry,
            )
            self.written += 1
            if self._trouble is not None:
                self._text_log.warning("the log is written again, after %.1f s", self._now() - self._trouble[0])
        finally:
            self._trouble = None

    def _log_retry(self, error: Exception) -> None:
        if self._trouble is None or self._trouble[1] != str(error):  # log it once, not at every try
            self._text_log.warning("the log can't be written, trying again: %s", error)
        since = self._now() if self._trouble is None else self._trouble[0]
        self._trouble = (since, str(error))

    def _pause(self, seconds: float) -> bool:
        with self._wake:
            return self._stopped or bool(self._wake.wait_for(lambda: self._stopped, seconds))

    def _fail(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        self.in_flight -= len(lost)
        self._on_failure(error, lost)

    def _act(self, group: Sequence[UnitOfWork]) -> None:
        for turn in group:
            self.in_flight -= 1
            for call in turn.then:
                call()


def is_of_content(error: Exception) -> bool:
    """Return True if the log refused the content of a write and is itself well."""
    return isinstance(error, InvalidEvent) or not isinstance(error, LogError)
