"""The trainer of `benchmarks.trl_kills`: examples/trl_grpo, or TRL alone. It notes the data that it trains on.

    python -m benchmarks.trl_recorded FOLDER '{"alone": false, "overrides": [...], "settings": {...}}'

A line of FOLDER/trained.jsonl is a generation that a step trains on: step, rows of the data set, rewards, ids.
FOLDER/done.json holds the eval reward after a complete training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer

from examples.grpo.reward import letter_share
from examples.grpo.taskset import write_taskset
from examples.grpo.tiny_model import make_tiny_model
from examples.trl_grpo import train

TRAINERS: list[GRPOTrainer] = []


class Beats(TrainerCallback):  # type: ignore[misc]  # transformers is typed in part
    """Callback that writes the trainer's progress, so that kills come during training and not during imports."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "beat"

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.file.write_text(f"{os.getpid()} {state.global_step}")


def _note(folder: Path, columns: dict[str, Any], rewards: list[float | None]) -> None:
    line = {"step": columns["trainer_state"].global_step, "train": TRAINERS[0].model.training,
            "rows": columns["row"], "rewards": rewards, "ids": columns["completion_ids"]}
    with (folder / "trained.jsonl").open("ab", buffering=0) as file:  # one write: a kill does not tear the line
        file.write(json.dumps(line).encode() + b"\n")


def main(folder: Path, *, alone: bool, overrides: list[str], settings: dict[str, Any]) -> None:
    letters = train.letters

    def numbered(file: Path) -> Dataset:
        rows = letters(file)
        return rows.add_column("row", list(range(len(rows))))

    def recorded(reward: list[float | None], **columns: Any) -> list[float | None]:
        _note(folder, columns, reward)
        return reward

    train.letters, train.rollout_reward = numbered, recorded

    def make(**given: Any) -> GRPOTrainer:
        TRAINERS.append(GRPOTrainer(**{**given, "callbacks": [*given.get("callbacks", []), Beats(folder)]}))
        return TRAINERS[0]

    train.GRPOTrainer = make
    reward = _train_alone(folder, settings) if alone else train.main(folder, *overrides, **settings)
    (folder / "done.json").write_text(json.dumps({"reward": reward}))


def _train_alone(folder: Path, settings: dict[str, Any]) -> float:
    """Train with TRL's own generation, as TRL's documentation shows, and return the eval reward."""
    torch.set_num_threads(1)
    if not (folder / "model" / "model.safetensors").is_file():
        make_tiny_model(folder / "model")
    data = write_taskset(folder / "data")

    def share(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        rewards = [letter_share(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]
        _note(folder, columns, rewards)  # type: ignore[arg-type]
        return rewards

    trainer = train.GRPOTrainer(
        model=str(folder / "model"), args=train.arguments(folder, **settings), reward_funcs=share,
        train_dataset=train.letters(data / "train.jsonl"), eval_dataset=train.letters(data / "eval.jsonl"))
    output = Path(trainer.args.output_dir)
    trainer.train(resume_from_checkpoint=output.is_dir() and get_last_checkpoint(str(output)) is not None)
    return float(trainer.evaluate()["eval_reward"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
