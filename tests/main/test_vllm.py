"""A real vLLM engine in a runner actor: a model is trained through the whole system, from start to new weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.engines import largest_difference
from tests.helpers.real_engine import TOLERANCE, letters, run, vllm_system
from trinity_es import MultiTurnWorkflow, SimpleWorkflow, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[RolloutClient]:
    with vllm_system(tmp_path_factory.mktemp("system"), tiny) as made:
        yield made


def test_a1_logprobs_agree_with_torch_through_the_whole_system_before_and_after_a_weight_sync(
    client: RolloutClient, tiny: Path, tmp_path: Path
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    trainer = GRPOTrainer(str(tiny))
    experiences = run(client, 1)
    assert [(e.eid.task, e.eid.run) for e in experiences] == [(t, r) for t in range(16) for r in range(4)]
    assert largest_difference(trainer, experiences) < TOLERANCE
    assert {e.info["model_version"] for e in experiences} == {0}
    client.submit_batch(batch_id=10, tasks=[Task(workflow=TwoTurns, repeat_times=4)], batch_type="train")
    client.finalize_train_batch(10, timeout=120)
    assert largest_difference(trainer, list(client.experiences(10))) < TOLERANCE, "of conversations, as sampled"
    rng = np.random.default_rng(0)
    for e in experiences:  # the reward is 0 almost everywhere before learning: any advantage moves the weights
        e.advantages = np.full(e.tokens.size - e.prompt_length, rng.normal(), dtype=np.float32)
    trainer.step(ExperienceColumns.of(experiences))
    trainer.save(str(tmp_path / "v1"))
    client.sync_weights(1, tmp_path / "v1")
    fresh = run(client, 2)
    assert {e.info["model_version"] for e in fresh} == {1}
    assert largest_difference(trainer, fresh) < TOLERANCE
    assert largest_difference(trainer, experiences) > 10 * TOLERANCE  # the weights did change


class TwoTurns(MultiTurnWorkflow):
    def run(self) -> list[Experience]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a="}]
        for turn in ("b=", None):
            [answer] = self.model.chat(messages, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.response_text})
            if turn:
                messages.append({"role": "user", "content": turn})
        whole = self.process_messages_to_experience(messages, 0.5, {"turns": 2})
        assert self.model.usage.requests == 2, "the logprobs are those of the samples"
        [kept] = self.model.extract_experience_from_history()
        assert kept.tokens.tolist() == whole.tokens.tolist()
        assert kept.action_mask.sum() == self.model.usage.response_tokens
        return [whole]


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
        Task(workflow=Loud, reward_fn="tests.main.test_vllm:half", **given), Task(workflow=TwoTurns, **given),
    ]
    client.submit_batch(batch_id=3, tasks=tasks, batch_type="train")
    result = client.finalize_train_batch(3, timeout=120)
    found = list(client.experiences(3))
    assert [(e.eid.task, e.eid.run) for e in found] == [(t, r) for t in range(3) for r in range(2)]
    version = client.status()["weights_version"]
    for e in found:
        assert e.tokens.dtype == np.int32
        assert e.logprobs.shape == e.action_mask.shape == (e.tokens.size - e.prompt_length,)
        assert (e.info["model_version"], e.info["model_version_drift"], e.info["use_count"]) == (version, 0, 0)
        if e.eid.task < 2:
            assert e.tokens.size - e.prompt_length <= 6
            assert e.info["version_spans"] == [[version, 0, e.tokens.size - e.prompt_length]]
            assert e.action_mask.all()
        else:
            assert 0 < e.action_mask.sum() < e.action_mask.size, "what the user said is not the model's"
            assert "untrained_turns" not in e.info
    assert found[0].info["task_index"] == {"index": 3}
    statuses = client.batch(3).statuses
    assert statuses[1].metrics[0]["reward"] == 0.5
    assert statuses[2].metrics[0] == {**statuses[2].metrics[0], "turns": 2.0, "reward": 0.5, "conversation_forks": 0.0}
    assert result["metrics"]["rollout/time/run_execution/max"] > 0
    client.submit_batch(batch_id="3/check", tasks=letters(4, is_eval=True), batch_type="eval")
    metrics = client.finalize_eval_batch("3/check", timeout=120)["metrics"]
    named = {f"eval/check/reward/{what}" for what in ("mean@4", "std@4", "best@2", "best@4", "worst@2", "worst@4")}
    assert named <= set(metrics)
    assert metrics["eval/check/reward/worst@4"] <= metrics["eval/check/reward/mean@4"]
    with pytest.raises(DataError, match="is an eval, whose experiences are not kept"):
        list(client.experiences("3/check"))
