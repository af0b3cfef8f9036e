"""Folders in Hugging Face format: where a model lies, which tensors it has, whether it can replace another.

Reads headers of safetensors files only; imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import Tokenizer
from trinity_es.events.errors import ConfigError, WeightNotFound

__all__ = [
    "auto_tokenizer", "cached_model", "difference", "model_dtype", "model_folder", "read_tensor", "reference_shapes",
    "resolve_model", "tensor_headers", "tensor_shapes", "torch_type", "unloadable", "vocabulary",
]

_NUMPY = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
"""Types of safetensors that numpy has too."""
_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(path: str) -> str:
    """Return the folder, or the hub id where it is none. Raises ConfigError for what is not there."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model_path {path} is no model in Hugging Face format: no config.json in it", path=path)
        return str(folder.resolve())
    if path and folder.exists():
        raise ConfigError(f"model_path {path} is a file: give the folder with config.json and the weights", path=path)
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "-")):
        raise ConfigError(
            f"model_path {path!r} is not there: give a folder in Hugging Face format, or a hub id", path=path
        )
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0") and cached_model(path) is None:
        raise ConfigError(
            f"model_path {path} is neither a folder nor in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to "
            "fetch it", path=path,
        )
    return path


def cached_model(model: str) -> str | None:
    """Return the local folder of a hub model, None where it was never fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return str(Path(found).parent) if isinstance(found, str) else None


def model_folder(model: str) -> Path | None:
    """Return where a model lies: its folder, or that of a hub model in the local cache; None: nowhere here."""
    if not model or Path(model).is_dir():
        return Path(model) if model else None
    found = cached_model(model) if _HUB_ID.fullmatch(model) else None
    return Path(found) if found else None


def model_dtype(model: str) -> str | None:
    config = _read_config(model)
    found = config.get("dtype") or config.get("torch_dtype")
    return str(found) if found else None


def _read_config(model: str) -> dict[str, Any]:
    try:
        loaded = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def auto_tokenizer(model: str, **more: Any) -> Tokenizer:
    """Return a model's tokenizer as transformers chooses it. Imports torch."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, **more)
    return tokenizer


def vocabulary(model: str, tokenizer: Any) -> int:
    """Return how many token ids a model has: those of its config, or of its tokenizer where that has more."""
    config = _read_config(str(model_folder(model) or ""))
    text = config.get("text_config")
    sizes = [c.get("vocab_size") for c in (config, text) if isinstance(c, dict)]
    return max([len(tokenizer), *(size for size in sizes if isinstance(size, int))])


def reference_shapes(model: str) -> tuple[dict[str, list[int]] | None, bool]:
    """Return the shapes that the engine started with (None: unknown), and whether lm_head is the embedding."""
    folder = model_folder(model)
    if folder is None:
        return None, False
    try:
        shapes = tensor_shapes(folder)
    except (OSError, ValueError):
        return None, False
    return shapes or None, bool(_read_config(str(folder)).get("tie_word_embeddings"))


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in a folder's safetensors files, from their headers. {} where there are none.

    Raises ValueError for a file that is cut off or no safetensors, or that the index names and is not there.
    """
    return {name: shape for name, (_, shape) in tensor_headers(folder).items()}


def tensor_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (type as safetensors writes it, such as BF16, and shape) of every tensor. Raises as `tensor_shapes`."""
    headers: dict[str, tuple[str, list[int]]] = {}
    for _, tensors in _open_files(folder):
        for name in tensors.keys():  # noqa: SIM118  # not a dict: it can't be iterated
            found = tensors.get_slice(name)
            headers[name] = (str(found.get_dtype()), list(found.get_shape()))
    return headers


def torch_type(kind: str) -> str:
    """Return torch's name of a type of safetensors: BF16 -> bfloat16. Raises ValueError for no type of weights."""
    if kind not in _TORCH:
        raise ValueError(f"tensors of type {kind} can't be sent")
    return _TORCH[kind]


def read_tensor(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Return one tensor; types that numpy has not (bfloat16, float8) as float32. Raises WeightNotFound, ValueError."""
    known: list[str] = []
    for file, tensors in _open_files(folder):
        names = list(tensors.keys())
        if name not in names:
            known += names
            continue
        if str(tensors.get_slice(name).get_dtype()) in _NUMPY:
            return np.asarray(tensors.get_tensor(name))
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as exact:
            return np.asarray(exact.get_tensor(name).float().numpy())
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    told = f": did you mean {' or '.join(near)}?" if near else f" ({len(known)} others are)"
    raise WeightNotFound(f"no tensor {name!r} in the weights that are served{told}", name=name, near=near)


def _open_files(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each safetensors file of a folder, open. Raises as `tensor_shapes`."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (KeyError, AttributeError, TypeError) as e:
            raise ValueError(f"{index.name} has no weight_map") from e
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
        try:
            with safe_open(str(file), framework="np") as tensors:
                yield file, tensors
        except SafetensorError as e:
            raise ValueError(f"{file.name} can't be read: {e}") from e


def unloadable(path: str, reference: dict[str, list[int]] | None, tied: bool) -> str | None:
    """Return why the checkpoint at `path` can't replace the weights served, as seen without loading it."""
    folder = Path(path)
    if not folder.is_dir():
        return f"{path} is no folder"
    try:
        shapes = tensor_shapes(folder)
    except (OSError, ValueError) as e:
        return f"{path}: {e}"
    if not shapes:
        return None if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) else f"{path} holds no weights"
    told = difference(shapes, reference, tied) if reference is not None else None
    return None if told is None else f"{path}: {told}"


def difference(shapes: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]], tied: bool) -> str | None:
    """Return why tensors of these shapes can't replace those of the model that is served; None: they can.

    `tied`: lm_head is the embedding, so it may be there or not.
    """
    either = {"lm_head.weight"} if tied else set()
    missing = sorted(reference.keys() - shapes.keys() - either)
    unknown = sorted(shapes.keys() - reference.keys() - either)
    if missing:
        return f"{_first(missing)} missing"
    if unknown:
        return f"{_first(unknown)} not in the model that is served"
    for name in sorted(reference.keys() & shapes.keys()):
        if list(shapes[name]) != list(reference[name]):
            return f"{name} has shape {list(shapes[name])}, the model that is served has {list(reference[name])}"
    return None


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
