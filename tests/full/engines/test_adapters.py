"""LoRA adapters on a real vLLM engine: what it answers is what PEFT's own model says, to 1e-3."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.adapters import ByHand, adapter_for, make_adapter
from tests.helpers.engines import Live
from tests.helpers.of_the_day import REAL, by_turns
from tests.helpers.servers import free_port
from tests.helpers.weight_transfer import state_of
from trinity_es.actors.engines.adapter_checks import checked_adapter
from trinity_es.actors.engines.checkpoints import tensor_shapes
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.vllm.weight_sender import WeightSender
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.errors import EngineError, SyncError

pytestmark = [
    by_turns("adapters", REAL), pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore"),
]

TOLERANCE = 1e-3
PROMPT = list(range(10, 50))


class Peft(ByHand):
    """PEFT's own model."""

    def __init__(self, model: Path, adapter: Path) -> None:
        from peft import PeftModel

        super().__init__(model)
        self.model = PeftModel.from_pretrained(self.model, str(adapter)).eval()


def difference(reference: ByHand, answer: Completion) -> float:
    found = reference.logprobs([*answer.prompt_token_ids, *answer.token_ids])[len(answer.prompt_token_ids) - 1 :]
    assert answer.logprobs is not None
    return float(np.abs(found - np.array(answer.logprobs)).max())


def ask(adapter: str = "", tokens: int = 16, **how: Any) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True, adapter=adapter, **how)


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [adapter_for(tiny, base / str(seed), seed) for seed in range(4)]


def load(live: Live, name: str, version: int, folder: Path) -> None:
    live.run(live.engine.load_adapter(name, version, str(folder)))


def answer(live: Live, sampling: Sampling) -> Completion:
    found: Completion = live.run(live.engine.generate(PROMPT, sampling))[0]
    return found


def test_i4_outputs_agree_with_pefts_own_model(live: Live, tiny: Path, folders: list[Path]) -> None:
    pytest.importorskip("peft", reason="needs peft, which is not installed")
    load(live, "math", 1, folders[0])
    found = answer(live, ask("math"))
    reference = Peft(tiny, folders[0])
    assert difference(reference, found) < TOLERANCE
    whole = live.run(live.engine.logprobs([*PROMPT, *found.token_ids], adapter="math"))
    assert np.abs(reference.logprobs([*PROMPT, *found.token_ids]) - np.array(whole)).max() < TOLERANCE
    by_hand = ByHand(tiny, folders[0]).logprobs([*PROMPT, *found.token_ids])
    assert np.abs(reference.logprobs([*PROMPT, *found.token_ids]) - by_hand).max() < TOLERANCE, "the other tests' way"


def test_several_adapters_and_two_versions_of_one_answer_in_the_same_steps(
    live: Live, tiny: Path, folders: list[Path]
) -> None:
    load(live, "math", 1, folders[0])
    load(live, "code", 5, folders[1])
    engine = live.engine

    async def together() -> list[Completion]:
        asked = [asyncio.ensure_future(engine.generate(PROMPT, ask(name, 150))) for name in ("math", "code", "")]
        while not engine._current["math"].uses:  # they run: the same prompt, so the prefix cache has it
            await asyncio.sleep(0.01)
        await engine.load_adapter("math", 2, str(folders[2]))
        asked.append(asyncio.ensure_future(engine.generate(PROMPT, ask("math", 20))))
        new = list(await asked[3])
        assert not asked[0].done(), "the version before answers on beside the next"
        return [(await a)[0] for a in asked[:3]] + new

    found = live.run(together())
    references = [ByHand(tiny, f) for f in (folders[0], folders[1], None, folders[2])]
    assert [a.adapter for a in found] == [("math", 1), ("code", 5), None, ("math", 2)]
    for reference, a in zip(references, found, strict=True):
        assert difference(reference, a) < TOLERANCE
    assert min(difference(references[0], a) for a in found[1:]) > 10 * TOLERANCE, "they do differ"
    assert engine.adapters == {"math": 2, "code": 5}

    async def stream() -> list[Completion]:
        return [part async for part in engine.stream(PROMPT, ask("math"))]

    parts = live.run(stream())
    assert {p.adapter for p in parts} == {("math", 2)}


def test_a_version_waits_while_earlier_ones_take_all_the_room(live: Live, tiny: Path, folders: list[Path]) -> None:
    engine = live.engine  # room for 2 adapters: 5 versions in all, 3 of them in a step

    async def pile_up() -> list[Completion]:
        asked = []
        for version in range(5):
            await engine.load_adapter("math", version, str(folders[version % 4]))
            asked.append(asyncio.ensure_future(engine.generate(PROMPT, ask("math", 60 + 20 * version))))
            await asyncio.sleep(0)
        assert len(await engine._llm.list_loras()) == 5
        await engine.load_adapter("math", 5, str(folders[3]))
        assert any(a.done() for a in asked), "the first had to end"
        assert len(await engine._llm.list_loras()) <= 5
        return [(await a)[0] for a in asked]

    found = live.run(pile_up())
    assert [a.adapter for a in found] == [("math", version) for version in range(5)]
    for version, a in enumerate(found):
        assert difference(ByHand(tiny, folders[version % 4]), a) < TOLERANCE


def test_the_folder_may_go_once_it_is_loaded(live: Live, tiny: Path, folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "a")
    load(live, "math", 1, tmp_path / "a")
    load(live, "code", 1, folders[1])
    shutil.rmtree(tmp_path / "a")
    for _ in range(2):
        answer(live, ask("code"))
        assert difference(ByHand(tiny, folders[0]), answer(live, ask("math"))) < TOLERANCE


def test_adapters_stay_over_a_change_of_the_models_weights(
    live: Live, tiny: Path, other: Path, folders: list[Path]
) -> None:
    load(live, "math", 1, folders[0])
    engine = live.engine

    async def change() -> Completion:
        asking = asyncio.ensure_future(engine.generate(PROMPT, ask("math", 150)))
        while not engine._current["math"].uses:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await engine.load_weights(1, str(other))
        return (await asking)[0]

    during: Any = live.run(change())
    assert during.adapter == ("math", 1)
    assert [version for version, _, _ in during.version_spans] == [0, 1], "it was answered while they changed"
    assert during.version_spans[-1][2] == 150
    after = answer(live, ask("math"))
    assert difference(ByHand(other, folders[0]), after) < TOLERANCE
    assert difference(ByHand(other), answer(live, ask())) < TOLERANCE


def test_adapters_stay_over_weights_that_are_sent(live: Live, other: Path, folders: list[Path]) -> None:
    load(live, "math", 1, folders[0])
    port, made = free_port(), []
    opening = threading.Thread(target=lambda: made.append(WeightSender("127.0.0.1", port, 2)), daemon=True)
    opening.start()
    live.run(live.engine.join_weight_group("127.0.0.1", port, 1, 2, 60.0))
    opening.join(60)
    state = {name: tensor for name, tensor in state_of(other).items() if name != "lm_head.weight"}  # it is tied
    sending = threading.Thread(target=made[0].send, args=(state,), daemon=True)
    sending.start()
    live.run(live.engine.receive_weights(1, str(other), 60.0))
    sending.join(60)
    assert difference(ByHand(other, folders[0]), answer(live, ask("math"))) < TOLERANCE
    assert difference(ByHand(other), answer(live, ask())) < TOLERANCE


def test_what_can_not_be_loaded_changes_nothing(live: Live, tiny: Path, folders: list[Path], tmp_path: Path) -> None:
    load(live, "math", 1, folders[0])
    with pytest.raises(SyncError, match="its rank is 16, and engines take at most 8"):
        load(live, "math", 2, adapter_for(tiny, tmp_path / "high", 0, rank=16))
    wrong = make_adapter(tmp_path / "wrong", rank=8, shapes={"model.layers.0.self_attn.q_proj.weight": [64, 128]})
    with pytest.raises(SyncError, match="q_proj has shape"):
        load(live, "math", 2, wrong)
    head = make_adapter(tmp_path / "head", shapes={"model.embed_tokens.weight": [261, 128]})
    with pytest.raises(SyncError, match=r"version 2 of adapter 'math' was not loaded: .*; still serving version 1"):
        load(live, "math", 2, head)  # only vLLM knows that it serves none of such
    load(live, "code", 1, folders[1])
    with pytest.raises(EngineError, match="there is no adapter 'maths': this engine serves math, code") as refused:
        answer(live, ask("maths"))
    assert refused.value.details["refused"]
    assert difference(ByHand(tiny, folders[0]), answer(live, ask("math"))) < TOLERANCE


def test_i4_an_adapter_sync_moves_at_most_a_tenth_of_the_bytes_of_a_full_one(tiny: Path, tmp_path: Path) -> None:
    """With rank 8 over every matrix: on the tests' model, of 0.4 million parameters, and on one as wide as the smallest
    that people train adapters of (Qwen2.5-0.5B has hidden size 896)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=261, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    for model, share in ((tiny, 0.1), (tmp_path / "model", 0.02)):
        full = (model / "model.safetensors").stat().st_size
        adapter = adapter_for(model, tmp_path / f"adapter-{share}", 0, rank=8)
        moved = checked_adapter(adapter, shapes=tensor_shapes(model)).size
        assert moved <= share * full, f"{moved:,} of {full:,} bytes"


def test_vllms_own_server_answers_by_the_adapter_that_a_client_names(
    live: Live, tiny: Path, folders: list[Path]
) -> None:
    load(live, "math", 4, folders[0])

    async def serve() -> EngineServer:
        server = EngineServer(live.engine, name="tiny", token="secret")
        await server.start()
        return server

    server = live.run(serve())
    try:
        session = server.open(model := Model(live.engine, defaults={"max_tokens": 8, "temperature": 0.0}))
        for name in ("math", "tiny"):
            told = httpx.post(f"{server.url}/s/{session}/v1/completions", json={"model": name, "prompt": [5, 6, 7]},
                              headers={"x-api-key": "secret"}, timeout=120)
            assert told.status_code == 200, told.text
        models = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}).json()["data"]
    finally:
        live.run(server.stop())
    assert [(m["id"], m["parent"]) for m in models] == [("tiny", None), ("math", "tiny")]
    found, plain = model.extract_experience_from_history()
    assert found.info["adapter_spans"] == [["math", 4, 0, len(found.tokens) - 3]]
    assert "adapter_spans" not in plain.info
    own = live.run(live.engine.logprobs(found.tokens.tolist(), adapter="math"))[2:]
    assert found.logprobs.tolist() == pytest.approx(own, abs=2e-3)
    assert np.abs(found.logprobs[:3] - plain.logprobs[:3]).max() > 1e-3
