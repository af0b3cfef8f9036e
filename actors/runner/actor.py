"""A runner: one inference engine, and the workflows that play on it. The actor's side.

It only passes things on: units, weights and endpoints to the engine's side (`engine_thread.py`, a thread of its own),
and what comes of them to the coordinator. A group of outcomes is kept until the coordinator says that it is in the log,
and is sent again to whichever coordinator comes next.
"""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from typing import Any

from trinity_es.actors.activity import runner_state
from trinity_es.actors.base import BaseActor
from trinity_es.actors.engines.devices import place
from trinity_es.actors.messages import (
    CancelUnits,
    CoordinatorUp,
    Endpoints,
    GroupJoinResult,
    Heartbeat,
    JoinGroup,
    LoadWeights,
    OutcomeReport,
    ProcessStarted,
    ReplaceRunner,
    Retire,
    RunnerState,
    RunnerStatus,
    RunUnits,
    StartRunner,
    TellState,
    UnitAssignment,
    UnitOutcome,
    WeightsLoadResult,
)
from trinity_es.actors.plugins import look_in
from trinity_es.actors.runner.engine_thread import EngineThread, Key
from trinity_es.actors.runner.reporting import failed
from trinity_es.events.store.known import Mark, told_less
from trinity_es.events.values import BatchId

__all__ = ["Runner"]

BEAT_SECONDS = 2.0
"""Interval between two heartbeats."""
ANNOUNCE_BEATS = 5
"""Interval between two RunnerUp messages, in beats; from them a coordinator sees what was lost on the way."""
RESEND_SECONDS = 5.0
"""How long outcomes may stay unacknowledged before they are sent again."""
HANG_SHARE = 0.8
"""Share of `system.hang_timeout` after which a workflow that lets nobody else on the loop is failed by its runner."""
GIVE_UP_SECONDS = 30.0
"""How long a runner that is to end waits for the coordinator to have the outcome of the unit that it ends for."""
REMEMBERED_UNITS = 20_000
"""Maximum number of units, whose outcome is in the log, that are not run again if they come again."""


class Runner(BaseActor):
    """See the module. Started by the guardian with StartRunner."""

    # --- messages ---------------------------------------------------------------------------------------------------
    def on_StartRunner(self, message: StartRunner, sender: Any) -> None:
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)  # engine and worker processes are ended with this one, as a group
        self.name, self.incarnation, self.config = message.name, message.incarnation, message.config
        self.model, self.how = message.model, self.config.model(message.model)
        size = self.how.engine.tensor_parallel_size
        os.environ.update(place(message.first_place, size, message.places))
        self.guardian = sender
        self.open_log(self.config.system.log_dir, self.name)
        os.umask(self.config.umask)
        self.start_watch()
        look_in(*self.config.code_path)
        self.coordinator: Any = None
        self.epoch = 0
        self.state, self.reason = "started", ""
        self.load_seconds = 0.0
        self.unacked: dict[int, OutcomeReport] = {}
        self.sent: dict[int, float] = {}
        self.number = 0
        self.settled: OrderedDict[tuple[Key, int], None] = OrderedDict()
        self.loading: int | None = None
        self.known: Mark | None = None
        self.beats = 0
        self.answered = self.beaten = self.now()
        self.attempts: dict[Key, int] = {}
        self.items: dict[Key, UnitAssignment] = {}
        self.given_up: int | None = None
        self.engine_side = EngineThread(self, self.name, self.model, self.how, self.config, self.log)
        self.send(self.guardian, ProcessStarted(self.name, self.incarnation, os.getpid()))
        self.engine_side.start()
        self.beat()

    def on_CoordinatorUp(self, message: CoordinatorUp, sender: Any) -> None:
        """Meet a coordinator to report to: tell it who this is and what it has, and all that was never acknowledged."""
        self.coordinator, self.epoch = message.coordinator, message.epoch
        self.announce()
        for number, group in self.unacked.items():
            self.sent[number] = self.now()
            self.send(self.coordinator, group)

    def beat(self) -> None:
        """Tell that this process lives and whether its engine's loop does; send again what may have been lost."""
        self.after(BEAT_SECONDS, "beat", self.beat)
        now = self.now()
        if now - self.beaten > 3 * BEAT_SECONDS:  # this process itself stood still, and its engine's loop with it
            self.answered = now
        self.beaten = now

        def answered() -> None:
            self.answered = now

        self.engine_side.ping(lambda: self.post(answered))
        silent = max(0.0, now - self.answered - BEAT_SECONDS)
        if silent > HANG_SHARE * self.config.system.hang_timeout and (key := self.engine_side.blocking()):
            self.give_up(key, f"its workflow blocked the engine's loop for {silent:.0f} s: await, or use a thread")
        if self.given_up is not None:  # it ends for it already: the guardian is not to end it first, and blame them all
            silent = 0.0
        alive = Heartbeat(self.name, self.incarnation, silent, self.epoch, self.engine_side.trouble)
        for to in (self.coordinator, self.guardian):
            if to is not None:
                self.send(to, alive)
        self.beats += 1
        if self.coordinator is None:
            return
        if self.beats % ANNOUNCE_BEATS == 0:
            self.announce()
        for number, group in self.unacked.items():
            if now - self.sent[number] > RESEND_SECONDS:
                self.sent[number] = now
                self.send(self.coordinator, group)

    def announce(self) -> None:
        running: dict[tuple[BatchId, str], list[tuple[int, int, int]]] = {}
        for (batch_id, submission, task, base), attempt in self.attempts.items():
            running.setdefault((batch_id, submission), []).append((task, base, attempt))
        up = RunnerStatus(
            name=self.name,
            incarnation=self.incarnation,
            state=self.state,
            pid=os.getpid(),
            host=socket.gethostname(),
            engine=self.how.engine_type,
            places=self.engine_side.places,
            model_version=self.engine_side.model_version,
            load_seconds=self.load_seconds,
            reason=self.reason,
            loading=self.loading,
            running=tuple((*key, tuple(units)) for key, units in running.items()),
            endpoint=self.engine_side.url if self.state == "ready" else "",
            model=self.model,
            engine_version=self.engine_side.engine_version if self.state == "ready" else "",
            known=self.known,
        )
        for to in (self.coordinator, self.guardian):
            if to is not None:
                self.send(to, up)

    def on_RunUnits(self, message: RunUnits, sender: Any) -> None:
        if message.incarnation != self.incarnation or not self.trusts(message.end):
            return
        for number in message.acks:
            self.sent.pop(number, None)
            group = self.unacked.pop(number, None)
            for outcome in group.outcomes if group is not None else []:
                self.settled[_key(outcome), outcome.unit.attempt] = None
                if self.attempts.get(_key(outcome)) == outcome.unit.attempt:
                    del self.attempts[_key(outcome)]
                    self.items.pop(_key(outcome), None)
            if number == self.given_up:
                self.after(0.0, "give up", self.end)
        while len(self.settled) > REMEMBERED_UNITS:
            self.settled.popitem(last=False)
        if self.state != "ready" or self.given_up is not None:
            return  # nothing could run it; what this runner says when it is ready brings it again
        for item in message.items:
            key = (item.batch_id, item.submission, item.unit.task, item.unit.run_id_base)
            if self.attempts.get(key, 0) >= item.unit.attempt or (key, item.unit.attempt) in self.settled:
                continue  # it was sent twice
            self.attempts[key] = item.unit.attempt
            self.items[key] = item
            self.engine_side.begin(key, item)

    def trusts(self, end: Mark | None) -> bool:
        """Say whether who tells this end of the log knows what this runner knows; where not, tell it what that is."""
        wrong = told_less(self.known, end)
        if wrong is not None:  # or it was under way while another took its place
            self.log.error("refused what a coordinator sent: %s", wrong)
            self.announce()
            return False
        self.known = end or self.known
        return True

    def on_CancelUnits(self, message: CancelUnits, sender: Any) -> None:
        if message.incarnation == self.incarnation:
            for task, base in message.units:
                key = (message.batch_id, message.submission, task, base)
                self.attempts.pop(key, None)
                self.items.pop(key, None)
                self.engine_side.stop_unit(key)

    def on_Endpoints(self, message: Endpoints, sender: Any) -> None:
        self.engine_side.update_auxiliary(message.models)

    def on_TellState(self, message: TellState, sender: Any) -> None:
        if message.incarnation != self.incarnation:
            return
        state = runner_state(
            self.engine_side.played,
            runner=self.name,
            incarnation=self.incarnation,
            model=self.model,
            state=self.state,
            model_version=self.engine_side.model_version,
            units=len(self.attempts),
        )
        self.send(sender, RunnerState(self.name, self.incarnation, state))

    def on_LoadWeights(self, message: LoadWeights, sender: Any) -> None:
        if message.incarnation == self.incarnation and self.loading != message.version:  # else it was sent twice
            self.loading = message.version
            self.engine_side.load_weights(message)

    def on_JoinGroup(self, message: JoinGroup, sender: Any) -> None:
        if message.incarnation == self.incarnation:
            self.engine_side.join_group(message)

    def on_Retire(self, message: Retire, sender: Any) -> None:
        def retired() -> None:
            self.state = "retired"
            self.announce()

        self.engine_side.stop(retired)

    # --- what the engine's side tells -------------------------------------------------------------------------------
    def become(self, state: str, reason: str, seconds: float) -> None:
        if self.state == "retired":
            return  # it was told to stop while its engine loaded
        self.state, self.reason, self.load_seconds = state, reason, seconds
        self.announce()

    def report(self, outcomes: list[UnitOutcome]) -> None:
        """Tell the coordinator of a group that is safe in the payload store."""
        self.number += 1
        group = OutcomeReport(self.name, self.incarnation, self.number, outcomes, self.known)
        self.unacked[self.number], self.sent[self.number] = group, self.now()
        self.tell(group)

    def give_up(self, key: Key, reason: str) -> None:
        """Fail a unit that can't be ended, and end this life for it: the others in it are attempted again, unblamed."""
        item = self.items.get(key)
        if self.given_up is not None or item is None or self.state != "ready":
            return
        self.log.error("unit %s is given up, and this process with it: %s", key, reason)
        self.report([failed(item, "workflow", reason)])
        self.given_up, self.ended_for = self.number, reason
        self.after(GIVE_UP_SECONDS, "give up", self.end)

    def end(self) -> None:
        """Ask for another life in this slot, at once and for no fault of what is in this one, until it is given."""
        self.after(RESEND_SECONDS, "give up", self.end)
        self.send(self.guardian, ReplaceRunner(self.name, self.incarnation, self.ended_for))

    def weights_done(self, version: int, seconds: float, error: str | None) -> None:
        """Tell that a version was loaded, or not."""
        if self.loading == version:
            self.loading = None
        self.tell(WeightsLoadResult(self.name, self.incarnation, version, seconds, error))

    def group_joined(self, id: str, error: str | None) -> None:
        """Tell that the engine is in the trainer's group, or could not join."""
        self.tell(GroupJoinResult(self.name, self.incarnation, id, error))

    def tell(self, message: Any) -> None:
        """Tell the coordinator, if there is one."""
        if self.coordinator is not None:
            self.send(self.coordinator, message)


def _key(outcome: UnitOutcome) -> Key:
    return (outcome.batch_id, outcome.submission, outcome.unit.task, outcome.unit.run_id_base)
