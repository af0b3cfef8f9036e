"""What only a GPU can show. Skipped by name where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trinity_es.testing import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(900)]

CHILD = textwrap.dedent("""
    import asyncio, os, sys, time
    os.setpgid(0, 0)
    from actors.engines import EngineConfig, Sampling
    from actors.engines.vllm_engine import VLLMEngine

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
