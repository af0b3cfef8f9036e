"""The Scheduler's life: many who wait at once, stop and start, and whatever dies (P16, P18, P20, P21, P23)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.scheduling import AsyncDummy, NewId, dummies, load
from tests.helpers.systems import StartSystem, kill_system, pid_of, play_batch, scripted, sleepers
from trinity_es import BatchLifecycleState, Scheduler, Status
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import NotRunning
from trinity_es.system import running_system
from trinity_es.testing import wait_until


async def test_p20_wait_all(scheduler: Scheduler, shared: RolloutClient, new_id: NewId) -> None:
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


async def test_p20_wait_all_waits_for_tasks_and_cancels_none_without_clear(scheduler: Scheduler, new_id: NewId) -> None:
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


async def test_p21_two_callers_of_one_batch_never_get_the_same(shared: RolloutClient, new_id: NewId) -> None:
    async with Scheduler(shared.config) as one, Scheduler(shared.config) as other:
        batch = new_id()
        one.schedule([*sleepers(6), *sleepers(6, 2.0)], batch)
        wait_until(lambda: shared.batch(batch).ready_task_count == 6, "six tasks to finish")
        got: list[int] = []
        for timeout in (0.0, None):  # what is there; and all of the rest
            calls = [s.get_results(batch, timeout=timeout, clear_timeout_tasks=False) for s in (one, other, one)]
            got += [e.eid.task for _, found in await asyncio.gather(*calls) for e in found]
        assert sorted(got) == list(range(12))


async def test_p18_a_caller_that_gives_up_loses_nothing(scheduler: Scheduler, new_id: NewId) -> None:
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


async def test_p16_stop_waits_for_runs_start_goes_on(system_for: StartSystem, new_id: NewId, tmp_path: Path) -> None:
    client, first, second = system_for(explorer={"max_concurrency": 2}), new_id(), new_id()
    count = tmp_path / "ran"
    scheduler = Scheduler(client.config)
    with pytest.raises(NotRunning, match=r"scheduler.start"):
        scheduler.schedule(sleepers(1), first)
    await scheduler.stop()
    await scheduler.start()
    await scheduler.start()
    scheduler.schedule(sleepers(6, 1.0, count_file=str(count)), first)
    wait_until(lambda: load(client) == 2, "two tasks to run")
    await scheduler.stop()
    await scheduler.stop()
    state = client.batch(first)
    assert state.flights == {}
    assert state.completed_task_count >= 2
    assert state.pending
    assert client.why(first).count("its scheduler was stopped") == 1
    with pytest.raises(NotRunning):
        scheduler.has_step(first)
    await scheduler.start()
    statuses, experiences = await scheduler.get_results(first, timeout=30)
    assert len(statuses) == len(experiences) == 6
    assert len(count.read_text().splitlines()) == 6
    scheduler.schedule(sleepers(3), second)
    assert len((await scheduler.get_results(second, min_num=3, timeout=30))[1]) == 3
    await scheduler.stop()


async def test_p16_stop_while_others_wait(system_for: StartSystem, new_id: NewId) -> None:
    client, batch = system_for(explorer={"max_concurrency": 2}), new_id()
    scheduler = Scheduler(client.config)
    await scheduler.start()
    scheduler.schedule(sleepers(5, 1.0), batch)
    results = asyncio.create_task(scheduler.get_results(batch))
    everything = asyncio.create_task(scheduler.wait_all())
    await asyncio.sleep(0.3)
    await asyncio.wait_for(scheduler.stop(), 30)
    statuses, experiences = await asyncio.wait_for(results, 5)
    assert 2 <= len(statuses) == len(experiences) < 5
    with pytest.raises(NotRunning):
        await asyncio.wait_for(everything, 5)
    async with Scheduler(client.config) as another:
        assert len((await another.get_results(batch))[0]) == 5 - len(statuses)


async def test_p16_a_scheduler_that_started_the_system_ends_it_and_finds_its_work_again(tmp_path: Path) -> None:
    config = scripted(tmp_path, explorer={"max_concurrency": 2})
    scheduler = Scheduler(config)
    await scheduler.start()
    scheduler.schedule(sleepers(2), 0)
    await scheduler.wait_all()
    scheduler.schedule(sleepers(5, 0.5), 1)
    await scheduler.stop()
    assert running_system.find(config) is None
    await scheduler.start()
    try:
        assert len((await scheduler.get_results(0, timeout=0))[1]) == 2
        assert [e.eid.task for e in (await scheduler.get_results(1))[1]] == list(range(5))
        assert scheduler.client.log.verify() == []
        assert scheduler.client.batch(1).state is BatchLifecycleState.FINALIZED
    finally:
        await scheduler.stop()


async def test_p18_promise_2_the_coordinator_is_killed_under_takers(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"max_concurrency": 4})
    count = tmp_path / "ran"
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
        assert Counter(got) == {**{(b, t): 1 for b in (1, 2) for t in range(8)}, **{(3, t): 1 for t in range(3)}}
        assert set(Counter(count.read_text().splitlines()).values()) == {1}  # and nothing was run again
        assert client.log.verify() == []


def test_p18_promise_2_after_kill_9_of_all_another_scheduler_goes_on(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"max_concurrency": 4})
    count = tmp_path / "ran"

    async def before() -> list[int]:
        scheduler = Scheduler(client.config)  # never stopped
        await scheduler.start()
        scheduler.schedule(sleepers(12, 0.5, count_file=str(count)), 1)
        scheduler.schedule(sleepers(2, count_file=str(count)), 1)
        _, got = await scheduler.get_results(1, min_num=3, timeout=1.2, clear_timeout_tasks=False)
        assert len(got) >= 3
        scheduler.schedule(sleepers(4, 0.5, count_file=str(count)), 1)  # a slow machine may have taken all by now
        wait_until(lambda: client.batch(1).ready_task_count >= 3, "results that nobody took")
        kill_system(client)
        with pytest.raises(NotRunning):
            scheduler.schedule(sleepers(1), 1)
        await scheduler.stop()
        return [e.eid.task for e in got]

    async def after(got: list[int]) -> None:
        finished = client.log.current(1)
        async with Scheduler(client.config) as scheduler:
            assert scheduler.has_step(1)
            statuses, experiences = await scheduler.get_results(1)
            assert all(status.ok for status in statuses)
            assert sorted(got + [e.eid.task for e in experiences]) == list(range(18))
            ran = Counter(int(line.split()[1]) for line in count.read_text().splitlines())
            assert not {task for task, times in ran.items() if times > 1} & finished.statuses.keys()
            assert not scheduler.has_step(1)
            assert scheduler.client.log.verify() == []

    asyncio.run(after(asyncio.run(before())))


async def test_p23_after_the_warmup_an_attempt_may_take_as_long_as_others_took(start_system: StartSystem) -> None:
    client = start_system(explorer={
        "max_timeout": 20.0, "max_retry_times": 0,
        "dynamic_timeout": {"enable": True, "ratio": 3.0, "warmup_min_steps": 2},
    })

    def timeouts() -> list[float]:
        return [r.event.timeout for r in client.log.read(types=["TasksDispatched"])
                if isinstance(r.event, ev.TasksDispatched)]

    def pace() -> list[ev.PaceMeasured]:
        return [r.event for r in client.log.read(stream="pace") if isinstance(r.event, ev.PaceMeasured)]
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
        play_batch(client, 3, sleepers(2, 0.1))
        assert timeouts()[-1] == pace()[-2].timeout


async def test_p7_p25_an_ended_batch_is_readable_after_its_id_is_reused(system_for: StartSystem, new_id: NewId) -> None:
    client, batch, other = system_for(), new_id(), new_id()
    result = play_batch(client, batch, sleepers(2, reward=0.25))
    async with Scheduler(client.config) as scheduler:
        scheduler.schedule(dummies(1, exception=1), other)
        await scheduler.get_results(other, timeout=30)
        before = client.log.head().position
        scheduler.schedule(sleepers(3), other)
        await scheduler.get_results(other, timeout=30)
    state = client.batch(batch)
    assert state.state is BatchLifecycleState.FINALIZED
    assert state.final_result == result
    assert all(isinstance(s, Status) and s.ok for s in state.statuses.values())
    assert client.batch(other).completed_task_count == 3
    past = client.log.replay(other, at=before)
    assert (past.state, past.completed_task_count) == (BatchLifecycleState.FINALIZED, 2)
    assert "Exception occurred" in (past.statuses[1].message or "")
    assert past.taken.keys() == {0, 1}
    assert [e.eid.task for e in client.read(past.experiences)] == [0]
    assert len(list(client.experiences(other))) == 3
