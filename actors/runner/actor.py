"""Actor of a runner, which has one inference engine and the workflows that call it.

The actor only forwards. It hands units (runs of one task), weights and endpoints to the engine's thread
(`engine_thread.py`), and sends outcomes to the coordinator. It keeps each group of outcomes until a coordinator
confirms that the log has it.
"""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType
from typing import Any

from trinity_es.actors import messages
from trinity_es.actors.base import BaseActor
from trinity_es.actors.engines.devices import device_environment
from trinity_es.actors.plugin_lookup import add_import_folders
from trinity_es.actors.runner.adapters import AdaptersLoaded
from trinity_es.actors.runner.engine_thread import EngineThread
from trinity_es.actors.runner.lease_reports import LeaseReports
from trinity_es.actors.runner.outbox import Key, Outbox, key_of
from trinity_es.actors.runner.unit_reports import failed_outcome
from trinity_es.actors.runner_activity import runner_state
from trinity_es.actors.serving.http_server import make_app, make_server
from trinity_es.events.store.checks.log_end import Mark, lost_between
from trinity_es.events.values import BatchId

__all__ = ["Runner", "import_ahead"]

ANNOUNCE_BEATS = 3
"""Interval between RunnerStatus messages, in heartbeats; they show the coordinator which messages were lost."""
ASK_SECONDS = 5.0
"""Interval between requests to the guardian to replace this runner."""
HANG_SHARE = 0.8
"""Share of `system.hang_timeout` after which a runner fails a workflow that blocks the engine's event loop."""
LEASE_SECONDS = 0.1
"""Delay of lease changes that no run waits for, so that one message carries several."""
GIVE_UP_SECONDS = 30.0
"""How long a runner that gave up a unit waits for confirmation of that outcome before it asks to be replaced."""


def import_ahead() -> None:
    """Import modules of the HTTP endpoint in the process from which runners are forked, so that they share memory."""
    make_server(make_app([]))


class Runner(BaseActor):
    """Actor of a runner, which the guardian sets up by a StartRunner message."""

    lease_awaited = False
    """True if a run waits until the log has its new lease, and that change was not sent yet."""

    # --- messages ---------------------------------------------------------------------------------------------------
    def accepts(self, message: Any) -> bool:
        """Return False for a message to an earlier runner, whose actor address this one may have got."""
        return not hasattr(self, "incarnation") or getattr(message, "incarnation", self.incarnation) == self.incarnation

    def on_StartRunner(self, message: messages.StartRunner, sender: Any) -> None:
        """Set this process up as the runner that the message describes, and start its engine."""
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)  # engine and worker processes are ended with this one, as a group
        self.name, self.incarnation, self.config = message.name, message.incarnation, message.config
        self.model, self.model_config = message.model, self.config.models[message.model]
        engine = self.config.engine_config(message.model)
        if message.url:
            engine = replace(engine, options={**engine.options, "url": message.url, "weights": message.weights})
        size = engine.tensor_parallel_size
        # A process that the engine spawns imports its parent's main module. Ours is the launcher's, whose imports would
        # cost each of vLLM's processes a second and memory for nothing.
        sys.modules["__main__"] = ModuleType("__main__")
        os.environ.update(device_environment(message.first_place, size, message.places))
        self.guardian = sender
        self.open_log(self.config.system.log_dir, self.name)
        os.umask(self.config.umask)
        self.start_watch()
        add_import_folders(self.config.code_path, self.config.started_in)
        self.coordinator: Any = None
        self.epoch = 0
        self.state, self.reason = "started", ""
        self.load_seconds = 0.0
        self.outbox = Outbox(self.name, self.incarnation)
        self.leases = LeaseReports(self.name, self.incarnation)
        self.loading_version: int | None = None
        self.known: Mark | None = None
        """End of the log, as a coordinator last reported it."""
        self.beat_count = 0
        self.loop_answered_at = self.last_beat_at = self.now()
        self.units: dict[Key, messages.UnitAssignment] = {}
        """Units that run here, or whose outcomes are not confirmed."""
        self.final_report: int | None = None
        """Number of the outcome group that reports a given-up unit, which ends this runner; None if there is none."""
        self.engine_thread = EngineThread(self, self.name, self.model, engine, self.config, self.log)
        self.beat()
        self.engine_thread.start()

    def on_crash(self, error: BaseException) -> None:
        """Report to the guardian a failure before the engine's thread existed, since no heartbeat would report it."""
        if not hasattr(self, "engine_thread"):
            self.send(self.guardian, messages.RunnerStatus(
                self.name, self.incarnation, "failed", os.getpid(), socket.gethostname(), self.model_config.engine_type,
                model=self.model, reason=f"{type(error).__name__}: {error}",
            ))

    def on_CoordinatorUp(self, message: messages.CoordinatorUp, sender: Any) -> None:
        """Report this runner's state and units to a new coordinator, and send it all unconfirmed outcomes."""
        self.coordinator, self.epoch = message.coordinator, message.epoch
        self.announce()
        self.send_due(resend_all=True)

    def send_due(self, *, resend_all: bool = False) -> None:
        """Send groups again that are unconfirmed for long, or with `resend_all` all unconfirmed ones."""
        now = self.now()
        for group in (*self.leases.due(now, resend_all=resend_all), *self.outbox.due(now, resend_all=resend_all)):
            self.tell(group)

    def beat(self) -> None:
        """Send a heartbeat and unconfirmed reports; give up a unit (runs of a task) that blocks the engine's loop."""
        interval = self.config.system.beat_seconds
        self.after(interval, "beat", self.beat)
        now, last_beat_at = self.now(), self.last_beat_at
        if now - last_beat_at > 3 * interval:  # this process itself stood still, and its engine's loop with it
            self.loop_answered_at = now
        self.last_beat_at = now

        def note_answer() -> None:  # runs in the engine's thread, and only sets a number
            self.loop_answered_at = now

        self.engine_thread.ping(note_answer)
        silence = 0.0
        if self.loop_answered_at < last_beat_at:
            silence = max(0.0, now - self.loop_answered_at - interval)
        if silence > HANG_SHARE * self.config.system.hang_timeout:
            key = self.engine_thread.loop.current_unit()
            if key is not None:
                self.give_up(key, f"its workflow blocked the engine's loop for {silence:.0f} s: await, or use a thread")
        if self.final_report is not None:  # if the guardian ended this runner, all its units would get a strike
            silence = 0.0
        trouble, waits_for = self.engine_thread.reporter.trouble, self.engine_thread.waits_for
        heartbeat = messages.Heartbeat(
            self.name, self.incarnation, os.getpid(), silence, self.epoch, trouble, waits_for=waits_for,
            runs_wait=self.engine_thread.runs_wait,
        )
        self.tell(heartbeat)
        self.send(self.guardian, heartbeat)
        self.beat_count += 1
        if self.coordinator is None:
            return
        if self.beat_count % ANNOUNCE_BEATS == 0:
            self.announce()
        self.send_due()

    def announce(self) -> None:
        """Send this runner's state and units to the coordinator and the guardian, as a RunnerStatus."""
        running: dict[tuple[BatchId, str], list[tuple[int, int, int]]] = {}
        for (batch_id, submission, task, first_run), item in self.units.items():
            running.setdefault((batch_id, submission), []).append((task, first_run, item.unit.attempt))
        places = self.engine_thread.places
        status = messages.RunnerStatus(
            name=self.name, incarnation=self.incarnation, state=self.state, pid=os.getpid(), host=socket.gethostname(),
            engine=self.model_config.engine_type, places=places.count,
            model_version=self.engine_thread.model_version, load_seconds=self.load_seconds, reason=self.reason,
            loading=self.loading_version, adapters=self.engine_thread.adapters,
            running=tuple((*key, tuple(units)) for key, units in running.items()),
            endpoint=self.engine_thread.url if self.state == "ready" else "",
            model=self.model, engine_version=self.engine_thread.engine_version if self.state == "ready" else "",
            known=self.known,
            kv_share=places.kv_share, waiting=places.waiting,
        )
        self.tell(status)
        self.send(self.guardian, status)

    def on_RunUnits(self, message: messages.RunUnits, sender: Any) -> None:
        """Drop the outcomes that the message confirms, and start its units (runs of one task each) if not started."""
        if not self.accept_log_end(message.end):
            return
        settled = self.outbox.acknowledge(message.acks)
        if settled:
            lost = [o for o in settled if any(kind == "infra" for _, kind, _ in o.failures)]
            self.engine_thread.free_journals([key_of(o) for o in settled if o not in lost], [key_of(o) for o in lost])
        for outcome in settled:
            key = key_of(outcome)
            if key in self.units and self.units[key].unit.attempt == outcome.unit.attempt:
                del self.units[key]
        if self.final_report in message.acks:
            self.after(0.0, "give up", self.request_replacement)
        if self.state != "ready" or self.final_report is not None:
            return  # it could not run them; the coordinator sends them again when a status lacks them
        for item in message.items:
            key = (item.batch_id, item.submission, item.unit.task, item.unit.run_id_base)
            current = self.units.get(key)
            if current is not None and current.unit.attempt >= item.unit.attempt:
                continue  # it was sent twice
            if self.outbox.has_settled(key, item.unit.attempt):
                continue
            self.units[key] = item
            self.engine_thread.begin(key, item)

    def accept_log_end(self, end: Mark | None) -> bool:
        """Note the end of the sender's log. If it lacks events known here, report this runner's state; return False."""
        loss = lost_between(self.known, end)
        if loss is not None:  # the log lost events, or the message comes from a coordinator that was replaced
            self.log.error("ignored a coordinator's message: %s", loss)
            self.announce()
            return False
        self.known = end or self.known
        return True

    def on_CancelUnits(self, message: messages.CancelUnits, sender: Any) -> None:
        for task, first_run in message.units:
            key = (message.batch_id, message.submission, task, first_run)
            self.units.pop(key, None)
            self.engine_thread.stop_unit(key)

    def on_Endpoints(self, message: messages.Endpoints, sender: Any) -> None:
        self.engine_thread.update_auxiliary(message.models)

    def on_QueryActivity(self, message: messages.QueryActivity, sender: Any) -> None:
        state = runner_state(
            self.engine_thread.activity, runner=self.name, incarnation=self.incarnation, model=self.model,
            state=self.state, model_version=self.engine_thread.model_version, units=len(self.units),
        )
        self.send(sender, messages.RunnerActivity(self.name, self.incarnation, state))

    def on_LoadWeights(self, message: messages.LoadWeights, sender: Any) -> None:
        if self.loading_version != message.version:  # otherwise the order came twice
            self.loading_version = message.version
            self.engine_thread.load_weights(message)

    def on_LoadAdapters(self, message: messages.LoadAdapters, sender: Any) -> None:
        self.engine_thread.load_adapters(message)

    def on_JoinGroup(self, message: messages.JoinGroup, sender: Any) -> None:
        self.engine_thread.join_group(message)

    def on_Retire(self, message: messages.Retire, sender: Any) -> None:
        """Stop the engine and report it; the guardian then ends this process."""
        def retired() -> None:
            self.state = "retired"
            self.announce()

        self.engine_thread.stop(retired)

    # --- calls from the engine's thread -----------------------------------------------------------------------------
    def become(self, state: str, reason: str, seconds: float) -> None:
        """Set this runner's state and report it. `seconds`: how long the engine took to load."""
        if self.state == "retired":
            return  # it got the order to stop while its engine loaded
        self.state, self.reason, self.load_seconds = state, reason, seconds
        self.announce()

    def report(self, outcomes: list[messages.UnitOutcome]) -> None:
        """Send the coordinator outcomes whose payloads are stored, after all lease changes that were not sent yet."""
        self.send_leases()
        self.tell(self.outbox.put(outcomes, self.known, self.now()))

    def lease_changed(self, change: messages.LeaseChange, when_recorded: Future[Any]) -> None:
        """Send the coordinator a lease change: at once if a run waits for it, otherwise soon."""
        self.leases.put(change, when_recorded)
        if change.what == "taken":
            self.lease_awaited = True
        elif not self.has_timer("leases"):
            self.after(LEASE_SECONDS, "leases", self.send_leases)

    def after_message(self) -> None:
        """Send all unsent lease changes if a run waits for one of them. Called after each message."""
        if self.lease_awaited:
            self.send_leases()

    def send_leases(self) -> None:
        self.lease_awaited = False
        self.cancel_timer("leases")
        for group in self.leases.next_groups(self.known, self.now()):
            self.tell(group)

    def on_LeaseReply(self, message: messages.LeaseReply, sender: Any) -> None:
        self.leases.acknowledge(message)

    def give_up(self, key: Key, reason: str) -> None:
        """Report a unit (runs of a task) that can't be stopped as failed, and end this runner; others get no strike."""
        item = self.units.get(key)
        if self.final_report is not None or item is None or self.state != "ready":
            return
        self.log.error("unit %s is given up, and this process with it: %s", key, reason)
        self.report([failed_outcome(item, "workflow", reason)])
        self.final_report, self.end_reason = self.outbox.number, reason
        self.after(GIVE_UP_SECONDS, "give up", self.request_replacement)

    def request_replacement(self) -> None:
        """Ask the guardian to replace this runner at once, and repeat the request until this process is ended."""
        self.after(ASK_SECONDS, "give up", self.request_replacement)
        self.send(self.guardian, messages.ReplaceRunner(self.name, self.incarnation, self.end_reason))

    def weights_done(self, version: int, seconds: float, error: str | None) -> None:
        if self.loading_version == version:
            self.loading_version = None
        self.tell(messages.WeightsLoadResult(self.name, self.incarnation, version, seconds, error))
        if error is None:
            self.announce()  # a runner that failed without weights may be ready now

    def adapters_done(self, number: int, done: AdaptersLoaded) -> None:
        self.tell(messages.AdaptersLoadResult(
            name=self.name, incarnation=self.incarnation, number=number, loaded=done.loaded, errors=done.errors,
            adapters=self.engine_thread.adapters,
        ))
        if done.loaded or done.errors:
            self.announce()  # a runner that failed without adapters may be ready now

    def group_joined(self, id: str, error: str | None) -> None:
        self.tell(messages.GroupJoinResult(self.name, self.incarnation, id, error))

    def tell(self, message: Any) -> None:
        """Send a message to the coordinator; drop it while no coordinator is known."""
        if self.coordinator is not None:
            self.send(self.coordinator, message)
