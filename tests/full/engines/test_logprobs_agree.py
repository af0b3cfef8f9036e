"""Acceptance A1: vLLM gives a token the logprob that the trainer's own model gives it, before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engines import Live
from trinity_es.actors.rollout.model import Model
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

LETTERS = "abcdefghijklmnop"
TOLERANCE = 1e-3


def rollout(live: Live) -> list[Experience]:
    async def play() -> list[Experience]:
        model = Model(live.engine, defaults={"max_tokens": 8})
        return await model.generate_async([f"{letter}=" for letter in LETTERS], n=4)

    return live.run(play())


def largest_difference(trainer: object, experiences: Sequence[Experience]) -> float:
    import torch

    with torch.no_grad():
        ours = trainer.logprobs(ExperienceColumns.of(experiences)).numpy()  # type: ignore[attr-defined]
    return max(
        float(np.abs(ours[i, e.prompt_length - 1 : e.tokens.size - 1] - e.logprobs).max())
        for i, e in enumerate(experiences)
    )


def test_logprobs_agree_at_version_0_and_after_every_step_of_training(live: Live, tiny: Path, tmp_path: Path) -> None:
    from examples.grpo.trainer import GRPOTrainer

    trainer = GRPOTrainer(str(tiny), lr=3e-3)
    rng = np.random.default_rng(0)
    experiences = rollout(live)
    assert largest_difference(trainer, experiences) < TOLERANCE
    for version in (1, 2, 3):
        stale = experiences
        for e in experiences:
            e.advantages = np.full(e.tokens.size - e.prompt_length, rng.normal(), dtype=np.float32)
        trainer.step(ExperienceColumns.of(experiences))
        trainer.save(str(tmp_path / str(version)))
        live.run(live.engine.load_weights(version, str(tmp_path / str(version))))
        experiences = rollout(live)
        assert largest_difference(trainer, experiences) < TOLERANCE
        # The weights did change by more than the tolerance, so the line above says something.
        assert largest_difference(trainer, stale) > 10 * TOLERANCE


def test_logprobs_are_those_after_temperature(live: Live, tiny: Path) -> None:
    from examples.grpo.trainer import GRPOTrainer

    trainer = GRPOTrainer(str(tiny), temperature=0.7)

    async def play() -> list[Experience]:
        return await Model(live.engine, defaults={"max_tokens": 8, "temperature": 0.7}).generate_async("c=", n=8)

    assert largest_difference(trainer, live.run(play())) < TOLERANCE
