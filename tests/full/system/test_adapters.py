"""LoRA adapters in a whole system, on the ScriptedEngine: several at once, over deaths, takeovers and new versions."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.adapters import make_adapter
from tests.helpers.systems import StartSystem, events, kill_system, pid_of, play_batch
from trinity_es import Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.events.experience import EID, Experience
from trinity_es.events.values import BatchId
from trinity_es.system import lifecycle
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)


def half(response: str, **_: Any) -> float:
    return 0.5


class ThreeWays(Workflow):
    """Sync, so it plays in a worker process: asks by `chat`, by an OpenAI client, and by one that streams."""

    def run(self) -> list[Experience]:
        messages: Any = [{"role": "user", "content": "a"}]
        self.model.chat(messages, adapter="code", max_tokens=6)
        client: Any = self.model.get_openai_client()
        client.chat.completions.create(model=client.model_path, messages=messages)
        for _ in client.chat.completions.create(model=client.model_path, messages=messages, stream=True):
            pass
        found = self.model.extract_experience_from_history()
        for experience in found:
            experience.reward = 1.0
        return found


def system(start_system: StartSystem, engines: int = 2, *, lora: Any = None, **sections: Any) -> RolloutClient:
    model = {"engine_num": engines, "lora": {"max_adapters": 2, "max_rank": 8, **(lora or {})},
             "script": {"latency_seconds": 0.01}}
    return start_system(explorer={"rollout_model": model, "max_retry_times": 1}, **sections)


def questions(*adapters: str | None, runs: int = 4, **args: Any) -> list[Task]:
    """One task for each of these: the adapter that is to answer, "" for the model itself, None for what is default."""
    return [
        Task(
            workflow="single_turn", repeat_times=runs, reward_fn="tests.full.system.test_adapters:half",
            raw_task={"prompt": f"{i}?", "answer": ""},
            rollout_args={"max_tokens": 6, **({} if adapter is None else {"adapter": adapter}), **args},
        )
        for i, adapter in enumerate(adapters)
    ]


def answers(client: RolloutClient, batch: BatchId, tasks: list[Task]) -> list[Experience]:
    play_batch(client, batch, tasks)
    return list(client.experiences(batch))


def spans(experiences: list[Experience]) -> Counter[Any]:
    """Who made the answers: (adapter, version), None for the model itself. Every token of an answer is one's."""
    found: Counter[Any] = Counter()
    for e in experiences:
        told = e.info.get("adapter_spans")
        if told is None:
            found[None] += 1
            continue
        [(name, version, start, stop)] = told
        assert (start, stop) == (0, e.tokens.size - e.prompt_length)
        found[name, version] += 1
    return found


def test_two_adapters_answer_beside_the_model_and_each_says_which(start_system: StartSystem, tmp_path: Path) -> None:
    client = system(start_system)
    math, code = make_adapter(tmp_path / "math"), make_adapter(tmp_path / "code", rank=4, seed=1)
    assert client.sync_adapter("math", 3, math) == {
        "adapter": "math", "version": 3, "runners": ["runner-0", "runner-1"]
    }
    client.sync_adapter("code", 1, code)
    found = answers(client, 1, questions("math", "code", "", None))
    assert spans(found) == {("math", 3): 4, ("code", 1): 4, None: 8}
    assert {e.info["sampling"].get("adapter") for e in found} == {"math", "code", None}
    assert all(e.info["model_version"] == 0 for e in found)
    by_task = [{e.response_text for e in found if e.eid.task == task} for task in range(4)]
    client.sync_adapter("math", 4, math)
    again = answers(client, 2, questions("math", "code", "", None))
    assert spans(again) == {("math", 4): 4, ("code", 1): 4, None: 8}
    assert {e.response_text for e in again if e.eid.task == 1} == by_task[1]
    assert {e.response_text for e in again if e.eid.task == 0} != by_task[0], "another version, other answers"
    client.remove_adapter("code")
    play_batch(client, 3, questions("code", "math"))
    assert spans(list(client.experiences(3))) == {("math", 4): 4}
    errors = [e.message for e in events(client, ev.AttemptFailed)]
    assert errors
    assert all("there is no adapter 'code': this engine serves math" in message for message in errors)
    status = client.status()
    assert status["adapters"] == {"math": 4}
    assert [r["adapters"] for r in status["runners"]] == [{"math": 4}] * 2
    loaded = Counter((e.adapter, e.version) for e in events(client, ev.AdapterLoaded))
    assert loaded == {("math", 3): 2, ("code", 1): 2, ("math", 4): 2}
    assert client.log.verify() == []


def test_workers_and_openai_clients_get_the_adapter_of_the_task(start_system: StartSystem, tmp_path: Path) -> None:
    client = system(start_system, engines=1)
    client.sync_adapter("math", 3, make_adapter(tmp_path / "math"))
    client.sync_adapter("code", 1, make_adapter(tmp_path / "code", seed=1))
    task = Task(workflow=ThreeWays, rollout_args={"adapter": "math", "max_tokens": 6}, raw_task={})
    found = answers(client, 1, [task])
    assert [e.info["adapter_spans"][0][:2] for e in found] == [["code", 1], ["math", 3], ["math", 3]]
    assert spans(found) == {("code", 1): 1, ("math", 3): 2}


def test_a_bad_adapter_changes_nothing(start_system: StartSystem, tmp_path: Path) -> None:
    client = system(start_system, engines=1)
    client.sync_adapter("math", 1, make_adapter(tmp_path / "1"))
    before = client.log.head().position
    with pytest.raises(SyncError, match="its rank is 16, and engines take at most 8"):
        client.sync_adapter("math", 2, make_adapter(tmp_path / "high", rank=16))
    with pytest.raises(SyncError, match="there is no adapter 'code'; current adapters: math"):
        client.remove_adapter("code")
    assert list(client.log.read(after=before)) == []
    refused = make_adapter(tmp_path / "bad")  # it looks right, and the engine can't load it
    with pytest.raises(SyncError, match=r"version 2 of adapter 'math' was not loaded everywhere .*no adapter at"):
        client.sync_adapter("math", 2, refused)
    assert spans(answers(client, 1, questions("math"))) == {("math", 1): 4}, "it goes on with what it had"
    assert client.log.verify() == []


def test_a_killed_runner_has_its_adapters_before_its_first_answer(start_system: StartSystem, tmp_path: Path) -> None:
    client = system(start_system, engines=1)
    client.sync_adapter("math", 7, make_adapter(tmp_path / "math"))
    client.sync_adapter("code", 2, make_adapter(tmp_path / "code", seed=1))
    client.submit_batch(batch_id=1, tasks=questions(*["math", "code"] * 20), batch_type="train")
    os.kill(pid_of(client, "runner-0"), signal.SIGKILL)
    client.finalize_train_batch(1, timeout=120)
    found = list(client.experiences(1))
    assert spans(found) == {("math", 7): 80, ("code", 2): 80}, "no task failed for want of an adapter"
    assert {e.kind for e in events(client, ev.AttemptFailed)} == {"runner_lost"}
    story = [r for r in client.log.events() if getattr(r.event, "runner", "") == "runner-0"]
    second = [r.event for r in story if getattr(r.event, "incarnation", 0) == 2]
    kinds = [type(e).__name__ for e in second]
    first_work = kinds.index("TasksDispatched")
    assert kinds[:first_work].count("AdapterLoaded") == 2, kinds[: first_work + 1]
    assert client.log.verify() == []


def test_a_takeover_and_a_restart_keep_the_adapters(start_system: StartSystem, tmp_path: Path) -> None:
    client = system(start_system, engines=1)
    client.sync_adapter("math", 7, make_adapter(tmp_path / "math"))
    client.sync_adapter("gone", 1, make_adapter(tmp_path / "gone"))
    client.remove_adapter("gone")
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    wait_until(lambda: len(events(client, ev.CoordinatorStarted)) == 2, "the next coordinator")
    assert spans(answers(client, 1, questions("math"))) == {("math", 7): 4}
    assert client.status()["adapters"] == {"math": 7}
    ready = [e for e in events(client, ev.RunnerReady) if e.adapters]
    assert ready[-1].adapters == {"math": 7}, "the next coordinator found it so"
    kill_system(client)
    lifecycle.start(client.config)
    with trinity_es.connect(client.config) as again:
        again.wait_ready(60)
        assert spans(answers(again, 2, questions("math"))) == {("math", 7): 4}
        assert again.status()["adapters"] == {"math": 7}
        assert again.log.verify() == []


class AsksUntil(Workflow):
    """Asks again and again; the first request that begins when the file `until` is there is the last one."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        until, found, last = Path(self.task.workflow_args["until"]), [], False
        while not last:
            last = until.exists()
            [answer] = await self.model.chat_async([{"role": "user", "content": f"{len(found)}?"}], max_tokens=6)
            answer.eid, answer.reward = EID(step=len(found)), 0.5
            found.append(answer)
            until.with_name(f"asked {self.task.task_id}").touch()
        return found


def test_a_version_that_comes_in_the_middle_of_a_batch_leaves_each_answer_whole(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = system(start_system, lora={"adapter": "math"})  # what answers where a task says nothing
    first, second = make_adapter(tmp_path / "1"), make_adapter(tmp_path / "2", seed=1)
    client.sync_adapter("math", 1, first)
    asking = [Task(workflow=AsksUntil, workflow_args={"until": str(tmp_path / "until")}) for _ in range(4)]
    client.submit_batch(batch_id=1, tasks=asking, batch_type="train")
    wait_until(lambda: len(list(tmp_path.glob("asked *"))) == 4, "each task's first answer")
    client.sync_adapter("math", 2, second)
    client.sync_weights(1, tmp_path)  # the model's own weights change under it, and it stays
    (tmp_path / "until").touch()
    client.finalize_train_batch(1, timeout=60)
    assert events(client, ev.AttemptFailed) == []
    for task in range(4):
        counts = spans([e for e in client.experiences(1) if e.eid.task == task])
        assert counts.keys() == {("math", 1), ("math", 2)}
    after = answers(client, 2, questions(None, ""))
    assert spans(after) == {("math", 2): 4, None: 4}
    assert {e.info["model_version"] for e in after} == {1}
