"""P15: judges and other auxiliary models: engines of their own, asked by workflows wherever these play."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from tests.helpers.judged import JudgedWithATool, lookup
from tests.helpers.parity_rows import NewId
from tests.helpers.systems import StartSystem, finalize_in_thread, pid_of, play_batch
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import StartupError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine, wait_until
from trinity_es.workflows.workflow import Workflow

JUDGE: dict[str, Any] = {"name": "judge", "engine_type": "scripted", "engine_num": 2, "temperature": 0.0}
TWO = [
    {**JUDGE, "script": {"response": "0.5"}},
    {"name": "taste", "engine_type": "scripted", "script": {"response": "salty"}},
]


def judge(**script: Any) -> list[dict[str, Any]]:
    return [{**JUDGE, "script": script}]


class Judged(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [mine] = await self.model.chat_async([{"role": "user", "content": self.task.task_desc}], max_tokens=4)
        [said] = await self.auxiliary["judge"].generate_async(f"judge {self.task.task_id}: {mine.response_text}")
        mine.reward = float(said.response_text)
        return [mine]


class JudgedSync(Workflow):
    """The same in a worker process; the judge is also there by its place."""

    def run(self) -> list[Experience]:
        [mine] = self.model.chat([{"role": "user", "content": self.task.task_desc}], max_tokens=4)
        wrappers = self.auxiliary_model_wrappers or []
        assert [model.name for model in wrappers] == list(self.auxiliary) == ["judge", "taste"]
        [said] = wrappers[0].generate(f"judge {self.task.task_id}: {mine.response_text}")
        [liked] = self.auxiliary["taste"].generate("and?", max_tokens=2)
        mine.reward = float(said.response_text)
        mine.info = {"taste": liked.response_text, "pid": os.getpid()}
        return [mine]


class AloneSync(Workflow):
    def run(self) -> list[Experience]:
        [mine] = self.model.chat([{"role": "user", "content": "hi"}], max_tokens=4)
        [said] = self.auxiliary["judge"].generate("judge it")
        mine.reward = float(said.response_text)
        return [mine]


def tasks(n: int, workflow: type[Workflow] | str, **given: Any) -> list[Task]:
    return [Task(workflow=workflow, raw_task={"prompt": f"prompt {i}"}, **given) for i in range(n)]


def rows(client: RolloutClient) -> dict[str, dict[str, Any]]:
    return {r["runner"]: r for r in client.status()["runners"]}


def test_p15_workflows_sync_and_async_reach_auxiliary_models(system_for: StartSystem, new_id: NewId) -> None:
    client, batch = system_for(explorer={"auxiliary_models": TWO}), new_id()
    given = [*tasks(8, Judged, repeat_times=2), *tasks(8, JudgedSync)]
    play_batch(client, batch, given)
    statuses = client.batch(batch).statuses
    assert all(s.ok for s in statuses.values()), [s.message for s in statuses.values()]
    experiences = list(client.experiences(batch))
    assert {e.reward for e in experiences} == {0.5}
    assert {e.info["taste"] for e in experiences if "taste" in e.info} == {"sa"}
    runner = pid_of(client, "runner-0")
    assert all(e.info["pid"] != runner for e in experiences if "pid" in e.info)

    # They are runners like the others, but they get no units and no weights.
    client.sync_weights(1, client.config.checkpoint_dir.parent.parent.parent)
    known = rows(client)
    assert {name: (r["model"], r["state"], r["model_version"]) for name, r in known.items()} == {
        "runner-0": ("rollout", "ready", 1), "judge-0": ("judge", "ready", 0), "judge-1": ("judge", "ready", 0),
        "taste-0": ("taste", "ready", 0),
    }
    assert all(known[name]["load"] == 0 for name in known if name != "runner-0")
    recorded = list(client.log.events())
    assert {(r.stream, r.event.model) for r in recorded if r.type == "RunnerStarted"} == {
        ("runner/runner-0", "rollout"), ("runner/judge-0", "judge"), ("runner/judge-1", "judge"),
        ("runner/taste-0", "taste"),
    }
    assert {r.event.runner for r in recorded if r.type in ("TasksDispatched", "WeightsLoaded")} == {"runner-0"}


def test_p15_a_killed_auxiliary_runner_is_a_pause_and_no_failure(start_system: StartSystem) -> None:
    script = {"response": "0.5", "latency_seconds": 0.1, "load_seconds": 3.0}
    judge = {**JUDGE, "engine_num": 1, "script": script}
    client = start_system(explorer={"auxiliary_models": [judge], "max_concurrency": 4})
    assert rows(client)["judge-0"]["state"] == "ready", "wait_ready did not wait for the judge, which loads for 3 s"
    given = [*tasks(12, Judged), *[Task(workflow=AloneSync, raw_task={"prompt": "x"}) for _ in range(4)]]
    client.submit_batch(batch_id=1, tasks=given, batch_type="train")
    answer = finalize_in_thread(client, 1)
    wait_until(lambda: client.batch(1).completed_task_count >= 4, "four tasks to finish")
    os.kill(pid_of(client, "judge-0"), signal.SIGKILL)
    told = wait_until(lambda: [w for w in client.why(1).splitlines() if "of model judge" in w], "why to name the judge")
    assert "workflows that ask model judge: judge-0 #2 of model judge is loading its engine" in told[0] or (
        "judge-0" in told[0] and "lost" in told[0]
    )
    row = rows(client)["judge-0"]
    assert (row["model"], row["state"] in ("lost", "started", "ready")) == ("judge", True)
    assert answer.result(60)["finished_task_count"] == 16
    state = client.batch(1)
    assert all(s.ok for s in state.statuses.values())
    assert state.failed_attempts == 0
    lost = [r.event for r in client.log.events() if isinstance(r.event, ev.RunnerLost)]
    assert [e.runner for e in lost] == ["judge-0"]
    wait_until(lambda: rows(client)["judge-0"]["state"] == "ready", "the judge to be back")


def test_p15_an_auxiliary_engine_that_can_not_start_is_told_by_its_name(start_system: StartSystem) -> None:
    broken = {**JUDGE, "engine_num": 1, "script": {"no such key": 1}}
    client = start_system(wait=False, explorer={"auxiliary_models": [broken]})
    with pytest.raises(StartupError, match=r"judge-0 could not start its engine: .*no such key"):
        client.wait_ready(60)


async def test_c6_p15_a_conversation_with_tool_and_judge_lines_up_with_the_engines(start_system: StartSystem) -> None:
    """64 tasks of 8 runs on two engines: tokens, masks and logprobs are what the engine itself gives."""
    script = {"tokens": 6, "latency_seconds": [0.0, 0.05]}
    client = start_system(
        explorer={
            "max_concurrency": 16,
            "max_repeat_times_per_runner": 4,
            "rollout_model": {"engine_num": 2, "script": script, "seed": 7},
            "auxiliary_models": judge(tokens=5),
        },
    )
    given = tasks(64, JudgedWithATool, repeat_times=8, rollout_args={"seed": 100, "max_tokens": 16})
    play_batch(client, 1, given, timeout=120)
    state = client.batch(1)
    assert all(s.ok and s.completed_runs == 8 for s in state.statuses.values())
    found = {(e.eid.task, e.eid.run, e.eid.step): e for e in client.experiences(1)}
    assert len(found) == 64 * 8 * 2

    engine = ScriptedEngine(EngineConfig(model_path="", seed=7, options={**script, "latency_seconds": [0.0, 0.0]}))
    said = ScriptedEngine(EngineConfig(model_path="", options={"tokens": 5}))
    for task in range(64):
        for run in range(8):
            sampling = Sampling(seed=100 + run, max_tokens=16)
            prompt = list(f"prompt {task}\n".encode())
            [first] = await engine.generate(prompt, sampling)
            so_far = [*prompt, *first.token_ids, *f"\n{lookup(first.text)}\n".encode()]
            [second] = await engine.generate(so_far, sampling)
            greedy = Sampling(temperature=0.0, max_tokens=1024)
            [judged] = await said.generate(list(f"{second.text}\n".encode()), greedy)
            whole, last = found[task, run, 0], found[task, run, 1]
            tokens = [*so_far, *second.token_ids]  # as they were sampled: no end of the turn that nobody sampled
            assert whole.tokens.tolist() == tokens
            assert whole.info["judge"] == judged.text
            assert whole.reward == float(len(set(judged.text)))
            assert whole.prompt_length == len(prompt)
            own = [False] * len(tokens)
            exact = np.zeros(len(tokens), dtype=np.float32)
            for start, answer in ((len(prompt), first), (len(so_far), second)):
                own[start : start + 6] = [True] * 6
                exact[start : start + 6] = answer.logprobs
            assert whole.action_mask.tolist() == own[len(prompt):]
            assert whole.logprobs is not None
            assert np.array_equal(whole.logprobs, exact[len(prompt) :])
            assert last.tokens.tolist() == [*so_far, *second.token_ids]
            assert last.prompt_length == len(so_far)
            assert last.logprobs is not None
            assert np.array_equal(last.logprobs, np.asarray(second.logprobs, dtype=np.float32))

    # Units of one task went to one runner where that was not much fuller, and both had their share.
    runners: dict[int, set[str]] = {}
    for r in client.log.events(1):
        if isinstance(r.event, ev.TasksDispatched):
            for unit in r.event.units:
                runners.setdefault(unit.task, set()).add(r.event.runner)
    assert sum(len(names) == 1 for names in runners.values()) > 40
    assert {name for names in runners.values() for name in names} == {"runner-0", "runner-1"}
