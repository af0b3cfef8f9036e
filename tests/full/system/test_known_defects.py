"""What goes wrong in the known system, and does not here: each of its defects as a test (PARITY P11, P13, P18, P26)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time

import pytest

from tests.helpers.scheduling import AsyncDummy, NewId, dummies
from tests.helpers.systems import StartSystem, pid_of, sleepers
from trinity_es import BatchLifecycleState, Scheduler, Status
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import FinalizeTimeout
from trinity_es.testing import wait_until


def serving(client: RolloutClient, runner: str) -> bool:
    return any(r["runner"] == runner and r["state"] == "ready" for r in client.status()["runners"])


def has_units(client: RolloutClient, runner: str) -> bool:
    return any(r["runner"] == runner and r["load"] > 0 for r in client.status()["runners"])


def test_p13_a_runner_that_died_gets_no_task_until_it_is_replaced_and_none_is_lost(start_system: StartSystem) -> None:
    """There: a runner that dies goes back to the idle set, and the next task given to it is lost."""
    client = start_system(explorer={"max_concurrency": 2, "max_retry_times": 2, "rollout_model": {"engine_num": 2}})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            for batch in range(2):
                victim = f"runner-{batch}"
                wait_until(lambda: all(serving(client, r) for r in ("runner-0", "runner-1")), "both to serve", 90)
                scheduler.schedule(sleepers(4, 4.0), batch)  # all places of both
                wait_until(lambda name=victim: has_units(client, name), f"{victim} to have units")
                os.kill(pid_of(client, victim), signal.SIGKILL)
                scheduler.schedule(sleepers(6, 0.1), batch)  # the next ones
                statuses, experiences = await scheduler.get_results(batch, timeout=120)
                assert [s.ok for s in statuses] == [True] * 10
                assert [e.eid.task for e in experiences] == list(range(10))
            lost: dict[str, int] = {}
            for recorded in client.log.events():
                event = recorded.event
                if isinstance(event, ev.RunnerLost):
                    lost[event.runner] = event.incarnation
                if isinstance(event, ev.TasksDispatched):
                    assert event.incarnation > lost.get(event.runner, 0), "a unit went to a runner that was dead"
            assert set(lost) == {"runner-0", "runner-1"}

    asyncio.run(main())


def test_p18_p26_a_timeout_keeps_what_is_finished(system_for: StartSystem, new_id: NewId) -> None:
    """There: a finalize that times out empties the finished results before it raises; 4 of 4 are never delivered."""
    client, batch, other = system_for(), new_id(), new_id()
    client.submit_batch(batch_id=batch, tasks=sleepers(3) + sleepers(1, 3.0), batch_type="train")
    wait_until(lambda: client.batch(batch).completed_task_count == 3, "three tasks to finish")
    for _ in range(2):
        with pytest.raises(FinalizeTimeout, match="3 of 4"):
            client.finalize_train_batch(batch, timeout=0.2)
    assert client.finalize_train_batch(batch, timeout=60)["finished_task_count"] == 4
    assert [e.eid.task for e in client.experiences(batch)] == [0, 1, 2, 3]

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(sleepers(3) + sleepers(1, 3.0), other)
            with pytest.raises(TimeoutError):
                await scheduler.wait_all(timeout=1.0, clear_timeout_tasks=False)
            statuses, experiences = await scheduler.get_results(other, timeout=60)
            assert len(statuses) == len(experiences) == 4

    asyncio.run(main())


def test_p11_the_retry_of_a_hung_task_goes_to_another_runner(start_system: StartSystem) -> None:
    """There: all retries of a hung task go to the same runner."""
    client = start_system(explorer={
        "max_concurrency": 4, "max_timeout": 1.0, "max_retry_times": 3, "rollout_model": {"engine_num": 2},
    })

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(dummies(0, timeout=2, workflow=AsyncDummy), 1)
            statuses, _ = await scheduler.get_results(1, timeout=60)
            assert [s.ok for s in statuses] == [False, False]
            went: dict[int, list[str]] = {0: [], 1: []}
            for recorded in client.log.read(types=["TasksDispatched"]):
                assert isinstance(recorded.event, ev.TasksDispatched)
                for unit in recorded.event.units:
                    went[unit.task].append(recorded.event.runner)
            for runners in went.values():
                assert len(runners) == 4
                assert all(a != b for a, b in itertools.pairwise(runners))

    asyncio.run(main())


def test_p7_p25_a_batch_that_ended_can_be_looked_at_also_when_its_id_was_used_again(
    system_for: StartSystem, new_id: NewId
) -> None:
    """There: batch state is a dict that is popped when the batch ends, so no past batch can be looked at."""
    client, batch, other = system_for(), new_id(), new_id()
    client.submit_batch(batch_id=batch, tasks=sleepers(2, reward=0.25), batch_type="train")
    result = client.finalize_train_batch(batch, timeout=30)

    async def main() -> int:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(dummies(1, exception=1), other)
            await scheduler.get_results(other, timeout=30)
            before = client.log.head().position
            time.sleep(0.01)
            scheduler.schedule(sleepers(3), other)
            await scheduler.get_results(other, timeout=30)
            return before

    before = asyncio.run(main())
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
