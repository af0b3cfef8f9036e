"""The coordinator: the only writer of batch events.

It loads the open batches and other open state from the log, answers clients (`handlers/`), gives units to runners and
takes their outcomes (`fleet/`). One message is one turn: decide (pure, `decisions/`), fold at once (`live_state.py`),
hand the events to the log's writer, and act only when they are durable. The coordinator never blocks: threads write and
read the log (`log_reader.py`), and another thread runs the pipeline.

While the database is down or hangs, only those threads wait: the coordinator still sends heartbeats and shows the
trouble in `status`. While the log can't be written (a full disk, a deleted file), requests fail at once
(`requests_while_unwritable.py`) and writing is retried after pauses that grow. The first write that succeeds records
the trouble. If the log lost acknowledged events, the work ends and every caller gets an error.

The coordinator may die at any moment. Acknowledged results are in the log, runners keep outcomes until they are
acknowledged, and clients repeat a request under the same id. The next coordinator takes the lease, which fences this
one."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_es.actors import messages
from trinity_es.actors.base import BaseActor
from trinity_es.actors.commands import CommandRequest, GetStatus, decode
from trinity_es.actors.commands.fields import is_request_id
from trinity_es.actors.coordinator.delivery.operator_models import OperatorModels
from trinity_es.actors.coordinator.delivery.outputs import Outputs, build_outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.batch_stalls import StallDetector
from trinity_es.actors.coordinator.fleet.external_servers import LOOK_SECONDS
from trinity_es.actors.coordinator.fleet.host_fleet import LOOK_SECONDS as HOSTS_SECONDS
from trinity_es.actors.coordinator.fleet.host_fleet import FarProcess, HostFleet, far_runners, lease_fields, start_head
from trinity_es.actors.coordinator.fleet.lease_releases import release_in_thread
from trinity_es.actors.coordinator.handlers.wiring import Handlers
from trinity_es.actors.coordinator.log_session import LogSession
from trinity_es.actors.coordinator.requests_while_unwritable import HeldRequests
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand
from trinity_es.actors.plugin_lookup import add_import_folders
from trinity_es.actors.requests import Parcel, Reply, Request
from trinity_es.actors.storable_text import clean_report
from trinity_es.actors.system_end_checks import watch_store
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogRewound, LogUnavailable, TrinityError, error_to_dict
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.checks.log_end import MemoryFile
from trinity_es.events.store.database.leader_lock import LeaderLock
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads, patient
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.tables.read_models import projectors

__all__ = ["Coordinator"]

EXIT_FENCED, EXIT_CRASHED = 3, 4
"""Exit statuses, which the guardian logs."""
STALL_CHECK_SECONDS = 5.0
"""Interval between two checks for stalls."""
LAST_WORDS_SECONDS = 0.5
"""Grace period for a fenced coordinator's last message."""
READ_SECONDS = 2.0
"""How long one attempt to read retries after transient errors. The reader makes further attempts."""
CLOSE_SECONDS = 8.0
"""Maximum time to close the log at the end, since its database may not answer."""
OUTPUT_SECONDS = 3.0
"""Maximum time at the system's end for the outputs and for closing the operators; outputs write the rest next time."""
HEAR_SECONDS = 1.0
"""How long clients wait for silent runners, which may know more of the log than this coordinator."""


class Coordinator(BaseActor):
    """Actor that the guardian starts with StartCoordinator."""

    session: LogSession | None = None
    hosts: HostFleet | None = None
    leader_lock: LeaderLock | None = None
    retired = False
    retiring_since = 0.0

    # --- start ------------------------------------------------------------------------------------------------------
    def on_StartCoordinator(self, message: messages.StartCoordinator, sender: Any) -> None:
        """Have threads open the log. The session calls `begin` when it is open."""
        config = self.config = message.config
        self.guardian, self.admin = sender, message.admin
        self.alive, self.hosts_heard = message.alive, message.hosts_heard
        self.open_log(config.system.log_dir, "coordinator")
        add_import_folders(config.code_path, config.started_in)
        self.start_watch()
        self.beat()
        self.host = socket.gethostname()
        token = engine_token(read_key()) if config.auxiliary else ""
        self.operator_models = OperatorModels(config.auxiliary, token)
        watch_store(config.store.url, lambda why: self.post(lambda: self.send(self.guardian, messages.StoreGone(why))))
        place, self.certificate = lease_fields(config.hosts)
        self.session = LogSession(
            self, config.store, {"pid": os.getpid(), "host": self.host, "admin": message.admin, **place},
            queue_capacity=config.buffer.queue.capacity,
            memory=MemoryFile.of(config.store.url, config.memory) if config.memory else None,
            claims=message.known, unheard_runners=message.informed_runners,
        )
        self.held_requests = HeldRequests(self, self.session)
        self.session.open()

    def open_store(self) -> tuple[EventLog, PayloadStore]:
        """Open the existing log and the payload store. Raises the errors of EventLog.open."""
        url, durability = self.config.store.url, self.config.store.durability
        log = EventLog.open(url, durability=durability, projectors=projectors(), patience=READ_SECONDS)
        try:
            return log, open_payloads(url, durability=durability, patience=READ_SECONDS)
        except BaseException:
            log.close()
            raise

    def begin(self) -> None:
        """Build the parts that work on the live state, then take over the open batches and leases."""
        config, session = self.config, self.require_session()
        self.live, self.mark_checks = session.live, session.mark_checks
        pipeline = config.buffer.pipeline
        operators = [] if config.mode == "bench" else [operator.model_dump() for operator in pipeline.operators]
        payloads = patient(self.live.payloads, config.store.retry_for)
        self.pipeline = PipelineThread(operators, payloads, self.post, self.operator_models.clients)
        outputs = build_outputs([output.model_dump() for output in pipeline.outputs], config.run_dir)
        self.outputs = Outputs(outputs, self.live, payloads, self.post)
        self.retention = Retention(config.store.retention, self.live, payloads, self.post, self.outputs.position)
        store_digest = hashlib.sha256(config.store.url.encode()).hexdigest()[:12]
        in_hand_file = Path(config.system.log_dir) / f"in-hand-{store_digest}.json"
        system_start = f"{self.admin.get('pid')} {self.admin.get('started')}"
        self.handlers = Handlers(
            config, session, self.pipeline, self.retention, self.outputs, self, guardian=self.guardian,
            in_hand=RequestsInHand(in_hand_file, system_start),
            release=functools.partial(release_in_thread, self.post), alive=self.alive, hosts=lambda: self.hosts,
        )
        self.held_requests.router = self.handlers.router
        self.fleet = self.handlers.fleet
        if config.explorer.runner_state_report_interval > 0:
            write = functools.partial(self.log.info, "runners:\n%s")
            self.handlers.runners.report(config.explorer.runner_state_report_interval, write)
        explorer = config.explorer
        self.stalls = StallDetector(
            self.fleet.registry, explorer.stall_after, attempt_timeout=explorer.max_timeout,
            sequential=explorer.concurrent_mode == "sequential",
        )
        self.every(min(STALL_CHECK_SECONDS, explorer.stall_after / 2), "stalls", self.stalls.check)
        self.listen_for_hosts()
        self.recover()

    def listen_for_hosts(self) -> None:
        settings = self.config.hosts
        if self.certificate is None:
            return
        self.leader_lock = LeaderLock(self.config.store.url)

        def shared_folders() -> list[str]:  # called in a thread
            weights = "" if self.live.weights.in_memory_only else self.live.weights.path
            return [path for path in (*(m.model_path for m in self.config.models.values()), weights) if path]

        hosts_while_running = lambda: self.hosts if self.running else None  # noqa: E731
        listener = start_head(settings, self.certificate, self.post, hosts_while_running, shared_folders)
        self.hosts = HostFleet(
            settings, self.fleet.registry, listener, epoch=self.require_session().lease.epoch,
            handle=self._handle, end_runner=lambda death: self._handle(death, None),
            models={name: model.model_path for name, model in self.config.models.items()},
            heard_at=self.hosts_heard,
        )
        self.every(HOSTS_SECONDS, "hosts", self.hosts.check_connections)

    def send(self, to: Any, message: Any) -> None:
        """Send to an actor on this host, or to a process on another host."""
        if isinstance(to, FarProcess):
            if self.hosts is not None:
                self.hosts.send(to, message)
        else:
            super().send(to, message)

    def recover(self) -> None:
        """Record the new coordinator and its decision for each open batch, then notify the guardian."""
        session = self.require_session()
        started = ev.CoordinatorStarted(
            epoch=session.lease.epoch, pid=os.getpid(), host=self.host, version=VERSION,
            open_batches=list(self.live.batches),
        )
        self.live.record(ev.SystemConfigured(config=self.config.masked()), started)
        if session.lease.copied_from:
            self.log.warning("the log is a copy of %s, which keeps its open leases", session.lease.copied_from)
            self.handlers.leases.give_up_all()
        alive = {**self.alive, **far_runners(self.live.hosts, self.live.lives)}
        self.handlers.batches.recover(alive)
        self.handlers.journals.begin(alive)
        session.start_writer()
        self.live.when_durable(self.on_recovered)

    def on_recovered(self) -> None:
        """Begin to work. The events of `recover` are durable now."""
        self.require_session().start_is_durable = True
        self.retention.wake()
        self.outputs.wake()
        self.announce()
        if self.handlers.servers.enabled:
            self.handlers.servers.start_reading()
            self.every(LOOK_SECONDS, "servers", self.handlers.servers.update)
        if self.mark_checks.unheard_runners:
            self.after(HEAR_SECONDS, "unheard", self.mark_checks.stop_waiting_for_runners)

    def require_session(self) -> LogSession:
        """Return the session, which exists from the first message on."""
        assert self.session is not None
        return self.session

    @property
    def running(self) -> bool:
        """True while the log's session is open, so that messages are handled."""
        return self.session is not None and self.session.running

    def announce(self) -> None:
        """Have the guardian announce this coordinator to all runners. They then report their state, their leases and
        unacknowledged outcomes. The epoch is 0 if the log could not be opened."""
        session, epoch = self.require_session(), 0
        if session.has_live_state:
            self.handlers.leases.begin()
            epoch = session.lease.epoch
        self.send(self.guardian, messages.CoordinatorUp(self.myAddress, epoch))

    # --- calls of the session ---------------------------------------------------------------------------------------
    def serve(self, again: bool) -> None:
        """Handle messages from now on; `again` means that this coordinator did so before a write failed."""
        self.after(0.0, "waiting", self.go_on_with_requests)
        for batch in self.live.batches.values():
            if batch.state is BatchLifecycleState.FINALIZING:  # its pipeline ended with the previous coordinator
                self.handlers.batches.start_pipeline(batch)
        if again:
            self.announce()
            self.handlers.batches.finalize_if_ready([*self.live.batches])
            self.handlers.scheduler.answer_polls(self.live.batches)
            self.handlers.journals.read_lost(self.live.batches)
        self.held_requests.handle()

    def go_on_with_requests(self) -> None:
        """Go on with the requests whose reads ended while no messages were handled, and with undone requests."""
        self.require_session().deliver_held_results()
        self.handlers.router.handle_undone_again()

    def forget(self) -> None:
        """Drop all state about runners and leases that is not in the log, such as addresses."""
        self.fleet.forget()
        self.handlers.leases.forget()
        self.handlers.journals.forget()

    def announce_waiting(self) -> None:
        """Have the guardian send clients to this coordinator, which answers them why it can't start."""
        self.send(self.guardian, messages.CoordinatorWaits(self.myAddress))

    def refuse(self, error: Exception) -> None:
        """Answer the requests that wait for the log with the error of the failed attempt to write it."""
        self.held_requests.refuse(error)

    def on_rewound(self, error: LogRewound) -> None:
        """Answer every waiting client with the error. Later clients get it too, so announce this coordinator."""
        session = self.require_session()
        if session.has_live_state:
            self.handlers.router.give_up(error)
        if not session.start_is_durable:
            self.announce()

    def on_fenced(self, lease: Lease | None) -> None:
        """End this coordinator. If the other writer belongs to another system, end this whole system."""
        owner = dict(lease.owner or {}) if lease is not None else {}
        if owner and (owner.get("host"), owner.get("admin")) != (self.host, self.admin):
            self.send(self.guardian, messages.LeaseLost(f"pid {owner.get('pid')} on {owner.get('host')}"))
        self.after(LAST_WORDS_SECONDS, "end", lambda: os._exit(EXIT_FENCED))  # after the message is out

    # --- turns ------------------------------------------------------------------------------------------------------
    def after_message(self) -> None:
        """End a turn: dispatch what can run, and hand everything to the writer."""
        if self.session is None:
            return
        if self.running:
            try:
                self.handlers.answer_requests()
                self.fleet.dispatcher.dispatch()
            except LogUnavailable as e:  # a large task could not be stored for its runner
                self.session.abandon_turn(e)
                return
            self.handlers.in_hand.end_turn()
            self.handlers.routes.update()
            self.handlers.leases.record_orphans_of_turn()
        self.session.end_turn()

    def on_crash(self, error: BaseException) -> None:
        """Exit after a handler crashed, since memory may be ahead of the log."""
        os._exit(EXIT_CRASHED)

    def beat(self) -> None:
        self.after(self.config.system.beat_seconds, "beat", self.beat)
        session = self.session
        epoch, log_end, hosts_heard = 0, None, dict[str, float]()
        if session is not None and session.running and session.start_is_durable:
            epoch, log_end = session.lease.epoch, session.log_end()
            hosts_heard = self.hosts.last_heard() if self.hosts is not None else {}
        beat = messages.Heartbeat("coordinator", 0, os.getpid(), epoch=epoch, end=log_end, hosts_heard=hosts_heard)
        self.send(self.guardian, beat)
        if session is not None:
            session.reset_pauses_if_calm()

    def every(self, seconds: float, name: str, check: Callable[[], None]) -> None:
        """Call `check` at this interval while messages are handled."""
        self.after(seconds, name, lambda: self.every(seconds, name, check))
        if self.running:
            check()

    # --- the end ----------------------------------------------------------------------------------------------------
    def on_Retire(self, message: messages.Retire, sender: Any) -> None:
        """Wait for outputs, leases and pipeline (OUTPUT_SECONDS at most), then close the session; batches stay open."""
        self.retiring_since = self.retiring_since or self.now()
        is_busy = self.running and (
            self.outputs.is_busy() or self.handlers.leases.is_busy()
            or not self.pipeline.close(lambda problem: self.log.warning("%s", problem))
        )
        if is_busy and self.now() - self.retiring_since < OUTPUT_SECONDS:
            self.after(0.05, "retire", lambda: self.on_Retire(message, sender))
            return
        if self.retired:
            return
        self.retired = True
        if self.session is None:
            self.end_retirement()
            return
        self.after(CLOSE_SECONDS, "closed", self.end_retirement)  # in case the database does not answer
        self.session.close(self.end_retirement)

    def end_retirement(self) -> None:
        """Disconnect the hosts, release the leader lock, and tell the guardian that this coordinator can end."""
        self.cancel_timer("closed")
        if self.hosts is not None:
            self.hosts.stop()
        if self.leader_lock is not None:
            self.leader_lock.stop()
        self.send(self.guardian, messages.Retired())

    # --- messages ---------------------------------------------------------------------------------------------------
    def accepts(self, message: Any) -> bool:
        """Accept the start, the end and requests at any time, and everything else while the live state is open."""
        early_messages = messages.StartCoordinator | messages.Retire | messages.Endpoints | Request
        return self.running or isinstance(message, early_messages)

    def admit(self, message: Any, sender_name: str, act: Callable[[], None]) -> None:
        """Check that the log holds the last event that the sender has seen; then call `act` if still running."""
        self.mark_checks.admit(message.known, sender_name, lambda: act() if self.running else None)

    def on_Endpoints(self, message: messages.Endpoints, sender: Any) -> None:
        self.operator_models.update(message.models)

    def on_Request(self, message: Request, sender: Any) -> None:
        """Handle or refuse a request, or leave it unanswered so that its client repeats it."""
        if not is_request_id(getattr(message, "id", None)):
            return  # without an id there is no reply
        try:
            request = CommandRequest(message.id, decode(message.command, message.args))
        except TrinityError as e:
            self.send(sender, Reply(message.id, Parcel(b"null"), error_to_dict(e)))
            return

        def handle() -> None:
            failure = self.require_session().failure
            if self.running:
                self.handlers.router.take(request, sender)
            elif failure is not None:
                self.held_requests.take(request, sender, failure)

        if not self.running:
            handle()
        elif isinstance(request.command, GetStatus):
            self.mark_checks.admit(message.known, message.by, handle, if_unreadable=True)
        else:
            self.mark_checks.after_runners(lambda: self.mark_checks.admit(message.known, message.by, handle))

    def on_RunnerStatus(self, message: messages.RunnerStatus, sender: Any) -> None:
        """Handle a runner's status once its mark is checked. Requests that wait for this runner's mark go on then."""

        def apply_report() -> None:
            self.fleet.on_status(clean_report(message), sender)
            self.mark_checks.note_runner(message.name)

        self.admit(message, f"{message.name} (pid {message.pid} on {message.host})", apply_report)

    def on_RunnerActivity(self, message: messages.RunnerActivity, sender: Any) -> None:
        self.handlers.runners.on_activity(message)

    def on_RunnerDied(self, message: messages.RunnerDied, sender: Any) -> None:
        self.fleet.on_death(clean_report(message))
        self.mark_checks.note_runner(message.name)

    def on_Heartbeat(self, message: messages.Heartbeat, sender: Any) -> None:
        self.fleet.on_heartbeat(message)

    def on_EndedRunners(self, message: messages.EndedRunners, sender: Any) -> None:
        self.fleet.on_ended_runners(message)

    def on_GroupJoinResult(self, message: messages.GroupJoinResult, sender: Any) -> None:
        self.fleet.weights.group.on_join_result(clean_report(message))

    def on_OutcomeReport(self, message: messages.OutcomeReport, sender: Any) -> None:
        self.admit(message, message.name, lambda: self.fleet.with_results(message, self.fleet.on_outcomes))

    def on_LeaseReport(self, message: messages.LeaseReport, sender: Any) -> None:
        self.admit(message, message.name, lambda: self.handlers.leases.on_report(message, sender))

    def on_AdaptersLoadResult(self, message: messages.AdaptersLoadResult, sender: Any) -> None:
        self.fleet.adapters.on_load_result(message)

    def on_WeightsLoadResult(self, message: messages.WeightsLoadResult, sender: Any) -> None:
        self.fleet.weights.on_load_result(clean_report(message))
