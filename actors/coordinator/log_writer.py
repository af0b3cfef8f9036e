"""Group commit: one thread that appends to the log, so that no handler waits for a disk.

The coordinator decides and folds at once and hands the events over together with what is to happen when they are
durable (`then`). The thread puts all that is waiting into one transaction; afterwards the actor's own loop runs each
`then`, in order.

An append that meets trouble that passes (a database that restarts, a lock) is tried again under the same commit id: if
the first try was written after all, the log knows it and nothing is written twice. What comes in meanwhile queues up.
If the append fails for good, nothing of the group and of what came behind it was acknowledged: `failed(error)` is
called instead, once, and the state in memory must be read anew from the log. Where the log is well and it is what is to
be written that the database can't hold, the turns of the group are written one by one: only the one that holds it gets
its error, and what came behind is Undone, to be done again.
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
"""How long the last append may take when the writer is stopped."""
LOOK_SECONDS = 1.0
"""Interval between two looks at the log's file while there is nothing to write."""


class Undone(LogError):
    """Nothing was wrong with this turn: it was decided on what another did that could not be written."""


@dataclass(slots=True)
class UnitOfWork:
    """What one turn of the coordinator decided."""

    writes: list[Write] = field(default_factory=list)
    batches: dict[BatchId, None] = field(default_factory=dict)
    """Those that it changed."""
    then: list[Callable[[], None]] = field(default_factory=list)
    failed: list[Callable[[Exception], None]] = field(default_factory=list)
    """Who asked for this, and has to be told if it can't be written."""


class LogWriter:
    """Appends in the order of `submit`. `post` runs a callable in the actor's loop."""

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
        """`numbers` makes commit ids: it goes on where the writer before this one, under the same lease, stopped.

        `retry_for`: seconds that trouble is waited out before the append fails.
        """
        self._log, self._lease, self._post, self._on_failure = log, lease, post, on_failure
        self._metadata, self._numbers = metadata, numbers
        self._text_log = logging.getLogger("trinity_es.writer")  # not at import: Thespian silences what it finds
        self._retry_for, self._now, self._chance = retry_for, now, chance
        self._queue: list[UnitOfWork] = []
        self._wake = threading.Condition()
        self._stopped = False
        self._broken: Exception | None = None
        self._trouble: tuple[float, str] | None = None
        self.in_flight = 0
        """Turns handed over and not yet acted on; read and written by the actor's loop only."""
        self.written = 0
        """Appends that went through."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """The trouble that is being waited out, and since when; None while all is well. For any thread."""
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
        """Write nothing more: what is queued fails with this error."""
        self._broken = self._broken or error

    def stop(self) -> None:
        """Write what is queued, then end. What can't be written at the first try fails."""
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
                self._look()
                continue
            if not group:
                return
            if self._broken is not None:  # decided on a state that was never written
                self._tell_lost(group, self._broken)
                continue
            try:
                self._append_all(group)
            except Exception as e:
                if not is_of_content(e):
                    self._broken = e
                    self._tell_lost(group, e)
                    continue
                self._one_by_one(group, e)
                continue
            self._post(lambda done=group: self._act(done))  # type: ignore[misc]  # binds the loop's value

    def _look(self) -> None:
        """Tell of a file that lost its name before somebody's event is refused for it."""
        if self._broken is None:
            try:
                self._log.require_place()
            except Exception as e:
                self._broken = e
                self._post(lambda error=e: self._fail(error, []))  # type: ignore[misc]  # binds the error

    def _append_all(self, group: Sequence[UnitOfWork]) -> None:
        writes = [w for turn in group for w in turn.writes]  # in the order of the decisions
        if writes:
            self._append(writes)

    def _one_by_one(self, group: list[UnitOfWork], error: Exception) -> None:
        """Write the turns up to the one that can't be written: that one has the error, what came behind is undone."""
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
                    what = f"this can't be recorded: {type(e).__name__}: {e}"
                    own = e if isinstance(e, LogError) else DataError(what)
                    self._broken = Undone(f"undone, since another request could not be recorded: {e}")
                self._tell_lost([turn], own)
                self._tell_lost(group[number + 1 :], self._broken)
                return
            self._post(lambda done=turn: self._act([done]))  # type: ignore[misc]  # binds the loop's value

    def _tell_lost(self, lost: Sequence[UnitOfWork], error: Exception) -> None:
        if lost:
            self._post(lambda: self._fail(error, lost))

    def _append(self, writes: list[Write]) -> None:
        commit_id = f"{self._lease.name}:{self._lease.epoch}:{next(self._numbers)}"  # of every try
        try:
            patiently(
                lambda: self._log.append(
                    writes, commit_id=commit_id, lease=self._lease, metadata=self._metadata, patience=0.0
                ),
                seconds=self._retry_for,
                wait=self._pause,
                now=self._now,
                chance=self._chance,
                tell=self._tell,
            )
            self.written += 1
            if self._trouble is not None:
                self._text_log.warning("the log is written again, after %.1f s", self._now() - self._trouble[0])
        finally:
            self._trouble = None

    def _tell(self, error: Exception) -> None:
        if self._trouble is None or self._trouble[1] != str(error):  # once, not at every try
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
    """Return True if it is what was to be written that the log refused, while the log itself is well."""
    return isinstance(error, InvalidEvent) or not isinstance(error, LogError)
