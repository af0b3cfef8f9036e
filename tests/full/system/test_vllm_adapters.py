"""LoRA adapters on a vLLM engine in a runner actor, through the whole system and over the runner's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.adapters import ByHand, adapter_for
from tests.helpers.real_engine import TOLERANCE, letters, vllm_system
from tests.helpers.systems import pid_of
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def answers(client: RolloutClient, batch: int, adapter: str) -> list[Experience]:
    client.submit_batch(batch_id=batch, tasks=letters(4, rollout_args={"adapter": adapter}), batch_type="train")
    client.finalize_train_batch(batch, timeout=600)
    found = list(client.experiences(batch))
    assert len(found) == 16
    return found


def largest_difference(reference: ByHand, experiences: list[Experience]) -> float:
    return max(
        float(np.abs(reference.logprobs(e.tokens.tolist())[e.prompt_length - 1 :] - e.logprobs).max())
        for e in experiences
    )


def test_i4_an_engine_that_was_killed_answers_with_its_adapters_as_before(tiny: Path, tmp_path: Path) -> None:
    folders = [adapter_for(tiny, tmp_path / str(seed), seed) for seed in range(2)]
    with vllm_system(tmp_path, tiny, lora={"max_adapters": 2, "max_rank": 8}) as client:
        client.sync_adapter("math", 3, folders[0])
        client.sync_adapter("code", 1, folders[1])
        os.kill(pid_of(client, "runner-0"), signal.SIGKILL)
        for batch, (adapter, version, reference) in enumerate((
            ("math", 3, ByHand(tiny, folders[0])), ("code", 1, ByHand(tiny, folders[1])), ("", 0, ByHand(tiny)),
        )):
            found = answers(client, batch, adapter)
            spans = {tuple(span[:2]) for e in found for span in e.info.get("adapter_spans", [])}
            assert spans == ({(adapter, version)} if adapter else set())
            assert largest_difference(reference, found) < TOLERANCE
        assert {r["incarnation"] for r in client.status()["runners"]} == {2}
        assert client.log.verify() == []
