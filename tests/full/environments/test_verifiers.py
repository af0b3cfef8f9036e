"""verifiers' environments, played through their own process: what is learned from, and what is not."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import pytest_asyncio

from tests.helpers.client_packages import LETTERS, environment
from tests.helpers.endpoint import serving, until
from tests.helpers.of_the_day import ALL, OTHERS, by_turns
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.environments.installs import Installed, find, remove
from trinity_es.environments.verifiers_tasks import ensure_tasks_file, tasks_file
from trinity_es.events.errors import EngineError, TasksetError
from trinity_es.events.values import Task
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.taskset import Taskset
from trinity_es.testing import ScriptedEngine

pytestmark = [
    by_turns("verifiers", OTHERS), pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"),
]

KINDS = {
    "ProviderError": "infra", "SandboxError": "infra", "TunnelError": "infra", "InterceptionError": "infra",
    "HarnessError": "workflow", "plain": "workflow", "exit": "workflow", "TaskError": "workflow",
    "EnvError": "workflow", "timeout": "timeout",
}
EACH = int(os.environ.get("FAILURES", "20" if ALL else "5"))
"""How often each way to fail is played; 20 times with ALL=1, and `FAILURES=100` to be surer still."""
ROWS = 8
EIGHT: dict[str, Any] = {"config": {"taskset": {"rows": ROWS}}}
THREE: dict[str, Any] = {"config": {"taskset": {"rows": 3, "shuffled": True}}}
"""Arguments of two tasksets. The tests here share them: it takes a Python with verifiers to write the tasks of one."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner(letters: Installed) -> AsyncIterator[WorkflowRunner]:
    """One for all tests: to start verifiers takes seconds."""
    engine = ScriptedEngine(EngineConfig(model_path=""))
    async with serving(engine, defaults={"max_tokens": 6}) as server:
        yield WorkflowRunner(engine, server=server, defaults={"max_tokens": 6}, timeout=120)


def tasks(*fails: str, **more: Any) -> list[Task]:
    """Return tasks of the environment that fail in these ways."""
    found = Taskset(TasksetConfig(path="verifiers:letters-env", name="letters", workflow_args=EIGHT)).all()
    return [replace(found[i % ROWS], raw_task={**found[i % ROWS].raw_task, "fails": how, **more})
            for i, how in enumerate(fails)]


async def played(runner: WorkflowRunner, asked: list[Task], at_once: int = 16) -> list[UnitResult]:
    room = asyncio.Semaphore(at_once)

    async def one(number: int, task: Task) -> UnitResult:
        async with room:
            task.task_id, task.workflow = number, "trinity_es.environments.verifiers_workflow:VerifiersWorkflow"
            return await runner.execute(task, 7, range(1))

    return await asyncio.gather(*(one(i, task) for i, task in enumerate(asked)))


async def test_an_episode_is_an_experience_of_what_was_sampled_and_of_nothing_else(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[bytes, bytes]] = []
    generate = runner.engine.generate

    async def noted(prompt: Any, sampling: Any) -> Any:
        answers = await generate(prompt, sampling)
        sampled.extend((bytes(a.prompt_token_ids), bytes(a.token_ids)) for a in answers)
        return answers

    monkeypatch.setattr(runner.engine, "generate", noted)
    done = await played(runner, tasks(*[""] * 8))
    assert [r.failures for r in done] == [[]] * 8
    trained = []
    for [e] in (r.experiences for r in done):
        assert e.reward == e.metrics["share"]
        assert e.metrics["turns"] == 2.0
        assert e.info["environment"] == "letters-env 0.3"
        assert (e.logprobs[e.action_mask] < 0).all()
        ids, at = e.tokens.tolist(), [e.prompt_length + i for i in np.flatnonzero(e.action_mask)]
        text = bytes(ids[i] for i in at).decode()
        assert e.reward == text.count("e") / len(text)
        trained += [(bytes(ids[:i]), ids[i]) for i in at]
    asked = [(prompt + answer[:i], token) for prompt, answer in sampled for i, token in enumerate(answer)]
    assert Counter(trained) == Counter(asked)  # each id that was sampled, once, behind what the model had read


async def test_each_typed_error_is_a_failure_of_its_kind_and_never_a_reward(runner: WorkflowRunner) -> None:
    asked = [replace(task) for task in tasks(*KINDS) * EACH]
    for task in asked:
        if task.raw_task["fails"] == "timeout":
            task.raw_task["timeout"] = {"agent": 0.05}
    done = await played(runner, asked)
    assert [e for r in done for e in r.experiences] == []
    assert [r.results for r in done] == [[]] * len(asked)
    found = Counter((t.raw_task["fails"], r.failures[0][1]) for t, r in zip(asked, done, strict=True))
    assert found == dict.fromkeys(KINDS.items(), EACH)


async def test_a_failure_that_an_agent_took_for_the_end_is_one_and_what_it_asked_again_is_none(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, asked = runner.engine.generate, itertools.count(1)

    async def fails_second(prompt: Any, sampling: Any) -> Any:
        if next(asked) == 2:
            raise EngineError("its weights are broken")
        return await generate(prompt, sampling)

    monkeypatch.setattr(runner.engine, "generate", fails_second)
    [gave_up] = await played(runner, tasks("gives up"))
    asked = itertools.count(1)
    [again] = await played(runner, tasks("asks again"))
    assert (gave_up.experiences, [f[1] for f in gave_up.failures]) == ([], ["infra"])
    assert "its weights are broken" in gave_up.failures[0][2]
    assert (again.failures, [e.metrics["turns"] for e in again.experiences]) == ([], [2.0])


async def test_what_is_no_number_and_no_reward_at_all_fails_a_run_by_name(runner: WorkflowRunner) -> None:
    done = await played(runner, tasks("nan metric", "nan reward", "no reward"))
    assert [e for r in done for e in r.experiences] == []
    said = ["gave turns = nan: a number is expected", "gave share = nan: a number is expected", "gave no reward"]
    for result, why in zip(done, said, strict=True):
        [(_, kind, message)] = [f[:3] for f in result.failures]
        assert kind == "workflow"
        assert why in message


async def test_what_two_branches_share_is_learned_from_once_and_a_judge_never(runner: WorkflowRunner) -> None:
    [forked, judged, silent] = await played(runner, tasks("fork", "judged", "silent"))
    assert [r.failures for r in (forked, judged, silent)] == [[], [], []]
    assert [int(e.action_mask.sum()) for e in forked.experiences] == [6, 6]
    assert len({e.reward for e in forked.experiences}) == 1
    assert [(e.info["agent"], int(e.action_mask.sum())) for e in judged.experiences] == [("agent", 12)]
    assert [int(e.action_mask.sum()) for e in silent.experiences] == [6]


async def test_a_run_that_is_over_is_over_in_its_environment(runner: WorkflowRunner, tmp_path: Path) -> None:
    note = tmp_path / "note"
    await played(runner, tasks(""))  # it has started
    runner.timeout = 3.0
    try:
        [done] = await played(runner, tasks("sleep", note=str(note)))
    finally:
        runner.timeout = 120
    assert [f[1] for f in done.failures] == ["timeout"]
    await until(lambda: note.read_text().count("over") == 1, "the episode that was cancelled to end")


async def test_a_server_that_is_killed_fails_what_it_played_as_infra_and_another_one_goes_on(
    runner: WorkflowRunner
) -> None:
    done = await played(runner, tasks("sleep", "sleep", "sleep", "die"))
    assert [f[1] for r in done for f in r.failures] == ["infra"] * 4
    assert "has ended" in done[0].failures[0][2]
    again = await played(runner, tasks(*[""] * 4))
    assert [len(r.experiences) for r in again] == [1] * 4


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


async def test_nothing_outlives_who_asked(runner: WorkflowRunner) -> None:
    family: list[psutil.Process] = []

    async def plays() -> None:
        async with serving(runner.engine, defaults={"max_tokens": 6}) as server:
            asks = WorkflowRunner(runner.engine, server=server, defaults={"max_tokens": 6}, timeout=120)
            before = set(psutil.Process().children(recursive=True))
            [done] = await played(asks, tasks("child"))
            assert done.failures == []
            family.extend(set(psutil.Process().children(recursive=True)) - before)

    await asyncio.to_thread(asyncio.run, plays())
    assert any("time.sleep(600)" in command_line(p) for p in family)
    await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family),
                "all that the environment had started to end")


async def test_an_orphan_that_has_ended_leaves_the_table_of_processes(runner: WorkflowRunner, tmp_path: Path) -> None:
    note = tmp_path / "note"
    [done] = await played(runner, tasks("orphan", note=str(note)))
    assert done.failures == []
    [orphan] = [int(line) for line in note.read_text().splitlines() if line.isdigit()]
    await until(lambda: not psutil.pid_exists(orphan), "the orphan to be reaped")


async def test_an_error_that_is_no_text_is_told_and_costs_no_other_run(runner: WorkflowRunner) -> None:
    *others, broken = await played(runner, tasks("", "", "", "surrogate"))
    assert [r.failures for r in others] == [[]] * 3
    [(_, kind, said)] = [f[:3] for f in broken.failures]
    assert kind == "workflow"
    assert "half a pair: ?" in said


async def test_the_tasks_are_the_environments(letters: Installed) -> None:
    found = tasks(*[""] * ROWS)
    assert [t.raw_task["prompt"] for t in found] == [f"{i}: write an e" for i in range(ROWS)]
    assert {t.workflow for t in found} == {"verifiers"}
    assert found[0].workflow_args["env"] == "letters-env"
    endless = {"env": "letters-env", "config": {"taskset": {"rows": 0}}}
    with pytest.raises(TasksetError, match="has endlessly many tasks"):
        ensure_tasks_file(endless)
    assert len(ensure_tasks_file({**endless, "tasks": 5}).read_text().splitlines()) == 5


async def test_of_two_who_make_the_tasks_at_once_the_first_counts(letters: Installed) -> None:
    args = {"env": "letters-env", **THREE}
    for file in (letters.folder / "tasks").glob("*.jsonl"):  # of a test before this one
        if len(file.read_text().splitlines()) == 3:
            file.unlink()
    both = await asyncio.gather(*(asyncio.to_thread(lambda: ensure_tasks_file(args).stat().st_ino) for _ in range(2)))
    assert both == [ensure_tasks_file(args).stat().st_ino] * 2
    assert [f.name for f in (letters.folder / "tasks").iterdir() if f.suffix != ".jsonl"] == []


async def test_a_run_that_goes_on_reads_the_tasks_that_it_began_with_or_says_why_not(letters: Installed) -> None:
    def taskset(args: dict[str, Any], recorded: TasksetSource | None = None) -> Taskset:
        return Taskset(TasksetConfig(path="verifiers:letters-env", name="t", workflow_args=args), recorded=recorded)

    source = taskset(EIGHT).source
    assert source is not None
    digest = hashlib.sha256(tasks_file(taskset(EIGHT).config.workflow_args).read_bytes()).hexdigest()
    assert (source.path, source.revision, source.rows) == ("verifiers:letters-env", f"0.3 sha256:{digest}", ROWS)
    assert taskset(EIGHT, source).source == source
    for other in (replace(source, revision=f"0.2 sha256:{digest}"), taskset(THREE).source):
        with pytest.raises(TasksetError, match=r"but the run in this log began with .* put its config back, or vers"):
            taskset(EIGHT, other)


async def test_a_check_shows_a_task_of_an_environment_under_another_name_token_by_token(letters: Installed) -> None:
    again = environment(LETTERS, "spelling")
    assert (again.name, again.distribution) == ("spelling", "letters-env")
    command = [sys.executable, "-m", "trinity_es", "env", "check", "Spelling", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told = orjson.loads(done.stdout)
    [rows] = told["tokens"]
    assert [row["at"] for row in rows] == list(range(len(rows)))
    assert sum(row["sampled"] for row in rows) == 2 * 16
    assert all((row["logprob"] is not None) == row["sampled"] for row in rows)
    assert told["failures"] == []
    assert find("Letters.Env").versions["verifiers"] == "0.4.0"
    assert remove("spelling") == again
