"""Batches on the real actor system, as a trainer sees them (PARITY P21, P25 to P29)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import trinity_es
from tests.helpers.parity_rows import NewId
from tests.helpers.systems import StartSystem, play_batch, sleepers
from trinity_es import EID, BatchLifecycleState, Experience, RolloutCoordinator, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import BatchAlreadyActive, BatchNotFound, DataError, FinalizeTimeout, PipelineError
from trinity_es.projections.reading.log_reader import canonical
from trinity_es.testing import SleepWorkflow, wait_until


@pytest.fixture
def batch(new_id: NewId) -> int:
    return new_id()


class ExplodingOperator:
    """A pipeline operator that fails while a file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        import os

        if os.path.exists(self.path):
            raise RuntimeError("the operator is broken")
        return experiences, {"seen": float(len(experiences))}


def test_p26_a_train_batch_is_submitted_finalized_and_read(shared: RolloutClient, batch: int) -> None:
    result = play_batch(shared, batch, sleepers(4, reward=0.25))
    assert (result["batch_id"], result["batch_type"], result["finished_task_count"]) == (batch, "train", 4)
    assert result["metrics"]["rollout/reward/mean"] == 0.25
    found = list(shared.experiences(batch))
    assert [(e.eid.batch, e.eid.task, e.eid.run) for e in found] == [(batch, t, 0) for t in range(4)]
    assert all(e.info["model_version"] == 0 and e.info["model_version_drift"] == 0 for e in found)
    assert all(e.advantages is not None for e in found)


def test_p26_finalize_asked_again_gives_the_same_result(shared: RolloutClient, batch: int) -> None:
    first = play_batch(shared, batch, sleepers(2))
    assert canonical(shared.finalize_train_batch(batch)) == canonical(first)


def test_p26_a_timeout_loses_nothing(shared: RolloutClient, batch: int) -> None:
    shared.submit_batch(batch_id=batch, tasks=sleepers(3) + sleepers(1, seconds=1.5), batch_type="train")
    with pytest.raises(FinalizeTimeout, match="nothing is lost") as caught:
        shared.finalize_train_batch(batch, timeout=0.5)
    assert isinstance(caught.value, TimeoutError)
    assert shared.finalize_train_batch(batch, timeout=30)["finished_task_count"] == 4
    assert len(list(shared.experiences(batch))) == 4


def test_p26_with_min_wait_num_the_rest_is_cancelled(start_system: StartSystem) -> None:
    client = start_system(explorer={"over_rollout": {"wait_after_min": 0.2}})
    tasks = sleepers(3) + sleepers(1, seconds=60)
    client.submit_batch(batch_id=1, tasks=tasks, batch_type="train", min_wait_num=3)
    assert client.finalize_train_batch(1, timeout=30)["finished_task_count"] == 3
    assert client.batch(1).dropped == {3: "finalized with 3 tasks, enough"}
    wait_until(lambda: client.status()["runners"][0]["load"] == 0, "the place of the cancelled task to be free", 10)


def test_p26_when_the_pipeline_fails_the_batch_runs_again(start_system: StartSystem, tmp_path: Any) -> None:
    fuse = tmp_path / "fuse"
    fuse.write_text("")
    operator = {"name": "tests.main.test_batches:ExplodingOperator", "args": {"path": str(fuse)}}
    client = start_system(buffer={"pipeline": {"operators": [operator]}})
    client.submit_batch(batch_id=1, tasks=sleepers(2), batch_type="train")
    with pytest.raises(PipelineError, match="the operator is broken"):
        client.finalize_train_batch(1, timeout=30)
    assert client.batch(1).state is BatchLifecycleState.RUNNING
    fuse.unlink()
    result = client.finalize_train_batch(1, timeout=30)
    assert result["finished_task_count"] == 2
    assert len(list(client.experiences(1))) == 2


def test_p25_an_active_batch_id_is_refused_and_a_finished_one_is_free(shared: RolloutClient, batch: int) -> None:
    shared.submit_batch(batch_id=batch, tasks=sleepers(1, seconds=0.5), batch_type="train")
    with pytest.raises(BatchAlreadyActive, match="already active") as caught:
        shared.submit_batch(batch_id=batch, tasks=sleepers(1), batch_type="train")
    assert isinstance(caught.value, ValueError)
    assert shared.finalize_train_batch(batch, timeout=30)["finished_task_count"] == 1
    play_batch(shared, batch, sleepers(3))
    assert len(list(shared.experiences(batch))) == 3


def test_p25_an_empty_batch_is_pending_until_it_is_finalized(shared: RolloutClient, batch: int) -> None:
    shared.submit_batch(batch_id=batch, tasks=[], batch_type="train")
    assert shared.batch(batch).state is BatchLifecycleState.PENDING
    assert shared.finalize_train_batch(batch, timeout=30)["finished_task_count"] == 0


def test_p26_unknown_and_mistyped_batches_are_errors(shared: RolloutClient, new_id: NewId) -> None:
    with pytest.raises(BatchNotFound, match="not registered") as caught:
        shared.finalize_train_batch(new_id())
    assert isinstance(caught.value, KeyError)
    batch = new_id()
    shared.submit_batch(batch_id=batch, tasks=sleepers(1), batch_type="train")
    with pytest.raises(ValueError, match="expected eval"):
        shared.finalize_eval_batch(batch)
    shared.finalize_train_batch(batch, timeout=30)


def test_p27_p31_an_eval_has_its_metrics_and_keeps_no_experiences(shared: RolloutClient, new_id: NewId) -> None:
    batch = f"{new_id()}/letters"
    tasks = [Task(workflow=SleepWorkflow, workflow_args={"reward": r}, repeat_times=2, is_eval=True) for r in (0, 1)]
    shared.submit_batch(batch_id=batch, tasks=tasks, batch_type="eval")
    metrics = shared.finalize_eval_batch(batch, timeout=30)["metrics"]
    assert metrics["eval/letters/reward/mean@2"] == 0.5
    assert metrics["eval/letters/finished_task_count"] == 2.0
    assert shared.batch(batch).experiences == []
    assert all(not task.payloads for task in shared.batch(batch).tasks)
    for read in (shared.columns, lambda batch: list(shared.experiences(batch))):
        with pytest.raises(DataError, match="is an eval, whose experiences are not kept"):
            read(batch)


def test_p28_abort_ends_a_batch_and_frees_its_places(shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    shared.submit_batch(batch_id=batch, tasks=sleepers(2, seconds=60), batch_type="train")
    waiter = ThreadPoolExecutor(1).submit(shared.finalize_train_batch, batch, timeout=30)
    wait_until(lambda: shared.batch(batch).flights, "the tasks to run")
    shared.abort_batch(batch, reason="not needed")
    answer = waiter.result(10)
    assert answer["finished_task_count"] == 0
    state = shared.batch(batch)
    assert (state.state, state.final_result) == (BatchLifecycleState.ABORTED, answer)
    wait_until(lambda: shared.status()["runners"][0]["load"] == 0, "its places to be free", 10)
    shared.abort_batch(batch, reason="again")
    shared.abort_batch(new_id(), reason="unknown")


def test_p29_experiences_are_processed_outside_a_batch(shared: RolloutClient) -> None:
    assert shared.process_experiences([]) == {}
    eid = [trinity_es.EID(batch=5, task=0, run=run) for run in range(2)]
    given = [
        Experience(eid=eid[run], tokens=[1, 2, 3], prompt_length=1, logprobs=[-0.1, -0.2], reward=float(run))
        for run in range(2)
    ]
    metrics = shared.process_experiences([Experience.serialize_many(given)])
    assert all(key.startswith("experience_pipeline/") for key in metrics)
    assert metrics["experience_pipeline/experience_count"] == 2


def test_p21_three_trainers_at_once_each_get_their_own(shared: RolloutClient) -> None:
    def trainer(number: int) -> int:
        with trinity_es.connect(shared.config) as client:
            ids = [f"{i}/trainer-{number}" for i in range(100, 104)]
            for batch in ids:
                tasks = sleepers(5, seconds=0.05, reward=float(number))
                client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
            for batch in reversed(ids):
                result = client.finalize_train_batch(batch, timeout=60)
                assert result["metrics"]["rollout/reward/mean"] == number
                assert {e.eid.batch for e in client.experiences(batch)} == {batch}
        return number

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(trainer, range(3), timeout=90)) == [0, 1, 2]


def test_a5_a_thousand_tasks_in_one_batch(shared: RolloutClient, batch: int) -> None:
    tasks = [Task(workflow=SleepWorkflow, raw_task={"prompt": "x" * 500, "i": i}, repeat_times=2) for i in range(1000)]
    play_batch(shared, batch, tasks, timeout=120)
    seen = Counter((e.eid.task, e.eid.run) for e in shared.experiences(batch))
    assert seen == {(task, run): 1 for task in range(1000) for run in range(2)}


def test_a_task_larger_than_a_message_may_be_runs(shared: RolloutClient, batch: int) -> None:
    task = Task(workflow=SleepWorkflow, raw_task={"document": "y" * 600_000})
    play_batch(shared, batch, [task])


def test_results_of_a_unit_larger_than_a_message_may_be_are_recorded(shared: RolloutClient, batch: int) -> None:
    runs = 2500
    tasks = [Task(workflow=SleepWorkflow, repeat_times=runs)]
    shared.submit_batch(batch_id=batch, tasks=tasks, batch_type="eval")
    assert shared.finalize_eval_batch(batch, timeout=60)["finished_task_count"] == 1
    [task] = shared.log.replay(batch).tasks
    assert sorted(task.done) == list(range(runs))
    assert {run.metrics["reward"] for run in task.done.values()} == {1.0}


async def test_the_async_face_has_the_known_names(shared: RolloutClient, new_id: NewId) -> None:
    coordinator = await RolloutCoordinator.get_actor(shared.config)
    await coordinator.prepare()
    await coordinator.prepare()
    ids = [new_id() for _ in range(3)]
    for batch in ids:
        await coordinator.submit_batch(batch_id=batch, tasks=sleepers(2), batch_type="train")
    results = await asyncio.gather(*(coordinator.finalize_train_batch(b, timeout=30) for b in ids))
    assert [r["batch_id"] for r in results] == ids
    await coordinator.wait_ready(timeout=30)
    position, seen = 0, []
    while not set(ids) <= set(seen):  # in the order in which they ended
        batch, position = await coordinator.next_batch(position, timeout=10)
        seen.append(batch)
    eid = EID(batch=ids[0], task=0, run=0)
    mine = Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=1.0)
    assert await coordinator.process_experiences([Experience.serialize_many([mine])])
    [(_, delivered)] = await coordinator.processed_experiences(position)
    assert [e.eid for e in delivered] == [eid]
    await coordinator.shutdown()
    await coordinator.shutdown()
    assert shared.status()["runners"][0]["state"] == "ready"  # it was not this object's to end


def test_a_runner_serves_new_weights_and_goes_on_after_a_failed_sync(start_system: StartSystem, tmp_path: Any) -> None:
    client = start_system()
    (tmp_path / "w1").mkdir()
    assert client.sync_weights(1, tmp_path / "w1") == {"version": 1, "runners": ["runner-0"], "from_group": False}
    with pytest.raises(trinity_es.TrinityError, match="these engines keep their weights"):
        client.sync_weights(2, tmp_path / "missing")
    play_batch(client, 1, sleepers(1))
    assert [e.info["model_version"] for e in client.experiences(1)] == [1]


def test_next_batch_waits_for_the_next_finalized_train_batch(start_system: StartSystem) -> None:
    client = start_system()
    with pytest.raises(TimeoutError):
        client.next_batch(timeout=0.3)
    waiter = ThreadPoolExecutor(1).submit(client.next_batch, timeout=20)
    play_batch(client, 4, sleepers(1))
    batch_id, position = waiter.result(10)
    assert batch_id == 4
    client.acknowledge(4, step=4, metrics={"loss": 0.5})
    wait_until(lambda: client.batch(4).trained_step == 4, "the acknowledgement")
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        client.next_batch(after=position, timeout=0.3)
    assert time.monotonic() - started < 10
