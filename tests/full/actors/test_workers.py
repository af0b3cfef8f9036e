"""Sync workflows in worker processes, on an engine in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.helpers import worker_workflows as cases
from trinity_es.actors.base import process_start_time
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout import workflow_runner
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import AuxiliaryModel, WorkflowRunner
from trinity_es.events.experience import EID
from trinity_es.events.values import Task
from trinity_es.testing import wait_until
from trinity_es.workflows.workflow import Workflow


def runner(pool: WorkerPool, engine: Any = None, **options: Any) -> WorkflowRunner:
    return WorkflowRunner(engine or cases.Recorder(), workers=pool, **options)


async def played(
    workflows: WorkflowRunner, workflow: type[Workflow] | str, runs: range = range(1), **args: Any
) -> UnitResult:
    return await workflows.execute(Task(workflow=workflow, workflow_args=args, task_id=4), 12, runs)


async def test_a_sync_workflow_plays_in_the_main_thread_of_a_process_that_is_used_again(pool: WorkerPool) -> None:
    workflows = runner(pool)
    done = [await played(workflows, cases.Tells) for _ in range(3)]
    pids = {r.metrics["pid"] for d in done for r in d.results}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert all(r.metrics["main"] == 1.0 for d in done for r in d.results)
    assert os.getpgid(int(pids.pop())) == os.getpgid(0)


async def test_a_workflow_can_not_signal_the_process_group_which_is_the_runners(pool: WorkerPool) -> None:
    done = await played(runner(pool), cases.SignalsItsGroup)
    assert [r.metrics["refused"] for r in done.results] == [4.0], done.failures


async def test_a_class_without_an_importable_name_plays_in_a_thread(pool: WorkerPool) -> None:
    class Local(cases.Tells):
        pass

    done = await played(runner(pool), Local)
    assert [r.metrics["pid"] for r in done.results] == [os.getpid()]
    named = await played(runner(pool), "tests.helpers.worker_workflows:NoNameOfItsOwn")
    assert [r.metrics["pid"] != os.getpid() for r in named.results] == [True]


async def test_what_it_returns_is_stamped_counted_and_measured_as_in_a_thread(pool: WorkerPool) -> None:
    async def result(workflows: WorkflowRunner) -> tuple[Any, ...]:
        task = Task(workflow=cases.Chats, rollout_args={"seed": 5, "max_tokens": 9}, index={"index": 7}, task_id=4)
        done = await workflows.execute(task, 12, range(2, 5))
        assert not done.failures
        for experience in done.experiences:
            experience.eid = EID(**{**experience.eid.to_dict(), "suffix": ""})
        for r in done.results:
            assert r.metrics.pop("time/run_execution") > 0
        return done.results, done.experiences, done.model_version, done.model_version_end

    engine = cases.Recorder()
    in_worker = await result(runner(pool, engine))
    assert in_worker == await result(WorkflowRunner(cases.Recorder()))
    results, experiences, *_ = in_worker
    assert [(r.run, r.prompt_tokens, r.response_tokens) for r in results] == [(2, 6, 4), (3, 6, 4), (4, 6, 4)]
    assert [(e.eid.batch, e.eid.task, e.eid.run) for e in experiences] == [(12, 4, 2), (12, 4, 3), (12, 4, 4)]
    assert len({tuple(e.tokens.tolist()) for e in experiences}) == 3, "a seed for each run"
    assert sorted(e.tokens.tolist() for e in experiences) == sorted(
        [*c.prompt_token_ids, *c.token_ids] for c in engine.gave
    )


async def test_versions_are_those_of_the_runner(pool: WorkerPool) -> None:
    workflows = runner(pool, cases.Updates(EngineConfig(model_path="", initial_version=3)))
    done = await played(workflows, cases.Chats)
    [experience] = done.experiences
    assert (experience.info["model_version"], experience.info["model_version_drift"]) == (3, 1)
    assert (done.model_version, done.model_version_end) == (3, 4)
    again = await played(workflows, cases.Chats)
    assert again.experiences[0].info["model_version"] == 4


async def test_weights_that_came_after_the_last_answer_count_as_drift(pool: WorkerPool, tmp_path: Path) -> None:
    engine, go = cases.Recorder(), tmp_path / "go"
    running = asyncio.create_task(played(runner(pool, engine), cases.Waits, go=str(go)))
    await asyncio.to_thread(wait_until, go.with_suffix(".asked").exists, "the answer")
    engine.model_version = 5
    go.touch()
    [experience] = (await running).experiences
    assert (experience.info["model_version"], experience.info["model_version_drift"]) == (3, 2)
    assert experience.info["version_spans"] == [[3, 0, 16]]


async def test_a_conversation_has_the_tokens_and_logprobs_that_the_engine_gave(pool: WorkerPool) -> None:
    engine = cases.Recorder()
    done = await played(runner(pool, engine), cases.Conversation)
    assert not done.failures, done.failures
    [whole] = done.experiences
    answers = [c.token_ids for c in engine.gave]
    assert whole.tokens.tolist() == [*b"hello\n", *answers[0], *b"\non\n", *answers[1]]
    first, second = (np.asarray(c.logprobs, dtype=np.float32).tolist() for c in engine.gave)
    assert whole.logprobs.tolist() == [*first, *[0.0] * len("\non\n"), *second]
    assert whole.action_mask.tolist() == [True] * 3 + [False] * len("\non\n") + [True] * 3
    assert whole.metrics["requests"] == 2, "the logprobs are known"
    assert done.results[0].metrics["conversation_forks"] == 0
    assert whole.metrics["version"] == 3
    assert done.results[0].response_tokens == 6


async def test_any_thread_and_any_loop_may_call_the_model(pool: WorkerPool) -> None:
    engine = cases.Recorder()
    done = await played(runner(pool, engine), cases.ChatsInThreads)
    assert [e.prompt_text for e in done.experiences] == [f"prompt {i}" for i in range(8)]
    by_prompt = {bytes(c.prompt_token_ids).decode(): c.token_ids for c in engine.gave}
    for e in done.experiences:
        assert e.tokens.tolist()[e.prompt_length :] == by_prompt[e.prompt_text or ""]
    assert done.results[0].response_tokens == 32
    done = await played(runner(pool), cases.ChatsOnALoopOfItsOwn)
    assert [e.eid.step for e in done.experiences] == [0, 1]


async def test_auxiliary_models_have_engines_of_their_own(pool: WorkerPool) -> None:
    judge = AuxiliaryModel("judge", cases.Recorder(tokens=5))
    done = await played(runner(pool, cases.Recorder(tokens=2), auxiliary=[judge]), cases.AsksTheJudge)
    assert (done.results[0].metrics["mine"], done.results[0].metrics["judged"]) == (2, 5)


async def test_p15_a_workflow_that_is_used_again_gets_the_auxiliary_models_of_its_new_run(pool: WorkerPool) -> None:
    judge = AuxiliaryModel("judge", cases.Recorder(tokens=5))
    for workers in (pool, None):
        workflows = WorkflowRunner(cases.Recorder(), auxiliary=[judge], workers=workers)
        for _ in range(2):
            done = await played(workflows, cases.KeptWithAJudge)
            assert not done.failures
            assert {k: done.results[0].metrics[k] for k in ("requests", "judged")} == {"requests": 1, "judged": 5}


@pytest.mark.parametrize("in_worker", [True, False])
async def test_p9_can_reset_and_can_repeat(pool: WorkerPool, in_worker: bool) -> None:
    workflows = WorkflowRunner(cases.Recorder(), workers=pool if in_worker else None)
    for workflow, built in ((cases.Kept, [1, 1, 1]), (cases.Rebuilt, [1, 2, 3])):
        done = [await played(workflows, workflow, reward=i) for i in range(3)]
        assert [d.results[0].metrics["built"] for d in done] == built
        assert [d.experiences[0].reward for d in done] == [0, 1, 2]
    done = [await played(workflows, cases.Repeats, range(6, 9))]
    assert [(r.run, r.experiences, r.metrics["at_once"]) for r in done[0].results] == [(n, 1, 3) for n in (6, 7, 8)]


@pytest.mark.parametrize(("how", "kind", "says"), [
    ("_exit", "workflow", "exit status 3"),
    ("_exit 0", "workflow", "exit status 0"),
    ("segfault", "workflow", "SIGSEGV"),
    ("abort", "workflow", "SIGABRT"),
    ("kill", "workflow", "SIGKILL"),
    ("SystemExit", "workflow", "Ends raised SystemExit: 0"),
    ("raise", "workflow", "RuntimeError: on purpose\nTraceback"),
    ("nothing", "workflow", "without an experience"),
    ("unserialisable", "data", "object"),
])
async def test_an_end_fails_its_run_and_no_other(pool: WorkerPool, how: str, kind: str, says: str) -> None:
    workflows = runner(pool)
    ended, other = await asyncio.gather(played(workflows, cases.Ends, how=how), played(workflows, cases.Chats))
    [(run, found, message)] = ended.failures
    assert (run, found) == (0, kind)
    assert says in message
    assert other.results
    assert (await played(workflows, cases.Chats)).results


async def test_what_ends_a_process_before_it_runs_is_a_failure_as_well(pool: WorkerPool) -> None:
    done = await played(runner(pool), cases.EndsBeforeItRuns)
    assert done.failures[0][1] == "workflow"
    assert "SystemExit: 4" in done.failures[0][2]


async def test_the_end_of_a_worker_is_seen_when_a_child_of_it_keeps_the_pipe(pool: WorkerPool) -> None:
    started = time.monotonic()
    done = await played(runner(pool), cases.Forks)
    assert "exit status 7" in done.failures[0][2]
    assert time.monotonic() - started < 6


async def gone(note: Path) -> None:
    pids = [int(pid) for pid in note.read_text().split()]
    await asyncio.to_thread(
        wait_until, lambda: not any(process_start_time(pid) for pid in pids), f"the end of {pids}", 3
    )


@pytest.mark.parametrize("how", ["sleep", "loop", "C", "model", "deaf"])
async def test_p12_a_hung_workflow_is_ended_and_its_place_free(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    engine = cases.Recorder(rules=[{"prompt": "hang", "hang": True}])
    workflows = runner(pool, engine, timeout=1.5)
    await played(workflows, cases.Tells)
    hung, *others = await asyncio.gather(
        played(workflows, cases.Hangs, how=how, note=str(tmp_path / "pids")),
        *(played(workflows, cases.Chats) for _ in range(4)),
    )
    assert hung.failures == [(0, "timeout", "no end after 1.5 s (max_timeout)")]
    assert all(d.results for d in others)
    await gone(tmp_path / "pids")
    assert engine.aborted == (how == "model")
    assert int((tmp_path / "pids").read_text().split()[0]) not in pool.pids()
    both = await asyncio.gather(played(workflows, cases.Tells), played(workflows, cases.Tells))
    assert all(d.results for d in both)


async def test_a_cancelled_run_is_killed(pool: WorkerPool, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    running = asyncio.create_task(played(runner(pool), cases.Hangs, how="sleep", note=str(note)))
    await asyncio.to_thread(wait_until, note.exists, "the workflow to run")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(note)


async def test_closing_ends_busy_and_idle_workers(tmp_path: Path) -> None:
    pool, note = WorkerPool(2), tmp_path / "pids"
    workflows = runner(pool)
    running = asyncio.create_task(played(workflows, cases.Hangs, how="sleep", note=str(note)))
    await asyncio.to_thread(wait_until, note.exists, "the workflow to run")
    await played(workflows, cases.Tells)
    pids = pool.pids()
    assert len(pids) == 2
    await pool.close()
    assert [pid for pid in pids if process_start_time(pid) is not None] == []
    assert (await running).failures
    [(_, kind, message)] = (await played(workflows, cases.Tells)).failures
    assert (kind, "ended with their runner" in message) == ("infra", True)
    await gone(note)


async def test_no_more_workers_than_places_and_waiting_for_one_is_no_timeout(pool: WorkerPool) -> None:
    workflows = runner(pool, cases.Recorder(latency_seconds=0.3), timeout=1.0)
    done = await played(workflows, cases.Chats, range(12))
    assert len(done.results) == 12
    assert len(pool.pids()) == 2


async def test_a_worker_that_died_while_idle_is_replaced(pool: WorkerPool) -> None:
    workflows = runner(pool)
    await played(workflows, cases.Tells)
    [pid] = pool.pids()
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: process_start_time(pid) is None, "its end")
    assert (await played(workflows, cases.Tells)).results


async def test_a_worker_that_can_t_start_is_infrastructure(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    [(_, kind, message)] = (await played(runner(pool), cases.Tells)).failures
    assert (kind, "could not be started" in message) == ("infra", True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    [(_, kind, message)] = (await played(runner(pool), cases.Tells)).failures
    assert (kind, "exit status 1" in message) == ("infra", True)


async def test_errors_of_the_engine_keep_their_kind(pool: WorkerPool) -> None:
    workflows = runner(pool, cases.Dead(EngineConfig(model_path="")))
    assert (await played(workflows, cases.Chats)).failures == [(0, "infra", "the core is gone")]
    assert workflows.engine_dead == "the core is gone"
    workflows = runner(pool, cases.Odd(EngineConfig(model_path="")), timeout=20.0)
    assert (await played(workflows, cases.Chats)).failures == [(0, "infra", "the engine cancelled the request")]
    workflows = runner(pool)
    bad = await workflows.execute(Task(workflow=cases.Chats, rollout_args={"temprature": 1}), 1, range(1))
    assert bad.failures[0][1] == "data"


async def test_that_this_machine_lacks_something_is_told_by_a_worker_too(pool: WorkerPool) -> None:
    done = await played(runner(pool), cases.LacksAModule)
    assert done.lacks
    assert [kind for _, kind, _ in done.failures] == ["data"]
    assert not (await played(runner(pool), cases.Ends, how="raise")).lacks


async def test_what_goes_wrong_in_a_call_is_told_where_it_was_called(pool: WorkerPool) -> None:
    done = await played(runner(pool), cases.GivesBadThings)
    assert not done.failures, done.failures
    assert done.experiences[0].info["errors"] == ["WorkflowError", "TypeError", "AttributeError", "TrinityError"]


async def test_a_thread_that_a_workflow_left_is_no_part_of_the_next_run(pool: WorkerPool, tmp_path: Path) -> None:
    engine, note = cases.Recorder(), tmp_path / "said"
    workflows = runner(pool, engine)
    first = await played(workflows, cases.LeavesAThread, note=str(note))
    await asyncio.to_thread(wait_until, note.exists, "the thread to be told")
    asked = len(engine.gave)
    second = await played(workflows, cases.Tells)
    assert second.results[0].metrics["pid"] == first.results[0].metrics["pid"]
    assert "the run is over" in note.read_text()
    assert len(engine.gave) == asked


RUNNER = """
import asyncio, sys
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine

async def main():
    workflows = WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), workers=WorkerPool(2))
    runs = [Task(workflow="tests.helpers.worker_workflows:Hangs", workflow_args={"how": how, "note": sys.argv[1] + how})
            for how in ("sleep", "C")]
    await asyncio.gather(*(workflows.execute(task, 1, range(1)) for task in runs))

asyncio.run(main())
"""


def test_no_worker_outlives_its_runner(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", RUNNER, str(tmp_path / "pids-")], start_new_session=True)
    notes = [tmp_path / "pids-sleep", tmp_path / "pids-C"]
    children = []
    try:
        wait_until(lambda: all(note.exists() for note in notes), "both to hang")
        children = [int(note.read_text().split()[1]) for note in notes]
        process.kill()  # this process alone, not its group
        process.wait()
        pids = [int(note.read_text().split()[0]) for note in notes]
        wait_until(lambda: not any(process_start_time(pid) for pid in pids), "the end of the workers", 2)
    finally:
        process.kill()
        for pid in children:  # which the guardian ends with the group
            psutil.Process(pid).kill()


async def test_an_async_workflow_that_can_not_be_cancelled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_runner, "GRACE_SECONDS", 0.2)
    workflows = WorkflowRunner(cases.Recorder(), timeout=0.1)
    async with asyncio.timeout(5):
        done = await played(workflows, cases.CatchesEverything)
    assert done.failures == [(0, "timeout", "no end after 0.1 s (max_timeout)")]
    [left] = workflows._tasks
    monkeypatch.setattr(cases.CatchesEverything, "enough", True)
    left.cancel()
    await asyncio.wait({left}, timeout=5)
    assert not workflows._tasks
