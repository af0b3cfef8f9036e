"""The example of an agent on the OpenAI SDK: trained by one command, token by token, and it knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import trinity_es
from tests.helpers.of_the_day import EXAMPLES, by_turns
from tests.helpers.paths import ROOT
from trinity_es import Experience, ExperienceColumns
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.vocabulary import BatchFinalized
from trinity_es.projections.reading.log_reader import Log


@by_turns(EXAMPLES[0], EXAMPLES)
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_agent_is_trained_by_one_command_on_what_was_sampled_alone(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from transformers import AutoTokenizer

    from examples.grpo.trainer import GRPOTrainer
    from examples.openai_agent.agent import count

    assert "trinity" not in (ROOT / "examples/openai_agent/agent.py").read_text().partition("import")[2]
    play(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with trinity_es.open_log(f"sqlite:///{tmp_path}/log.sqlite") as log:
        assert log.verify() == []
        assert {b.batch_id: b.state for b in log.batches()} == dict.fromkeys([1, 2], "finalized")
        result = log.replay(1).final_result
        learned = delivered(log, 1)
        rows = {e.eid.task: log.task(1, int(e.eid.task))["raw_task"] for e in learned}
    assert result is not None
    assert result["metrics"]["rollout/reward/mean"] == pytest.approx(0.5, abs=0.4), "neither never right nor always"

    called = 0
    last = {(e.eid.task, e.eid.run): e.eid.uid for e in sorted(learned, key=lambda e: e.eid.step)}
    assert len(last) == 8 * 8
    for e in learned:
        assert e.logprobs is not None
        assert e.action_mask is not None
        assert (e.logprobs[~e.action_mask] == 0).all()
        response = e.tokens[e.prompt_length :]
        parts = [
            (mask, [token for token, _ in pairs])
            for mask, pairs in groupby(zip(response, e.action_mask, strict=True), key=lambda pair: bool(pair[1]))
        ]
        told = [tokenizer.decode(ids) for mask, ids in parts if not mask]
        assert all(text.startswith("<|tool|>") and text.endswith("<|assistant|>") for text in told), e.response_text
        said = [tokenizer.decode(ids, skip_special_tokens=True) for mask, ids in parts if mask]
        if e.eid.uid not in last.values():  # a call that the template writes otherwise later ends a sequence
            continue
        assert e.reward == (said[-1] == rows[e.eid.task]["answer"])
        if e.reward and told and told[-1].count("<|tool|>") == 1:
            call = json.loads(said[-2].partition("<tool_call>")[2].partition("</tool_call>")[0])
            seen = count(rows[e.eid.task]["shelf"], json.dumps(call["arguments"]))  # an error where it asks for no item
            assert told[-1] == f"<|tool|>{seen}<|assistant|>"
            called += seen == said[-1]
    assert called > 0

    recomputed = GRPOTrainer(str(tmp_path / "model")).logprobs(ExperienceColumns.of(learned)).detach().numpy()
    for e, row in zip(learned, recomputed, strict=True):
        assert e.logprobs is not None
        assert e.action_mask is not None
        sampled = np.flatnonzero(e.action_mask)
        of_response = row[e.prompt_length - 1 :]  # the first token has no logprob
        np.testing.assert_allclose(of_response[sampled], e.logprobs[sampled], atol=1e-3)


def test_the_same_seed_teaches_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from examples.openai_agent.tiny_model import make_model

    made = [make_model(tmp_path / name, steps=2, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    a, b, c = ((model / "model.safetensors").read_bytes() for model in made)
    assert a == b != c
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}, "nothing half-made stays"


def play(folder: Path) -> None:
    settings = {
        "total_steps": 2, "explorer.max_concurrency": 4, "explorer.eval_interval": 4,
        "explorer.eval_on_startup": "false", "run_dir": folder / "run",
        "checkpoint_root_dir": folder / "checkpoints", "model.model_path": folder / "model",
        "store.url": f"sqlite:///{folder}/log.sqlite",
        "buffer.explorer_input.tasksets.0.path": folder / "data/train.jsonl",
        "buffer.explorer_input.eval_tasksets.0.path": folder / "data/eval.jsonl",
    }
    done = subprocess.run(
        [sys.executable, "-m", "examples.openai_agent",
         *(text for key, value in settings.items() for text in ("--set", f"{key}={value}"))],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=580, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def delivered(log: Log, batch: int) -> list[Experience]:
    store = log.payloads()
    try:
        return [
            e for r in log.events(batch) if isinstance(r.event, BatchFinalized) for ref in r.event.experiences
            for e in read_experiences(store, [ref])
        ]
    finally:
        store.close()
