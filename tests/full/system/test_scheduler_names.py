"""The Scheduler's names of Trinity-RFT 0.6 on the real actor system (PARITY P41)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.scheduling import AsyncDummy, OneRun, dummies, half_done
from tests.helpers.systems import StartSystem, sleepers
from trinity_es import Experience, Scheduler
from trinity_es.events.errors import BatchTypeMismatch, DataError


def test_p41_payloads_statuses_an_abort_and_partial_tasks(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"max_repeat_times_per_runner": 1, "over_rollout": {"wait_after_min": 1.0}})

    async def main() -> None:
        async with Scheduler(client.config) as scheduler:
            # payloads: the experiences of get_results, serialized, and gone with it
            scheduler.schedule(dummies(2, exception=1, workflow=OneRun, repeat_times=2, step_num=2), 0)
            statuses, payloads = await scheduler.get_payload_results(batch_id=0, min_num=3, timeout=60)
            assert [s.ok for s in statuses] == [True, True, False]
            assert all(isinstance(p, bytes) for p in payloads)
            experiences = [e for p in payloads for e in Experience.deserialize_many(p)]
            assert [e.eid.rid for e in experiences] == ["0/0/0"] * 2 + ["0/0/1"] * 2 + ["0/1/0"] * 2 + ["0/1/1"] * 2
            assert await scheduler.get_payload_results(0, timeout=1) == ([], [])
            # statuses alone
            scheduler.schedule(dummies(2, workflow=AsyncDummy, repeat_times=3), 1)
            found = await scheduler.get_statuses(1, timeout=60)
            assert [(s.completed_runs, s.total_runs) for s in found] == [(3, 3)] * 2
            assert not scheduler.has_step(1)
            assert await scheduler.get_statuses(1) == []
            # partial tasks, by the call and not by the config
            for batch, partial in ((2, True), (3, False)):
                scheduler.schedule(half_done(tmp_path / str(batch)), batch)
                found = await scheduler.get_statuses(batch, min_num=1, timeout=60, return_partial_tasks=partial)
                assert [s.completed_runs for s in found] == ([4, 3] if partial else [4])
                assert not scheduler.has_step(batch)
            # an abort: what is done stays, what is half done too if that is wanted
            for batch, partial in ((4, True), (5, False)):
                scheduler.schedule(half_done(tmp_path / str(batch)), batch)
                await scheduler.get_statuses(batch, min_num=1, timeout=60, clear_timeout_tasks=False)
                await scheduler.abort_batch(batch, return_partial_tasks=partial, restart_runners=True)
                assert scheduler.has_step(batch) is partial
                _, experiences = await scheduler.get_results(batch, timeout=60)
                assert Counter(e.eid.task for e in experiences) == ({1: 3} if partial else {})
            await scheduler.abort_batch(99)
            with pytest.raises(DataError):
                await scheduler.get_payload_results(0, min_num=-1)

    asyncio.run(main())
    client.submit_batch(batch_id=6, tasks=sleepers(1), batch_type="train")

    async def refused() -> None:
        async with Scheduler(client.config) as scheduler:
            with pytest.raises(BatchTypeMismatch):
                await scheduler.abort_batch(6)

    asyncio.run(refused())
    client.finalize_train_batch(6, timeout=60)
