"""Model folders in Hugging Face format: location, tensors, compatibility. Imports neither torch nor vllm."""

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
    "auto_tokenizer", "cached_model", "mismatch", "model_dtype", "model_folder", "read_tensor", "reference_shapes",
    "resolve_model", "tensor_headers", "tensor_shapes", "torch_type", "vocabulary_size", "why_unloadable",
]

_NUMPY = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
"""Dtypes of safetensors that numpy has too."""
_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(path: str) -> str:
    """Return the absolute folder of a model, or a hub id unchanged. Raises ConfigError if there is no such model."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model_path {path} has no config.json: give a folder in Hugging Face format", path=path)
        return str(folder.resolve())
    if path and folder.exists():
        raise ConfigError(f"model_path {path} is a file: give the folder with config.json and the weights", path=path)
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "-")):
        raise ConfigError(
            f"model_path {path!r} does not exist: give a folder in Hugging Face format, or a hub id", path=path
        )
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0") and cached_model(path) is None:
        raise ConfigError(
            f"model_path {path} is neither a folder nor in the local Hugging Face cache: download it first, or unset "
            "HF_HUB_OFFLINE", path=path,
        )
    return path


def cached_model(model: str) -> str | None:
    """Return the folder of a model (a hub id) in the local Hugging Face cache; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return str(Path(config).parent) if isinstance(config, str) else None


def model_folder(model: str) -> Path | None:
    """Return the local folder of a model (a folder or a cached hub id); None if it is not on this machine."""
    if not model or Path(model).is_dir():
        return Path(model) if model else None
    cached = cached_model(model) if _HUB_ID.fullmatch(model) else None
    return Path(cached) if cached else None


def model_dtype(model: str) -> str | None:
    """Return the dtype in a model's config, such as `bfloat16`; None if the config names none."""
    config = _read_config(model)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return str(dtype) if dtype else None


def _read_config(model: str) -> dict[str, Any]:
    """Return the content of a folder's config.json; {} if it can't be read."""
    try:
        loaded = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def auto_tokenizer(model: str, **more: Any) -> Tokenizer:
    """Return the tokenizer that transformers chooses for a model. Imports torch."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, **more)
    return tokenizer


def vocabulary_size(model: str, tokenizer: Any) -> int:
    """Return the number of token ids of a model: that of its config or of its tokenizer, whichever is larger."""
    config = _read_config(str(model_folder(model) or ""))
    text_config = config.get("text_config")  # multimodal models have it
    sizes = [c.get("vocab_size") for c in (config, text_config) if isinstance(c, dict)]
    return max([len(tokenizer), *(size for size in sizes if isinstance(size, int))])


def reference_shapes(model: str) -> tuple[dict[str, list[int]] | None, bool]:
    """Return the shapes of a model's tensors, None if unknown, and True if its lm_head is tied to the embedding."""
    folder = model_folder(model)
    if folder is None:
        return None, False
    try:
        shapes = tensor_shapes(folder)
    except (OSError, ValueError):
        return None, False
    return shapes or None, bool(_read_config(str(folder)).get("tie_word_embeddings"))


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in a checkpoint, by name. Raises ValueError for a bad or missing file."""
    return {name: shape for name, (_, shape) in tensor_headers(folder).items()}


def tensor_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype (as in safetensors: BF16) and shape of each tensor, by name. Raises ValueError for a bad file."""
    headers: dict[str, tuple[str, list[int]]] = {}
    for _, tensors in _open_files(folder):
        for name in tensors.keys():  # noqa: SIM118  # not a dict: it can't be iterated
            view = tensors.get_slice(name)
            headers[name] = (str(view.get_dtype()), list(view.get_shape()))
    return headers


def torch_type(dtype: str) -> str:
    """Return torch's name of a safetensors dtype: BF16 -> bfloat16. Raises ValueError for an unknown dtype."""
    if dtype not in _TORCH:
        raise ValueError(f"tensors of type {dtype} can't be sent: convert them to one of {', '.join(_TORCH)}")
    return _TORCH[dtype]


def read_tensor(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Return a tensor; bfloat16 and float8 become float32. Raises WeightNotFound, or ValueError for a bad file."""
    other_names: list[str] = []
    for file, tensors in _open_files(folder):
        names = list(tensors.keys())
        if name not in names:
            other_names += names
            continue
        if str(tensors.get_slice(name).get_dtype()) in _NUMPY:
            return np.asarray(tensors.get_tensor(name))
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as torch_tensors:
            return np.asarray(torch_tensors.get_tensor(name).float().numpy())
    similar = difflib.get_close_matches(name, other_names, n=3, cutoff=0.4)
    hint = f": did you mean {' or '.join(similar)}?" if similar else f" ({len(other_names)} other tensors are)"
    raise WeightNotFound(f"no tensor {name!r} in the weights that are served{hint}", name=name, near=similar)


def _open_files(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each safetensors file of a checkpoint, opened with numpy. Raises ValueError for a bad or missing one."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (KeyError, AttributeError, TypeError) as e:
            raise ValueError(f"{index.name} has no weight_map of file names: save the checkpoint again") from e
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name}, which {index.name} names, is missing: save the checkpoint again")
        try:
            with safe_open(str(file), framework="np") as tensors:
                yield file, tensors
        except SafetensorError as e:
            raise ValueError(f"{file.name} can't be read: {e}") from e


def why_unloadable(path: str, reference: dict[str, list[int]] | None, tied: bool) -> str | None:
    """Return why the checkpoint at `path` can't replace the served weights; None if it can. Reads only its headers.

    `reference`: shapes of the served model's tensors, None if not read; `tied`: its lm_head is tied to the embedding.
    """
    folder = Path(path)
    if not folder.is_dir():
        return f"{path} is no folder: give one in Hugging Face format"
    try:
        shapes = tensor_shapes(folder)
    except (OSError, ValueError) as e:
        return f"{path}: {e}"
    if not shapes:
        return None if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) else f"{path} holds no weights"
    problem = mismatch(shapes, reference, tied) if reference is not None else None
    return None if problem is None else f"{path}: {problem}"


def mismatch(shapes: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]], tied: bool) -> str | None:
    """Return why tensors of these shapes can't replace `reference`; None if they can. `tied`: lm_head is optional."""
    optional_names = {"lm_head.weight"} if tied else set()
    missing = sorted(reference.keys() - shapes.keys() - optional_names)
    unknown = sorted(shapes.keys() - reference.keys() - optional_names)
    if missing:
        return f"{_first_and_count(missing)} missing"
    if unknown:
        return f"{_first_and_count(unknown)} not in the model that is served"
    for name in sorted(reference.keys() & shapes.keys()):
        if list(shapes[name]) != list(reference[name]):
            return f"{name} has shape {list(shapes[name])}, not {list(reference[name])} as in the served model"
    return None


def _first_and_count(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
