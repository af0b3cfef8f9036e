"""The example of reasoning-gym trains a model on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import trinity_es
from tests.helpers.reasoning_gym import play_example, rewards
from tests.helpers.runs import finish
from trinity_es.events.values import BatchId
from trinity_es.projections.reading.log_reader import Log


@pytest.mark.all
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_j2_the_example_trains_both_families(reasoning_gym: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    store = f"sqlite:///{tmp_path / 'log.sqlite'}"
    changes: dict[str, object] = {
        "store.url": store, "run_dir": tmp_path, "checkpoint_root_dir": tmp_path / "checkpoints",
        "model.model_path": tmp_path / "model",
    }
    play_example(changes, reasoning_gym, tmp_path, timeout=3500)
    with trinity_es.open_log(store) as log:
        steps = max(batch.batch_id for batch in log.batches() if isinstance(batch.batch_id, int))
        for family in ("letters", "bits"):
            before, after = (mean(log, f"{step}/{family}") for step in (0, steps))
            assert before < 0.05, family
            assert after > before + 0.15, family
    code, _, err = finish("verify", "--log", store, cwd=tmp_path)
    assert code == 0, err


def mean(log: Log, batch: BatchId) -> float:
    found = [reward for _, reward in rewards(log, batch)]
    return sum(found) / len(found)
