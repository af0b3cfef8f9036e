"""The coordinator: the only writer of batch events.

It loads what is open from the log, answers clients (`handlers/`), gives units to runners and takes their outcomes
(`fleet/`). One message is one turn: decide (pure, `decisions/`), fold at once (`live_state.py`), hand the events to the
log's writer, and act only when they are durable. It never blocks: the log is written by a thread and read by
others (`log_reader.py`), the pipeline runs in another.

While the database is away, or does not answer, those threads wait and this one goes on: it beats, and tells `status`
what is waited for. Where the log can't be written (a full disk, a file that lost its name) who asks is told so at once
(`requests_while_unwritable.py`), and it is tried again after pauses that grow: the first write that goes through says
in the log what it was. A log that lost what was acknowledged ends the work: everybody who asks is told.

It may die at any moment. What was acknowledged is in the log; runners keep their outcomes until it acknowledges them;
clients send a request again under the same id. The next coordinator fences this one by taking the lease.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_es.actors.base import BaseActor
from trinity_es.actors.commands import CommandRequest, GetStatus, decode
from trinity_es.actors.commands.fields import is_request_id
from trinity_es.actors.coordinator.delivery.operator_models import OperatorModels
from trinity_es.actors.coordinator.delivery.outputs import Outputs, build_outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.batch_stalls import Stalls
from trinity_es.actors.coordinator.fleet.host_fleet import LOOK_SECONDS as HOSTS_SECONDS
from trinity_es.actors.coordinator.fleet.host_fleet import FarProcess, HostFleet, far_lives, listening, place_of_head
from trinity_es.actors.coordinator.fleet.lease_releases import LeaseReleases
from trinity_es.actors.coordinator.fleet.server_fleet import LOOK_SECONDS
from trinity_es.actors.coordinator.handlers.wiring import Handlers
from trinity_es.actors.coordinator.log_session import LogSession
from trinity_es.actors.coordinator.requests_in_hand import RequestsInHand
from trinity_es.actors.coordinator.requests_while_unwritable import Unwritten
from trinity_es.actors.messages import (
    AdaptersLoadResult,
    CoordinatorUp,
    CoordinatorWaits,
    EndedRunners,
    Endpoints,
    GroupJoinResult,
    Heartbeat,
    LeaseLost,
    LeaseReport,
    OutcomeReport,
    Retire,
    Retired,
    RunnerActivity,
    RunnerDied,
    RunnerStatus,
    StartCoordinator,
    StoreGone,
    WeightsLoadResult,
)
from trinity_es.actors.orphaned import StoreWatch
from trinity_es.actors.plugins import look_in
from trinity_es.actors.reports import clean_report
from trinity_es.actors.requests import Parcel, Reply, Request
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    LogRewound,
    LogUnavailable,
    TrinityError,
    error_to_dict,
)
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.checks.log_end import Memory
from trinity_es.events.store.database.leader_lock import LeaderLock
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads, patient
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.tables.read_models import projectors

__all__ = ["Coordinator"]

EXIT_FENCED, EXIT_CRASHED = 3, 4
"""Exit statuses, for the guardian's log."""
BEAT_SECONDS = 2.0
"""Interval between two heartbeats."""
STALL_CHECK_SECONDS = 5.0
"""Interval between two looks for stalls."""
LAST_WORDS_SECONDS = 0.5
"""Grace period for a fenced coordinator's last message."""
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

    session: LogSession | None = None
    hosts: HostFleet | None = None
    leader_lock: LeaderLock | None = None
    retired = False
    retiring_since = 0.0

    # --- start ------------------------------------------------------------------------------------------------------
    def on_StartCoordinator(self, message: StartCoordinator, sender: Any) -> None:
        config = self.config = message.config
        self.guardian, self.admin, self.alive = sender, message.admin, message.alive
        self.hosts_heard = message.hosts_heard
        self.open_log(config.system.log_dir, "coordinator")
        look_in(config.code_path, config.started_in)
        self.start_watch()
        self.beat()
        self.host = socket.gethostname()
        token = engine_token(read_key()) if config.auxiliary else ""
        self.models = OperatorModels(config.auxiliary, token)
        StoreWatch(config.store.url, lambda why: self.post(lambda: self.send(self.guardian, StoreGone(why))))
        place, self.certificate = place_of_head(config.hosts)
        self.session = LogSession(
            self, config.store, {"pid": os.getpid(), "host": self.host, "admin": message.admin, **place},
            queue_capacity=config.buffer.queue.capacity,
            memory=Memory.of(config.store.url, config.memory) if config.memory else None,
            known=message.known, told=message.told,
        )
        self.unwritten = Unwritten(self, self.session)
        self.session.open()

    def open_store(self) -> tuple[EventLog, PayloadStore]:
        """Open the log, which was made before, and the payloads. Raises what EventLog.open does."""
        url, durability = self.config.store.url, self.config.store.durability
        log = EventLog.open(url, durability=durability, projectors=projectors(), patience=READ_SECONDS)
        try:
            return log, open_payloads(url, durability=durability, patience=READ_SECONDS)
        except BaseException:
            log.close()
            raise

    def begin(self) -> None:
        """Take over a log that is this coordinator's: build what works on it, and go on with what is open."""
        config, session = self.config, self.opened()
        self.live, self.witnesses = session.live, session.witnesses
        pipeline = config.buffer.pipeline
        operators = [] if config.mode == "bench" else [operator.model_dump() for operator in pipeline.operators]
        payloads = patient(self.live.payloads, config.store.retry_for)
        self.pipeline = PipelineThread(operators, payloads, self.post, self.models.clients)
        outputs = build_outputs([output.model_dump() for output in pipeline.outputs], config.run_dir)
        self.outputs = Outputs(outputs, self.live, payloads, self.post)
        self.retention = Retention(config.store.retention, self.live, payloads, self.post, self.outputs.position)
        store = hashlib.sha256(config.store.url.encode()).hexdigest()[:12]
        life = f"{self.admin.get('pid')} {self.admin.get('started')}"
        self.handlers = Handlers(
            config, self.live, self.pipeline, self.retention, self.outputs, self, guardian=self.guardian,
            in_hand=RequestsInHand(Path(config.system.log_dir) / f"in-hand-{store}.json", life), end=session.end,
            releases=LeaseReleases(self.post), alive=self.alive, epoch=session.lease.epoch,
            trouble=lambda: session.trouble, refuses=lambda: session.failure is not None,
            hosts=lambda: self.hosts,
        )
        self.unwritten.router = self.handlers.router
        self.fleet = self.handlers.fleet
        if config.explorer.runner_state_report_interval > 0:
            self.handlers.runners.report(config.explorer.runner_state_report_interval, self.report_states)
        explorer, registry = config.explorer, self.fleet.registry
        self.stalls = Stalls(
            self.live, registry, explorer.stall_after, registry.clock, limit=explorer.max_timeout,
            sequential=explorer.concurrent_mode == "sequential",
        )
        self.every(min(STALL_CHECK_SECONDS, explorer.stall_after / 2), "stalls", self.stalls.check)
        self.take_hosts()
        self.recover()

    def take_hosts(self) -> None:
        """Begin to listen for other hosts, where the config says so."""
        settings = self.config.hosts
        if self.certificate is None:
            return
        self.leader_lock = LeaderLock(self.config.store.url)
        fleet = lambda: self.hosts if self.running else None  # noqa: E731
        end = listening(settings, self.certificate, self.post, fleet, self.folders)
        self.hosts = HostFleet(
            settings, self.fleet.registry, end, epoch=self.opened().lease.epoch,
            handle=self._handle, died=lambda death: self._handle(death, None),
            models={name: model.model_path for name, model in self.config.models.items()},
            heard=self.hosts_heard,
        )
        self.every(HOSTS_SECONDS, "hosts", self.hosts.look)

    def folders(self) -> list[str]:
        """Return the folders of the models and of the current weights, which hosts have to have too; in a thread."""
        weights = "" if self.live.weights.in_memory_only else self.live.weights.path
        return [path for path in (*(m.model_path for m in self.config.models.values()), weights) if path]

    def send(self, to: Any, message: Any) -> None:
        """Send to an actor here, or to a process of another host."""
        if isinstance(to, FarProcess):
            if self.hosts is not None:
                self.hosts.send(to, message)
        else:
            super().send(to, message)

    def recover(self) -> None:
        """Say in the log whose it is and what becomes of every open batch; then tell the guardian."""
        session = self.opened()
        started = ev.CoordinatorStarted(
            epoch=session.lease.epoch, pid=os.getpid(), host=self.host, version=VERSION,
            open_batches=list(self.live.batches),
        )
        self.live.record(ev.SystemConfigured(config=self.config.masked()), started)
        if session.lease.copied_from:
            self.log.warning("the log is a copy of %s: its open leases are left to that", session.lease.copied_from)
            self.handlers.leases.leave()
        self.handlers.batches.recover({**self.alive, **far_lives(self.live.hosts, self.live.lives)})
        session.go_on()
        self.live.then(self.recovered)

    def recovered(self) -> None:
        """Go on when what `recover` decided is in the log."""
        self.opened().begun = True
        self.retention.wake()
        self.outputs.wake()
        self.tell_guardian()
        if self.handlers.servers.enabled:
            self.handlers.servers.start_reading()
            self.every(LOOK_SECONDS, "servers", self.handlers.servers.look)
        if self.witnesses.unheard:
            self.after(HEAR_SECONDS, "unheard", self.witnesses.hear_no_more)

    def opened(self) -> LogSession:
        """Return the session, which there is from the first message on."""
        assert self.session is not None
        return self.session

    @property
    def running(self) -> bool:
        """Messages are taken now."""
        return self.session is not None and self.session.running

    def tell_guardian(self) -> None:
        """Say who coordinates. Runners then say again who they are, and send what was not acknowledged; the guardian
        knows them all, also those that came or died meanwhile."""
        session = self.opened()
        if session.opened:
            self.handlers.leases.begin()
        self.send(self.guardian, CoordinatorUp(self.myAddress, session.lease.epoch if session.opened else 0))

    # --- what the session of the log tells --------------------------------------------------------------------------
    def serve(self, again: bool) -> None:
        """Take messages from now on; `again`: as this coordinator did before the log could not be written."""
        self.after(0.0, "waiting", self.go_on_with_requests)
        for batch in self.live.batches.values():
            if batch.state is BatchLifecycleState.FINALIZING:  # its pipeline died with the last coordinator
                self.handlers.batches.start_pipeline(batch)
        if again:
            self.tell_guardian()
            self.handlers.batches.check_finalize([*self.live.batches])
            self.handlers.scheduler.check(self.live.batches)
        self.unwritten.go_on()

    def go_on_with_requests(self) -> None:
        """Take the requests that came while the live state was closed, and those that were undone."""
        self.opened().hand_over()
        self.handlers.router.do_again()

    def forget(self) -> None:
        """Forget what was known of the runners beyond the log."""
        self.fleet.forget()
        self.handlers.leases.forget()

    def waits(self, error: Exception) -> None:
        """Let clients find this coordinator, which tells them what it waits for."""
        self.send(self.guardian, CoordinatorWaits(self.myAddress))

    def refuse(self, error: Exception) -> None:
        """Tell who was held that the try failed."""
        self.unwritten.refuse(error)

    def stopped(self, error: LogRewound) -> None:
        """Tell everybody who waits, and be found by who asks later."""
        session = self.opened()
        if session.opened:
            self.handlers.router.give_up(error)
        if not session.begun:
            self.tell_guardian()

    def fenced(self, lease: Lease | None) -> None:
        """End. Where the other writer is of another system, this whole system has to."""
        owner = dict(lease.owner or {}) if lease is not None else {}
        if owner and (owner.get("host"), owner.get("admin")) != (self.host, self.admin):
            self.send(self.guardian, LeaseLost(f"pid {owner.get('pid')} on {owner.get('host')}"))
        self.after(LAST_WORDS_SECONDS, "end", lambda: os._exit(EXIT_FENCED))  # the message has to get out first

    # --- turns ------------------------------------------------------------------------------------------------------
    def after_message(self) -> None:
        """End a turn: give out what can run, hand everything to the writer."""
        if self.session is None:
            return
        if self.running:
            try:
                self.handlers.check()
                self.fleet.dispatcher.dispatch()
            except LogUnavailable as e:  # a large task could not be stored for its runner
                self.session.abandon_turn(e)
                return
            self.handlers.in_hand.let_go()
            self.handlers.routes.look()
            self.handlers.leases.look()
        self.session.end_turn()

    def crashed(self, error: BaseException) -> None:
        """End after a handler broke: memory may be ahead of the log; the next coordinator reads the log."""
        os._exit(EXIT_CRASHED)

    def beat(self) -> None:
        """Tell the guardian that this process lives."""
        self.after(BEAT_SECONDS, "beat", self.beat)
        session = self.session
        epoch, end, heard = 0, None, dict[str, float]()
        if session is not None and session.running and session.begun:
            epoch, end = session.lease.epoch, session.end()
            heard = self.hosts.heard() if self.hosts is not None else {}
        self.send(self.guardian, Heartbeat("coordinator", 0, os.getpid(), epoch=epoch, end=end, hosts_heard=heard))
        if session is not None:
            session.calm_down()

    def every(self, seconds: float, name: str, look: Callable[[], None]) -> None:
        """Call `look` now and then, while messages are taken."""
        self.after(seconds, name, lambda: self.every(seconds, name, look))
        if self.running:
            look()

    def report_states(self, table: str) -> None:
        """Into the text log: what the runners do."""
        self.log.info("runners:\n%s", table)

    # --- the end ----------------------------------------------------------------------------------------------------
    def on_Retire(self, message: Retire, sender: Any) -> None:
        """Write what is queued and give the lease back; batches that are open stay open."""
        self.retiring_since = self.retiring_since or self.now()
        busy = self.running and (
            self.outputs.busy() or self.handlers.leases.is_busy() or not self.pipeline.closed(self.close_problem)
        )
        if busy and self.now() - self.retiring_since < OUTPUT_SECONDS:
            self.after(0.05, "retire", lambda: self.on_Retire(message, sender))
            return
        if self.retired:
            return
        self.retired = True
        if self.session is None:
            self.closed()
            return
        self.after(CLOSE_SECONDS, "closed", self.closed)
        self.session.close(self.closed)

    def closed(self) -> None:
        """Say that the log is closed, or given up where its database does not answer."""
        self.cancel("closed")
        if self.hosts is not None:
            self.hosts.stop()
        if self.leader_lock is not None:
            self.leader_lock.stop()
        self.send(self.guardian, Retired())

    def close_problem(self, problem: str) -> None:
        """Into the text log: an operator could not be closed."""
        self.log.warning("%s", problem)

    # --- messages ---------------------------------------------------------------------------------------------------
    def accepts(self, message: Any) -> bool:
        """Take the start, the end and what clients ask at any time, all else while the live state is open."""
        return self.running or isinstance(message, StartCoordinator | Retire | Endpoints | Request)

    def admit(self, message: Any, by: str, act: Callable[[], None], *, anyway: bool = False) -> None:
        """Call `act` when whoever sent this is known to know nothing that the log has not, while messages are taken."""
        self.witnesses.admit(message.known, by, lambda: act() if self.running else None, anyway=anyway)

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

        def take() -> None:
            self.take(request, sender)

        if not self.running:
            take()
        elif isinstance(request.command, GetStatus):
            self.witnesses.admit(message.known, message.by, take, anyway=True)
        else:
            self.witnesses.after_runners(lambda: self.witnesses.admit(message.known, message.by, take))

    def take(self, request: CommandRequest[Any], sender: Any) -> None:
        """Take a request of a client that knows nothing which the log has not; while nothing is taken, tell it why, and
        where that passes leave it to ask again."""
        failure = self.opened().failure
        if self.running:
            self.handlers.router.take(request, sender)
        elif failure is not None:
            self.unwritten.take(request, sender, failure)

    def on_RunnerStatus(self, message: RunnerStatus, sender: Any) -> None:
        def take() -> None:
            self.fleet.on_status(clean_report(message), sender)
            self.witnesses.heard(message.name)

        self.admit(message, f"{message.name} (pid {message.pid} on {message.host})", take)

    def on_RunnerActivity(self, message: RunnerActivity, sender: Any) -> None:
        self.handlers.runners.on_activity(message)

    def on_RunnerDied(self, message: RunnerDied, sender: Any) -> None:
        self.fleet.on_death(clean_report(message))
        self.witnesses.heard(message.name)

    def on_Heartbeat(self, message: Heartbeat, sender: Any) -> None:
        self.fleet.on_heartbeat(message)

    def on_EndedRunners(self, message: EndedRunners, sender: Any) -> None:
        self.fleet.on_ended_runners(message)

    def on_GroupJoinResult(self, message: GroupJoinResult, sender: Any) -> None:
        self.fleet.weights.group.on_join_result(clean_report(message))

    def on_OutcomeReport(self, message: OutcomeReport, sender: Any) -> None:
        self.admit(message, message.name, lambda: self.fleet.with_results(message, self.fleet.on_outcomes))

    def on_LeaseReport(self, message: LeaseReport, sender: Any) -> None:
        self.admit(message, message.name, lambda: self.handlers.leases.on_report(message, sender))

    def on_AdaptersLoadResult(self, message: AdaptersLoadResult, sender: Any) -> None:
        self.fleet.adapters.on_load_result(message)

    def on_WeightsLoadResult(self, message: WeightsLoadResult, sender: Any) -> None:
        self.fleet.weights.on_load_result(clean_report(message))
