"""Writing a trainer's tensors to shared memory (`sync_method: memory`), and removing old versions.

A version is a folder in Hugging Face format, `version_<n>-...`, under /dev/shm, so engines load it like a checkpoint.
It is deleted when every engine serves a newer version. It survives every process, but not a restart of the machine.
After a restart the trainer recreates the lost weights from its checkpoint and the experiences in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.actors.engines.checkpoints import mismatch, model_folder, reference_shapes
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, DataError, SyncError

__all__ = ["free_shared_memory", "memory_dir", "write_to_shared_memory"]

SHARED_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 64 * 2**20
"""Shared memory that stays free for other users."""
_MODEL_FILES = ("config.json", "generation_config.json")


def memory_dir(config: Config) -> Path:
    """Return the folder of a run's weights in shared memory. Each store and user has one; it may not exist yet."""
    owner = f"{os.getuid()} {config.store.url}"
    return SHARED_MEMORY / f"trinity_es-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


def write_to_shared_memory(config: Config, version: int, state: Mapping[str, Any], path: Path | None = None) -> Path:
    """Write named tensors as `version` into shared memory, all or nothing, and return the folder. Publishes nothing.

    `state`: {name in the model's checkpoint: torch tensor (of any device, FSDP's too) or numpy array}. `path`: the
    folder, if its name is already fixed. Raises DataError for values that are not tensors. Raises SyncError for too
    little memory, or the first tensor that is missing, unknown, not finite, or of another shape than the model's.
    """
    tensors = _checked_tensors(version, state)
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    reference, tied = reference_shapes(config.rollout.model_path)
    problem = None if reference is None else mismatch(shapes, reference, tied)  # None: the model's files are not here
    if problem:
        raise SyncError(f"weights version {version} was not published: {problem}")
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"there is no shared memory at {SHARED_MEMORY}: set synchronizer.sync_method to checkpoint")
    folder = path or memory_dir(config) / f"version_{version}-{uuid.uuid4().hex[:8]}"
    _make_private(folder.parent)
    size = sum(int(t.nbytes) for t in tensors.values())
    free = shutil.disk_usage(folder.parent).free
    if size + _SPARE_BYTES > free:
        raise SyncError(
            f"weights version {version} was not published: it takes {size / 2**30:.2f} GiB of shared memory, and "
            f"{SHARED_MEMORY} has {free / 2**30:.2f} GiB free: enlarge it, or set synchronizer.sync_method to "
            "checkpoint"
        )
    partial_folder = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(mode=0o700)
    try:
        _save(tensors, partial_folder / "model.safetensors")
        model = model_folder(config.rollout.model_path)
        for name in _MODEL_FILES:
            if model is not None and (model / name).is_file():
                shutil.copyfile(model / name, partial_folder / name)
        partial_folder.rename(folder)
    except OSError as e:
        raise SyncError(f"weights version {version} was not published: {partial_folder} can't be written: {e}") from e
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def _make_private(folder: Path) -> None:
    """Make this folder readable for this user only. Raises SyncError if another user, guessing its name, made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid():
        raise SyncError(
            f"weights can't be published in {folder}: the folder belongs to another user, who could change them. Have "
            "it removed, or set synchronizer.sync_method to checkpoint"
        )
    folder.chmod(0o700)


def free_shared_memory(config: Config, keep: str) -> None:
    """Delete every weights version in the run's shared memory, except the folder `keep`."""
    folder = memory_dir(config)
    for version in folder.glob("*version_*"):
        if str(version) != keep:
            shutil.rmtree(version, ignore_errors=True)
    with contextlib.suppress(OSError):  # missing, or not empty
        folder.rmdir()


# --- tensors --------------------------------------------------------------------------------------------------------
def _checked_tensors(version: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors on the CPU, unsharded and contiguous in memory.

    Raises DataError for a value that is not a tensor, SyncError for NaN or infinite values.
    """
    if not isinstance(state, Mapping) or not state:
        raise DataError(f"weights are {'empty' if isinstance(state, Mapping) else type(state).__name__}: a folder, or "
                        "a mapping from names to tensors is expected")
    torch = sys.modules.get("torch")  # a process with tensors has imported torch
    tensors: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise DataError(f"weights hold the key {name!r}: names of tensors are expected")
        if torch is not None and isinstance(value, torch.Tensor):
            tensor = value.detach()
            if hasattr(tensor, "full_tensor"):
                tensor = tensor.full_tensor()  # FSDP's shards
            tensors[name] = tensor.to("cpu").contiguous()
            is_finite = not tensor.is_floating_point() or bool(torch.isfinite(tensors[name].float()).all())
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            tensors[name] = np.ascontiguousarray(value)
            is_finite = value.dtype.kind != "f" or bool(np.isfinite(value).all())
        else:
            raise DataError(f"weights[{name!r}] is a {type(value).__name__}: a torch tensor or numpy array is expected")
        if not is_finite:
            raise SyncError(f"weights version {version} was not published: {name} holds NaN or infinite values")
    return tensors


def _save(tensors: dict[str, Any], file: Path) -> None:
    """Write the tensors as a safetensors file, without importing torch if all are numpy arrays."""
    if all(isinstance(t, np.ndarray) for t in tensors.values()):
        from safetensors.numpy import save_file

        save_file(tensors, str(file), metadata={"format": "pt"})
        return
    import torch
    from safetensors.torch import save_file as save_torch

    separate_tensors: dict[str, Any] = {}
    addresses: set[int] = set()
    for name, value in tensors.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        address = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as a tied head does with the embedding.
        separate_tensors[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    save_torch(separate_tensors, str(file), metadata={"format": "pt"})
