"""The coordinator: the only writer of batch events.

It loads what is open from the log, answers clients (`desk.py`), gives units to runners and takes their outcomes
(`crew.py`). One message is one turn: decide (pure, `decisions.py`), fold at once (`book.py`), hand the events to the
log's writer, and act only when they are durable. It never blocks: the log is written by a thread, the pipeline runs in
another.

It may die at any moment. What was acknowledged is in the log; runners keep their outcomes until it acknowledges them;
clients send a request again under the same id. The next coordinator fences this one by taking the lease.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from typing import Any

from actors.base import SafeActor
from actors.book import Book
from actors.crew import Crew
from actors.desk import Desk
from actors.jobs import PipelineJobs
from actors.messages import (
    Alive,
    Census,
    CoordinatorUp,
    FencedOff,
    Hello,
    Outcomes,
    Request,
    Retire,
    Retired,
    RunnerDied,
    RunnerUp,
    StartCoordinator,
    WeightsDone,
)
from actors.writer import LogWriter, Turn
from events import vocabulary as ev
from events.errors import Fenced
from events.log import EventLog
from events.payloads import open_payloads
from events.values import BatchLifecycleState
from events.version import VERSION
from projections.readmodels import projectors

__all__ = ["Coordinator"]

EXIT_FENCED, EXIT_CRASHED = 3, 4
"""Exit statuses, for the guardian's log."""
BEAT_SECONDS = 2.0
"""Between two heartbeats."""
LAST_WORDS_SECONDS = 0.5
"""So long has the last message of a coordinator that was fenced to get out."""
RELOAD_SECONDS = 0.2, 10.0
"""Pause before the log is read again when it could not be: the first, and the longest."""


class Coordinator(SafeActor):
    """See the module. Started by the guardian with StartCoordinator."""

    running = False

    # --- start and end ----------------------------------------------------------------------------------------------
    def on_StartCoordinator(self, message: StartCoordinator, sender: Any) -> None:
        config = self.config = message.config
        self.guardian, self.admin = sender, message.admin
        self.open_log(config["system"]["log_dir"], "coordinator")
        self.add_code_path(config["code_path"])
        self.start_watch()
        self.send(sender, Hello("coordinator", 0, os.getpid()))
        self.beat()
        url, durability = config["store"]["url"], config["store"]["durability"]
        self.events = EventLog.open(url, create=True, durability=durability, projectors=projectors())
        self.host = socket.gethostname()
        owner = {"pid": os.getpid(), "host": self.host, "admin": message.admin}
        self.lease = self.events.acquire_lease("coordinator", owner)
        self.commits = itertools.count(1)
        self.book = Book(self.events, open_payloads(url, durability=durability))
        self.crew = Crew(self.book, self)
        operators = [] if config["mode"] == "bench" else config["buffer"]["pipeline"]["operators"]
        jobs = PipelineJobs(operators, self.book.payloads, self.post)
        self.desk = Desk(config, self.book, self.crew, jobs, self)
        started = ev.CoordinatorStarted(
            epoch=self.lease.epoch,
            pid=os.getpid(),
            host=self.host,
            version=VERSION,
            open_batches=list(self.book.batches),
        )
        self.book.record("system", [ev.SystemConfigured(config=config["masked"]), started])
        self.crew.forget_all_but(message.alive)
        self.go_on()
        up = CoordinatorUp(self.myAddress, self.lease.epoch)
        self.book.then(lambda: self.send(self.guardian, up))

    def go_on(self) -> None:
        """The book is open: write into it, and go on with what was being finalized."""
        metadata = {"epoch": self.lease.epoch, "host": self.host}
        self.writer = LogWriter(self.events, self.lease, self.post, self.write_failed, metadata, self.commits)
        self.running = True
        for batch in self.book.batches.values():
            if batch.state is BatchLifecycleState.FINALIZING:  # its pipeline died with the last coordinator
                self.desk.start_pipeline(batch)

    def after_message(self) -> None:
        """The end of a turn: give out what can run, hand everything to the writer."""
        if not self.running:
            return
        self.crew.dispatch()
        turn = self.book.close_turn()
        if turn.writes or (turn.then and self.writer.in_flight):
            self.writer.submit(turn)
        else:  # nothing to wait for
            for call in turn.then:
                call()

    def write_failed(self, error: Exception, lost: Sequence[Turn]) -> None:
        """The log could not be written. Tell who asked; then read the book anew, without what was not written."""
        self.log.error("log not written: %s", error)
        if isinstance(error, Fenced):
            self.fenced()
            return
        self.running = False
        for turn in lost:
            for tell in turn.failed:
                tell(error)
        if self.writer.in_flight == 0:  # the rest of the queue comes with its own call
            self.writer.stop()
            self.reload(RELOAD_SECONDS[0], error)

    def fenced(self) -> None:
        """Another writer has the lease: end. Where it is of another system, this whole system has to."""
        self.running = False
        try:
            lease = self.events.read_lease("coordinator")
            owner = dict(lease.owner or {}) if lease is not None else {}
        except Exception as e:
            self.log.error("the lease can't be read: %s", e)
            owner = {}
        if owner and (owner.get("host"), owner.get("admin")) != (self.host, self.admin):
            self.send(self.guardian, FencedOff(f"pid {owner.get('pid')} on {owner.get('host')}"))
        self.after(LAST_WORDS_SECONDS, "end", lambda: os._exit(EXIT_FENCED))  # the message has to get out first

    def reload(self, pause: float, error: Exception) -> None:
        for tell in self.book.turn.failed:  # what was decided meanwhile is not written either
            tell(error)
        try:
            self.book.load()
        except Exception as e:
            self.log.error("log not readable: %s", e)
            self.after(pause, "reload", lambda: self.reload(min(pause * 2, RELOAD_SECONDS[1]), error))
            return
        self.go_on()
        self.crew.forget()
        # Runners say again who they are, and send what was not acknowledged. The guardian knows them all, also those
        # that came or died meanwhile.
        self.send(self.guardian, CoordinatorUp(self.myAddress, self.lease.epoch))
        self.desk.check_finalize(list(self.book.batches))

    def crashed(self, error: BaseException) -> None:
        """A handler broke: memory may be ahead of the log. End; the next coordinator reads the log."""
        os._exit(EXIT_CRASHED)

    def on_Retire(self, message: Retire, sender: Any) -> None:
        """Write what is queued and give the lease back; batches that are open stay open."""
        self.running = False
        self.writer.stop()
        self.events.release_lease(self.lease)
        self.events.close()
        self.send(self.guardian, Retired())

    def beat(self) -> None:
        """Tell the guardian that this process lives."""
        self.after(BEAT_SECONDS, "beat", self.beat)
        self.send(self.guardian, Alive("coordinator", 0))

    # --- messages ---------------------------------------------------------------------------------------------------
    def on_Request(self, message: Request, sender: Any) -> None:
        if self.running:  # else the client asks again
            self.desk.take(message, sender)

    def on_RunnerUp(self, message: RunnerUp, sender: Any) -> None:
        if self.running:
            self.crew.up(message, sender)

    def on_RunnerDied(self, message: RunnerDied, sender: Any) -> None:
        if self.running:
            self.crew.died(message)
            self.desk.check_finalize(list(self.book.batches))
            self.desk.check_syncs()

    def on_Alive(self, message: Alive, sender: Any) -> None:
        if self.running:
            self.crew.alive(message)

    def on_Census(self, message: Census, sender: Any) -> None:
        if self.running:
            self.crew.census(message)
            self.desk.check_finalize(list(self.book.batches))
            self.desk.check_syncs()

    def on_Outcomes(self, message: Outcomes, sender: Any) -> None:
        if self.running:
            self.desk.check_finalize(self.crew.outcomes(message))

    def on_WeightsDone(self, message: WeightsDone, sender: Any) -> None:
        if self.running:
            self.crew.weights_done(message)
            self.desk.check_syncs()
