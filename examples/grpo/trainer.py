"""A minimal GRPO trainer in plain torch.

It gets experiences with advantages (from the pipeline's `grpo` operator), makes one step of a clipped policy gradient
on them, and writes its weights as a folder that an engine loads. It runs on one CPU thread. A real trainer has the
same methods and shards the work over GPUs.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trinity_es import ExperienceColumns

__all__ = ["GRPOTrainer"]

STATE = "trainer.pt"
"""File beside the weights with optimizer, steps and random state, so that a run resumes exactly."""


class GRPOTrainer:
    """Trainer of the model at `model_path`; it resumes if `save` wrote this folder.

    `lr`: learning rate of AdamW; `clip`: epsilon of the clipped ratio; `entropy`: weight of the entropy bonus, 0 for
    none; `max_grad_norm`: maximum norm of the gradient; `temperature`: the rollouts' temperature, since the engine's
    logprobs include it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        lr: float = 2e-3,
        clip: float = 0.2,
        entropy: float = 0.03,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.clip, self.entropy = clip, entropy
        self.max_grad_norm, self.temperature = max_grad_norm, temperature
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.steps = 0
        if (Path(model_path) / STATE).is_file():
            self.load(model_path)

    def load(self, path: str) -> None:
        """Restore optimizer, steps and random state from the folder `path`, which `save` wrote."""
        state = torch.load(Path(path) / STATE, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["random"])

    def step(self, experiences: ExperienceColumns) -> dict[str, float]:
        """Make one update on one batch, and return its metrics.

        Loss: the clipped surrogate of PPO (Schulman et al. 2017, eq. 7) with GRPO's advantages (Shao et al. 2024),
        - mean over response tokens of min(r A, clip(r, 1 - eps, 1 + eps) A) + entropy weight * entropy,
        r = exp(logprob - logprob at sampling).
        """
        started = time.perf_counter()
        batch = experiences[experiences.tokens.lengths > experiences.prompt_lengths]
        if not batch:
            raise ValueError(f"none of the {len(experiences)} experiences has a response to learn from")
        for lacking in (~(batch.logprobs.present & batch.advantages.present)).nonzero()[0]:
            raise ValueError(f"experience {batch.uids[lacking]} lacks logprobs or advantages: see buffer.pipeline and "
                             "logprobs")
        rows = batch.padded().to_torch()
        logprobs, entropy = self._logprobs_and_entropy(rows["tokens"])
        old, advantages, mask = (rows[name][:, 1:] for name in ("logprobs", "advantages", "action_mask"))

        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        tokens = mask.sum().clamp(min=1)
        # A group whose runs all fail has no advantage, so a wrong answer that became certain would never change. The
        # entropy bonus keeps other answers possible (Schulman et al. 2017, eq. 9).
        objective = torch.minimum(ratio * advantages, clipped * advantages) + self.entropy * entropy
        loss = -(objective * mask).sum() / tokens

        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.steps + 1}: the gradient's norm is {float(norm)}; nothing was learnt")
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            return {
                "loss": float(loss),
                "grad_norm": float(norm),
                # The next two are 0 if the engine has the trainer's weights: a check of the whole system.
                "max_logprob_difference": float(((logprobs - old).abs() * mask).max()),
                "clip_fraction": float((((ratio - 1).abs() > self.clip) * mask).sum() / tokens),
                "entropy": float((entropy * mask).sum() / tokens),
                "reward": float(np.mean(rewards)) if len(rewards := batch.rewards[~np.isnan(batch.rewards)]) else 0.0,
                "response_tokens": float(tokens),
                "seconds": time.perf_counter() - started,
            }

    def logprobs(self, experiences: ExperienceColumns) -> torch.Tensor:
        """Return the current logprob of each token but the first: float32 [experiences, longest - 1], nats."""
        return self._logprobs_and_entropy(experiences.padded().to_torch()["tokens"])[0]

    def _logprobs_and_entropy(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprob of each token but the first, and the entropy of the distribution at its position."""
        # Padding is on the right, where a causal model can't see it, so no attention mask is needed.
        logits = self.model(input_ids=tokens).logits[:, :-1].float() / self.temperature
        of_all = torch.log_softmax(logits, dim=-1)
        of_next = of_all.gather(-1, tokens[:, 1:, None].long())[..., 0]
        return of_next, -(of_all.exp() * of_all).sum(-1)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, for `synchronizer.sync_method: memory`."""
        return dict(self.model.state_dict())

    def save(self, path: str) -> None:
        """Write weights, tokenizer and state to the folder `path`, all or nothing. Replaces an existing folder."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{target.name}.*"):  # of a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        half = target.parent / f".{target.name}.{uuid4().hex[:8]}"  # same file system: the rename is atomic
        try:
            self.model.save_pretrained(half)
            self.tokenizer.save_pretrained(half)
            state = {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "random": torch.get_rng_state()}
            torch.save(state, half / STATE)
            for file in half.iterdir():
                _sync(file)
            if target.exists():
                shutil.rmtree(target)
            half.rename(target)
            _sync(target.parent)
        finally:
            shutil.rmtree(half, ignore_errors=True)


def _sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to disk, so that it survives a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
