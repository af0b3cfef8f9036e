"""A real vLLM engine in a runner actor: a model is trained through the whole system, and what dies comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import trinity_es
from tests.helpers.engines import largest_difference
from tests.helpers.systems import end, finalize_in_thread, kill_all, name_as_ours, pid_of, scripted
from trinity_es import MultiTurnWorkflow, SimpleWorkflow, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.events.vocabulary import TasksDispatched
from trinity_es.system import discovery, lifecycle
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

LETTERS = "abcdefghijklmnop"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.grpo.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RolloutClient]:
    rollout = {
        "engine_type": "vllm", "model_path": str(model), "max_model_len": 64, "max_response_tokens": 8,
        "gpu_memory_utilization": 0.3,
    }
    explorer = {"places": 32, "rollout_model": rollout}
    config = scripted(tmp_path_factory.mktemp("system"), explorer=explorer, system={"keeper": True})
    name_as_ours(Path(config.code_path))
    with contextlib.chdir(config.code_path):  # vLLM's own processes find these modules too
        lifecycle.start(config)
    client = trinity_es.connect(config)
    try:
        client.wait_ready(600)
        yield client
    finally:
        end(client)


def letters(rows: int = 16, **changes: Any) -> list[Task]:
    reward = "examples.grpo.reward:letter_share"
    rollout_args = changes.pop("rollout_args", {})
    return [
        Task(
            workflow="single_turn", repeat_times=4, reward_fn=reward, rollout_args=rollout_args,
            raw_task={"prompt": f"{LETTERS[i % 16]}=", "answer": LETTERS[i % 16]}, **changes,
        )
        for i in range(rows)
    ]


def run(client: RolloutClient, batch: int) -> list[Experience]:
    client.submit_batch(batch_id=batch, tasks=letters(), batch_type="train")
    result = client.finalize_train_batch(batch, timeout=120)
    assert result["finished_task_count"] == 16
    return list(client.experiences(batch))


def test_a1_logprobs_agree_with_torch_through_the_whole_system_before_and_after_a_weight_sync(
    client: RolloutClient, model: Path, tmp_path: Path
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    trainer = GRPOTrainer(str(model))
    experiences = run(client, 1)
    assert [(e.eid.task, e.eid.run) for e in experiences] == [(t, r) for t in range(16) for r in range(4)]
    assert largest_difference(trainer, experiences) < TOLERANCE
    assert {e.info["model_version"] for e in experiences} == {0}
    rng = np.random.default_rng(0)
    for e in experiences:  # the reward is 0 almost everywhere before learning: any advantage moves the weights
        e.advantages = np.full(e.tokens.size - e.prompt_length, rng.normal(), dtype=np.float32)
    trainer.step(experiences)
    trainer.save(str(tmp_path / "v1"))
    client.sync_weights(1, tmp_path / "v1")
    fresh = run(client, 2)
    assert {e.info["model_version"] for e in fresh} == {1}
    assert largest_difference(trainer, fresh) < TOLERANCE
    assert largest_difference(trainer, experiences) > 10 * TOLERANCE  # the weights did change


class TwoTurns(MultiTurnWorkflow):
    """Sync, so it plays in a worker process: two answers, one experience."""

    def run(self) -> list[Experience]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a="}]
        for turn in ("b=", None):
            [answer] = self.model.chat(messages, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.response_text})
            if turn:
                messages.append({"role": "user", "content": turn})
        return [self.process_messages_to_experience(messages, 0.5, {"turns": 2})]


class Loud(SimpleWorkflow):
    def format_messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "!"}, *super().format_messages()]


def half(response: str, truth: str) -> float:
    return 0.5


def test_p2_p5_p8_p9_p27_p31_kinds_of_workflows_on_a_real_engine(client: RolloutClient) -> None:
    given: dict[str, Any] = {"repeat_times": 2, "raw_task": {"prompt": "c=", "answer": "c"},
                             "rollout_args": {"max_tokens": 6, "temperature": 0.7}}
    tasks = [
        Task(workflow="single_turn", reward_fn="examples.grpo.reward:letter_share", index={"index": 3}, **given),
        Task(workflow=Loud, reward_fn="tests.system.test_vllm:half", **given), Task(workflow=TwoTurns, **given),
    ]
    client.submit_batch(batch_id=3, tasks=tasks, batch_type="train")
    result = client.finalize_train_batch(3, timeout=120)
    found = list(client.experiences(3))
    assert [(e.eid.task, e.eid.run) for e in found] == [(t, r) for t in range(3) for r in range(2)]
    version = client.status()["weights_version"]
    for e in found:
        assert e.tokens.dtype == np.int32
        assert e.logprobs is not None
        assert e.action_mask is not None
        assert e.logprobs.shape == e.action_mask.shape == (e.tokens.size - e.prompt_length,)
        assert (e.info["model_version"], e.info["model_version_drift"], e.info["use_count"]) == (version, 0, 0)
        if e.eid.task < 2:
            assert e.tokens.size - e.prompt_length <= 6
            assert e.info["version_spans"] == [[version, 0, e.tokens.size - e.prompt_length]]
            assert e.action_mask.all()
        else:
            assert 0 < e.action_mask.sum() < e.action_mask.size, "what the user said is not the model's"
    assert found[0].info["task_index"] == {"index": 3}
    statuses = client.batch(3).statuses
    assert statuses[1].metrics[0]["reward"] == 0.5
    assert statuses[2].metrics[0] == {**statuses[2].metrics[0], "turns": 2.0, "reward": 0.5}
    assert result["metrics"]["rollout/time/run_execution/max"] > 0
    client.submit_batch(batch_id="3/check", tasks=letters(4, is_eval=True), batch_type="eval")
    metrics = client.finalize_eval_batch("3/check", timeout=120)["metrics"]
    named = {f"eval/check/reward/{what}" for what in ("mean@4", "std@4", "best@2", "best@4", "worst@2", "worst@4")}
    assert named <= set(metrics)
    assert metrics["eval/check/reward/worst@4"] <= metrics["eval/check/reward/mean@4"]
    assert list(client.experiences("3/check")) == []


def test_a_failed_sync_leaves_the_engine_serving(client: RolloutClient, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((model / "config.json").read_text())
    version = client.status()["weights_version"] + 1
    with pytest.raises(trinity_es.TrinityError, match="they serve what they had"):
        client.sync_weights(version, broken)
    assert len(run(client, 10)) == 64


def test_p12_a_request_that_takes_too_long_for_its_finalize_loses_nothing(client: RolloutClient) -> None:
    client.submit_batch(batch_id=20, tasks=letters(64), batch_type="train")
    with pytest.raises(TimeoutError):
        client.finalize_train_batch(20, timeout=0.01)
    assert client.finalize_train_batch(20, timeout=120)["finished_task_count"] == 64


def runner(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(pid_of(client, "runner-0"))]


def engine_core(client: RolloutClient) -> list[psutil.Process]:
    found = [p for p in runner(client)[0].children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert found
    return found


def coordinator(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(pid_of(client, "coordinator"))]


def everything(client: RolloutClient) -> list[psutil.Process]:
    return discovery.processes(client._link.admin)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("number", "victims"), list(enumerate([runner, engine_core, coordinator, everything])),
    ids=["runner", "engine core", "coordinator", "everything"],
)
def test_b2_what_is_killed_while_it_generates_comes_back_with_the_right_weights_and_loses_nothing(
    client: RolloutClient, model: Path, tmp_path: Path, number: int,
    victims: Callable[[RolloutClient], list[psutil.Process]],
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    batch, version = 30 + 2 * number, 9 + number
    trainer = GRPOTrainer(str(model), lr=1e-3 * (number + 1))  # other weights every time
    trainer.step(run(client, batch))
    trainer.save(str(tmp_path / "weights"))
    client.sync_weights(version, tmp_path / "weights")
    before = runner(client)
    family = before[0].children(recursive=True)
    assert family
    client.submit_batch(batch_id=batch + 1, tasks=letters(256), batch_type="train")
    waiter, answers = finalize_in_thread(client, batch + 1, timeout=600)
    wait_until(lambda: client.batch(batch + 1).completed_task_count > 8, "some tasks to finish")
    finished = set(client.batch(batch + 1).statuses)
    kill_all(victims(client))
    if victims is not coordinator:
        wait_until(lambda: not discovery.wait_gone(before, 0), "the runner to end")
        assert not discovery.wait_gone(family, 2.0), "an engine process outlived its runner by 2 s"
    waiter.join(timeout=600)
    assert answers
    assert answers[0]["finished_task_count"] == 256, answers
    state = client.batch(batch + 1)
    assert all(s.ok for s in state.statuses.values())
    later = [r.event for r in client.log.events(batch + 1) if isinstance(r.event, TasksDispatched)][1:]
    assert not {u.task for event in later for u in event.units if u.attempt > 1} & finished
    experiences = list(client.experiences(batch + 1))
    assert {e.info["model_version"] for e in experiences} == {version}
    assert largest_difference(trainer, experiences) < TOLERANCE
