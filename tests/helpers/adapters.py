"""LoRA adapters in PEFT's file format, made without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trinity_es.actors.engines.checkpoints import tensor_shapes
from trinity_es.events import vocabulary as ev

SHAPES = {"model.layers.0.self_attn.q_proj.weight": [8, 8], "model.layers.0.mlp.up_proj.weight": [16, 8]}
"""Default of `make_adapter`: names and shapes of the model's tensors."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices that adapters of `adapter_for` change."""
MODULES = tuple(name.removesuffix(".weight") for name in SHAPES)


def tensors_of(rank: int = 2, seed: int = 0, shapes: dict[str, list[int]] | None = None) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, (out, width) in (shapes or SHAPES).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{module}.lora_A.weight"] = chance.normal(0, 0.2, (rank, width)).astype(np.float32)
        found[f"{module}.lora_B.weight"] = chance.normal(0, 0.2, (out, rank)).astype(np.float32)
    return found


def make_adapter(
    folder: Path, *, rank: int = 2, seed: int = 0, shapes: dict[str, list[int]] | None = None,
    tensors: dict[str, Any] | None = None, **settings: Any,
) -> Path:
    """Write an adapter. `settings` replace fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name.split(".")[-2] for name in (shapes or SHAPES)})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    save_file(tensors or tensors_of(rank, seed, shapes), str(folder / "adapter_model.safetensors"))
    return folder


def adapter_for(model: Path, folder: Path, seed: int, rank: int = 8) -> Path:
    """Write an adapter of all MATRICES of the model, large enough to change its answers."""
    shapes = {n: s for n, s in tensor_shapes(model).items() if n.endswith(".weight") and n.split(".")[-2] in MATRICES}
    return make_adapter(folder, rank=rank, seed=seed, shapes=shapes)


class ByHand:
    """Model in torch with an adapter merged by hand: `W + alpha / r * B A`."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
        if adapter is None:
            return
        given: Mapping[str, Any] = load_file(str(adapter / "adapter_model.safetensors"))
        weights = self.model.state_dict()
        for name, a in given.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += 2.0 * given[name.replace("lora_A", "lora_B")] @ a

    def logprobs(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        import torch

        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0], -1)
        return np.asarray(rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy())


def published(adapter: str = "math", version: int = 1, **changes: Any) -> ev.AdapterPublished:
    """Return the AdapterPublished of a version, whose digest differs from that of other versions."""
    values: dict[str, Any] = {"path": f"/{adapter}/{version}", "rank": 8, "size": 9, "digest": f"{adapter}{version}"}
    return ev.AdapterPublished(adapter=adapter, version=version, **(values | changes))
