"""TRL's GRPOTrainer with rollouts by trinity_es: a tiny model learns to repeat a letter, in minutes on two CPU cores.

    python -m examples.trl_grpo.train runs/trl

Kill it, or any of its processes, and start it again: it resumes from its newest checkpoint and takes the later rollouts
from the log. For your own training change the model, the data, the reward and the numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trinity_es
from examples.grpo.taskset import write_taskset
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.integrations.trl import Rollouts, resume, rollout_reward

__all__ = ["arguments", "letters", "main"]

SETTINGS: dict[str, Any] = {
    "max_steps": 100, "per_device_train_batch_size": 256, "num_generations": 8, "max_completion_length": 8,
    "learning_rate": 2e-3, "lr_scheduler_type": "constant", "entropy_coef": 0.03, "loss_type": "grpo",
    "per_device_eval_batch_size": 128, "save_steps": 10, "save_total_limit": 2, "logging_steps": 10,
    "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
}


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    """Return the trainer's arguments; `settings` override those of this example."""
    return GRPOConfig(output_dir=str(folder / "trainer"), **{**SETTINGS, **settings})


def letters(file: Path) -> Dataset:
    """Return a data set with a prompt, as messages, and its answer, a letter, in each row."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows])


def main(folder: Path, *overrides: str, **settings: Any) -> float:
    """Train in this folder, or resume there, and return the mean reward on the eval set.

    `overrides` change config.yaml, as in "explorer.rollout_model.seed=1"; `settings` are fields of GRPOConfig.
    """
    torch.set_num_threads(1)
    if not (folder / "model" / "model.safetensors").is_file():
        make_tiny_model(folder / "model")
    data = write_taskset(folder / "data")
    config = trinity_es.load_config(Path(__file__).with_name("config.yaml"), [
        f"model.model_path={folder}/model", f"store.url=sqlite:///{folder}/log.sqlite", *overrides])
    rollouts = Rollouts(config, reward_fn="examples.grpo.reward:letter_share", columns=["answer"])
    trainer = GRPOTrainer(
        model=str(folder / "model"), args=arguments(folder, **settings), reward_funcs=rollout_reward,
        rollout_func=rollouts, callbacks=[rollouts], train_dataset=letters(data / "train.jsonl"),
        eval_dataset=letters(data / "eval.jsonl"),
    )
    rollouts.check(trainer)  # refuses unsupported settings before engines load
    with trinity_es.running(config):  # starts engines, or uses the running ones
        resume(trainer)  # from the newest checkpoint, if there is one
        reward = float(trainer.evaluate()["eval_reward"])
    print(f"eval reward {reward:.2f} after {trainer.state.global_step} steps")
    return reward


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trl").absolute(), *sys.argv[2:])
