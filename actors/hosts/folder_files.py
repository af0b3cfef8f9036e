"""Comparison of the files in a folder of weights between the head and a host.

A file on a shared file system has the same inode, size and times on both hosts, to the nanosecond. Such files count as
equal without being read. Otherwise their SHA-256 decides.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileFacts", "FolderName", "hash_files", "list_files"]

_TRAINER_FILES = ("optimizer*", "scheduler*", "rng_state*", "training_args*", "trainer_state*", "scaler*")
"""Names of files that a trainer leaves beside weights and no engine reads."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
"""Names of weights in other formats, which no engine reads if there are safetensors."""


@dataclass(frozen=True, slots=True)
class FolderName:
    """Name by which a host requests a folder. Only the head knows the path."""

    kind: str
    """`weights`, `adapter`, or `model` for the model's original weights."""
    name: str = ""
    """Name of the adapter, or of the model (`rollout` or an auxiliary model)."""
    version: int = 0

    def __str__(self) -> str:
        if self.kind == "model":
            return f"the folder of model {self.name!r}"
        return f"version {self.version}" + (f" of adapter {self.name!r}" if self.kind == "adapter" else "")

    @property
    def label(self) -> str:
        """Prefix of the pulled folder's name on a host."""
        name_digest = hashlib.sha256(self.name.encode()).hexdigest()[:12] + "-" if self.name else ""
        return f"{self.kind}-{name_digest}{self.version}"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file on one host: name, size, and an identity that changes with its content."""

    name: str
    size: int
    identity: tuple[int, int, int]
    """Inode of the file, and the times when its content and its inode changed, in nanoseconds."""


def list_files(folder: Path) -> list[FileFacts]:
    """Return the files of a folder that an engine may read, sorted by name. Raises OSError, also if there are none. It
    follows links, since the cache of Hugging Face's hub consists of them."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    excluded_patterns: tuple[str, ...] = _TRAINER_FILES
    if any(name.endswith(".safetensors") for name in names):
        excluded_patterns += _OTHER_WEIGHTS
    files = []
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in excluded_patterns):
            continue
        with (folder / name).open("rb") as file:  # opened, so that NFS asks its server for the file's attributes
            status = os.fstat(file.fileno())
        files.append(FileFacts(name, status.st_size, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)))
    if not files:
        raise FileNotFoundError(f"the folder {folder} holds no files")
    return files


async def hash_files(folder: Path, files: Sequence[FileFacts], threads: Executor) -> list[str]:
    """Return the SHA-256 of each file, computed in `threads`. Raises OSError, also if a file's size has changed."""
    loop = asyncio.get_running_loop()
    return list(await asyncio.gather(
        *(loop.run_in_executor(threads, _digest, folder / file.name, file.size) for file in files)))


def _digest(path: Path, size: int) -> str:
    """Return a file's SHA-256. Raises OSError, also if it does not have `size` bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if file.tell() != size:
            raise OSError(f"{path} changed while it was hashed: it has {file.tell()} bytes instead of {size}")
        return digest
