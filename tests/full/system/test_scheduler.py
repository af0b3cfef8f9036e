"""The Scheduler on the real actor system, as a user of the known one writes it (PARITY P16 to P23)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scheduling import AsyncDummy, Dummy, NewId, OneRun, dummies, half_done, load
from tests.helpers.systems import StartSystem, sleepers
from trinity_es import Scheduler, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    BatchAlreadyActive,
    BatchTypeMismatch,
    DataError,
    TaskNotSerializable,
    UnknownWorkflow,
)
from trinity_es.testing import wait_until


# --- P17, P18, P19: as the known scheduler's users know it -----------------------------------------------------------
async def test_p17_p18_p19_eight_tasks_and_three_batches_interleaved(scheduler: Scheduler, new_id: NewId) -> None:
    zero, *others = [new_id() for _ in range(4)]
    assert not scheduler.has_step(zero)
    scheduler.schedule(dummies(8), batch_id=zero)
    assert scheduler.has_step(zero)
    statuses, experiences = await scheduler.get_results(batch_id=zero, min_num=8, timeout=30)
    assert [s.ok for s in statuses] == [True] * 8
    assert [s.metrics[0]["run_metrics"] for s in statuses] == [0.0] * 8
    assert [(e.eid.batch, e.eid.task, e.eid.run, e.eid.step) for e in experiences] == [
        (zero, i, 0, 0) for i in range(8)
    ]
    assert all(e.info["model_version"] == 0 and e.advantages is None for e in experiences)  # raw
    for batch_id in others:
        scheduler.schedule(dummies(4), batch_id=batch_id)
    for batch_id in reversed(others):
        assert scheduler.has_step(batch_id)
        statuses, experiences = await scheduler.get_results(batch_id=batch_id, min_num=4, timeout=30)
        assert (len(statuses), len(experiences)) == (4, 4)
        assert {e.eid.batch for e in experiences} == {batch_id}
        assert not scheduler.has_step(batch_id)
    assert await scheduler.get_results(batch_id=zero, min_num=1, timeout=30) == ([], [])


async def test_p18_two_hang_and_the_id_is_reused(scheduler: Scheduler, shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    scheduler.schedule(dummies(4), batch_id=batch)  # their worker processes take a while to start
    await scheduler.get_results(batch_id=batch)
    scheduler.schedule(dummies(2, timeout=2), batch_id=batch)
    began = time.monotonic()
    statuses, experiences = await scheduler.get_results(batch_id=batch, min_num=4, timeout=2)
    assert time.monotonic() - began >= 2
    assert [s.ok for s in statuses] == [True, True]
    assert len(experiences) == 2
    assert not scheduler.has_step(batch)
    wait_until(lambda: load(shared) == 0, "the places of the cancelled tasks to be free", 5)
    scheduler.schedule(dummies(4), batch_id=batch)
    statuses, experiences = await scheduler.get_results(batch_id=batch, timeout=30)
    assert [s.ok for s in statuses] == [True] * 4
    assert [e.eid.task for e in experiences] == [0, 1, 2, 3]


async def test_p18_a_task_that_raises_is_a_status(scheduler: Scheduler, new_id: NewId) -> None:
    batch = new_id()
    scheduler.schedule(dummies(1, exception=3), batch_id=batch)
    statuses, experiences = await scheduler.get_results(batch_id=batch)
    assert [s.ok for s in statuses] == [True, False, False, False]
    assert all("Exception occurred" in (s.message or "") for s in statuses[1:])
    assert statuses[1].metrics == []
    assert statuses[1].metric == {}
    assert len(experiences) == 1
    assert await scheduler.get_results(batch_id=batch, min_num=1, timeout=30) == ([], [])


async def test_p18_without_clear_the_rest_goes_on_and_comes_later(scheduler: Scheduler, new_id: NewId) -> None:
    batch = new_id()
    scheduler.schedule(dummies(3, timeout=1, seconds=3, workflow=AsyncDummy), batch_id=batch)
    statuses, first = await scheduler.get_results(batch_id=batch, timeout=1.5, clear_timeout_tasks=False)
    assert [e.eid.task for e in first] == [0, 1, 2]
    assert len(statuses) == 3
    assert scheduler.has_step(batch)
    assert await scheduler.get_results(batch_id=batch, timeout=0, clear_timeout_tasks=False) == ([], [])
    statuses, rest = await scheduler.get_results(batch_id=batch, timeout=30, clear_timeout_tasks=False)
    assert [s.ok for s in statuses] == [True]
    assert [e.eid.task for e in rest] == [3]
    assert not scheduler.has_step(batch)
    # with clear it is given up
    scheduler.schedule(dummies(3, timeout=1, workflow=AsyncDummy), batch_id=batch)
    assert len((await scheduler.get_results(batch_id=batch, timeout=1.5))[0]) == 3
    assert await scheduler.get_results(batch_id=batch, timeout=1.5) == ([], [])


async def test_p1_p17_lower_batch_first_and_first_in_first_out_inside(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_concurrency": 1})
    async with Scheduler(client.config) as scheduler:
        scheduler.schedule(sleepers(1, 1.5), 0)
        wait_until(lambda: load(client) == 1, "the only place to be taken")
        for batch in ("nightly", 12, 3, "3/gsm8k", 2):
            scheduler.schedule(sleepers(3, 0.15), batch)
        scheduler.schedule(sleepers(1, 0.15), 3)
        await scheduler.wait_all()
        order = [
            (r.stream.removeprefix("batch/"), unit.task)
            for r in client.log.read(types=["TasksDispatched"])
            if isinstance(r.event, ev.TasksDispatched)
            for unit in r.event.units
        ]
        batches = ["2"] * 3 + ["3"] * 4 + ["3/gsm8k"] * 3 + ["12"] * 3 + ["nightly"] * 3
        numbers = [*range(3), *range(4), *range(3), *range(3), *range(3)]
        assert order == [("0", 0), *zip(batches, numbers, strict=True)]


async def test_p17_more_tasks_join_a_batch_while_somebody_waits_for_it(scheduler: Scheduler, new_id: NewId) -> None:
    batch = new_id()
    tasks = sleepers(2, 1.0)
    scheduler.schedule(tasks, batch)
    waiting = asyncio.create_task(scheduler.get_results(batch, timeout=30))
    await asyncio.sleep(0.2)
    more = sleepers(2)
    await scheduler.schedule((t for t in more), batch)
    statuses, experiences = await waiting
    assert len(statuses) == 4
    assert [e.eid.task for e in experiences] == [0, 1, 2, 3]
    assert [(t.batch_id, t.task_id) for t in (*tasks, *more)] == [(batch, i) for i in range(4)]
    assert not scheduler.has_step(batch)


async def test_p17_what_is_refused_leaves_nothing(scheduler: Scheduler, shared: RolloutClient, new_id: NewId) -> None:
    batch, train = new_id(), new_id()
    with pytest.raises(TaskNotSerializable, match="task 1"):
        scheduler.schedule([*dummies(1), Task(workflow=Dummy, raw_task={"x": object()})], batch)
    with pytest.raises(UnknownWorkflow):
        scheduler.schedule([Task(workflow="no_such_workflow")], batch)
    with pytest.raises(DataError):
        scheduler.schedule([Task(workflow=Dummy, repeat_times=0)], batch)
    with pytest.raises(TaskNotSerializable):
        scheduler.schedule(["a task"], batch)  # type: ignore[list-item]  # a mistake of a user
    for bad in (1.5, "", None, True):
        with pytest.raises(DataError):
            scheduler.schedule(dummies(1), bad)  # type: ignore[arg-type]  # a mistake of a user
        with pytest.raises(DataError):
            await scheduler.get_results(bad)  # type: ignore[arg-type]  # a mistake of a user
    assert not scheduler.has_step(batch)
    assert await scheduler.get_results(batch) == ([], [])
    shared.submit_batch(batch_id=train, tasks=sleepers(1), batch_type="train")
    with pytest.raises(BatchAlreadyActive):
        scheduler.schedule(dummies(1), train)
    with pytest.raises(BatchTypeMismatch, match="finalize_train_batch"):
        await scheduler.get_results(train)
    assert shared.finalize_train_batch(train, timeout=30)["finished_task_count"] == 1
    scheduler.schedule(dummies(1), batch)
    with pytest.raises(BatchTypeMismatch, match="get_results"):
        shared.finalize_train_batch(batch, timeout=5)
    with pytest.raises(DataError, match="min_num"):
        await scheduler.get_results(batch, min_num=-1)
    with pytest.raises(DataError, match="timeout"):
        await scheduler.get_results(batch, timeout="soon")  # type: ignore[arg-type]  # a mistake of a user
    assert len((await scheduler.get_results(batch))[0]) == 1


async def test_p17_p19_an_empty_batch_and_unknown_ids(scheduler: Scheduler, new_id: NewId) -> None:
    batch = new_id()
    scheduler.schedule([], batch)
    for unknown in (batch, f"{batch}/gsm8k", "no number"):
        assert not scheduler.has_step(unknown)
        assert await scheduler.get_results(unknown) == ([], [])
        assert await scheduler.get_results(unknown, min_num=3, timeout=5) == ([], [])
    scheduler.schedule(dummies(2), str(batch))
    assert not scheduler.has_step(batch)  # the text and the number are different batches
    _, experiences = await scheduler.get_results(str(batch))
    assert {e.eid.batch for e in experiences} == {str(batch)}


async def test_p18_min_num(scheduler: Scheduler, new_id: NewId, caplog: pytest.LogCaptureFixture) -> None:
    batch = new_id()
    scheduler.schedule(dummies(3), batch)
    with caplog.at_level(logging.WARNING, "trinity_es.client.scheduler"):
        statuses, _ = await scheduler.get_results(batch, min_num=7, timeout=30)
    assert len(statuses) == 3
    assert [r.getMessage() for r in caplog.records if "min_num is 7" in r.getMessage()]
    scheduler.schedule(sleepers(2, 60), batch)
    assert await scheduler.get_results(batch, min_num=0, timeout=0.5) == ([], [])
    assert not scheduler.has_step(batch)  # cancelled


def hasty(partial: bool = False) -> dict[str, Any]:
    return {"max_repeat_times_per_runner": 1, "over_rollout": {"wait_after_min": 1.0, "return_partial_tasks": partial}}


async def test_p22_p18_after_min_num_some_come_the_rest_is_cancelled(system_for: StartSystem, new_id: NewId) -> None:
    client = system_for(explorer=hasty())
    first, second, third = new_id(), new_id(), new_id()
    async with Scheduler(client.config) as scheduler:
        scheduler.schedule(sleepers(2) + sleepers(1, 0.3) + sleepers(1, 60), first)
        began = time.monotonic()
        statuses, experiences = await scheduler.get_results(first, min_num=2)
        assert 1.0 <= time.monotonic() - began < 30
        assert [e.eid.task for e in experiences] == [0, 1, 2]
        assert len(statuses) == 3
        assert not scheduler.has_step(first)
        wait_until(lambda: load(client) == 0, "the place of the cancelled task to be free", 5)
        assert client.batch(first).dropped == {3: "3 tasks were ready, 2 were wanted"}
        # all of them before the time is over: no more is waited for
        scheduler.schedule(sleepers(4), second)
        assert len((await scheduler.get_results(second, min_num=2, timeout=30))[0]) == 4
        # without clear the rest goes on
        scheduler.schedule(sleepers(2) + sleepers(1, 3.0), third)
        assert len((await scheduler.get_results(third, min_num=1, clear_timeout_tasks=False))[0]) == 2
        _, experiences = await scheduler.get_results(third)
        assert [e.eid.task for e in experiences] == [2]


@pytest.mark.parametrize("partial", [False, True])
def test_p22_return_partial_tasks(system_for: StartSystem, new_id: NewId, tmp_path: Path, partial: bool) -> None:
    client, scheduled, submitted = system_for(explorer=hasty(partial)), new_id(), new_id()

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(half_done(tmp_path / "0"), scheduled)
            statuses, experiences = await scheduler.get_results(scheduled, min_num=1)
            ran = Counter(e.eid.task for e in experiences)
            if partial:
                assert [(s.completed_runs, s.total_runs, s.ok) for s in statuses] == [(4, 4, True), (3, 4, False)]
                assert ran == {0: 4, 1: 3}
            else:
                assert [s.ok for s in statuses] == [True]
                assert ran == {0: 4}
            assert not scheduler.has_step(scheduled)

    asyncio.run(main())
    client.submit_batch(batch_id=submitted, tasks=half_done(tmp_path / "1"), batch_type="train", min_wait_num=1)
    assert client.finalize_train_batch(submitted, timeout=60)["finished_task_count"] == 1
    ran = Counter(e.eid.task for e in client.experiences(submitted))
    assert ran == ({0: 4, 1: 3} if partial else {0: 4})


# --- experiences ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workflow", [Dummy, OneRun, AsyncDummy])
async def test_p3_p18_experiences_of_many_steps_and_runs_have_their_ids(
    system_for: StartSystem, new_id: NewId, workflow: type[Dummy]
) -> None:
    client = system_for(explorer={"max_repeat_times_per_runner": 2, "rollout_model": {"engine_num": 2}})
    batches = new_id(), new_id()
    async with Scheduler(client.config) as scheduler:
        found = []
        for batch in batches:
            scheduler.schedule(dummies(3, workflow=workflow, repeat_times=4, step_num=3), batch)
            statuses, experiences = await scheduler.get_results(batch)
            assert [(s.completed_runs, s.total_runs, len(s.per_run)) for s in statuses] == [(4, 4, 4)] * 3
            assert [(e.eid.batch, e.eid.task, e.eid.run, e.eid.step) for e in experiences] == [
                (batch, t, r, s) for t in range(3) for r in range(4) for s in range(3)
            ]
            found += experiences
        assert len({e.eid.tid for e in found}) == 2 * 3
        assert len({e.eid.rid for e in found}) == 2 * 3 * 4
        assert len({e.eid.uid for e in found}) == 2 * 3 * 4 * 3
        units = [(u.run_id_base, u.runs) for batch in batches for r in client.log.events(batch)
                 if isinstance(r.event, ev.TasksDispatched) for u in r.event.units]
        assert Counter(units) == {(0, 2): 6, (2, 2): 6}
