"""`load_weights` on a stand-in engine that fails at will: it is resumed or ended, never paused or with unnamed weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.engines import StandIn
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.events.errors import EngineError, SyncError


def checkpoint(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, str(folder / "model.safetensors"))
    return str(folder)


@pytest.fixture
def engine(tmp_path: Path) -> VLLMEngine:
    built = VLLMEngine(EngineConfig(model_path=checkpoint(tmp_path / "old")))
    checkpoint(tmp_path / "new")
    built._llm, built._why_dead = StandIn(), None
    return built


RELOADED = ["reload:new", "trinity_pack_again", "trinity_weights_finite"]
UNDONE = ["trinity_forget_half_reload", "reload:old", "trinity_pack_again"]


async def test_a_load_pauses_reloads_labels_and_resumes(engine: VLLMEngine, tmp_path: Path) -> None:
    await engine.load_weights(3, str(tmp_path / "new"))
    assert engine._llm.calls == ["pause", *RELOADED, "label:3", "resume"]
    assert engine.model_version == 3


@pytest.mark.parametrize("step", ["reload:new", "trinity_pack_again", "trinity_weights_finite"])
async def test_whichever_step_fails_the_old_weights_come_back(engine: VLLMEngine, tmp_path: Path, step: str) -> None:
    llm = engine._llm
    if step == "trinity_pack_again":  # fails once, then the way back works
        llm.fail[step] = RuntimeError("boom")
        notes = llm.note

        def once(call: str) -> None:
            try:
                notes(call)
            finally:
                if call == step:
                    llm.fail.pop(step, None)

        llm.note = once
    elif step == "trinity_weights_finite":
        llm.finite = False
    else:
        llm.fail[step] = RuntimeError("boom")
    with pytest.raises(SyncError, match="was loaded again; still serving version 0"):
        await engine.load_weights(3, str(tmp_path / "new"))
    assert llm.calls[-4:] == [*UNDONE, "resume"]
    assert not llm.paused
    assert engine.model_version == 0


@pytest.mark.parametrize(("failing", "said"), [
    ({"reload:new": "boom", "reload:old": "gone"}, "gone"), ({"resume": "boom"}, "resumed"),
])
async def test_when_the_old_weights_do_not_come_back_or_it_can_not_be_resumed_the_engine_is_ended(
    engine: VLLMEngine, tmp_path: Path, failing: dict[str, str], said: str
) -> None:
    llm = engine._llm
    llm.fail |= {call: RuntimeError(why) for call, why in failing.items()}
    with pytest.raises(EngineError, match=said) as ended:
        await engine.load_weights(3, str(tmp_path / "new"))
    assert ended.value.details["dead"]
    assert llm.shut_down
    with pytest.raises(EngineError, match="the engine is dead"):
        await engine.generate("a", Sampling())


async def test_a_pause_that_fails_is_resumed(engine: VLLMEngine, tmp_path: Path) -> None:
    llm = engine._llm
    llm.fail["pause"] = RuntimeError("boom")
    with pytest.raises(SyncError, match="boom"):
        await engine.load_weights(3, str(tmp_path / "new"))
    assert not llm.paused


async def test_a_cancelled_caller_does_not_stop_a_load_half_way(engine: VLLMEngine, tmp_path: Path) -> None:
    llm = engine._llm
    llm.slow = 0.01
    call = asyncio.ensure_future(engine.load_weights(3, str(tmp_path / "new")))
    while "pause" not in llm.calls:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(10):
        while engine.model_version != 3 or llm.paused:
            await asyncio.sleep(0.001)


async def test_two_loads_go_one_after_the_other(engine: VLLMEngine, tmp_path: Path) -> None:
    llm = engine._llm
    llm.slow = 0.005
    await asyncio.gather(engine.load_weights(3, str(tmp_path / "new")), engine.load_weights(4, str(tmp_path / "new")))
    one = ["pause", *RELOADED, "label:3", "resume"]
    assert llm.calls == [*one, *(c.replace("3", "4") for c in one)]
