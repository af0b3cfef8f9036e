"""LoRA adapters as PEFT saves them, made without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

__all__ = ["MODULES", "SHAPES", "make_adapter", "tensors_of"]

SHAPES = {"model.layers.0.self_attn.q_proj.weight": [8, 8], "model.layers.0.mlp.up_proj.weight": [16, 8]}
"""Tensors of a model that adapters of `make_adapter` are for, by default."""
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
    """Write an adapter; `settings` go over those of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name.split(".")[-2] for name in (shapes or SHAPES)})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    save_file(tensors or tensors_of(rank, seed, shapes), str(folder / "adapter_model.safetensors"))
    return folder
