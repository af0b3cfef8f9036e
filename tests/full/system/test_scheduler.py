"""The Scheduler on the real actor system, as a user of the known one writes it (PARITY P16 to P23)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.scheduling import AsyncDummy, Dummy, OneRun, dummies, sleepers
from tests.helpers.systems import StartSystem, kill_system, pid_of, scripted
from trinity_es import BatchLifecycleState, Scheduler, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    BatchAlreadyActive,
    BatchTypeMismatch,
    DataError,
    NotRunning,
    StartupError,
    TaskNotSerializable,
    UnknownWorkflow,
)
from trinity_es.system import discovery
from trinity_es.testing import wait_until

NewId = Callable[[], int]


def load(client: RolloutClient) -> int:
    return sum(r["load"] for r in client.status()["runners"])


# --- P17, P18, P19: as the known scheduler's users know it -----------------------------------------------------------
def test_p17_p18_p19_eight_tasks_and_three_batches_interleaved(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


def test_p18_two_of_four_hang_and_the_id_is_used_again(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


def test_p18_a_task_that_raises_is_a_status(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = new_id()
            scheduler.schedule(dummies(1, exception=3), batch_id=batch)
            statuses, experiences = await scheduler.get_results(batch_id=batch)
            assert [s.ok for s in statuses] == [True, False, False, False]
            assert all("Exception occurred" in (s.message or "") for s in statuses[1:])
            assert statuses[1].metrics == []
            assert statuses[1].metric == {}
            assert len(experiences) == 1
            assert await scheduler.get_results(batch_id=batch, min_num=1, timeout=30) == ([], [])

    asyncio.run(main())


def test_p18_without_clear_the_rest_goes_on_and_a_later_call_returns_only_that(
    shared: RolloutClient, new_id: NewId
) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


@pytest.mark.parametrize("workflow", [Dummy, AsyncDummy])
def test_p12_p18_a_hung_workflow_fails_after_its_attempts_without_a_timeout_of_ours(
    shared: RolloutClient, new_id: NewId, workflow: type[Dummy]
) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = new_id()
            scheduler.schedule(dummies(1, timeout=1, workflow=workflow), batch_id=batch)
            statuses, experiences = await scheduler.get_results(batch_id=batch)
            assert [s.ok for s in statuses] == [True, False]
            assert "max_timeout" in (statuses[1].message or "")
            assert len(experiences) == 1
        assert load(shared) == 0

    asyncio.run(main())


def test_p10_p18_a_workflow_that_ends_its_process_fails_alone(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_retry_times": 1, "rollout_model": {"engine_num": 2}})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(dummies(2, exit=1), batch_id=0)  # of a worker
            statuses, experiences = await scheduler.get_results(0, timeout=60)
            assert [s.ok for s in statuses] == [True, True, False]
            assert len(experiences) == 2
            scheduler.schedule(dummies(1, exit=1, workflow=AsyncDummy), batch_id=1)  # of a runner
            statuses, _ = await scheduler.get_results(1, timeout=120)
            assert not statuses[1].ok
            assert "runner_lost" in (statuses[1].message or "")
            scheduler.schedule(dummies(8), batch_id=2)
            statuses, experiences = await scheduler.get_results(2, timeout=120)
            assert [s.ok for s in statuses] == [True] * 8
            assert len(experiences) == 8

    asyncio.run(main())


def test_p17_lower_batch_first_and_first_in_first_out_inside(start_system: StartSystem) -> None:
    client = start_system(explorer={"places": 1})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(sleepers(1, 1.5), 0)
            wait_until(lambda: load(client) == 1, "the only place to be taken")
            for batch in ("nightly", 3, "3/gsm8k", 2):
                scheduler.schedule(sleepers(3, 0.15), batch)
            scheduler.schedule(sleepers(1, 0.15), 3)
            await scheduler.wait_all()
            order = [
                (r.stream.removeprefix("batch/"), unit.task)
                for r in client.log.read(types=["TasksDispatched"])
                if isinstance(r.event, ev.TasksDispatched)
                for unit in r.event.units
            ]
            batches = ["2"] * 3 + ["3"] * 4 + ["3/gsm8k"] * 3 + ["nightly"] * 3
            numbers = [*range(3), *range(4), *range(3), *range(3)]
            assert order == [("0", 0), *zip(batches, numbers, strict=True)]

    asyncio.run(main())


def test_p17_more_tasks_join_a_batch_also_while_somebody_waits_for_it(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


def test_p17_what_cant_be_scheduled_leaves_nothing_behind(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


def test_p17_p19_an_empty_batch_and_unknown_ids(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
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

    asyncio.run(main())


def test_p18_min_num(shared: RolloutClient, new_id: NewId, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = new_id()
            scheduler.schedule(dummies(3), batch)
            with caplog.at_level(logging.WARNING, "trinity_es.client.scheduler"):
                statuses, _ = await scheduler.get_results(batch, min_num=7, timeout=30)
            assert len(statuses) == 3
            assert [r.getMessage() for r in caplog.records if "min_num is 7" in r.getMessage()]
            scheduler.schedule(sleepers(2, 60), batch)
            assert await scheduler.get_results(batch, min_num=0, timeout=0.5) == ([], [])
            assert not scheduler.has_step(batch)  # cancelled

    asyncio.run(main())


def test_p22_p18_after_min_num_a_little_more_is_waited_for_and_the_rest_is_cancelled(start_system: StartSystem) -> None:
    client = start_system(explorer={"over_rollout": {"wait_after_min": 2.0}})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(sleepers(2) + sleepers(1, 1.0) + sleepers(1, 60), 0)
            began = time.monotonic()
            statuses, experiences = await scheduler.get_results(0, min_num=2)
            assert 2.0 <= time.monotonic() - began < 30
            assert [e.eid.task for e in experiences] == [0, 1, 2]
            assert len(statuses) == 3
            assert not scheduler.has_step(0)
            wait_until(lambda: load(client) == 0, "the place of the cancelled task to be free", 5)
            assert client.batch(0).dropped == {3: "3 tasks were ready, 2 were wanted"}
            # all of them before the time is over: no more is waited for
            scheduler.schedule(sleepers(4), 1)
            assert len((await scheduler.get_results(1, min_num=2, timeout=30))[0]) == 4
            # without clear the rest goes on
            scheduler.schedule(sleepers(2) + sleepers(1, 4.0), 2)
            assert len((await scheduler.get_results(2, min_num=1, clear_timeout_tasks=False))[0]) == 2
            _, experiences = await scheduler.get_results(2)
            assert [e.eid.task for e in experiences] == [2]

    asyncio.run(main())


@pytest.mark.parametrize("partial", [False, True])
def test_p22_return_partial_tasks(start_system: StartSystem, tmp_path: Path, partial: bool) -> None:
    client = start_system(explorer={
        "max_repeat_times_per_runner": 1, "over_rollout": {"wait_after_min": 1.0, "return_partial_tasks": partial},
    })

    def tasks(name: str) -> list[Task]:  # the second task has a run that hangs
        slow = {"slow_file": str(tmp_path / name)}
        return dummies(1, workflow=AsyncDummy, repeat_times=4) + dummies(
            1, workflow=AsyncDummy, repeat_times=4, **slow
        )

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(tasks("0"), 0)
            statuses, experiences = await scheduler.get_results(0, min_num=1)
            ran = Counter(e.eid.task for e in experiences)
            if partial:
                assert [(s.completed_runs, s.total_runs, s.ok) for s in statuses] == [(4, 4, True), (3, 4, False)]
                assert ran == {0: 4, 1: 3}
            else:
                assert [s.ok for s in statuses] == [True]
                assert ran == {0: 4}
            assert not scheduler.has_step(0)

    asyncio.run(main())
    client.submit_batch(batch_id=1, tasks=tasks("1"), batch_type="train", min_wait_num=1)
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 1
    ran = Counter(e.eid.task for e in client.experiences(1))
    assert ran == ({0: 4, 1: 3} if partial else {0: 4})


# --- experiences ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workflow", [Dummy, OneRun, AsyncDummy])
def test_p3_p18_experiences_of_many_steps_and_runs_have_their_ids(
    start_system: StartSystem, workflow: type[Dummy]
) -> None:
    client = start_system(explorer={"max_repeat_times_per_runner": 2, "rollout_model": {"engine_num": 2}})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            found = []
            for batch in (1, 2):
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
            units = [(u.run_id_base, u.runs) for r in client.log.read(types=["TasksDispatched"])
                     if isinstance(r.event, ev.TasksDispatched) for u in r.event.units]
            assert Counter(units) == {(0, 2): 6, (2, 2): 6}

    asyncio.run(main())


def test_p8_p18_eval_tasks_have_metrics_and_no_experiences(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = f"{new_id()}/gsm8k"
            tasks = dummies(4)
            tasks[1].is_eval = tasks[2].is_eval = True
            scheduler.schedule(tasks, batch)
            scheduler.schedule(tasks[1:2], batch)
            statuses, experiences = await scheduler.get_results(batch)
            assert [s.metric["reward"] for s in statuses] == [0.5] * 5
            assert [e.eid.task for e in experiences] == [0, 3]

    asyncio.run(main())


def test_p17_p18_a_huge_batch(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch, filling = new_id(), "x" * 200
            scheduler.schedule([Task(workflow=Dummy.__module__ + ":AsyncDummy", raw_task={"pad": filling})
                                for _ in range(1500)], batch)
            scheduler.schedule([Task(workflow=Dummy.__module__ + ":AsyncDummy", raw_task={"pad": filling})
                                for _ in range(1000)], batch)
            statuses, experiences = await scheduler.get_results(batch)
            assert len(statuses) == 2500
            assert [e.eid.task for e in experiences] == list(range(2500))

    asyncio.run(main())


# --- P16, P20, P21 ----------------------------------------------------------------------------------------------------
def test_p20_wait_all(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            await scheduler.wait_all(timeout=30)  # nothing there
            await scheduler.wait_all(timeout=0)
            one, two = new_id(), new_id()
            scheduler.schedule(dummies(4), one)
            scheduler.schedule(dummies(3, exception=1), two)
            await scheduler.wait_all(timeout=30)
            assert scheduler.has_step(one)  # it takes nothing
            assert len((await scheduler.get_results(two, min_num=4, timeout=0))[0]) == 4
            assert len((await scheduler.get_results(one, min_num=4, timeout=0))[1]) == 4
            scheduler.schedule(dummies(2, timeout=1, workflow=AsyncDummy), one)
            scheduler.schedule(dummies(0, timeout=1, workflow=AsyncDummy), two)
            began = time.monotonic()
            with pytest.raises(TimeoutError, match=r"no task finished within 1\.5 s; 2 were open"):
                await scheduler.wait_all(timeout=1.5)
            assert 1.5 <= time.monotonic() - began < 4.5
            await scheduler.wait_all(timeout=5)  # they were cancelled
            assert load(shared) == 0
            assert [s.ok for s in (await scheduler.get_results(one))[0]] == [True, True]  # and what was done is there
            assert not scheduler.has_step(two)

    asyncio.run(main())


def test_p20_wait_all_goes_on_while_tasks_finish_and_cancels_nothing_without_clear(
    shared: RolloutClient, new_id: NewId
) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = new_id()
            scheduler.schedule([t for i in range(1, 5) for t in sleepers(1, 0.9 * i)], batch)
            began = time.monotonic()
            await scheduler.wait_all(timeout=1.8)
            assert time.monotonic() - began > 3.5
            assert len((await scheduler.get_results(batch, timeout=0))[0]) == 4
            scheduler.schedule(sleepers(1, 2.0), batch)
            with pytest.raises(TimeoutError):
                await scheduler.wait_all(timeout=0.5, clear_timeout_tasks=False)
            assert [s.ok for s in (await scheduler.get_results(batch))[0]] == [True]

    asyncio.run(main())


def test_p21_many_callers_and_two_schedulers_on_one_store(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as one, Scheduler(shared.config) as other:

            async def use(scheduler: Scheduler, batch: int, number: int) -> None:
                scheduler.schedule(sleepers(number, 0.05), batch)
                statuses, experiences = await scheduler.get_results(batch, min_num=number, timeout=60)
                assert len(statuses) == number
                assert {e.eid.batch for e in experiences} == {batch}
                assert [e.eid.task for e in experiences] == list(range(number))

            await asyncio.gather(*(use(s, new_id(), 2 + i % 3) for i in range(6) for s in (one, other)))
            batch = new_id()
            one.schedule(sleepers(3), batch)
            other.schedule(sleepers(2), batch)
            assert len((await other.get_results(batch))[0]) == 5
            assert not one.has_step(batch)

    asyncio.run(main())


def test_p21_two_callers_of_one_batch_never_get_the_same(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as one, Scheduler(shared.config) as other:
            batch = new_id()
            one.schedule([*sleepers(6), *sleepers(6, 2.0)], batch)
            wait_until(lambda: shared.batch(batch).ready_task_count == 6, "six tasks to finish")
            got: list[int] = []
            for timeout in (0.0, None):  # what is there; and all of the rest
                calls = [s.get_results(batch, timeout=timeout, clear_timeout_tasks=False) for s in (one, other, one)]
                got += [e.eid.task for _, found in await asyncio.gather(*calls) for e in found]
            assert sorted(got) == list(range(12))

    asyncio.run(main())


def test_p18_a_caller_that_gives_up_loses_nothing(shared: RolloutClient, new_id: NewId) -> None:
    async def main() -> None:
        async with Scheduler(shared.config) as scheduler:
            batch = new_id()
            scheduler.schedule(sleepers(2, 1.0), batch)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(scheduler.get_results(batch), 0.3)
            assert len((await scheduler.get_results(batch))[0]) == 2
            # Also while it is about to be answered: what was taken is returned, whatever was cancelled.
            scheduler.schedule([t for i in range(20) for t in sleepers(1, 0.05 * i)], batch)
            got: list[int] = []
            for i in range(40):
                call = asyncio.create_task(scheduler.get_results(batch, timeout=0, clear_timeout_tasks=False))
                await asyncio.sleep(0.002 * (i % 12))
                call.cancel()
                for answer in await asyncio.gather(call, return_exceptions=True):
                    if not isinstance(answer, BaseException):
                        got += [e.eid.task for e in answer[1]]
            got += [e.eid.task for e in (await scheduler.get_results(batch))[1]]
            assert sorted(got) == list(range(20))

    asyncio.run(main())


def test_p16_stop_waits_for_what_runs_and_start_goes_on(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"places": 2})

    async def main() -> None:
        count = tmp_path / "ran"
        scheduler = Scheduler(client.config)
        with pytest.raises(NotRunning, match=r"scheduler.start"):
            scheduler.schedule(sleepers(1), 0)
        await scheduler.stop()
        await scheduler.start()
        await scheduler.start()
        scheduler.schedule(sleepers(6, 1.0, count_file=str(count)), 0)
        wait_until(lambda: load(client) == 2, "two tasks to run")
        await scheduler.stop()
        await scheduler.stop()
        state = client.batch(0)
        assert state.flights == {}
        assert state.completed_task_count >= 2
        assert state.pending
        assert client.why(0).count("its scheduler was stopped") == 1
        with pytest.raises(NotRunning):
            scheduler.has_step(0)
        await scheduler.start()
        statuses, experiences = await scheduler.get_results(0, timeout=30)
        assert len(statuses) == len(experiences) == 6
        assert len(count.read_text().splitlines()) == 6
        scheduler.schedule(sleepers(3), 1)
        assert len((await scheduler.get_results(1, min_num=3, timeout=30))[1]) == 3
        await scheduler.stop()

    asyncio.run(main())


def test_p16_stop_while_others_wait(start_system: StartSystem) -> None:
    client = start_system(explorer={"places": 2})

    async def main() -> None:
        scheduler = Scheduler(client.config)
        await scheduler.start()
        scheduler.schedule(sleepers(5, 1.0), 0)
        results = asyncio.create_task(scheduler.get_results(0))
        everything = asyncio.create_task(scheduler.wait_all())
        await asyncio.sleep(0.3)
        await asyncio.wait_for(scheduler.stop(), 30)
        statuses, experiences = await asyncio.wait_for(results, 5)
        assert 2 <= len(statuses) == len(experiences) < 5
        with pytest.raises(NotRunning):
            await asyncio.wait_for(everything, 5)
        async with Scheduler(client.config) as another:
            assert len((await another.get_results(0))[0]) == 5 - len(statuses)

    asyncio.run(main())


def test_p16_a_scheduler_that_started_the_system_ends_it_and_finds_its_work_again(tmp_path: Path) -> None:
    config = scripted(tmp_path, explorer={"places": 2})

    async def main() -> None:
        scheduler = Scheduler(config)
        await scheduler.start()
        scheduler.schedule(sleepers(2), 0)
        await scheduler.wait_all()
        scheduler.schedule(sleepers(5, 0.5), 1)
        await scheduler.stop()
        assert discovery.find(config) is None
        await scheduler.start()
        try:
            assert len((await scheduler.get_results(0, timeout=0))[1]) == 2
            assert [e.eid.task for e in (await scheduler.get_results(1))[1]] == list(range(5))
            assert scheduler.client.log.verify() == []
            assert scheduler.client.batch(1).state is BatchLifecycleState.FINALIZED
        finally:
            await scheduler.stop()

    asyncio.run(main())


# --- whatever dies ----------------------------------------------------------------------------------------------------
def test_p18_promise_2_the_coordinator_is_killed_while_results_are_waited_for_and_taken(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"places": 4})
    count = tmp_path / "ran"

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            got: list[tuple[object, int]] = []
            for batch in (1, 2):
                scheduler.schedule(sleepers(8, 0.5, count_file=str(count)), batch)
            waiting = asyncio.create_task(scheduler.get_results(2))
            for _ in range(3):
                first = pid_of(client, "coordinator")
                await asyncio.sleep(0.4)
                taking = asyncio.create_task(scheduler.get_results(1, timeout=0, clear_timeout_tasks=False))
                await asyncio.sleep(0.02)
                os.kill(first, signal.SIGKILL)
                scheduler.schedule(sleepers(1, count_file=str(count)), 3)
                # one that is away for longer than GRACE_SECONDS has given nothing: it is taken below
                with contextlib.suppress(TimeoutError):
                    got += [(e.eid.batch, e.eid.task) for e in (await taking)[1]]
                await asyncio.to_thread(
                    wait_until, lambda gone=first: pid_of(client, "coordinator") != gone, "another coordinator"
                )
            for results in (await waiting, await scheduler.get_results(1), await scheduler.get_results(3)):
                assert all(status.ok for status in results[0])
                got += [(e.eid.batch, e.eid.task) for e in results[1]]
            assert Counter(got) == {
                **{(b, t): 1 for b in (1, 2) for t in range(8)}, **{(3, t): 1 for t in range(3)},
            }
            assert set(Counter(count.read_text().splitlines()).values()) == {1}  # and nothing was run again
            assert client.log.verify() == []

    asyncio.run(main())


def test_p18_promise_2_everything_is_killed_and_another_scheduler_collects_the_rest(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"places": 4})
    count = tmp_path / "ran"

    async def before() -> list[int]:
        scheduler = Scheduler(client.config)  # never stopped
        await scheduler.start()
        scheduler.schedule(sleepers(12, 0.5, count_file=str(count)), 1)
        scheduler.schedule(sleepers(2, count_file=str(count)), 1)
        _, got = await scheduler.get_results(1, min_num=3, timeout=1.2, clear_timeout_tasks=False)
        assert len(got) >= 3
        wait_until(lambda: client.batch(1).ready_task_count >= 3, "results that nobody took")
        kill_system(client)
        with pytest.raises(NotRunning):
            scheduler.schedule(sleepers(1), 1)
        await scheduler.stop()
        return [e.eid.task for e in got]

    async def after(got: list[int]) -> None:
        finished = client.log.current(1)
        assert finished is not None
        async with Scheduler(client.config) as scheduler:
            assert scheduler.has_step(1)
            statuses, experiences = await scheduler.get_results(1)
            assert all(status.ok for status in statuses)
            assert sorted(got + [e.eid.task for e in experiences]) == list(range(14))
            ran = Counter(int(line.split()[1]) for line in count.read_text().splitlines())
            assert not {task for task, times in ran.items() if times > 1} & finished.statuses.keys()
            assert not scheduler.has_step(1)
            assert scheduler.client.log.verify() == []

    asyncio.run(after(asyncio.run(before())))


def test_p16_start_says_why_an_engine_cant_start(tmp_path: Path) -> None:
    config = scripted(tmp_path, explorer={"rollout_model": {"script": {"no such key": 1}}})

    async def main() -> None:
        with pytest.raises(StartupError, match="no such key"):
            await Scheduler(config).start()
        assert discovery.find(config) is None

    asyncio.run(main())


# --- P23 --------------------------------------------------------------------------------------------------------------
def test_p23_after_the_warmup_an_attempt_may_take_so_many_times_what_attempts_took(
    start_system: StartSystem,
) -> None:
    client = start_system(explorer={
        "max_timeout": 20.0, "max_retry_times": 0,
        "dynamic_timeout": {"enable": True, "ratio": 3.0, "warmup_min_steps": 2},
    })

    def timeouts() -> list[float]:
        return [r.event.timeout for r in client.log.read(types=["TasksDispatched"])
                if isinstance(r.event, ev.TasksDispatched)]

    def pace() -> list[ev.PaceMeasured]:
        return [r.event for r in client.log.read(stream="pace") if isinstance(r.event, ev.PaceMeasured)]

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            slow = sleepers(2, 3.0)
            for task in slow:
                task.is_eval = True
            scheduler.schedule(slow, "0/eval")  # evals don't count
            assert [s.ok for s in (await scheduler.get_results("0/eval"))[0]] == [True, True]
            client.submit_batch(batch_id="1/eval", tasks=sleepers(2, 0.1), batch_type="eval")
            client.finalize_eval_batch("1/eval", timeout=30)
            assert pace() == []
            scheduler.schedule(sleepers(4, 0.6), 0)
            assert len((await scheduler.get_results(0))[0]) == 4
            client.submit_batch(batch_id=1, tasks=sleepers(4, 0.6), batch_type="train")  # a step is a step
            client.finalize_train_batch(1, timeout=30)
            assert set(timeouts()) == {0.0}
            one, two = pace()
            assert (one.batch_id, one.steps, one.attempts, one.timeout) == (0, 1, 4, 0.0)
            assert (two.batch_id, two.steps, two.attempts) == (1, 2, 8)
            limit = two.timeout
            assert limit == 3.0 * two.seconds / two.attempts
            assert 1.8 <= limit < 20
            os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
            scheduler.schedule(sleepers(2, 18.0) + sleepers(2, 0.6), 2)
            began = time.monotonic()
            statuses, experiences = await scheduler.get_results(2)
            assert time.monotonic() - began < 18
            assert [s.ok for s in statuses] == [False, False, True, True]
            assert "dynamic_timeout" in (statuses[0].message or "")
            assert len(experiences) == 2
            assert set(timeouts()) == {0.0, limit}
            assert pace()[-1].timeout > limit  # those that timed out count: the pace follows tasks that get longer
            client.submit_batch(batch_id=3, tasks=sleepers(2, 0.1), batch_type="train")
            client.finalize_train_batch(3, timeout=30)
            assert timeouts()[-1] == pace()[-2].timeout

    asyncio.run(main())
