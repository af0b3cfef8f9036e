"""A step of the real GRPOTrainer on a running system: what it made of the rows. Arguments and answers are JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer

import trinity_es
from examples.grpo.tiny_model import make_tiny_model
from examples.trl_grpo.train import arguments
from trinity_es.integrations.trl import Rollouts, resume, rollout_reward
from trinity_es.testing import ByteTokenizer


def main(given: Any) -> Any:
    torch.set_num_threads(1)
    folder = Path(given["folder"])
    model = make_tiny_model(folder / "model")
    tokenizer, processing = ByteTokenizer(), None
    if given.get("texts"):  # with the engine's own tokens
        tokenizer.save_pretrained(folder)
        processing = AutoTokenizer.from_pretrained(folder, eos_token="!", pad_token="!")

    def letters(which: str) -> Dataset:
        prompts = [f"{x}=" if given.get("texts") else [{"role": "user", "content": f"{x}="}] for x in which]
        return Dataset.from_list([{"prompt": p, "answer": x} for p, x in zip(prompts, which, strict=True)])

    def length(completions: Any, **columns: Any) -> list[float]:
        return [100.0] * len(completions)  # of a run that failed, too, if it is asked

    rollouts = Rollouts(trinity_es.load_config(given["config"]), **given["rollouts"])
    ours = rollouts._task["reward_fn"] is not None or rollouts._task["workflow"].endswith("Flaky")
    trainer = GRPOTrainer(
        model=str(model), args=arguments(folder, **given["settings"]),
        reward_funcs=[rollout_reward, length] if ours else [length], rollout_func=rollouts, callbacks=[rollouts],
        train_dataset=letters("abcdefgh"), eval_dataset=letters("abcd"), processing_class=processing)
    score, made = trainer._generate_and_score_completions, []

    def scored(inputs: Any) -> Any:
        outputs = score(inputs)
        columns = ("rollout_id", "reward", "rollout_failed", "rollout_version")
        rows = {column: [row[column] for row in inputs] for column in columns}
        made.append({
            **rows, "prompts": [row["prompt"] if processing else row["prompt"][0]["content"] for row in inputs],
            "prompt_ids": [ids[mask.bool()].tolist()
                           for ids, mask in zip(outputs["prompt_ids"], outputs["prompt_mask"], strict=True)],
            "trl_ids": trainer._tokenize_prompts([row["prompt"] for row in inputs])[0],
            "advantages": outputs["advantages"].tolist(),
            "masks": (outputs["tool_mask"] * outputs["completion_mask"]).sum(1).tolist()})
        return outputs

    trainer._generate_and_score_completions = scored
    resume(trainer)
    metrics = trainer.evaluate() if given.get("evaluate") else {}
    if given.get("others"):
        metrics = trainer.evaluate(eval_dataset=letters(given["others"]))
    return {"rank": trainer.accelerator.process_index, "generations": made, "metrics": metrics,
            "step": trainer.state.global_step}


if __name__ == "__main__":
    told = main(json.loads(sys.argv[1]))
    (Path(json.loads(sys.argv[1])["folder"]) / f"rank-{told['rank']}.json").write_text(json.dumps(told))
    print(json.dumps(told))  # noqa: T201
