"""P15: a judge with a real engine of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engines import largest_difference
from tests.helpers.judged import JudgedWithATool
from tests.helpers.systems import StartSystem
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.workflow import Workflow

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


class AsksVLLM(Workflow):
    """Its own answer, the judge's answer to it, and what the judge thinks of a text, token by token."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        [mine] = await self.model.chat_async([{"role": "user", "content": str(self.task.task_desc)}])
        judge = self.auxiliary["judge"]
        [said] = await judge.chat_async([{"role": "user", "content": "b="}], n=1)
        ids = said.tokens.tolist()
        again = await judge.logprobs_async(ids, temperature=1.0)
        rendered = judge.tokenizer.apply_chat_template([{"role": "user", "content": "b="}], add_generation_prompt=True)
        ours = rendered["input_ids"] if hasattr(rendered, "keys") else rendered
        same = list(ours) == ids[: said.prompt_length]
        said.eid.step, mine.reward, said.reward = 1, 1.0, float(same)
        said.info = {"again": again[said.prompt_length - 1 :].tolist()}
        return [mine, said]


def test_c6_p15_a_real_judge_gives_the_tokens_and_logprobs_of_its_own_weights(
    start_system: StartSystem, tmp_path: Path
) -> None:
    from examples.grpo.tiny_model import make_tiny_model
    from examples.grpo.trainer import GRPOTrainer

    paths = [str(make_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("rollout", "judge"))]
    how = {"engine_type": "vllm", "max_model_len": 128, "max_response_tokens": 8, "gpu_memory_utilization": 0.3}
    client = start_system(wait=False, explorer={
        "rollout_model": {**how, "model_path": paths[0]},
        "auxiliary_models": [{**how, "name": "judge", "model_path": paths[1]}],
    })
    client.wait_ready(600)
    given = [Task(workflow=AsksVLLM, raw_task={"prompt": f"{letter}="}, repeat_times=2) for letter in "abcd"]
    client.submit_batch(batch_id=1, tasks=given, batch_type="train")
    client.finalize_train_batch(1, timeout=300)
    assert all(s.ok for s in client.batch(1).statuses.values()), client.batch(1).statuses
    found = list(client.experiences(1))
    mine, said = [e for e in found if e.eid.step == 0], [e for e in found if e.eid.step == 1]
    assert (len(mine), len(said)) == (8, 8)
    assert {e.reward for e in said} == {1.0}, "the judge's prompt was not rendered with its own tokenizer"
    assert all(np.allclose(e.info["again"], e.logprobs, atol=1e-3) for e in said)
    assert largest_difference(GRPOTrainer(paths[0]), mine) < 1e-3
    assert largest_difference(GRPOTrainer(paths[1]), said) < 1e-3
    assert largest_difference(GRPOTrainer(paths[0]), said) > 1e-2  # it is another model's

    # C6: a conversation with a tool and the judge, 64 tasks of 8 runs.
    given = [Task(workflow=JudgedWithATool, raw_task={"prompt": f"{'abcdefgh'[i % 8]}="}, repeat_times=8)
             for i in range(64)]
    client.submit_batch(batch_id=2, tasks=given, batch_type="train")
    assert client.finalize_train_batch(2, timeout=400)["finished_task_count"] == 64
    assert all(s.ok and s.completed_runs == 8 for s in client.batch(2).statuses.values())
    found = list(client.experiences(2))
    whole, last = [e for e in found if e.eid.step == 0], [e for e in found if e.eid.step == 1]
    assert len({e.eid.uid for e in found}) == len(found) == 64 * 8 * 2
    for e in found:
        response = len(e.tokens) - e.prompt_length
        assert e.logprobs is not None
        assert e.action_mask is not None
        assert len(e.logprobs) == len(e.action_mask) == response > 0
    assert all(e.action_mask is not None and 0 < e.action_mask.sum() < len(e.action_mask) for e in whole)  # the tool's
    assert all(isinstance(e.info["judge"], str) for e in whole)
    assert largest_difference(GRPOTrainer(paths[0]), whole) < 1e-3
    assert largest_difference(GRPOTrainer(paths[0]), last) < 1e-3
