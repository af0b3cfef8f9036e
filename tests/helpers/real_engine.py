"""A real vLLM engine in a runner actor, with a tiny model that learns to repeat a letter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trinity_es
from tests.helpers.systems import end, name_as_ours, scripted
from trinity_es import Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.system import lifecycle

LETTERS = "abcdefghijklmnop"
TOLERANCE = 1e-3
"""Maximum difference between a logprob and torch's."""


@contextlib.contextmanager
def vllm_system(
    folder: Path, model: Path, *, auxiliary_models: Sequence[dict[str, Any]] = (), **more: Any
) -> Iterator[RolloutClient]:
    """Start a system with a vLLM engine, in a folder with modules named like our packages. `more`: keys
    of the rollout model's config.
    """
    rollout = {
        "engine_type": "vllm", "model_path": str(model), "max_model_len": 64, "max_response_tokens": 8,
        "gpu_memory_utilization": 0.3, **more,
    }
    explorer = {"max_concurrency": 32, "rollout_model": rollout, "auxiliary_models": list(auxiliary_models)}
    config = scripted(folder, explorer=explorer, system={"keeper": True})
    name_as_ours(Path(config.code_path))
    with contextlib.chdir(config.code_path):  # vLLM's processes find the modules there too
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
