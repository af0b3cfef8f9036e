"""The coordinator: the only writer of batch events.

It loads what is open from the log, answers clients (`handlers/`), gives units to runners and takes their outcomes
(`fleet/`). One message is one turn: decide (pure, `decisions/`), fold at once (`live_state.py`), hand the events to the
log's writer, and act only when they are durable. It never blocks: the log is written by a thread and read by
others (`log_reader.py`), the pipeline runs in another.

While the database is away, or does not answer, those threads wait and this one goes on: it beats, and tells `status`
what is waited for. Where the log can't be written (a full disk, a file that lost its name) who asks is told so at once
(`unwritten.py`), and it is tried again after pauses that grow: the first write that goes through says in the log what
it was. A log that lost what was acknowledged ends the work:
everybody who asks is told.

It may die at any moment. What was acknowledged is in the log; runners keep their outcomes until it acknowledges them;
clients send a request again under the same id. The next coordinator fences this one by taking the lease.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trinity_es.actors.base import BaseActor
from trinity_es.actors.command_fields import is_request_id
from trinity_es.actors.commands import CommandRequest, GetStatus, decode
from trinity_es.actors.coordinator.delivery.operator_models import OperatorModels
from trinity_es.actors.coordinator.delivery.outputs import Outputs, build_outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.lifecycle import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.stall_detector import Stalls
from trinity_es.actors.coordinator.handlers.wiring import Handlers
from trinity_es.actors.coordinator.live_state import LiveState, Loaded
from trinity_es.actors.coordinator.log_reader import Reader, Watch
from trinity_es.actors.coordinator.log_writer import LogWriter, Undone, UnitOfWork, is_of_content
from trinity_es.actors.coordinator.requests_in_hand import RequestsInHand
from trinity_es.actors.coordinator.unwritten import Unwritten
from trinity_es.actors.coordinator.witnesses import Witnesses
from trinity_es.actors.ending import StoreWatch
from trinity_es.actors.keys import engine_token, read_key
from trinity_es.actors.messages import (
    CoordinatorUp,
    CoordinatorWaits,
    EndedRunners,
    Endpoints,
    GroupJoinResult,
    Heartbeat,
    LeaseLost,
    OutcomeReport,
    Parcel,
    Reply,
    Request,
    Retire,
    Retired,
    RunnerDied,
    RunnerState,
    RunnerStatus,
    StartCoordinator,
    StoreGone,
    WeightsLoadResult,
)
from trinity_es.actors.reports import clean_report
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    Fenced,
    LogError,
    LogNotFound,
    LogRewound,
    LogUnavailable,
    NotALog,
    TrinityError,
    error_to_dict,
)
from trinity_es.events.store.database import masked
from trinity_es.events.store.known import Claim, Memory, claims_of, rewound
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads import PayloadStore, open_payloads, patient
from trinity_es.events.store.retry import Backoff, is_transient
from trinity_es.events.values import BatchLifecycleState
from trinity_es.events.version import VERSION
from trinity_es.projections.tables.read_models import projectors

__all__ = ["Coordinator"]

EXIT_FENCED, EXIT_CRASHED = 3, 4
"""Exit statuses, for the guardian's log."""
BEAT_SECONDS = 2.0
"""Interval between two heartbeats."""
STALL_CHECK_SECONDS = 5.0
"""Interval between two looks for stalls."""
FENCED_SECONDS = 5.0
"""Maximum of the time that a coordinator that was fenced waits to hear by whom."""
LAST_WORDS_SECONDS = 0.5
"""Grace period for a fenced coordinator's last message."""
RELOAD_SECONDS = 0.2, 10.0
"""Pause before the log is opened or read again when it could not be, or not be written: the first, and the longest."""
CALM_SECONDS = 10.0
"""How long without trouble until the pause is the first again."""
READ_SECONDS = 2.0
"""Seconds that one try at reading waits out trouble that passes; the reader tries again."""
CLOSE_SECONDS = 8.0
"""Maximum of the time that the log may take to be closed at the end: its database may not answer."""
OUTPUT_SECONDS = 3.0
"""How long the pipeline's outputs and the closing of its operators may take at the system's end; what outputs have left
is written next time."""
HEAR_SECONDS = 1.0
"""How long clients wait for runners that a predecessor told of the log, and that have not said what they know."""


class Coordinator(BaseActor):
    """See the module. Started by the guardian with StartCoordinator."""

    running = False
    opened = False
    begun = False
    retired = False
    resuming = False
    """What is open was read anew, and the write that says so is on its way."""
    retiring_since = 0.0
    failure: Exception | None = None
    """Why the log can't be written now."""
    failing_since = failed_at = 0.0
    """When it could not be for the first time since it could, and for the last."""

    # --- start and end ----------------------------------------------------------------------------------------------
    def on_StartCoordinator(self, message: StartCoordinator, sender: Any) -> None:
        config = self.config = message.config
        self.guardian, self.admin = sender, message.admin
        self.open_log(config["system"]["log_dir"], "coordinator")
        self.add_code_path(config["code_path"])
        self.start_watch()
        self.beat()
        self.host = socket.gethostname()
        self.pauses, self.said = Backoff(*RELOAD_SECONDS), ""
        auxiliary = config["auxiliary"]
        token = engine_token(read_key()) if auxiliary else ""
        self.models = OperatorModels(auxiliary, token)
        self.unwritten = Unwritten(self)
        self.memory = Memory.of(config["store"]["url"], config["memory"]) if config.get("memory") else None
        self.waiting: list[Callable[[], None]] = []
        self.reader = Reader(self.post, retry_for=config["store"]["retry_for"])
        StoreWatch(config["store"]["url"], lambda why: self.post(lambda: self.send(self.guardian, StoreGone(why))))
        self.take_over(message)

    def open_store(self, config: dict[str, Any]) -> tuple[EventLog, PayloadStore]:
        """Open the log, which was made before, and the payloads. Raises what EventLog.open does."""
        url, durability = config["store"]["url"], config["store"]["durability"]
        log = EventLog.open(
            url, durability=durability, projectors=projectors(), patience=READ_SECONDS
        )
        try:
            return log, open_payloads(url, durability=durability, patience=READ_SECONDS)
        except BaseException:
            log.close()
            raise

    def take_over(self, message: StartCoordinator) -> None:
        """Take the lease, read the live state and begin. While the database is away: wait, and try again."""
        self.reader.ask(lambda: self.open_book(message), lambda found: self.took_over(message, found), once=True)

    def open_book(self, message: StartCoordinator) -> tuple[Lease, LiveState]:
        """Open the store and read what is open: in a thread, since it takes as long as the database does."""
        store = self.open_store(message.config)
        try:
            self.look_back(store[0], message.known)
            owner = {"pid": os.getpid(), "host": self.host, "admin": message.admin}
            lease = store[0].acquire_lease("coordinator", owner)
            return lease, LiveState(*store, queue_capacity=message.config["buffer"]["queue"]["capacity"])
        except BaseException:
            for part in store:
                part.close()
            raise

    def took_over(self, message: StartCoordinator, found: tuple[Lease, LiveState] | Exception) -> None:
        """Go on after the log was opened, or could not be."""
        if self.retired:
            return  # this process ends
        if isinstance(found, LogNotFound | NotALog) and message.known:
            found = rewound(masked(message.config["store"]["url"]), None, message.known)
        if isinstance(found, LogRewound):
            self.rewound(found)
            return
        if isinstance(found, Exception):
            if not is_transient(found) and not isinstance(found, LogError):
                raise found
            self.say("waiting for the database", found)
            if not is_transient(found):  # that may last: clients are told meanwhile
                self.failing(found)
                self.send(self.guardian, CoordinatorWaits(self.myAddress))
            self.try_again = lambda: self.take_over(message)
            self.after(self.pauses.next(self.chance()), "reload", self.try_again)
            self.unwritten.refuse(found)
            return
        self.lease, self.live = found
        self.commits = itertools.count(1)  # of this lease: a commit id is never used again
        self.events, self.opened = self.live.log, True
        self.live.ask = self.ask
        self.watch = Watch(self.events.is_reachable, self.now, lambda e: self.post(lambda: self.rewound(e)))
        self.witnesses = Witnesses(self.events, message.told, self.post, self.rewound)
        self.begin(message)

    def look_back(self, log: EventLog, known: Sequence[Claim]) -> None:
        """See that the log holds what guardian and host know of it. Raises LogRewound."""
        claims = list(known)
        if self.memory is not None:
            claims += self.memory.claims(log.head().generation)
        log.require(claims)
        log.memory = self.memory

    def rewound(self, error: LogRewound) -> None:
        """Stop where the log lacks what was acknowledged: do nothing more, and tell that to everybody who asks."""
        if self.retired:
            return
        self.say("the work is stopped", error)
        self.failing(error)
        self.unwritten.refuse(error)
        if self.memory is not None:
            self.memory.claim(claims_of(error.details.get("lost", ())))
        if self.opened:
            self.writer.abandon(error)
            self.handlers.router.give_up(error)
        if not self.begun:  # who asks has to find this one
            self.send(self.guardian, CoordinatorUp(self.myAddress, self.lease.epoch if self.opened else 0))

    def ask(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have something read by a thread; `done` comes when the live state is open."""

        def told(found: Any) -> None:
            if self.running:
                done(found)
            else:
                self.waiting.append(lambda: done(found))

        self.reader.ask(read, told)

    def begin(self, message: StartCoordinator) -> None:
        """Take over a log that is this coordinator's: get everybody together, and go on with what is open."""
        config = self.config
        self.fleet = RunnerLifecycle(self.live, self)
        self.fleet.end = self.witnesses.end
        operators = [] if config["mode"] == "bench" else config["buffer"]["pipeline"]["operators"]
        payloads = patient(self.live.payloads, config["store"]["retry_for"])
        self.jobs = PipelineThread(operators, payloads, self.post, self.models.clients)
        outputs = build_outputs(config["buffer"]["pipeline"]["outputs"], config["run_dir"])
        self.outputs = Outputs(outputs, self.live, payloads, self.post)
        self.retention = Retention(config["store"]["retention"], self.live, payloads, self.post, self.outputs.position)
        store = hashlib.sha256(config["store"]["url"].encode()).hexdigest()[:12]
        life = f"{message.admin.get('pid')} {message.admin.get('started')}"
        self.handlers = Handlers(
            config, self.live, self.fleet, self.jobs, self.retention, self.outputs, self, guardian=self.guardian,
            hands=RequestsInHand(Path(config["system"]["log_dir"]) / f"in-hand-{store}.json", life),
            epoch=self.lease.epoch, trouble=self.trouble, refuses=lambda: self.failure is not None,
        )
        self.unwritten.router = self.handlers.router
        self.fleet.timeout = self.handlers.pace.timeout
        if config["mode"] == "serve":
            keep = config["explorer"]["min_running_model_num"]
            self.fleet.weights.roll_with(keep, self.handlers.routes.take_out, message.alive)
        explorer = config["explorer"]
        if explorer["runner_state_report_interval"] > 0:
            self.handlers.runners.report(explorer["runner_state_report_interval"], self.report_states)
        self.stalls = Stalls(
            self.live,
            self.fleet,
            explorer["stall_after"],
            self.fleet.clock,
            limit=explorer["max_timeout"],
            sequential=explorer["concurrent_mode"] == "sequential",
        )
        self.check_stalls()
        self.alive = message.alive
        self.recover()

    def recover(self) -> None:
        """Say in the log whose it is and what becomes of every open batch; then tell the guardian."""
        started = ev.CoordinatorStarted(
            epoch=self.lease.epoch,
            pid=os.getpid(),
            host=self.host,
            version=VERSION,
            open_batches=list(self.live.batches),
        )
        self.live.record("system", [ev.SystemConfigured(config=self.config["masked"]), started])
        self.handlers.batches.recover(self.alive)
        self.go_on()
        self.live.then(self.recovered)

    def recovered(self) -> None:
        """Go on when what `recover` decided is in the log."""
        self.begun = True
        self.retention.wake()
        self.outputs.wake()
        self.send(self.guardian, CoordinatorUp(self.myAddress, self.lease.epoch))
        if self.witnesses.unheard:
            self.after(HEAR_SECONDS, "unheard", self.witnesses.hear_no_more)

    def go_on(self) -> None:
        """Use the live state, which is open: write into it, and go on with what was being finalized."""
        metadata = {"epoch": self.lease.epoch, "host": self.host}
        self.writer = LogWriter(
            self.events,
            self.lease,
            self.post,
            self.write_failed,
            metadata,
            self.commits,
            retry_for=self.config["store"]["retry_for"],
            now=self.now,
            chance=self.chance,
        )
        if self.failure is None or isinstance(self.failure, Undone):
            self.run(again=self.failure is not None and self.begun)
            return
        told = str(self.failure)[:2000].encode(errors="replace").decode()
        self.live.record("system", [ev.WritingResumed(error=told, seconds=round(self.now() - self.failing_since, 3))])
        again = self.begun
        self.live.then(lambda: self.run(again))
        self.resuming = True
        self.writer.submit(self.live.close_turn())

    def run(self, again: bool) -> None:
        """Take messages from now on; `again`: as this coordinator did before the log could not be written."""
        self.failure, self.resuming = None, False
        self.running, self.since = True, self.now()
        self.after(0.0, "waiting", self.go_on_with_requests)
        for batch in self.live.batches.values():
            if batch.state is BatchLifecycleState.FINALIZING:  # its pipeline died with the last coordinator
                self.handlers.batches.start_pipeline(batch)
        if again:
            # Runners say again who they are, and send what was not acknowledged. The guardian knows them all, also
            # those that came or died meanwhile.
            self.send(self.guardian, CoordinatorUp(self.myAddress, self.lease.epoch))
            self.handlers.batches.check_finalize(list(self.live.batches))
        self.unwritten.go_on()

    def go_on_with_requests(self) -> None:
        """Take the requests that came while the live state was closed, and those that were undone."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()
        self.handlers.router.do_again()

    def after_message(self) -> None:
        """End a turn: give out what can run, hand everything to the writer."""
        if not self.running:
            if self.failure is not None and not self.resuming and self.opened:  # nothing is written: tell who asked
                for tell in self.live.close_turn().failed:
                    tell(self.failure)
            return
        try:
            self.fleet.dispatch()
        except LogUnavailable as e:  # a large task could not be stored for its runner
            self.write_failed(e, [self.live.close_turn()], decided=False)
            return
        self.handlers.hands.let_go()
        self.handlers.routes.look()
        turn = self.live.close_turn()
        if turn.writes or (turn.then and self.writer.in_flight):
            self.writer.submit(turn)
        else:  # nothing to wait for
            for call in turn.then:
                call()

    def failing(self, error: Exception) -> None:
        """Note that nothing can be written now, for this reason."""
        if self.failure is None:
            self.failing_since = self.now()
        self.running, self.resuming, self.failure, self.failed_at = False, False, error, self.now()

    def trouble(self) -> str | None:
        """Return what keeps the log from being written now."""
        if self.failure is not None:
            return f"the log can't be written: {self.failure}"
        return self.watch.trouble or self.writer.trouble

    def write_failed(self, error: Exception, lost: Sequence[UnitOfWork], *, decided: bool = True) -> None:
        """Tell who asked that the log could not be written; then read the state anew, without what was not written.

        Not `decided`: it never came to the writer, which goes on with what it has.
        """
        self.say("log not written", error)
        if isinstance(error, Fenced):
            self.fenced()
            return
        # The log is well where only what a request wanted written could not be: nobody else hears of that.
        well = isinstance(error, Undone) or is_of_content(error)
        self.failing(Undone(f"undone with what could not be recorded: {error}") if well else error)
        for turn in lost:
            for tell in turn.failed:
                tell(error)
        if not well:
            self.unwritten.refuse(error)
        if isinstance(error, LogRewound):
            self.rewound(error)  # to go on would be to work on what others were told is different
            return
        if not self.retired and not (decided and self.writer.in_flight):  # the rest of the queue has its own call
            self.try_again = lambda: self.reload(error)
            self.after(self.pauses.next(self.chance()), "reload", self.try_again)

    def say(self, what: str, error: Exception) -> None:
        """Into the text log: what is wrong, once and not at every try, though how much room is left may change."""
        alike = re.sub(r"\d+", "", str(error))
        if alike != self.said:
            self.log.error("%s: %s", what, error)
            self.said = alike

    def fenced(self) -> None:
        """Another writer has the lease: end. Where it is of another system, this whole system has to."""
        self.running = False
        self.after(FENCED_SECONDS, "end", lambda: os._exit(EXIT_FENCED))  # whatever the database does
        self.reader.ask(lambda: self.events.read_lease("coordinator"), self.end_fenced, once=True)

    def end_fenced(self, lease: Lease | Exception | None) -> None:
        """End, when it is known who fenced this coordinator."""
        if isinstance(lease, Exception):
            self.log.error("the lease can't be read: %s", lease)
            lease = None
        owner = dict(lease.owner or {}) if lease is not None else {}
        if owner and (owner.get("host"), owner.get("admin")) != (self.host, self.admin):
            self.send(self.guardian, LeaseLost(f"pid {owner.get('pid')} on {owner.get('host')}"))
        self.after(LAST_WORDS_SECONDS, "end", lambda: os._exit(EXIT_FENCED))  # the message has to get out first

    def reload(self, error: Exception) -> None:
        """Read the live state anew. It stays closed while a thread does so."""
        self.reader.ask(self.read_again, lambda found: self.reloaded(error, found), once=True)

    def read_again(self) -> Loaded:
        """Read what is open, in a thread, when the writer has ended."""
        self.writer.stop()
        return self.live.read_log()

    def reloaded(self, error: Exception, found: Loaded | Exception) -> None:
        """Go on after the log was read anew, or could not be."""
        if self.retired:
            return
        if isinstance(found, LogRewound):
            self.rewound(found)
            return
        if isinstance(found, Exception):
            self.say("log not readable", found)
            self.failing(found)
            self.after(self.pauses.next(self.chance()), "reload", self.try_again)
            self.unwritten.refuse(found)
            return
        for tell in self.live.turn.failed:  # what was decided meanwhile is not written either
            tell(error)
        self.live.adopt(found)
        self.fleet.forget()
        if self.begun:
            self.go_on()
        else:
            self.recover()

    def crashed(self, error: BaseException) -> None:
        """End after a handler broke: memory may be ahead of the log; the next coordinator reads the log."""
        os._exit(EXIT_CRASHED)

    def on_Retire(self, message: Retire, sender: Any) -> None:
        """Write what is queued and give the lease back; batches that are open stay open."""
        self.retiring_since = self.retiring_since or self.now()
        busy = self.running and (self.outputs.busy() or not self.jobs.closed(self.close_problem))
        if busy and self.now() - self.retiring_since < OUTPUT_SECONDS:
            self.after(0.05, "retire", lambda: self.on_Retire(message, sender))
            return
        if self.retired:
            return
        self.running, self.retired = False, True
        self.cancel("reload")
        if self.opened:
            self.after(CLOSE_SECONDS, "closed", self.closed)
            self.watch.stop()
            self.reader.ask(self.close_log, lambda _: self.closed(), once=True)
        else:
            self.closed()

    def close_log(self) -> None:
        """Write what is queued and give the lease back, in a thread."""
        self.writer.stop()
        try:
            self.events.release_lease(self.lease)
        except LogError as e:  # it will be taken all the same
            self.log.warning("the lease was not given back: %s", e)
        self.events.close()

    def closed(self) -> None:
        """Close the log, or give it up where its database does not answer."""
        self.cancel("closed")
        self.send(self.guardian, Retired())

    def close_problem(self, problem: str) -> None:
        """Into the text log: an operator could not be closed."""
        self.log.warning("%s", problem)

    def beat(self) -> None:
        """Tell the guardian that this process lives."""
        self.after(BEAT_SECONDS, "beat", self.beat)
        serves = self.running and self.begun
        self.send(self.guardian, Heartbeat("coordinator", 0, os.getpid(), epoch=self.lease.epoch if serves else 0,
                                           end=self.witnesses.end() if serves else None))
        if self.running and self.said and self.writer.written and self.now() - self.since > CALM_SECONDS:
            self.log.info("the log is written again")
            self.pauses.reset()
            self.said = ""

    def check_stalls(self) -> None:
        """Look, now and then, for batches in which nothing moves."""
        self.after(min(STALL_CHECK_SECONDS, self.stalls.after_seconds / 2), "stalls", self.check_stalls)
        if self.running:
            self.stalls.check()

    def report_states(self, table: str) -> None:
        """Into the text log: what the runners do."""
        self.log.info("runners:\n%s", table)

    # --- messages ---------------------------------------------------------------------------------------------------
    def on_Endpoints(self, message: Endpoints, sender: Any) -> None:
        self.models.update(message.models)

    def on_Request(self, message: Request, sender: Any) -> None:
        """Take it, refuse it, or leave it unanswered: then the client asks again."""
        if not is_request_id(getattr(message, "id", None)):
            return  # there is nobody to answer
        try:
            request = CommandRequest(message.id, decode(message.command, message.args))
        except TrinityError as e:
            self.send(sender, Reply(message.id, Parcel(b"null"), error_to_dict(e)))
            return
        if not self.running:
            self.refuse(request, sender)
        elif isinstance(request.command, GetStatus):
            self.witnesses.admit(message.known, message.by, lambda: self.take(request, sender), anyway=True)
        else:
            self.witnesses.after_runners(
                lambda: self.witnesses.admit(message.known, message.by, lambda: self.take(request, sender))
            )

    def take(self, request: CommandRequest[Any], sender: Any) -> None:
        """Take a request of a client that knows nothing which the log has not."""
        if self.running:
            self.handlers.router.take(request, sender)
        else:
            self.refuse(request, sender)

    def refuse(self, request: CommandRequest[Any], sender: Any) -> None:
        """Tell a client why nothing is done; where that passes it is left to ask again."""
        if self.failure is not None:
            self.unwritten.take(request, sender, self.failure)

    def on_RunnerStatus(self, message: RunnerStatus, sender: Any) -> None:
        if self.running:
            by = f"{message.name} (pid {message.pid} on {message.host})"
            self.witnesses.admit(message.known, by, lambda: self.runner_up(message, sender))

    def runner_up(self, message: RunnerStatus, sender: Any) -> None:
        """Take what a runner tells of itself, which knows nothing that the log has not."""
        if self.running:
            self.fleet.up(clean_report(message), sender)
            self.handlers.runners.check_restarts()
            self.witnesses.heard(message.name)

    def on_RunnerState(self, message: RunnerState, sender: Any) -> None:
        if self.running:
            self.handlers.runners.told(message)

    def on_RunnerDied(self, message: RunnerDied, sender: Any) -> None:
        if self.running:
            self.fleet.died(clean_report(message))
            self.witnesses.heard(message.name)
            self.handlers.runners.check_restarts()
            self.handlers.batches.check_finalize(list(self.live.batches))
            self.handlers.weights.check_syncs()
            self.handlers.weights.check_group()

    def on_Heartbeat(self, message: Heartbeat, sender: Any) -> None:
        if self.running:
            self.fleet.alive(message)

    def on_EndedRunners(self, message: EndedRunners, sender: Any) -> None:
        if self.running:
            self.fleet.census(message)
            self.handlers.batches.check_finalize(list(self.live.batches))
            self.handlers.weights.check_syncs()
            self.handlers.weights.check_group()

    def on_GroupJoinResult(self, message: GroupJoinResult, sender: Any) -> None:
        if self.running:
            self.fleet.weights.group.joined(clean_report(message))
            self.handlers.weights.check_group()

    def on_OutcomeReport(self, message: OutcomeReport, sender: Any) -> None:
        if self.running:
            self.witnesses.admit(message.known, message.name, lambda: self.outcomes(message))

    def outcomes(self, message: OutcomeReport) -> None:
        """Take a group of outcomes of a runner that knows nothing which the log has not."""
        if self.running:
            self.handlers.batches.check_finalize(self.fleet.outcomes(message))

    def on_WeightsLoadResult(self, message: WeightsLoadResult, sender: Any) -> None:
        if self.running:
            self.fleet.weights.done(clean_report(message))
            self.handlers.weights.check_syncs()
            self.handlers.weights.check_group()  # who could not take them in leaves it
