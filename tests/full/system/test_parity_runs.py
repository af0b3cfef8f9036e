"""Rows of the parity table on a running system: how workflows, their runs and attempts go (P9 to P12, P24)."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.parity_rows import NewId, one, recorded, train
from tests.helpers.systems import StartSystem, scripted
from trinity_es import BatchLifecycleState, RolloutCoordinator, Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import EID, Experience
from trinity_es.events.vocabulary import AttemptFailed, TasksDispatched
from trinity_es.system import running_system
from trinity_es.testing import SleepWorkflow, wait_until


class Says(Workflow):
    is_async = True

    def said(self) -> list[Experience]:
        main = threading.current_thread() is threading.main_thread()
        return [one(eid=EID(run=self.run_id_base), info={"pid": os.getpid(), "main": main})]

    async def run_async(self) -> list[Experience]:
        return self.said()


class SaysInAWorker(Says):
    is_async = False

    def run(self) -> list[Experience]:
        return self.said()


@pytest.fixture
def in_order(system_for: StartSystem) -> RolloutClient:
    return system_for(explorer={
        "max_concurrency": 1, "concurrent_mode": "sequential", "max_timeout": 1.5, "max_retry_times": 1,
    })


def told(client: RolloutClient, batch: int, workflow: type[Workflow]) -> list[Any]:
    return [e.info for e in train(client, batch, [Task(workflow=workflow) for _ in range(3)])]


def test_p9_async_workflows_are_on_the_loop_and_sync_ones_in_a_process(in_order: RolloutClient, new_id: NewId) -> None:
    runner = in_order.status()["runners"][0]["pid"]
    assert {(i["pid"] == runner, i["main"]) for i in told(in_order, new_id(), Says)} == {(True, False)}
    assert {(i["pid"] == runner, i["main"]) for i in told(in_order, new_id(), SaysInAWorker)} == {(False, True)}


class Notes(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        began = time.monotonic()
        await asyncio.sleep(0.1)
        return [one(info={"began": began, "ended": time.monotonic(), "pid": os.getpid()})]


class NotesInAWorker(Notes):
    is_async = False

    def run(self) -> list[Experience]:
        return asyncio.run(self.run_async())


class Meets(Workflow):
    """Ends when as many runs as `workflow_args["runs"]` are there at the same time: each leaves a file."""

    is_async = True

    def all_are_there(self) -> bool:
        return len(list(Path(self.task.workflow_args["folder"]).iterdir())) >= self.task.workflow_args["runs"]

    async def run_async(self) -> list[Experience]:
        (Path(self.task.workflow_args["folder"]) / EID().suffix).touch()
        while not self.all_are_there():
            await asyncio.sleep(0.01)
        return [one(info={"pid": os.getpid()})]


class MeetsInWorkers(Meets):
    is_async = False

    def run(self) -> list[Experience]:
        return asyncio.run(self.run_async())


@pytest.mark.parametrize("workflow", [Notes, NotesInAWorker])
def test_p10_sequential_runs_never_overlap(in_order: RolloutClient, new_id: NewId, workflow: type[Workflow]) -> None:
    notes = [e.info for e in train(in_order, new_id(), [Task(workflow=workflow, repeat_times=4)])]
    assert len({n["pid"] for n in notes}) == 1
    notes.sort(key=lambda n: n["began"])
    assert all(a["ended"] <= b["began"] for a, b in itertools.pairwise(notes))


@pytest.mark.parametrize(
    ("mode", "workflow", "processes"), [("asynchronous", Meets, 1), ("multi-threading", MeetsInWorkers, 4)]
)
def test_p10_asynchronous_runs_overlap_on_the_loop_and_multi_threading_ones_in_processes(
    start_system: StartSystem, tmp_path: Path, mode: str, workflow: type[Workflow], processes: int
) -> None:
    client = start_system(explorer={"concurrent_mode": mode, "max_timeout": 60.0, "max_retry_times": 0})
    (tmp_path / "here").mkdir()
    task = Task(workflow=workflow, repeat_times=4, workflow_args={"folder": str(tmp_path / "here"), "runs": 4})
    found = train(client, 1, [task])
    assert (len(found), len({e.info["pid"] for e in found})) == (4, processes)


class FailsAtFirst(Workflow):
    """A line in `note` for every run; run `bad` fails in its first `times` attempts. It knows its run by its seed."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        run = self.model.sampling.seed - 100
        with open(args["note"], "a") as f:
            f.write(f"{run}\n")
        if run == args["bad"] and Path(args["note"]).read_text().split().count(str(run)) <= args["times"]:
            raise RuntimeError("not yet")
        return [one()]


def test_p11_only_the_run_that_failed_is_attempted_again_on_another_runner(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"max_retry_times": 2, "rollout_model": {"engine_num": 2}})
    for batch, times, wanted, good in ((1, 1, [1, 1, 2, 1], [0, 1, 2, 3]), (2, 5, [1, 1, 3, 1], [0, 1, 3])):
        note = tmp_path / f"note {batch}"
        task = Task(workflow=FailsAtFirst, repeat_times=4, rollout_args={"seed": 100},
                    workflow_args={"note": str(note), "bad": 2, "times": times})
        assert [e.eid.run for e in train(client, batch, [task])] == good, "what was done is kept"
        seen = Counter(note.read_text().split())
        assert [seen[str(run)] for run in range(4)] == wanted
        assert client.batch(batch).statuses[0].completed_runs == len(good)
        sent = [(d.runner, u.run_id_base, u.runs) for d in recorded(client, batch, TasksDispatched) for u in d.units]
        assert [unit[1:] for unit in sent] == [(0, 4)] + [(2, 1)] * (len(sent) - 1)
        assert all(a != b for (a, *_), (b, *_) in itertools.pairwise(sent)), "another runner, where there is one"


class SwallowsItsEnd(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize("workflow", [SleepWorkflow, SwallowsItsEnd])
def test_p12_a_hung_workflow_frees_its_place(in_order: RolloutClient, new_id: NewId, workflow: type[Workflow]) -> None:
    batch = new_id()
    tasks = [Task(workflow=workflow, workflow_args={"seconds": 600}), Task(workflow=Says)]
    assert [e.eid.task for e in train(in_order, batch, tasks)] == [1]
    failed = recorded(in_order, batch, AttemptFailed)
    assert [(f.task, f.kind) for f in failed] == [(0, "timeout")] * 2
    assert "no end after 1.5 s (max_timeout)" in failed[0].message
    wait_until(lambda: in_order.status()["runners"][0]["load"] == 0, "the place to be free")


def test_c8_an_engine_that_is_not_ready_in_time_is_started_again(start_system: StartSystem) -> None:
    rollout = {"script": {"load_seconds": 600}}
    client = start_system(wait=False, explorer={"rollout_model": rollout}, system={"startup_timeout": 1.0})
    lost = wait_until(lambda: [r.event for r in client.log.events() if r.type == "RunnerLost"], "the runner's end", 60)
    assert "its engine was not ready 1 s after its start" in lost[0].reason


async def test_p24_prepare_and_shutdown_may_be_said_twice_and_bench_has_no_pipeline(tmp_path: Path) -> None:
    """`bench` delivers what the workflows returned, without advantages."""
    config = scripted(tmp_path, mode="bench")
    first = await RolloutCoordinator.get_actor(config)
    try:
        await first.prepare()
        await first.prepare()
        second = await RolloutCoordinator.get_actor(config)
        await second.prepare()
        await second.submit_batch(batch_id=1, tasks=[Task(workflow=SleepWorkflow)], batch_type="train")
        result = await first.finalize_train_batch(1, timeout=30)
        assert not any(key.startswith("experience_pipeline/grpo") for key in result["metrics"])
        [experience] = await first.experiences(1)
        assert experience.advantages is None
        await second.shutdown()  # it did not start the system
        await second.shutdown()
        assert (await first.batch(1)).state is BatchLifecycleState.FINALIZED
    finally:
        await first.shutdown()
        await first.shutdown()
    assert running_system.find(config) is None
