"""The handlers of commands on a real log, without actors: what is remembered of requests, what outlives a reload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.live_log import LiveLog
from tests.helpers.systems import scripted
from trinity_es.actors.commands import (
    AbortBatch,
    Command,
    CommandRequest,
    FinalizeBatch,
    GetRunnerStates,
    GetStatus,
    SubmitBatch,
)
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob, PipelineThread
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.handlers import command_router
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, handler_row
from trinity_es.actors.coordinator.handlers.runner_commands import ANSWER_SECONDS
from trinity_es.actors.coordinator.handlers.wiring import Handlers
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand
from trinity_es.actors.messages import RunnerDied, RunnerStatus
from trinity_es.actors.requests import Reply, pack, unpack
from trinity_es.events import vocabulary as ev
from trinity_es.projections.runner import RunnerLife, RunnerState
from trinity_es.system.launch import launched_config


class Place(LiveLog):
    """All handlers, and the runners. A test fires the timers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = launched_config(scripted(folder))
        outputs = Outputs({}, self.live, self.payloads, lambda call: call())
        retention = Retention(None, self.live, self.payloads, lambda call: call())
        self.pipeline = PipelineThread([], self.payloads, lambda call: call())
        session: Any = SimpleNamespace(
            live=self.live, log_end=lambda: None, lease=SimpleNamespace(epoch=1), trouble=None, failure=None
        )
        self.handlers = Handlers(
            config, session, self.pipeline, retention, outputs, self, guardian="guardian", in_hand=RequestsInHand(),
            release=lambda leases, done: None,  # no test here takes a lease
        )
        self.fleet = self.handlers.fleet

    def ask(self, request: str, command: Command[Any]) -> None:
        self.handlers.router.take(CommandRequest(request, command), f"client of {request}")
        self.turn()

    def turn(self) -> None:
        self.handlers.answer_requests()
        super().turn()

    def submit(self, batch_id: int) -> None:
        tasks = pack([{"workflow": "sleep"}], self.live.payloads)
        self.ask(f"submit {batch_id}", SubmitBatch(
            batch_id=batch_id, batch_type="train", tasks=tasks, min_wait_num=None, cursor=None
        ))

    def replies(self, request: str) -> list[Reply]:
        return [m for _, m in self.sent if isinstance(m, Reply) and m.id == request]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.close()


def test_a_waiting_request_is_not_forgotten_under_later_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_router, "REMEMBERED_ANSWERS", 4)
    place.submit(1)
    place.ask("waits", FinalizeBatch(batch_id=1, batch_type="train", timeout=None))
    for number in range(20):
        place.ask(f"later {number}", GetStatus())
    assert "waits" in place.handlers.router._answers
    place.ask("waits", FinalizeBatch(batch_id=1, batch_type="train", timeout=None))  # the client asks again
    assert [w.request.id for w in place.handlers.batches.waiters[1]] == ["waits"], "it was taken for a new request"
    assert len(place.handlers.router._answers) == 4
    assert len(place.replies("later 19")) == 1


def test_a_finalize_whose_time_is_over_while_the_book_can_not_be_read_is_told_when_it_can(place: Place) -> None:
    place.submit(1)
    place.ask("waits", FinalizeBatch(batch_id=1, batch_type="train", timeout=5.0))
    place.live.batches = {}  # the database is away in the middle of `load`
    place.timers.pop("finalize:waits")()
    assert place.replies("waits") == []
    place.live.load()
    place.fleet.forget()
    place.timers.pop("finalize:waits")()
    place.turn()
    [reply] = place.replies("waits")
    assert reply.error["type"] == "FinalizeTimeout"
    assert "0 of 1 tasks" in reply.error["message"]


def test_runner_states_asked_before_a_reload_leave_out_who_was_forgotten(place: Place) -> None:
    place.fleet.on_status(RunnerStatus("runner-0", 1, "ready", 10, "here", "scripted", places=2), "address")
    place.turn()
    place.ask("states", GetRunnerStates(names=None))
    place.fleet.forget()
    assert ANSWER_SECONDS > 0
    [over] = [name for name in place.timers if name.startswith("states:")]
    place.timers.pop(over)()
    [reply] = place.replies("states")
    assert reply.error is None
    assert unpack(reply.value, place.live.payloads) == {}


@pytest.mark.parametrize("quarantined", [True, False])
def test_the_end_of_an_earlier_life_told_late_changes_nothing_for_the_next(place: Place, quarantined: bool) -> None:
    """The guardian's message and the new life's own come from two processes, in any order."""
    # as a new coordinator reads it
    state = RunnerState.QUARANTINED if quarantined else RunnerState.LOST
    place.live.lives["runner-0", 1] = RunnerLife(name="runner-0", incarnation=1, state=state)
    place.fleet.on_status(RunnerStatus("runner-0", 2, "ready", 10, "here", "scripted", places=2), "address")
    waiter, _ = place.fleet.weights.publish(1, "weights")
    place.fleet.on_death(RunnerDied("runner-0", 1, "a restart was asked for", asked=True))
    place.turn()
    assert place.fleet.registry.runners["runner-0"].state == "ready"
    assert waiter.waiting_on == {"runner-0"}
    assert [r.type for r in place.log.read(stream="runner/runner-0")] == ["RunnerStarted", "RunnerReady"]


def test_each_command_has_one_handler(place: Place) -> None:
    handlers = place.handlers
    half = CommandRouter(place.live, place, lambda: None, RequestsInHand())
    with pytest.raises(TypeError, match=r"no handler for .*SubmitBatch"):
        half.add_handlers(handlers.runners.handlers())
    with pytest.raises(TypeError, match="AbortBatch has two handlers"):
        handlers.router.add_handlers([handler_row(AbortBatch, handlers.batches.abort)])


def test_a_coordinator_that_finds_a_batch_in_the_pipeline_delivers_all_groups_asked_for(place: Place) -> None:
    place.submit(1)
    place.live.record_batch(1, [ev.BatchFinalizing(groups=2)])
    place.turn()
    place.live.load()  # as the next coordinator reads it, whose clients have not asked yet
    batch = place.live.batches[1]
    place.handlers.batches._on_pipeline_done(batch, PipelineDone({}, [], 1, 0, usable=1))
    place.turn()
    assert place.live.batches[1].missing == ev.GroupsMissing(usable=1, missing=1, lost={})



def test_a_pipeline_run_for_an_unwritten_turn_counts_for_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins while the last outcome is written; the coordinator reads the log again if that fails."""
    jobs: list[PipelineJob] = []
    monkeypatch.setattr(place.pipeline, "run", jobs.append)
    place.submit(1)
    place.ask("waits", FinalizeBatch(batch_id=1, batch_type="train", timeout=None))
    unit = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
    runner: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    last = [
        ev.TasksDispatched(**runner, units=[unit], model_version=0, timeout=0.0),
        ev.AttemptFailed(**runner, task=0, run_id_base=0, failed_runs=[0], attempt=1, kind="workflow", message="no",
                         retry=False, blamed=True),
    ]
    place.live.record_batch(1, last)
    place.handlers.answer_requests()
    assert len(jobs) == 1
    assert place.live.turn.follow_up_seconds > 0
    place.live.load()
    place.live.record_batch(1, last)
    place.turn()
    assert len(jobs) == 2
    jobs[0].done(PipelineDone({}, [], 7, 0, usable=0))
    place.turn()
    assert place.live.batches[1].state == "finalizing"
    jobs[1].done(PipelineDone({}, [], 0, 0, usable=0))
    place.turn()
    [finalized] = [r.event for r in place.log.read(stream="batch/1", types=["BatchFinalized"])]
    assert finalized.selected == 0
