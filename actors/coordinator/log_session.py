"""A coordinator's hold on the log: the lease, the live state read from it, the writer, and what happens when one fails.

It is in one phase at a time:

    OPENING -> OPEN -> CLOSED -> OPEN ...          and from each of them: ENDED
                          \\-> RESUMING -> OPEN

OPENING: the lease is taken and what is open is read. OPEN: messages are decided on. CLOSED: something could not be
written, so memory is ahead of the log; it is read anew, after pauses that grow. RESUMING: it was read, and the write
that says in the log what was wrong is on its way. ENDED: given back, fenced, or a log that lost what was acknowledged.

Reading and writing are done by threads; what came of it is told in the actor's loop. Nothing here blocks.
"""

from __future__ import annotations

import enum
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from trinity_es.actors.config.schema import StoreConfig
from trinity_es.actors.coordinator.live_state import LiveState, Loaded
from trinity_es.actors.coordinator.log_end_checks import Witnesses
from trinity_es.actors.coordinator.log_reader import Reader, Watch
from trinity_es.actors.coordinator.log_writer import LogWriter, Undone, UnitOfWork, is_of_content
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import Fenced, LogError, LogNotFound, LogRewound, LogUnavailable, NotALog
from trinity_es.events.store.checks.log_end import Claim, Mark, Memory, claims_of, rewound
from trinity_es.events.store.database.retry import Backoff, is_transient
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["LogSession", "Phase", "SessionHost"]

RELOAD_SECONDS = 0.2, 10.0
"""Pause before the log is opened or read again when it could not be, or not be written: the first, and the longest."""
CALM_SECONDS = 10.0
"""How long without trouble until the pause is the first again."""
FENCED_SECONDS = 5.0
"""Maximum of the time that a coordinator that was fenced waits to hear by whom."""
LEASE = "coordinator"
"""The name under which the only writer of batch events holds the log."""


class Phase(enum.Enum):
    """See the module."""

    OPENING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()
    RESUMING = enum.auto()
    ENDED = enum.auto()


class SessionHost(TimerHost, Protocol):
    """The coordinator, as its session needs it."""

    log: logging.Logger

    def post(self, call: Callable[[], None]) -> None: ...
    def chance(self) -> float: ...
    def open_store(self) -> tuple[EventLog, PayloadStore]: ...
    def begin(self) -> None:
        """Build all that works on the live state, and record that another coordinator has taken over."""

    def recover(self) -> None:
        """Record so again: the first time nothing of it was written."""

    def forget(self) -> None:
        """Forget what was known beyond the log: the live state was read anew."""

    def serve(self, again: bool) -> None:
        """Go on: the live state is open. `again`: it was before."""

    def waits(self, error: Exception) -> None:
        """Let clients know: the log can't be opened, and that may last."""

    def refuse(self, error: Exception) -> None:
        """Tell those who asked that a try has failed."""

    def stopped(self, error: LogRewound) -> None:
        """Tell everybody that the log lost what was acknowledged: nothing more is done."""

    def fenced(self, lease: Lease | None) -> None:
        """Another writer has the lease; None where it can't be read who."""


class LogSession:
    """See the module. `live`, `lease` and `witnesses` are there once it was opened."""

    live: LiveState
    lease: Lease
    events: EventLog
    witnesses: Witnesses
    writer: LogWriter
    watch: Watch

    def __init__(
        self, host: SessionHost, store: StoreConfig, owner: dict[str, Any], *, queue_capacity: int,
        memory: Memory | None, known: Sequence[Claim], told: Iterable[str],
    ) -> None:
        """`owner`: who takes the lease (pid, host, admin). `memory`: what this host knows of the log. `known`: what the
        guardian does. `told`: runners that a predecessor told of it, and that have to say what they know first.
        """
        self._host, self._store, self._owner, self._capacity = host, store, owner, queue_capacity
        self._memory, self._known, self._told = memory, known, told
        self.phase = Phase.OPENING
        self.opened = self.begun = False
        """It has the lease and the live state; what this coordinator recorded first is in the log."""
        self.failure: Exception | None = None
        """Why the log can't be written now."""
        self.failed_at = self._failing_since = self._open_since = 0.0
        self._pauses, self._said = Backoff(*RELOAD_SECONDS), ""
        self._waiting: list[Callable[[], None]] = []
        self.reader = Reader(host.post, retry_for=store.retry_for)
        self.try_again: Callable[[], None] = self.open

    @property
    def running(self) -> bool:
        """Messages are taken now."""
        return self.phase is Phase.OPEN

    @property
    def trouble(self) -> str | None:
        """The trouble that keeps the log from being written now; None while there is none."""
        if self.failure is not None:
            return f"the log can't be written: {self.failure}"
        return self.watch.trouble or self.writer.trouble

    def end(self) -> Mark | None:
        """Return the end of the log, as it may be told; None before there is one."""
        return self.witnesses.end() if self.opened else None

    # --- opening ----------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Take the lease and read the live state. While the database is away: wait, and try again."""
        self.reader.ask(self._open, self._opened, once=True)

    def _open(self) -> tuple[Lease, LiveState]:
        """Open the store and read what is open: in a thread, since it takes as long as the database does."""
        store = self._host.open_store()
        try:
            self._look_back(store[0])
            lease = store[0].acquire_lease(LEASE, self._owner)
            return lease, LiveState(*store, queue_capacity=self._capacity, ask=self._ask)
        except BaseException:
            for part in store:
                part.close()
            raise

    def _look_back(self, log: EventLog) -> None:
        """See that the log holds what guardian and host know of it. Raises LogRewound."""
        claims = list(self._known)
        if self._memory is not None:
            claims += log.remembered(self._memory)
        log.require(claims)
        log.memory = self._memory

    def _opened(self, found: tuple[Lease, LiveState] | Exception) -> None:
        if self.phase is Phase.ENDED:
            return
        if isinstance(found, LogNotFound | NotALog) and self._known:
            found = rewound(masked(self._store.url), None, self._known)
        if isinstance(found, LogRewound):
            self.stop(found)
            return
        if isinstance(found, Exception):
            if not is_transient(found) and not isinstance(found, LogError):
                raise found
            self._say("waiting for the database", found)
            if not is_transient(found):  # that may last: clients are told meanwhile
                self._failing(found)
                self._host.waits(found)
            self._later(self.open)
            self._host.refuse(found)
            return
        self.lease, self.live = found
        self._commits = itertools.count(1)  # of this lease: a commit id is never used again
        self.events, self.opened = self.live.log, True
        self.watch = Watch(self.events.is_reachable, self._host.now, lambda e: self._host.post(lambda: self.stop(e)))
        self.witnesses = Witnesses(
            self.events, self._told, self._host.post, self.stop,
            lambda: self._failed(Fenced("the log has what a later coordinator told"), []),
        )
        self._host.begin()

    def _ask(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have something read by a thread; `done` comes when the live state is open."""

        def told(found: Any) -> None:
            if self.running:
                done(found)
            else:
                self._waiting.append(lambda: done(found))

        self.reader.ask(read, told)

    # --- writing ----------------------------------------------------------------------------------------------------
    def go_on(self) -> None:
        """Write into the live state's log, from what was recorded in this turn on."""
        self.writer = LogWriter(
            self.events, self.lease, self._host.post, self.write_failed,
            {"epoch": self.lease.epoch, "host": self._owner["host"]}, self._commits,
            retry_for=self._store.retry_for, now=self._host.now, chance=self._host.chance,
        )
        if self.failure is None or isinstance(self.failure, Undone):
            self._run(again=self.failure is not None and self.begun)
            return
        told = str(self.failure)[:2000].encode(errors="replace").decode()
        self.live.record(ev.WritingResumed(error=told, seconds=round(self._host.now() - self._failing_since, 3)))
        again = self.begun
        self.live.then(lambda: self._run(again))
        self.phase = Phase.RESUMING
        self.writer.submit(self.live.close_turn())

    def _run(self, again: bool) -> None:
        if self.phase is Phase.ENDED:
            return  # meanwhile: what was on its way to the log is there, and nothing comes after it
        self.failure, self.phase, self._open_since = None, Phase.OPEN, self._host.now()
        self._host.serve(again)

    def hand_over(self) -> None:
        """Hand over what was read while the live state was closed."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def end_turn(self) -> None:
        """Hand what was decided to the writer; call at once what waits for nothing."""
        if self.phase is not Phase.OPEN:
            if self.failure is not None and self.opened and self.phase is not Phase.RESUMING:
                for tell in self.live.close_turn().failed:  # nothing is written
                    tell(self.failure)
            return
        turn = self.live.close_turn()
        if turn.writes or (turn.then and self.writer.in_flight):
            self.writer.submit(turn)
        else:
            for call in turn.then:
                call()

    def calm_down(self) -> None:
        """Say that the trouble is over, once nothing failed for a while."""
        calm = self._host.now() - self._open_since > CALM_SECONDS
        if self.running and self._said and self.writer.written and calm:
            self._host.log.info("the log is written again")
            self._pauses.reset()
            self._said = ""

    # --- when it can't be written -------------------------------------------------------------------------------------
    def _failing(self, error: Exception) -> None:
        if self.phase is Phase.ENDED:
            return  # for a reason that stays
        if self.failure is None:
            self._failing_since = self._host.now()
        self.phase, self.failure, self.failed_at = Phase.CLOSED, error, self._host.now()

    def write_failed(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        """Tell who asked that the log could not be written; then read the state anew, without what was not written."""
        self._failed(error, lost)
        if self.phase is Phase.CLOSED and not self.writer.in_flight:  # the rest of the queue has its own call
            self._later(lambda: self._reload(error))

    def abandon_turn(self, error: LogUnavailable) -> None:
        """Undo this turn, which never came to the writer: that goes on with what it has."""
        self._failed(error, [self.live.close_turn()])
        if self.phase is Phase.CLOSED:
            self._later(lambda: self._reload(error))

    def _failed(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        self._say("log not written", error)
        if isinstance(error, Fenced):
            self.phase = Phase.ENDED
            self._host.after(FENCED_SECONDS, "fenced", lambda: self._host.fenced(None))  # whatever the database does
            self.reader.ask(lambda: self.events.read_lease(LEASE), self._end_fenced, once=True)
            return
        # The log is well where only what a request wanted written could not be: nobody else hears of that.
        well = isinstance(error, Undone) or is_of_content(error)
        self._failing(Undone(f"undone with what could not be recorded: {error}") if well else error)
        for turn in lost:
            for tell in turn.failed:
                tell(error)
        if not well:
            self._host.refuse(error)
        if isinstance(error, LogRewound):
            self.stop(error)  # to go on would be to work on what others were told is different

    def _later(self, again: Callable[[], None]) -> None:
        self.try_again = again
        self._host.after(self._pauses.next(self._host.chance()), "reload", again)

    def _reload(self, error: Exception) -> None:
        """Read the live state anew. It stays closed while a thread does so."""
        self.reader.ask(self._read_again, lambda found: self._reloaded(error, found), once=True)

    def _read_again(self) -> Loaded:
        """Read what is open, in a thread, when the writer has ended."""
        self.writer.stop()
        return self.live.read_log()

    def _reloaded(self, error: Exception, found: Loaded | Exception) -> None:
        if self.phase is Phase.ENDED:
            return
        if isinstance(found, LogRewound):
            self.stop(found)
            return
        if isinstance(found, Exception):
            self._say("log not readable", found)
            self._failing(found)
            self._later(self.try_again)
            self._host.refuse(found)
            return
        for tell in self.live.turn.failed:  # what was decided meanwhile is not written either
            tell(error)
        self.live.adopt(found)
        self._host.forget()
        if self.begun:
            self.go_on()
        else:
            self._host.recover()

    def _say(self, what: str, error: Exception) -> None:
        """Into the text log: what is wrong, once and not at every try, though how much room is left may change."""
        alike = re.sub(r"\d+", "", str(error))
        if alike != self._said:
            self._host.log.error("%s: %s", what, error)
            self._said = alike

    # --- the end ------------------------------------------------------------------------------------------------------
    def stop(self, error: LogRewound) -> None:
        """Do nothing more: the log lacks what was acknowledged."""
        if self.phase is Phase.ENDED:
            return
        self._say("the work is stopped", error)
        self._failing(error)
        self.phase = Phase.ENDED
        self._host.refuse(error)
        if self._memory is not None:
            self._memory.claim(claims_of(error.details.get("lost", ())))
        if self.opened:
            self.writer.abandon(error)
        self._host.stopped(error)

    def _end_fenced(self, lease: Lease | Exception | None) -> None:
        if isinstance(lease, Exception):
            self._host.log.error("the lease can't be read: %s", lease)
            lease = None
        self._host.fenced(lease)

    def close(self, closed: Callable[[], None]) -> None:
        """Write what is queued and give the lease back; then call `closed`."""
        self.phase = Phase.ENDED
        self._host.cancel("reload")
        if not self.opened:
            closed()
            return
        self.watch.stop()
        self.reader.ask(self._close, lambda _: closed(), once=True)

    def _close(self) -> None:
        self.writer.stop()
        try:
            self.events.release_lease(self.lease)
        except LogError as e:  # it will be taken all the same
            self._host.log.warning("the lease was not given back: %s", e)
        self.events.close()
