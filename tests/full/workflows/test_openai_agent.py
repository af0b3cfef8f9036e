"""The example of an agent on the OpenAI SDK: it runs from one command, and its tool is called in each run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trinity_es
from tests.helpers.paths import ROOT
from trinity_es.events.vocabulary import BatchFinalized

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_agent_is_trained_by_one_command_and_knows_nothing_of_it(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    text = (ROOT / "examples/openai_agent/agent.py").read_text()
    assert [line for line in text.splitlines() if "import" in line and "trinity_es" in line] == []
    settings = {
        "total_steps": 2, "explorer.eval_interval": 2, "buffer.batch_size": 4, "run_dir": tmp_path / "run",
        "checkpoint_root_dir": tmp_path / "checkpoints", "model.model_path": tmp_path / "model",
        "store.url": f"sqlite:///{tmp_path}/log.sqlite",
        "buffer.explorer_input.tasksets.0.path": tmp_path / "data/train.jsonl",
        "buffer.explorer_input.eval_tasksets.0.path": tmp_path / "data/eval.jsonl",
    }
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "examples.openai_agent", *options], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=580, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with trinity_es.open_log(f"sqlite:///{tmp_path}/log.sqlite") as log:
        assert [b.state for b in log.batches()] == ["finalized"] * 4
        for step in (1, 2):
            result = log.replay(step).final_result
            assert result is not None
            assert result["metrics"]["rollout/looks/mean"] == 1.0
            assert result["finished_task_count"] == 4
        made = [r.event.model_versions for r in log.events(2) if isinstance(r.event, BatchFinalized)]
        assert {version for _, version in made[0]} == {1}, "by the weights that step 1 made"
