"""P36 on real vLLM: the official client chats, streams and lists models; rewards come later; weights change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.helpers.of_the_day import REAL, by_turns
from tests.helpers.serving import Load, Serving, VLLMServed, client_of, post, recorded
from tests.helpers.systems import pid_of
from trinity_es.actors.engines.devices import usable_cores
from trinity_es.events.experience_columns import ExperienceColumns

pytestmark = [
    by_turns("clients", REAL), pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore"),
]

TOLERANCE = 1e-3


def test_p36_c5_the_official_client_chats_streams_lists_models_and_a_reward_shows_up(vllm_served: VLLMServed) -> None:
    from examples.grpo.trainer import GRPOTrainer

    log, proxy, model = vllm_served
    client = client_of(proxy)
    [found] = client.models.list().data
    messages: Any = [{"role": "user", "content": "c="}]
    answers = [
        client.chat.completions.create(model=found.id, messages=messages, max_tokens=12, seed=seed) for seed in range(4)
    ]
    chunks = list(client.chat.completions.create(model=found.id, messages=messages, max_tokens=12, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    ids = [*(a.id for a in answers), chunks[0].id]
    experiences = [recorded(log, message)[0] for message in ids]
    assert [e.response_text for e in experiences] == [*(a.choices[0].message.content for a in answers), text]
    assert answers[0].usage is not None
    assert experiences[0].prompt_length == answers[0].usage.prompt_tokens
    trainer = GRPOTrainer(str(model))
    for e in experiences:  # exact token ids: torch gives the same logprobs to them
        import torch

        with torch.no_grad():
            ours = trainer.logprobs(ExperienceColumns.of([e])).numpy()[0, e.prompt_length - 1 : e.tokens.size - 1]
        assert e.logprobs is not None
        assert float(np.abs(ours - e.logprobs).max()) < TOLERANCE
    after = log.log.head().position
    for number, message in enumerate(ids):
        body = {"msg_ids": [message], "reward": float(number), "task_id": "c", "run_id": number}
        assert post(proxy, "/feedback", body).status_code == 200
    assert post(proxy, "/commit", {}).json()["count"] == 5
    [(_, delivered)] = list(log.processed_experiences(after))
    assert [(e.eid.suffix, e.reward) for e in delivered] == [(m, float(i)) for i, m in enumerate(ids)]


def test_p36_c5_no_request_fails_while_weights_are_updated(vllm_served: VLLMServed, tmp_path: Path) -> None:
    from examples.grpo.trainer import GRPOTrainer

    log, proxy, model = vllm_served
    trainer = GRPOTrainer(str(model))
    name = str(model)
    with Load(proxy, clients=8, tokens=24, model=name) as load, Serving(log) as seen:
        for version in (1, 2):
            trainer.save(str(tmp_path / f"v{version}"))
            log.sync_weights(version, tmp_path / f"v{version}", timeout=300)
            load.more()
    assert load.failed == []
    assert min(seen.counts) == 1
    states = log.log.answers()
    assert {m for m, _ in load.answered} <= states.keys()
    assert {s.model_version for s in states.values()} == {0, 1, 2}


@pytest.mark.skipif(len(usable_cores()) < 4, reason="needs four cores: with fewer, two engines are bound by vLLM alone")
def test_two_engines_on_a_cpu_compute_on_cores_of_their_own(vllm_served: VLLMServed) -> None:
    log = vllm_served.client
    bound = []
    for runner in ("runner-0", "runner-1"):
        family = psutil.Process(pid_of(log, runner)).children(recursive=True)
        threads = [thread.id for p in family if "Worker" in p.name() for thread in p.threads()]
        each = [os.sched_getaffinity(thread) for thread in threads]
        bound.append({cpu for some in each if len(some) < len(os.sched_getaffinity(0)) for cpu in some})
    assert all(bound)
    assert not bound[0] & bound[1]
