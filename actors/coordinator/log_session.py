"""The coordinator's session with the log: lease, live state, writer, and recovery when one of them fails.

The session is in one phase at a time:

    OPENING -> OPEN -> CLOSED -> OPEN ...          and from each of them: ENDED
                          \\-> RESUMING -> OPEN

OPENING: threads take the lease and read what is open. OPEN: the coordinator decides on messages. CLOSED: a write
failed, so memory is ahead of the log; the session reads the log again, after pauses that grow. RESUMING: the session
writes the event that records the trouble. ENDED: the lease was given back, another coordinator fenced this one, or the
log lost acknowledged events.

A turn is the handling of one message or timer. Its `UnitOfWork` has the events that the handlers recorded, and the
callbacks for when they are written or can't be. Threads read and write; their results come back in the actor's loop.
Methods that only threads call say so; no other method blocks.
"""

from __future__ import annotations

import enum
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from trinity_es.actors.config.run_sections import StoreConfig
from trinity_es.actors.coordinator.live_state import LiveState, Loaded
from trinity_es.actors.coordinator.log_reader import Reader, Watch
from trinity_es.actors.coordinator.log_writer import LogWriter, Undone, UnitOfWork, is_content_error
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.sender_mark_checks import SenderMarkChecks
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import Fenced, LogError, LogNotFound, LogRewound, LogUnavailable, NotALog
from trinity_es.events.store.checks.log_end import Claim, Mark, MemoryFile, claims_of, rewound_error
from trinity_es.events.store.database.retry import Backoff, is_transient
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["LogSession", "Phase", "SessionHost"]

RELOAD_SECONDS = 0.2, 10.0
"""First and longest pause before the log is opened or read again after a failure."""
CALM_SECONDS = 10.0
"""Time without trouble after which the next pause is the first one again."""
FENCED_SECONDS = 5.0
"""Maximum time that a fenced coordinator waits to read the lease of its successor."""
LEASE = "coordinator"
"""Name of the lease of the only writer of batch events."""


class Phase(enum.Enum):
    """Phase of a session; the module describes each."""

    OPENING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()
    RESUMING = enum.auto()
    ENDED = enum.auto()


class SessionHost(TimerHost, Protocol):
    """Coordinator that a session calls. The class `Coordinator` describes the methods."""

    log: logging.Logger

    def post(self, call: Callable[[], None]) -> None: ...
    def chance(self) -> float: ...
    def open_store(self) -> tuple[EventLog, PayloadStore]: ...
    def begin(self) -> None: ...
    def recover(self) -> None: ...
    def forget(self) -> None: ...
    def serve(self, again: bool) -> None: ...
    def announce_waiting(self) -> None: ...
    def refuse(self, error: Exception) -> None: ...
    def on_rewound(self, error: LogRewound) -> None: ...
    def on_fenced(self, lease: Lease | None) -> None: ...


class LogSession:
    """Session with one log. `live`, `lease` and `events` exist once `has_live_state` is True; `watch`, `mark_checks`
    and `writer` are made in the same call."""

    live: LiveState
    lease: Lease
    events: EventLog
    mark_checks: SenderMarkChecks
    writer: LogWriter
    watch: Watch
    has_live_state = False
    """True once the session has the lease and the live state."""
    start_is_durable = False
    """True once the first events of this coordinator are in the log."""

    def __init__(
        self, host: SessionHost, store: StoreConfig, owner: dict[str, Any], *, queue_capacity: int,
        memory: MemoryFile | None, claims: Sequence[Claim], unheard_runners: Iterable[str],
    ) -> None:
        """`owner` (pid, host, admin) goes into the lease. `memory` and `claims` are the ends of the log that this host
        and the guardian have seen. The `unheard_runners` may have seen a later end, so requests wait for their reports.
        """
        self._host, self._store, self._owner, self._queue_capacity = host, store, owner, queue_capacity
        self._memory, self._claims, self._unheard_runners = memory, claims, unheard_runners
        self.phase = Phase.OPENING
        self.failure: Exception | None = None
        """Reason why the log can't be written now."""
        self.failed_at = self._failing_since = self._open_since = 0.0
        """Monotonic seconds of the last failure, of the first failure since the last success, of the last opening."""
        self._pauses, self._logged_error = Backoff(*RELOAD_SECONDS), ""
        self._held_results: list[Callable[[], None]] = []
        """Calls that deliver the results of reads that ended while no messages were handled."""
        self.reader = Reader(host.post, retry_for=store.retry_for)
        self.try_again: Callable[[], None] = self.open
        """Next step of the recovery, which a timer or a request triggers."""

    @property
    def running(self) -> bool:
        """True while messages are handled."""
        return self.phase is Phase.OPEN

    @property
    def trouble(self) -> str | None:
        """Reason why the log can't be written now; None while it can."""
        if self.failure is not None:
            return f"the log can't be written: {self.failure}"
        return self.watch.trouble or self.writer.trouble

    def log_end(self) -> Mark | None:
        """Return the mark of the last acknowledged event; None before the log is open."""
        return self.mark_checks.log_end() if self.has_live_state else None

    # --- opening ----------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Take the lease and read the live state; retry while the database is unreachable."""
        self.reader.run(self._open_store, self._on_opened, once=True)

    def _open_store(self) -> tuple[Lease, LiveState]:
        """Open the store, take the lease and read the live state; for a thread, since the database may be slow.
        Raises LogRewound if the log lacks events that the guardian or this host remember."""
        log, payloads = self._host.open_store()
        try:
            claims = list(self._claims)
            if self._memory is not None:
                claims += log.remembered_claims(self._memory)
            log.require(claims)
            log.memory = self._memory
            lease = log.acquire_lease(LEASE, self._owner)
            live = LiveState(
                log, payloads, queue_capacity=self._queue_capacity, run_in_thread=self._run_in_thread
            )
            return lease, live
        except BaseException:
            log.close()
            payloads.close()
            raise

    def _on_opened(self, result: tuple[Lease, LiveState] | Exception) -> None:
        """Begin to work with the opened store. After an error try again, but stop if the log lost events."""
        if self.phase is Phase.ENDED:
            return
        if isinstance(result, LogNotFound | NotALog) and self._claims:
            result = rewound_error(masked(self._store.url), None, self._claims)
        if isinstance(result, LogRewound):
            self.stop(result)
            return
        if isinstance(result, Exception):
            if not is_transient(result) and not isinstance(result, LogError):
                raise result
            self._log_error("waiting for the database", result)
            if not is_transient(result):  # this may last, so clients get an answer meanwhile
                self._set_failure(result)
                self._host.announce_waiting()
            self._retry_later(self.open)
            self._host.refuse(result)
            return
        self.lease, self.live = result
        self.events = self.live.log
        self._commit_numbers = itertools.count(1)  # under this lease a commit id is never used twice
        self.has_live_state = True
        self.watch = Watch(self.events.is_reachable, self._host.now, lambda e: self._host.post(lambda: self.stop(e)))
        self.mark_checks = SenderMarkChecks(
            self.events, self._unheard_runners, self._host.post, self.stop,
            lambda: self._handle_failure(Fenced("the log has events of a later coordinator"), []),
        )
        self._host.begin()

    def _run_in_thread(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call `read` in a thread, then `done` with its result. While no messages are handled, `done` has to wait."""

        def deliver(result: Any) -> None:
            if self.running:
                done(result)
            else:
                self._held_results.append(lambda: done(result))

        self.reader.run(read, deliver)

    # --- writing ----------------------------------------------------------------------------------------------------
    def start_writer(self) -> None:
        """Start a writer, then handle messages. After a failure, first wait until WritingResumed is durable."""
        self.writer = LogWriter(
            self.events, self.lease, self._host.post, self.write_failed,
            {"epoch": self.lease.epoch, "host": self._owner["host"]}, self._commit_numbers,
            retry_for=self._store.retry_for, now=self._host.now, chance=self._host.chance,
        )
        if self.failure is None or isinstance(self.failure, Undone):
            self._serve(again=self.failure is not None and self.start_is_durable)
            return
        trouble = str(self.failure)[:2000].encode(errors="replace").decode()
        self.live.record(ev.WritingResumed(error=trouble, seconds=round(self._host.now() - self._failing_since, 3)))
        again = self.start_is_durable
        self.live.when_durable(lambda: self._serve(again))
        self.phase = Phase.RESUMING
        self.writer.submit(self.live.close_turn())

    def _serve(self, again: bool) -> None:
        """Open the session, unless it ended meanwhile, and have the coordinator handle messages."""
        if self.phase is Phase.ENDED:
            return
        self.failure, self.phase, self._open_since = None, Phase.OPEN, self._host.now()
        self._host.serve(again)

    def deliver_held_results(self) -> None:
        """Deliver the results of reads that ended while no messages were handled."""
        calls, self._held_results = self._held_results, []
        for call in calls:
            call()

    def end_turn(self) -> None:
        """Hand the turn to the writer, or call its actions now if there is nothing to write. If the log can't be
        written, the callers of the turn get the failure."""
        if self.phase is not Phase.OPEN:
            if self.failure is not None and self.has_live_state and self.phase is not Phase.RESUMING:
                for fail in self.live.close_turn().failure_calls:
                    fail(self.failure)
            return
        turn = self.live.close_turn()
        if turn.writes or (turn.durable_calls and self.writer.in_flight):  # calls keep the order of the turns
            self.writer.submit(turn)
        else:
            for call in turn.durable_calls:
                call()

    def reset_pauses_if_calm(self) -> None:
        """If the database has not failed for a while, log that, and let pauses between retries begin small."""
        is_calm = self._host.now() - self._open_since > CALM_SECONDS
        if self.running and self._logged_error and self.writer.written and is_calm:
            self._host.log.info("the log is written again")
            self._pauses.reset()
            self._logged_error = ""

    # --- failed writes ------------------------------------------------------------------------------------------------
    def _set_failure(self, error: Exception) -> None:
        """Close the session with this error; an ended session keeps the reason for its end."""
        if self.phase is Phase.ENDED:
            return
        if self.failure is None:
            self._failing_since = self._host.now()
        self.phase, self.failure, self.failed_at = Phase.CLOSED, error, self._host.now()

    def write_failed(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        """Answer the callers of the lost turns with the error; then read the live state again."""
        self._handle_failure(error, lost)
        if self.phase is Phase.CLOSED and not self.writer.in_flight:  # the rest of the queue fails in another call
            self._retry_later(lambda: self._reload(error))

    def abandon_turn(self, error: LogUnavailable) -> None:
        """Undo the present turn, which the writer does not have yet. The writer finishes the earlier turns."""
        self._handle_failure(error, [self.live.close_turn()])
        if self.phase is Phase.CLOSED:
            self._retry_later(lambda: self._reload(error))

    def _handle_failure(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        """Close the session after a failed write, and give the error to the callers of the `lost` turns."""
        self._log_error("log not written", error)
        if isinstance(error, Fenced):
            self.phase = Phase.ENDED
            self._host.after(FENCED_SECONDS, "fenced", lambda: self._host.on_fenced(None))  # if the database is silent
            self.reader.run(lambda: self.events.read_lease(LEASE), self._end_fenced, once=True)
            return
        # If only one request's content was refused, the log is well, and no other client needs to hear of it.
        log_is_well = isinstance(error, Undone) or is_content_error(error)
        self._set_failure(Undone(f"undone, as another turn could not be recorded: {error}") if log_is_well else error)
        for turn in lost:
            for fail in turn.failure_calls:
                fail(error)
        if not log_is_well:
            self._host.refuse(error)
        if isinstance(error, LogRewound):
            self.stop(error)  # clients and runners have acknowledgements of events that this log lacks

    def _retry_later(self, retry: Callable[[], None]) -> None:
        """Call `retry` after a pause that grows with each failure; requests may trigger it earlier by `try_again`."""
        self.try_again = retry
        self._host.after(self._pauses.next(self._host.chance()), "reload", retry)

    def _reload(self, error: Exception) -> None:
        """Have a thread read the live state again; `error` is why the last write failed."""

        def read() -> Loaded:
            self.writer.stop()
            return self.live.read_log()

        self.reader.run(read, lambda result: self._on_reloaded(error, result), once=True)

    def _on_reloaded(self, error: Exception, loaded: Loaded | Exception) -> None:
        """Go on with the state that was read, or retry later. `error` is why the last write failed."""
        if self.phase is Phase.ENDED:
            return
        if isinstance(loaded, LogRewound):
            self.stop(loaded)
            return
        if isinstance(loaded, Exception):
            self._log_error("log not readable", loaded)
            self._set_failure(loaded)
            self._retry_later(self.try_again)
            self._host.refuse(loaded)
            return
        for fail in self.live.turn.failure_calls:  # decided meanwhile, and not written either
            fail(error)
        self.live.replace_state(loaded)
        self._host.forget()
        if self.start_is_durable:
            self.start_writer()
        else:
            self._host.recover()

    def _log_error(self, what: str, error: Exception) -> None:
        """Log an error, unless it differs from the last logged one only in digits, such as the free space."""
        message = re.sub(r"\d+", "", str(error))
        if message != self._logged_error:
            self._host.log.error("%s: %s", what, error)
            self._logged_error = message

    # --- the end ------------------------------------------------------------------------------------------------------
    def stop(self, error: LogRewound) -> None:
        """End the session, because the log lost acknowledged events."""
        if self.phase is Phase.ENDED:
            return
        self._log_error("the work is stopped", error)
        self._set_failure(error)
        self.phase = Phase.ENDED
        self._host.refuse(error)
        if self._memory is not None:
            self._memory.add_claims(claims_of(error.details.get("lost", ())))
        if self.has_live_state:
            self.writer.abandon(error)
        self._host.on_rewound(error)

    def _end_fenced(self, lease: Lease | Exception | None) -> None:
        """End this coordinator. `lease` is the other writer's lease, or the error of reading it."""
        if isinstance(lease, Exception):
            self._host.log.error("the lease can't be read: %s", lease)
            lease = None
        self._host.on_fenced(lease)

    def close(self, on_closed: Callable[[], None]) -> None:
        """Write what is queued and give the lease back; then call `on_closed`."""
        self.phase = Phase.ENDED
        self._host.cancel_timer("reload")
        if not self.has_live_state:
            on_closed()
            return
        self.watch.stop()
        self.reader.run(self._close_log, lambda _: on_closed(), once=True)

    def _close_log(self) -> None:
        """Write what is queued, give the lease back and close the log; for a thread."""
        self.writer.stop()
        try:
            self.events.release_lease(self.lease)
        except LogError as e:  # the next coordinator takes it anyway
            self._host.log.warning("the lease was not given back: %s", e)
        self.events.close()
