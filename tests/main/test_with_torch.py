"""Values and weights from torch, conversations with a tokenizer of transformers: what both really give."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.grpo.tiny_model import CHAT_TEMPLATE
from tests.helpers.any_experience import small
from tests.helpers.recorded_engine import TALK, Recorder
from trinity_es.actors.engines.checkpoints import read_tensor
from trinity_es.actors.rollout.model import Model
from trinity_es.config.config import Config
from trinity_es.events.errors import DataError
from trinity_es.events.experience import CustomField, Experience
from trinity_es.weights import shared_memory

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def test_p45_an_experience_of_the_known_system_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trinity_es.events.experience")
    for _ in range(2):
        e = Experience(tokens=torch.zeros(5), prompt_length=2)
        assert (e.tokens.dtype, e.tokens.tolist(), e.action_mask.tolist()) == (np.int32, [0] * 5, [True] * 3)
    assert [r.message for r in caplog.records].count(
        "Experience: tokens given as float32: whole numbers are taken as int32, give them as integers") <= 1
    with pytest.raises(DataError, match="float32"):
        Experience(tokens=torch.tensor([0.0, 1.5]), prompt_length=1)
    with pytest.raises(DataError, match="fit int32"):
        Experience(tokens=torch.tensor([0.0, 1e12]), prompt_length=1)
    with pytest.raises(DataError, match="tokens has dtype"):
        Experience(tokens=torch.tensor([0.0, math.nan]), prompt_length=1)


def test_p5_torch_tensors_are_accepted() -> None:
    e = small(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True), reward=torch.tensor(0.5),
        action_mask=torch.ones(2, dtype=torch.bool), routed_experts=torch.ones(2, 3, dtype=torch.bfloat16),
        info={"x": torch.tensor(2)}, custom_fields=[CustomField("x", "y", torch.float32)],
    )
    assert (e.logprobs.tolist(), e.reward, e.info) == ([-1.0, -2.0], 0.5, {"x": 2})
    assert (e.routed_experts.dtype, e.custom_fields[0].data_type) == (np.float32, "float32")
    assert Experience.deserialize(e.serialize()) == e


def test_p34_torch_s_tensors_tied_ones_and_bfloat16_are_taken(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"tie_word_embeddings": true}')
    chance = np.random.default_rng(2)
    given = {
        name: chance.normal(size=shape).astype(np.float32)
        for name, shape in {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}.items()
    }
    save_file(given, str(model / "model.safetensors"))
    config = Config.from_dict({"model": {"model_path": str(model)}}, folder=tmp_path)
    made = {name: torch.from_numpy(tensor).to(torch.bfloat16) for name, tensor in given.items()}
    made["lm_head.weight"] = made["model.embed_tokens.weight"]
    made["model.norm.weight"] = torch.nn.Parameter(made["model.norm.weight"])
    folder = shared_memory.write_to_shared_memory(config, 1, made)
    got = read_tensor(folder, "lm_head.weight")
    assert got.dtype == np.float32  # numpy has no bfloat16
    np.testing.assert_array_equal(got, made["lm_head.weight"].float().numpy())
    shared_memory.free_shared_memory(config, keep="")
    assert not shared_memory.memory_dir(config).exists()


@pytest.mark.filterwarnings("ignore")
def test_a_real_tokenizer_gives_the_same_mask_by_its_marks_and_by_growth() -> None:
    alphabet = {chr(32 + i): i for i in range(95)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    bpe.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    engine = Recorder()
    engine.tokenizer = tokenizer
    grown = Model(engine).tokenized(TALK)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}",
        "<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}",
    )
    assert "generation %" in tokenizer.chat_template
    marked = Model(engine).tokenized(TALK)
    assert marked.tokens.tolist() == grown.tokens.tolist()
    assert marked.prompt_length == grown.prompt_length
    assert marked.action_mask.tolist() == grown.action_mask.tolist()
    written = grown.tokens[grown.prompt_length :][grown.action_mask].tolist()
    assert tokenizer.convert_ids_to_tokens(written) == ["a", "1", "<|end|>", "a", "2", "<|end|>"]
