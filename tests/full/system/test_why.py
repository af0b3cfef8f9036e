"""`why`, `status` and stalls on real systems: whatever a batch waits for is named (promise 7)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import sample_log
from tests.helpers.handmade import cli
from tests.helpers.parity_rows import recorded
from tests.helpers.systems import StartSystem, kill_system, pid_of, play_batch, sleepers
from trinity_es import Task
from trinity_es.actors.commands import ResumeTrainer
from trinity_es.actors.coordinator.fleet.batch_stalls import StallDetector
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary import WeightsPublished
from trinity_es.projections.batch import BatchState, evolve, fold
from trinity_es.projections.host_states import Hosts
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.runner import RunnerLife, RunnerState
from trinity_es.projections.servers import Server
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.why.answer import Why
from trinity_es.testing import ManualClock, SleepWorkflow, Workflow, wait_until


class BlockingWorkflow(Workflow):
    """Async, and stands on the engine's loop all the same: the mistake that makes a runner silent."""

    is_async = True

    async def run_async(self) -> Any:
        time.sleep(60)


def sleep(seconds: float) -> Task:
    return Task(workflow=SleepWorkflow, workflow_args={"seconds": seconds})


def explained(client: RolloutClient, batch: BatchId) -> Why:
    live, system = client.facts()
    return client.log.why(batch, live=live, system=system)


def wait_for(client: RolloutClient, batch: BatchId, cause: str) -> Why:
    last: list[Why] = []

    def look() -> bool:
        last.append(explained(client, batch))
        return last[-1].cause == cause

    wait_until(look, f"{cause}")
    return last[-1]


def told(client: RolloutClient, *args: object) -> tuple[int, Any]:
    done = cli(*args, "--json", "--log", client.config.store.url)
    return done.exit_code, json.loads(done.stdout)


# --- what a batch waits for -----------------------------------------------------------------------------------------
async def test_a_slow_task_and_then_a_trainer(start_system: StartSystem) -> None:
    client = start_system()
    client.submit_batch(batch_id=1, tasks=[sleep(0.05)] * 7 + [sleep(4.0)], batch_type="train")
    why = wait_for(client, 1, "slow")
    [unit] = why.waiting
    assert (unit.task, unit.attempt, unit.runner, unit.incarnation) == (7, 1, "runner-0", 1)
    assert unit.limit == client.config.explorer.max_timeout
    assert unit.seen is not None
    assert "its engine's loop answers" in unit.text
    assert (why.settled, why.stalled) == (7, False)
    assert client.why(1).splitlines()[1].strip().startswith("task 7, run 0, attempt 1 of 3 on runner-0 #1 for ")
    assert told(client, "why", 1)[0] == 0
    assert told(client, "status")[0] == 0
    why = wait_for(client, 1, "finalize")
    assert "finalize_train_batch has not been called" in why.sentence
    client.finalize_train_batch(1)
    assert explained(client, 1).cause == "training"
    client.acknowledge(1, 5)
    assert "trained in step 5" in client.why(1)


def test_a_workflow_that_hangs_its_runner_is_told_from_a_slow_one(start_system: StartSystem) -> None:
    client = start_system(explorer={"stall_after": 2.0})
    client.submit_batch(batch_id=1, tasks=[Task(workflow=BlockingWorkflow)], batch_type="train")
    why = wait_for(client, 1, "hung")
    [unit] = why.waiting
    assert (unit.task, unit.runner) == (0, "runner-0")
    assert "hung: the engine's loop of its runner has not answered for 1" in unit.text
    assert why.stalled
    code, found = told(client, "why", 1)
    assert (code, found["cause"]) == (1, "hung")
    code, found = told(client, "status")
    assert code == 1
    assert any(p.startswith("runner-0 is hung") for p in found["problems"])
    stalled = "batch 1 is stalled: task 0, run 0, attempt 1 of 3 on runner-0 #1"
    assert any(p.startswith(stalled) for p in found["problems"])
    wait_until(lambda: len(recorded(client, 1, ev.StallDetected)) > 1, "the cause to change")
    first, then = recorded(client, 1, ev.StallDetected)
    assert "running" in first.waiting_on, "nothing moved"
    assert "hung" in then.waiting_on
    assert first.since == then.since
    os.kill(pid_of(client, "runner-0"), signal.SIGKILL)  # or the end of the system would wait for it


# --- a dead system --------------------------------------------------------------------------------------------------
def test_a_dead_system_is_explained_by_its_log_and_by_a_client_that_outlived_it(start_system: StartSystem) -> None:
    client = start_system(system={"keeper": False})
    client.submit_batch(batch_id=1, tasks=[sleep(0.0), sleep(60.0)], batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count == 1, "the first task")
    pid = pid_of(client, "coordinator")
    kill_system(client)
    with open_log(client.config.store.url) as log:
        why = log.why(1)
    assert [w.cause for w in why.waiting] == ["no_system", "interrupted"]
    assert f"coordinator pid {pid}" in why.sentence
    assert why.waiting[1].text == "task 1, run 0, attempt 1 of 3 was on runner-0 #1 when the system ended"
    assert "no actor system runs" in client.why(1)
    assert told(client, "why", 1)[0] == 1
    code, found = told(client, "status")
    assert (code, found["up"]) == (1, False)
    assert "`trinity-es up CONFIG`" in found["problems"][0]
    # Started again it goes on, and is explained as living.
    again = start_system()
    assert wait_for(again, 1, "slow").settled == 1


def test_a_coordinator_that_does_not_answer_is_said_and_its_log_read(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_es.client.system_client.FACTS_SECONDS", 2.0)
    client = start_system()
    client.submit_batch(batch_id=1, tasks=[sleep(20.0)], batch_type="train")
    wait_for(client, 1, "running")
    coordinator = psutil.Process(pid_of(client, "coordinator"))
    coordinator.suspend()  # the guardian finds out after heartbeat_timeout
    try:
        why = explained(client, 1)
        assert [(w.cause, w.task) for w in why.waiting] == [("no_answer", None), ("running", 0)]
        assert why.stalled
        assert told(client, "status")[0] == 1
    finally:
        coordinator.resume()


# --- stalls ---------------------------------------------------------------------------------------------------------
class Memory:
    """The coordinator's live state and runners, as far as stalls look at them."""

    def __init__(self, *events: ev.Event) -> None:
        self.batches: dict[BatchId, BatchState] = {}
        self.recorded: list[ev.StallDetected] = []
        ready = RunnerLife(name="runner-0", incarnation=1, pid=7, state=RunnerState.READY, places=4)
        self.servers: dict[str, Server] = {}
        self.hosts: Hosts = {}
        self.clock = ManualClock(1000.0)
        self.registry = RunnerRegistry(self, self, self.clock)  # type: ignore[arg-type]  # they have what is used here
        self.runners = self.registry.runners
        self.runners["runner-0"] = RunnerRecord(ready)
        self.stalls = StallDetector(self.registry, 10.0, attempt_timeout=60.0)
        state = fold(events)
        self.batches[state.batch_id] = state

    def record_batch(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        for event in events:
            self.batches[batch_id] = evolve(self.batches[batch_id], event)
            if isinstance(event, ev.StallDetected):
                self.recorded.append(event)

    def after(self, seconds: float) -> int:
        """Checks as the timer makes them, for so long; how many stalls are recorded by then."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.stalls.check()
        return len(self.recorded)


@pytest.fixture
def memory() -> Memory:
    units = [ev.Unit(task=task, run_id_base=0, runs=1, attempt=1) for task in range(2)]
    return Memory(
        ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1, 1], tasks=[{}, {}], max_attempts=3),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=units, model_version=0),
    )


def done(task: int) -> ev.TaskFinished:
    return ev.TaskFinished(
        task=task, run_id_base=0, attempt=1, runner="runner-0", incarnation=1,
        runs=[ev.RunResult(run=0, metrics={})], payload=None, model_version=0, model_version_end=0, seconds=1.0,
    )


def test_a_stall_names_the_server_that_a_runner_waits_for_and_that_there_is_none_any_more() -> None:
    memory = Memory(ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1], tasks=[{}], max_attempts=3))
    runner, url = memory.runners["runner-0"], "http://gpu-7:8000"
    runner.life.state, runner.waits_for = RunnerState.STARTED, f"{url} does not answer"
    memory.servers = {url: Server(url, "runner-0", wanted=True, by="list")}
    assert memory.after(15) == 1
    assert memory.recorded[0].waiting_on.endswith(f"runner-0 #1 waits to start its engine: {url} does not answer")
    runner.life.state, memory.registry.leaving = RunnerState.RETIRED, frozenset({"runner-0"})
    assert memory.after(15) == 2
    assert memory.recorded[1].waiting_on.endswith("there is no server any more")


def test_a_stall_comes_once_and_again_when_its_cause_changes(memory: Memory) -> None:
    memory.runners["runner-0"].silent = 0.0
    assert memory.after(10) == 0
    assert memory.after(30) == 1
    assert memory.recorded[0].since == 1001.0
    assert "running" in memory.recorded[0].waiting_on
    memory.runners["runner-0"].silent = 30.0
    assert memory.after(20) == 2
    assert "hung" in memory.recorded[1].waiting_on
    assert memory.recorded[1].since == 1001.0


def test_what_moved_and_stands_still_again_is_another_stall(memory: Memory) -> None:
    assert memory.after(15) == 1
    memory.record_batch(1, [done(1)])
    assert memory.after(10) == 1
    assert memory.after(5) == 2, "on the same unit as before, but it had moved"
    assert memory.recorded[1].waiting_on.startswith("task 0, run 0, attempt 1 of 3")
    assert memory.recorded[1].since == 1016.0
    lost = ev.AttemptFailed(
        task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1, kind="workflow",
        message="x", retry=True,
    )
    memory.record_batch(1, [lost])
    memory.runners["runner-0"].life.state = RunnerState.FAILED
    assert memory.after(9) == 2
    assert memory.after(5) == 3
    assert "attempt 2 of 3 without a runner: runner-0 #1 failed" in memory.recorded[2].waiting_on


def test_a_batch_that_ended_or_waits_for_its_trainer_never_stalls(memory: Memory) -> None:
    memory.record_batch(1, [done(0), done(1)])
    assert memory.after(50) == 0
    memory.record_batch(1, [ev.BatchFinalizing()])
    assert memory.after(50) == 1, "a pipeline that takes long is one"
    assert memory.recorded[0].waiting_on.startswith("it is finalizing")
    memory.batches.clear()
    assert memory.after(50) == 1


# --- long logs --------------------------------------------------------------------------------------------------------
pytestmark = pytest.mark.slow
EVENTS = 60_000
ASKED = 24


def publish(url: str, folder: Path) -> None:
    """Weights that are there: those that the made log names are not."""
    with EventLog.open(url, durability="process", projectors=projectors()) as log:
        published = WeightsPublished(version=1_000_000, path=str(folder))
        write = Write(stream="weights", expected_version=log.stream_version("weights"), events=[published])
        log.append([write], commit_id="weights")


def test_status_is_answered_at_once_while_the_first_batches_of_a_long_log_are_asked_for(
    start_system: StartSystem, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'long.db'}"
    sample_log.make(url, batches=10_000, tasks=64, events=EVENTS, payloads=False, dead=True)
    with open_log(url) as log:
        first = next(
            r for r in log.events() if r.type == "BatchFinalized" and r.event.result["batch_type"] == "train"  # type: ignore[attr-defined]  # a BatchFinalized
        )
    publish(url, tmp_path)
    client = start_system(store={"url": url})
    play_batch(client, "mine", sleepers(4))
    slowest = 0.0
    with ThreadPoolExecutor(ASKED + 2) as pool:
        asked = [pool.submit(client.next_batch, 0, 120) for _ in range(ASKED)]
        asked_back = pool.submit(client._link.call, ResumeTrainer(step=0), 120.0)
        old = pool.submit(client.finalize_train_batch, first.event.result["batch_id"], timeout=120)  # type: ignore[attr-defined]  # as above
        while not all(one.done() for one in [*asked, asked_back, old]):
            began = time.monotonic()
            client.status(60)
            slowest = max(slowest, time.monotonic() - began)
        found = {one.result() for one in asked}
        assert found == {(first.event.result["batch_id"], first.position)}  # type: ignore[attr-defined]  # as above
        assert old.result()["batch_type"] == "train"
    assert slowest < 0.6
