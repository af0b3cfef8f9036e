"""Weights from the trainer's memory into a real engine's, over gloo as there is no GPU, and each failure (PARITY P34).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engines import Live
from tests.helpers.servers import free_port
from tests.helpers.weight_transfer import PROMPT, state_of
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.vllm.weight_sender import WeightSender
from trinity_es.config.config import Config
from trinity_es.events.errors import SyncError
from trinity_es.weights import shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def expected(model: Path) -> list[float]:
    """Logprobs of PROMPT as plain torch computes them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(str(model))(torch.tensor([PROMPT])).logits[0]
    found = torch.log_softmax(logits.double(), dim=-1)
    return [float(found[i - 1, PROMPT[i]]) for i in range(1, len(PROMPT))]


def served(live: Live) -> list[float]:
    return live.run(live.engine.logprobs(PROMPT))


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Iterator[Config]:
    made = Config.from_dict({"model": {"model_path": str(tiny)}}, folder=tmp_path)
    yield made
    shared_memory.free_shared_memory(made, keep="")
    assert not shared_memory.memory_dir(made).exists()


@pytest.fixture
def sender(live: Live) -> WeightSender:
    port, made = free_port(), []
    opening = threading.Thread(target=lambda: made.append(WeightSender("127.0.0.1", port, 2)), daemon=True)
    opening.start()
    live.run(live.engine.join_weight_group("127.0.0.1", port, 1, 2, 60.0))
    opening.join(60)
    return made[0]


def test_p34_logprobs_after_a_sync_from_memory_are_those_of_torch(live: Live, other: Path, config: Config) -> None:
    before = served(live)
    folder = shared_memory.write_to_shared_memory(config, 1, state_of(other))
    assert str(folder).startswith("/dev/shm/")
    live.run(live.engine.load_weights(1, str(folder)))
    assert live.engine.model_version == 1
    np.testing.assert_allclose(served(live), expected(other), atol=2e-4)
    assert np.abs(np.array(served(live)) - before).max() > 1e-2


def test_p34_logprobs_after_a_transfer_are_those_of_torch_and_requests_in_flight_go_on(
    live: Live, other: Path, config: Config, sender: WeightSender
) -> None:
    state = state_of(other)
    folder = shared_memory.write_to_shared_memory(config, 2, state)
    long = live.spawn(live.engine.generate(PROMPT, Sampling(max_tokens=200, ignore_eos=True)))
    sending = threading.Thread(target=sender.send, args=(state,), daemon=True)
    sending.start()
    live.run(live.engine.receive_weights(2, str(folder), 60.0))
    sending.join(60)
    assert not sending.is_alive()
    np.testing.assert_allclose(served(live), expected(other), atol=2e-4)
    [answer] = long.result(120)
    assert len(answer.token_ids) == 200
    assert answer.version_spans[-1][0] == 2


def test_p34_a_transfer_that_fails_leaves_the_old_weights_served(
    live: Live, other: Path, config: Config, sender: WeightSender
) -> None:
    before = served(live)
    state = state_of(other)
    folder = shared_memory.write_to_shared_memory(config, 3, state)
    bad = {name: tensor * float("nan") for name, tensor in state.items()}
    sending = threading.Thread(target=sender.send, args=(bad,), daemon=True)
    sending.start()
    with pytest.raises(SyncError, match="NaN"):
        live.run(live.engine.receive_weights(3, str(folder), 60.0))
    sending.join(60)
    assert served(live) == before
    with pytest.raises(SyncError, match="has left its weight transfer group"):  # tensors may be on their way
        live.run(live.engine.receive_weights(3, str(folder), 60.0))
    assert served(live) == before
    live.run(live.engine.load_weights(3, str(folder)))  # the way for who can't receive
    np.testing.assert_allclose(served(live), expected(other), atol=2e-4)


def test_p34_a_trainer_that_dies_in_a_transfer_leaves_the_old_weights_served(
    live: Live, other: Path, config: Config, sender: WeightSender
) -> None:
    before = served(live)
    state = state_of(other)
    folder = shared_memory.write_to_shared_memory(config, 4, state)
    receiving = live.spawn(live.engine.receive_weights(4, str(folder), 60.0))
    sender.send({name: state[name] for name in sorted(state)[:9]})
    sender.group = None
    with pytest.raises(SyncError, match="was loaded again; still serving version 0"):
        receiving.result(60)
    assert served(live) == before
    [answer] = live.run(live.engine.generate(PROMPT, Sampling(max_tokens=4, ignore_eos=True)))
    assert len(answer.token_ids) == 4
