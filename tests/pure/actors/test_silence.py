"""What is known of vLLM's processes: whether they still take what they are asked, and why they ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.actors.engines.vllm.processes import last_error_in, wait_for_silence
from trinity_es.events.errors import EngineError


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_process_that_answers_nothing_is_told_after_a_while() -> None:
    asked: list[asyncio.Task[Any] | None] = []

    async def ask() -> Any:
        asked.append(asyncio.current_task())
        await (asyncio.sleep(0) if len(asked) < 3 else never())

    await asyncio.wait_for(wait_for_silence(ask, lambda: False, interval=0.001, limit=0.005), 10)
    assert len(asked) == 3
    assert asked[-1].cancelling()


@pytest.mark.parametrize("error", [True, False])
async def test_one_that_answers_somehow_or_is_known_to_be_busy_is_not(error: bool) -> None:
    count = 0

    async def ask() -> Any:
        nonlocal count
        count += 1
        if error:
            raise RuntimeError("it ended")
        await asyncio.sleep(0.004)

    watching = asyncio.create_task(wait_for_silence(ask, lambda: False, interval=0.002, limit=0.1))
    loading = asyncio.create_task(wait_for_silence(never, lambda: True, interval=0.001, limit=0.001))
    while count < 20:
        await asyncio.sleep(0.001)
    assert not watching.done()
    assert not loading.done()
    for task in (watching, loading):
        task.cancel()


CORE = "(EngineCore pid=7) ERROR 11-27 13:16:20 [core.py:1510] "
PRINTED = """\
(Worker pid=8) ERROR 11-27 13:16:15 [multiproc_executor.py:953]          ^^^^^^^^^^^^^^^^^^
(Worker pid=8) ERROR 11-27 13:16:15 [multiproc_executor.py:953] safetensors_rust.SafetensorError: not fully covered
(EngineCore pid=7) ERROR 11-27 13:16:20 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-27 13:16:20 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-27 13:16:20 [core.py:1510] Exception: WorkerProc failed. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
    raise e from None
Exception: WorkerProc failed. See stack trace for root cause.
"""
NO_SHM = "RuntimeError: Insufficient space in /dev/shm for a buffer: 240 MiB required, 64 MiB free. Increase /dev/shm"


@pytest.mark.parametrize(("printed", "pids", "said"), [
    (PRINTED, [], "safetensors_rust.SafetensorError: not fully covered"),
    (f"{CORE}{NO_SHM}\n{CORE}done\n", [], NO_SHM),
    (f"Process EngineCore:\nTraceback:\n{NO_SHM}\n", [], NO_SHM),
    (f"{CORE}ValueError: mine\n(EngineCore pid=9) ValueError: another's\nValueError: anybody's\n", [7, 8],
     "ValueError: mine"),
    ("Fatal Python error: Bus error\n", [], "Fatal Python error: Bus error"),
    ("all is well: nothing raised\nINFO 11-27 13:16:20 [x.py:1] Error handling is on\n", [], ""),
])
def test_the_error_that_vllm_s_processes_printed_is_found(printed: str, pids: list[int], said: str) -> None:
    assert last_error_in(printed, pids) == said


@pytest.mark.parametrize("points", [True, False])
async def test_an_engine_that_does_not_start_is_told_with_what_its_processes_printed(
    points: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = VLLMEngine(EngineConfig(model_path=str(tmp_path)))
    before = os.dup(2)
    with (tmp_path / "printed").open("ab") as file:
        file.write(b"ValueError: of an earlier engine\n")
        file.flush()
        os.dup2(file.fileno(), 2)

    def build() -> Any:
        os.write(2, PRINTED.encode())
        raise RuntimeError("Engine core initialization failed. See root cause above." if points else "of its own")

    monkeypatch.setattr(engine, "_build", build)
    try:
        with pytest.raises(EngineError) as error:
            await engine.start()
    finally:
        os.dup2(before, 2)
        os.close(before)
    told = "safetensors_rust.SafetensorError: not fully covered" if points else "RuntimeError: of its own"
    assert error.value.message == f"the engine for {tmp_path} did not start: {told}"
    assert "SafetensorError: not fully covered" in caplog.text, "which the runner's own log keeps"
    assert "earlier" not in caplog.text
