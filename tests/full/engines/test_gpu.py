"""What only a GPU can show. Skipped by name where there is none."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engines import Live, again, cut_off
from tests.helpers.servers import free_port
from tests.helpers.weight_transfer import PROMPT, state_of
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.engines.vllm.weight_sender import WeightSender
from trinity_es.config.config import Config
from trinity_es.testing import wait_until
from trinity_es.weights import shared_memory

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(900)]

CHILD = textwrap.dedent("""
    import asyncio, os, sys, time
    os.setpgid(0, 0)
    from trinity_es.actors.engines.interface import EngineConfig, Sampling
    from trinity_es.actors.engines.vllm.engine import VLLMEngine

    async def main():
        engine = VLLMEngine(EngineConfig(model_path=sys.argv[1], max_model_len=64, gpu_memory_utilization=0.3))
        await engine.start()
        [answer] = await engine.generate("c=", Sampling(max_tokens=8, ignore_eos=True))
        print(len(answer.token_ids), flush=True)
        time.sleep(600)

    asyncio.run(main())
""")


def used_mib() -> int:
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True, timeout=60,
    )
    return int(out.stdout.split()[0])


def test_a_killed_runner_gives_the_gpu_s_memory_back(tiny: Path) -> None:
    before = used_mib()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tiny)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "8"
        assert used_mib() > before + 1000
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
        assert child.stdout is not None
        child.stdout.close()
    wait_until(lambda: used_mib() < before + 500, "the GPU's memory to come back", 30)


def test_weights_sent_by_nccl_are_those_loaded_from_their_place(tiny: Path, other: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    config = Config.from_dict({"model": {"model_path": str(tiny)}}, folder=tmp_path)
    gpu = EngineConfig(model_path=str(tiny), max_model_len=64, gpu_memory_utilization=0.3, weight_transfer=True)
    live = Live(gpu)
    try:
        state = {name: tensor.to("cuda:1") for name, tensor in state_of(other).items()}
        place = shared_memory.write_to_shared_memory(config, 1, state)
        port = free_port()
        made: list[WeightSender] = []

        def open_end() -> None:
            made.append(WeightSender("127.0.0.1", port, 2, device=1))

        opening = threading.Thread(target=open_end, daemon=True)
        opening.start()
        live.run(live.engine.join_weight_group("127.0.0.1", port, 1, 2, 60.0))
        opening.join(60)
        threading.Thread(target=made[0].send, args=(state,), daemon=True).start()
        live.run(live.engine.receive_weights(1, str(place), 60.0))
        sent = live.run(live.engine.logprobs(PROMPT))
        live.run(live.engine.load_weights(2, str(place)))
        np.testing.assert_allclose(sent, live.run(live.engine.logprobs(PROMPT)), atol=1e-4)
    finally:
        live.close()
        shared_memory.free_shared_memory(config, keep="")


def test_trap_9_what_is_kept_is_bit_equal_and_the_rest_is_as_close_as_two_undisturbed_answers(tiny: Path) -> None:
    """Greedy answers differ from run to run on a GPU, so the rest is compared by the logprobs of equal tokens."""
    live = Live(EngineConfig(model_path=str(tiny), max_model_len=256, gpu_memory_utilization=0.3))
    greedy = Sampling(temperature=0.0, max_tokens=120, ignore_eos=True)
    try:
        undisturbed = [live.run(live.engine.generate("c=", greedy))[0] for _ in range(4)]
        spread = max(
            abs(a - b) for one, two in itertools.combinations(undisturbed, 2)
            for a, b in zip(*same_so_far(one, two, 0), strict=True)
        )
        for least in (1, 40, 90):
            writer = live.run(cut_off(live, greedy, least))
            kept = writer.kept()
            assert kept is not None
            [[part]] = [list(answers.values()) for answers in kept.calls.values()]
            [answer] = again(live, greedy, writer)
            length = len(part.tokens)
            assert answer.token_ids[:length] == part.tokens
            assert answer.logprobs is not None
            assert answer.logprobs[:length] == part.logprobs
            nearest = min(
                max((abs(a - b) for a, b in zip(*same_so_far(answer, one, length), strict=True)), default=0.0)
                for one in undisturbed if one.token_ids[:length] == part.tokens
            )
            assert nearest <= 2 * spread + 1e-4
    finally:
        live.close()


def same_so_far(one: Completion, other: Completion, start: int) -> tuple[list[float], list[float]]:
    """Return the logprobs of two answers from `start` to the first token in which they differ."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    end = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
    return (one.logprobs or [])[start:end], (other.logprobs or [])[start:end]
