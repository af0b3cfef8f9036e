"""What judges an answer, in a process that can be killed: whatever it does there, it is no reward."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import graders as faulty
from tests.helpers.endpoint import until
from tests.helpers.graders import FAULTS, Faulty
from tests.helpers.ready_made import Answers
from trinity_es import Experience, Workflow
from trinity_es.actors.base import process_start_time
from trinity_es.actors.rollout.result import UnitResult, classify
from trinity_es.actors.rollout.workers.graders import Graders
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.errors import DataError, GraderError, StartupError, UnknownWorkflow, WorkflowError
from trinity_es.events.values import Task
from trinity_es.testing import wait_until
from trinity_es.workflows.rewards import call_of

HERE = "tests.helpers.graders"
MEMORY = 400 * 2**20


@pytest.fixture
async def graders() -> AsyncIterator[Graders]:
    async with Graders.alone() as graders:
        yield graders


async def grade(graders: Graders, function: Any, *args: Any, **limits: Any) -> Any:
    path, call = call_of(function, args, {})
    return await graders.grade(path, call, **limits)


async def test_a_call_has_a_process_of_its_own_that_is_gone_afterwards(graders: Graders) -> None:
    seen = [await grade(graders, faulty.pids) for _ in range(3)]
    assert len({pid for pid, _, _ in seen}) == 3
    assert all(pid == group != os.getpid() for pid, group, _ in seen)
    assert len({parent for _, _, parent in seen}) == 1, "all are forked from one template"
    wait_until(lambda: not any(process_start_time(pid) for pid, _, _ in seen), "their ends")


async def test_arguments_and_what_it_gives_are_plain_json(graders: Graders) -> None:
    path, call = call_of(faulty.echo, ["é", 1, None, {"a": [0.5]}], {"b": True})
    assert await graders.grade(path, call) == [["é", 1, None, {"a": [0.5]}], {"b": True}]
    with pytest.raises(WorkflowError, match=r"arguments of the grader .*:echo must be plain JSON"):
        call_of(faulty.echo, [object()], {})
    with pytest.raises(WorkflowError, match="give a function at the top level of a module"):
        call_of(lambda: 1.0, [], {})


@pytest.mark.parametrize(("how", "says"), [
    ("sleep", "did not end within 0.5 s"), ("regex", "did not end within 0.5 s"), ("deaf", "did not end within 0.5 s"),
    ("_exit", "ended its process with exit status 3"), ("SystemExit", "raised SystemExit: 0"),
    ("segfault", "was ended by SIGSEGV"), ("SIGTERM", "was ended by SIGTERM"),
    ("raise", "raised RuntimeError: on purpose"),
    ("memory", "MiB of memory: the limit is 400"), ("no_json", "which is not plain JSON"),
    ("forks", "ended its process with exit status 0"),
])
async def test_a_grader_that_fails_is_a_failure_of_its_own_kind(graders: Graders, how: str, says: str) -> None:
    timeout = 0.5 if "0.5 s" in says else 30.0
    with pytest.raises(GraderError, match=says) as e:
        await grade(graders, faulty.fault, how, timeout=timeout, memory=MEMORY)
    assert classify(e.value)[0] == "grader"
    assert await grade(graders, faulty.half) == 0.5, "and the next one finds nothing of it"


async def test_an_error_of_this_package_is_raised_as_itself(graders: Graders) -> None:
    with pytest.raises(DataError, match="no grader for x"):
        await grade(graders, faulty.refuses, "x")
    with pytest.raises(UnknownWorkflow, match="No module named 'there_is_none'"):
        await graders.grade("there_is_none:f", b"[[], {}]")


async def test_what_a_grader_started_ends_with_it(graders: Graders, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    assert await grade(graders, faulty.starts, 3600, str(note)) == 1.0
    [pid] = map(int, note.read_text().split())
    wait_until(lambda: process_start_time(pid) is None, "the end of what it started")


async def test_a_call_that_is_given_up_leaves_no_process(graders: Graders) -> None:
    await grade(graders, faulty.half)
    calls = [asyncio.create_task(grade(graders, faulty.fault, "sleep", timeout=3600)) for _ in range(2)]
    template = await graders.templates._template(f"{HERE}:fault")
    await until(lambda: len(template.children) == 2, "both calls")
    pids = [child.pid for child in template.children.values()]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    wait_until(lambda: not any(pid and process_start_time(pid) for pid in pids), "their ends")
    assert await grade(graders, faulty.half) == 0.5


async def test_the_end_of_the_template_is_the_machinerys_failure(graders: Graders) -> None:
    _, _, parent = await grade(graders, faulty.pids)
    call = asyncio.create_task(grade(graders, faulty.fault, "sleep", timeout=60))
    await asyncio.sleep(0)
    template = await graders.templates._template(f"{HERE}:fault")
    await until(lambda: template.children, "the call")
    os.kill(parent, 9)
    with pytest.raises(StartupError) as e:
        await call
    assert classify(e.value)[0] == "infra"
    assert await grade(graders, faulty.half) == 0.5


async def test_a_call_that_waits_for_room_has_its_whole_time(graders: Graders) -> None:
    graders._slots = asyncio.Semaphore(1)
    seconds = time.monotonic()
    calls = [grade(graders, faulty.fault, "sleep", timeout=0.3) for _ in range(3)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, GraderError) for one in found)
    assert time.monotonic() - seconds >= 0.9, "a call's time begins when it has a process"


# --- in runs --------------------------------------------------------------------------------------------------------
class Itself(Workflow):
    def run(self) -> list[Experience]:
        [answer] = self.model.chat(self.prompt_messages())
        answer.reward = self.grade(faulty.fault, answer.response_text, timeout=1.0, memory=MEMORY)
        return [answer]


class ItselfAsync(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [answer] = await self.model.chat_async(self.prompt_messages())
        answer.reward = await self.grade_async(faulty.fault, answer.response_text, timeout=1.0, memory=MEMORY)
        return [answer]


async def played(pool: WorkerPool | None, workflow: Any, answers: list[str], **fields: Any) -> UnitResult:
    runner = WorkflowRunner(Answers(*answers), workers=pool)
    task = Task(workflow=workflow, raw_task={"prompt": "?", "answer": "1"}, task_id=0, **fields)
    return await runner.execute(task, 1, range(len(answers)), timeout=120)


@pytest.mark.parametrize("workflow", ["single_turn", "simple_workflow", "async_simple_workflow"])
async def test_of_a_hundred_graders_that_fail_none_becomes_a_reward(pool: WorkerPool, workflow: str) -> None:
    """And those of the other answers of the same request do. (Of each workflow a third.)"""
    path = {"single_turn": "trinity_es.workflows.workflow:SingleTurnWorkflow"}.get(workflow)
    path = path or f"trinity_es.workflows.simple:{'Async' * workflow.startswith('async')}SimpleWorkflow"
    quick = [how for how in FAULTS if how not in ("sleep", "regex", "deaf", "memory")]
    answers = [*quick * 4, "fine", "sleep", "regex", "deaf", "fine", "fine"][:34]
    done = await played(pool, path, answers, reward_fn=Faulty)
    good = [i for i, answer in enumerate(answers) if answer == "fine"]
    assert len(done.results) == len(good)
    assert {r.metrics["reward"] for r in done.results} == {1.0}
    assert len(done.failures) == len(answers) - len(good) == 31
    assert {kind for _, kind, _ in done.failures} == {"grader"}
    assert {e.reward for e in done.experiences} == {1.0}
    if workflow != "async_simple_workflow":  # whose runs are requests of their own, in any order
        assert [r.run for r in done.results] == [e.eid.run for e in done.experiences] == good


@pytest.mark.parametrize("workflow", [Itself, ItselfAsync])
@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "processes of its own"])
async def test_a_workflow_calls_a_grader_itself(workflow: type[Workflow], pooled: bool, pool: WorkerPool) -> None:
    done = await played(pool if pooled else None, workflow, ["fine"] * 2)
    assert [r.metrics["reward"] for r in done.results] == [1.0, 1.0], done.failures
    done = await played(pool if pooled else None, workflow, ["segfault"] * 2)
    assert [kind for _, kind, _ in done.failures] == ["grader", "grader"]
