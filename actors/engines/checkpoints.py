"""Folders in Hugging Face format: where a model lies, which tensors it has, whether it can replace another.

Reads headers of safetensors files only; imports neither torch nor vllm.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from events.errors import ConfigError

__all__ = ["cached_model", "model_dtype", "reference_shapes", "resolve_model", "tensor_shapes", "unloadable"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(path: str) -> str:
    """The folder, or the hub id where it is none. Raises ConfigError for what is not there."""
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
    """The local folder of a hub model, None where it was never fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return str(Path(found).parent) if isinstance(found, str) else None


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


def reference_shapes(model: str) -> tuple[dict[str, list[int]] | None, bool]:
    """Shapes of the tensors that the engine started with, and whether lm_head is the embedding. None: unknown."""
    folder = model if Path(model).is_dir() else cached_model(model)
    if folder is None:
        return None, False
    try:
        shapes = tensor_shapes(Path(folder))
    except (OSError, ValueError):
        return None, False
    return shapes or None, bool(_read_config(folder).get("tie_word_embeddings"))


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in a folder's safetensors files, from their headers. {} where there are none.

    Raises ValueError for a file that is cut off or no safetensors, or that the index names and is not there.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (KeyError, AttributeError, TypeError) as e:
            raise ValueError(f"{index.name} has no weight_map") from e
    shapes: dict[str, list[int]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
        try:
            with safe_open(str(file), framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a dict: it can't be iterated
                    shapes[name] = list(tensors.get_slice(name).get_shape())
        except SafetensorError as e:
            raise ValueError(f"{file.name} can't be read: {e}") from e
    return shapes


def unloadable(path: str, reference: dict[str, list[int]] | None, tied: bool) -> str | None:
    """Why the checkpoint at `path` can't replace the weights served, as far as can be seen without loading it."""
    folder = Path(path)
    if not folder.is_dir():
        return f"{path} is no folder"
    try:
        shapes = tensor_shapes(folder)
    except (OSError, ValueError) as e:
        return f"{path}: {e}"
    if not shapes:
        return None if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) else f"{path} holds no weights"
    if reference is None:
        return None
    either = {"lm_head.weight"} if tied else set()  # a tied head may be written or left out
    missing = sorted(reference.keys() - shapes.keys() - either)
    unknown = sorted(shapes.keys() - reference.keys() - either)
    if missing:
        return f"{path}: {_first(missing)} missing"
    if unknown:
        return f"{path}: {_first(unknown)} not in the model that is served"
    for name in sorted(reference.keys() & shapes.keys()):
        if shapes[name] != reference[name]:
            return f"{path}: {name} has shape {shapes[name]}, the model that is served has {reference[name]}"
    return None


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
