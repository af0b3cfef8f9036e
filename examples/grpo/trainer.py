"""A minimal GRPO trainer in plain torch.

It gets experiences with their advantages (from the pipeline's `grpo` operator), makes one step of a clipped policy
gradient on them, and writes its weights as a folder that an engine loads. It runs on one CPU thread; a real trainer
shards this over GPUs and has the same methods.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["GRPOTrainer"]

STATE = "trainer.pt"
"""File beside the weights with optimizer, steps and random state, so that a run resumes as if never interrupted."""


class GRPOTrainer:
    """Trainer of the model at `model_path`; it resumes if that is a folder that `save` wrote.

    `lr` for AdamW; `clip` is epsilon of the clipped ratio; `entropy` the weight of the entropy bonus, 0 for none;
    `max_grad_norm` the maximum norm of the gradient; `temperature` that of the rollouts, since the engine's logprobs
    are those after temperature.
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
        """Restore everything but the weights from the folder `path`, which `save` wrote."""
        state = torch.load(Path(path) / STATE, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["random"])

    def step(self, experiences: Sequence[Any]) -> dict[str, float]:
        """Make one update on one batch; return its metrics.

        Loss: the clipped surrogate of PPO (Schulman et al. 2017, eq. 7) with GRPO's advantages (Shao et al. 2024),
        - mean over response tokens of min(r A, clip(r, 1 - eps, 1 + eps) A) + entropy weight * entropy,
        r = exp(logprob - logprob at sampling).
        """
        started = time.perf_counter()
        batch = [e for e in experiences if e.tokens.size > e.prompt_length]
        if not batch:
            raise ValueError(f"none of the {len(experiences)} experiences has a response to learn from")
        logprobs, entropy = self._logprobs_and_entropy(batch)
        old = _padded(batch, [e.logprobs for e in batch])
        advantages = _padded(batch, [e.advantages for e in batch])
        mask = _padded(batch, [e.action_mask for e in batch])

        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        tokens = mask.sum().clamp(min=1)
        # A group whose runs all fail alike has no advantage, so nothing would lead out of a wrong answer that became
        # certain. The entropy bonus keeps the others possible (Schulman et al. 2017, eq. 9).
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
                # Both are 0 where the engine has the trainer's own weights: the check on the whole way round.
                "max_logprob_difference": float(((logprobs - old).abs() * mask).max()),
                "clip_fraction": float((((ratio - 1).abs() > self.clip) * mask).sum() / tokens),
                "entropy": float((entropy * mask).sum() / tokens),
                "reward": float(np.mean([e.reward for e in batch if e.reward is not None] or [0.0])),
                "response_tokens": float(tokens),
                "seconds": time.perf_counter() - started,
            }

    def logprobs(self, experiences: Sequence[Any]) -> torch.Tensor:
        """Return the current logprob of each response token: float32 [experiences, longest response], nats."""
        return self._logprobs_and_entropy(experiences)[0]

    def _logprobs_and_entropy(self, experiences: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprob of each response token, and the entropy of the distribution that it was drawn from."""
        longest = max(e.tokens.size for e in experiences)
        tokens = torch.zeros((len(experiences), longest), dtype=torch.long)
        for row, e in zip(tokens, experiences, strict=True):
            row[: e.tokens.size] = torch.from_numpy(e.tokens.astype(np.int64))
        # Padding is on the right, where a causal model can't see it: it needs no attention mask.
        logits = self.model(input_ids=tokens).logits[:, :-1].float() / self.temperature
        of_all = torch.log_softmax(logits, dim=-1)
        of_next = of_all.gather(-1, tokens[:, 1:, None])[..., 0]
        entropy = -(of_all.exp() * of_all).sum(-1)
        responses = [(i, slice(e.prompt_length - 1, e.tokens.size - 1)) for i, e in enumerate(experiences)]
        return _stacked([of_next[r] for r in responses]), _stacked([entropy[r] for r in responses])

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, for `synchronizer.sync_method: memory`."""
        return dict(self.model.state_dict())

    def save(self, path: str) -> None:
        """Write weights, tokenizer and state to the folder `path`, all or nothing; replaces what is there."""
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
    """Sync a file, or the names in a folder, to disk, so that they survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _padded(experiences: Sequence[Any], values: Sequence[Any]) -> torch.Tensor:
    """Return one row per response, padded with zeros; a scalar is repeated for each token."""
    rows = []
    for e, value in zip(experiences, values, strict=True):
        if value is None:
            raise ValueError(f"experience {e.eid} lacks logprobs or advantages: see buffer.pipeline and logprobs")
        length = e.tokens.size - e.prompt_length
        rows.append(torch.from_numpy(np.broadcast_to(np.asarray(value, dtype=np.float32), (length,)).copy()))
    return _stacked(rows)
