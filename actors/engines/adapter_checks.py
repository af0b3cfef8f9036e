"""Checks that engines can serve a LoRA adapter folder in PEFT's format. Imports neither torch nor vllm nor peft."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.events.errors import SyncError

__all__ = ["CONFIG", "TENSORS", "AdapterFiles", "checked_adapter", "require_unchanged"]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_NOT_SERVED = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora",
    "modules_to_save",
)
"""Settings in adapter_config.json beyond plain LoRA, all of which vLLM refuses."""
_PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that leave the base model's weights unchanged; the others change them."""
_EXPONENT_MASKS: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0000000000000), "F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Allowed dtypes: for each an unsigned type of the same width, and a mask of the exponent's bits. Only NaN and infinity
have all of these bits."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Highest rank of an adapter's modules; size in bytes and SHA-256 of its two files."""

    rank: int
    size: int
    digest: str


def checked_adapter(
    path: str | Path, *, max_rank: int | None = None, shapes: Mapping[str, Sequence[int]] | None = None
) -> AdapterFiles:
    """Check an adapter folder. Raises SyncError if it can't be served over a model with these tensor shapes."""
    folder = Path(path)
    try:
        settings = (folder / CONFIG).read_bytes()
        data = (folder / TENSORS).read_bytes()
    except OSError as e:
        missing = Path(e.filename or folder).name if folder.is_dir() else ""
        problem = f"{missing} can't be read ({e.strerror})" if missing else "there is no such folder"
        raise SyncError(
            f"{folder} holds no adapter in PEFT's format: {problem}. Save one with model.save_pretrained(folder)"
        ) from e
    try:
        rank = max(_rank_in_config(settings), _rank_of_tensors(data, shapes))
    except ValueError as e:
        raise SyncError(f"the adapter at {folder} can't be served: {e}") from e
    if max_rank is not None and rank > max_rank:
        raise SyncError(
            f"the adapter at {folder} can't be served: its rank is {rank}, and engines take at most {max_rank}. Raise "
            "explorer.rollout_model.lora.max_rank and restart"
        )
    digest = hashlib.sha256(hashlib.sha256(settings).digest() + hashlib.sha256(data).digest()).hexdigest()
    return AdapterFiles(rank, len(settings) + len(data), digest)


def require_unchanged(path: str | Path, digest: str, files: AdapterFiles) -> None:
    """Raise SyncError if the files read from `path` do not have the published digest."""
    if files.digest != digest:
        raise SyncError(f"the files at {path} changed since they were published: publish them as a new version")


def _rank_in_config(settings: bytes) -> int:
    """Return the highest rank in adapter_config.json. Raises ValueError if it describes anything but plain LoRA."""
    try:
        config = json.loads(settings)
    except ValueError as e:
        raise ValueError(f"{CONFIG} is not JSON ({e}): save the adapter with model.save_pretrained(folder)") from e
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is not a JSON object: save the adapter with model.save_pretrained(folder)")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type in {CONFIG} is {config.get('peft_type')!r}: engines serve 'LORA' only")
    for key in _NOT_SERVED:
        if config.get(key):
            raise ValueError(f"{key} is set in {CONFIG}: engines serve plain LoRA only, so train without it")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias in {CONFIG} is {config['bias']!r}: engines serve adapters without biases only")
    initialization = config.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization.lower() not in _PLAIN_INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights in {CONFIG} is {initialization!r}, which changes the base model's weights: save it as "
            "a plain adapter (PEFT's path_initial_model_for_weight_conversion)"
        )
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"rank_pattern in {CONFIG} is {pattern!r:.80}, not an object of ranks by module")
    ranks = [config.get("r"), *pattern.values()]
    if not all(isinstance(r, int) and not isinstance(r, bool) and r > 0 for r in ranks):
        raise ValueError(
            f"r in {CONFIG} is {config.get('r')!r}, and rank_pattern is {pattern!r:.80}: ranks must be "
            "whole numbers above 0"
        )
    return int(max(ranks))


def _rank_of_tensors(data: bytes, model_shapes: Mapping[str, Sequence[int]] | None) -> int:
    """Return the highest rank of an adapter's tensors. Raises ValueError if they can't be served over the model.

    `model_shapes`: shapes of the model's tensors by name; None if they are unknown and not compared.
    """
    half_shapes: dict[str, dict[str, list[int]]] = {}  # by module, then by half: A or B
    for name, dtype, shape, content in _read_tensors(data):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{TENSORS}: {name} is no tensor of a LoRA adapter: names must end with lora_A.weight or lora_B.weight"
            )
        if dtype not in _EXPONENT_MASKS:
            dtypes = ", ".join(_EXPONENT_MASKS)
            raise ValueError(f"{TENSORS}: {name} is of type {dtype}: save the adapter as one of {dtypes}")
        uint, exponent_mask = _EXPONENT_MASKS[dtype]
        if (np.frombuffer(content, dtype=uint) & uint(exponent_mask) == uint(exponent_mask)).any():
            raise ValueError(f"{TENSORS}: {name} holds NaN or infinite weights")
        half_shapes.setdefault(match["module"], {})[match["half"]] = shape
    if not half_shapes:
        raise ValueError(f"{TENSORS} holds no tensors: save the adapter with model.save_pretrained(folder)")
    return max(_module_rank(module, halves, model_shapes) for module, halves in half_shapes.items())


def _module_rank(
    module: str, halves: Mapping[str, list[int]], model_shapes: Mapping[str, Sequence[int]] | None
) -> int:
    """Return the rank of a module from the shapes of its matrices A and B. Raises like `_rank_of_tensors`."""
    for half, other in ("A", "B"), ("B", "A"):
        if half not in halves:
            raise ValueError(f"{TENSORS}: {module} has lora_{other} and no lora_{half}")
    a, b = halves["A"], halves["B"]
    if ".experts" in module:  # the layout of experts' matrices depends on the model, so only the engine can check it
        return 1
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise ValueError(f"{TENSORS}: {module} has lora_A {a} and lora_B {b}, expected [rank, in] and [out, rank]")
    if model_shapes is not None:
        shape = model_shapes.get(f"{module}.weight")
        if shape is None and "layers." in module:  # models have different prefixes before `layers.`
            tail = f".{module[module.index('layers.'):]}.weight"
            shape = next((shape for name, shape in model_shapes.items() if name.endswith(tail)), None)
        if shape is None:
            raise ValueError(f"{module} is not in the model that is served")
        if [b[0], a[1]] != list(shape):
            raise ValueError(f"{module} has shape {list(shape)} in the model that is served, not [{b[0]}, {a[1]}]")
    return a[0]


def _read_tensors(data: bytes) -> list[tuple[str, str, list[int], memoryview]]:
    """Return name, dtype, shape and content of each tensor in a safetensors file. Raises ValueError for a bad file."""
    from safetensors import SafetensorError, deserialize

    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
        return [(name, str(t["dtype"]), list(t["shape"]), memoryview(t["data"])) for name, t in tensors]
    except SafetensorError as e:
        raise ValueError(f"{TENSORS} can't be read: {e}") from e
