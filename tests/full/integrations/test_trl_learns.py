"""TRL's trainer learns a task on a real engine, and is killed meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.trl_kills import WRONG, Trainee, kill_while_training, training_figures


@pytest.mark.all
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_trl_learns_the_letters_from_one_command(
    tmp_path: Path, trl: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in trl.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    trainee = Trainee(tmp_path / "run", [], {"max_steps": 100})
    try:
        kill_while_training(trainee, ["trainer"], random.Random(0), seconds=600)
        found = training_figures(trainee, None)
    finally:
        trainee.end()
    assert found["reward"] >= 0.7
    assert {name: found[name] for name in WRONG if found[name]} == {}, trainee.log_end()
