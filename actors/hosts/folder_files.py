"""A folder of weights as head and host compare it: which files it has, and whether those of another host are the same.

A file that two hosts share over a file system has the same inode, size and times for both, to the nanosecond; that is
seen without reading it. Whether another one is equal, its SHA-256 tells.
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

__all__ = ["FileFacts", "FolderName", "digests_of", "listing"]

_TRAINER_S = ("optimizer*", "scheduler*", "rng_state*", "training_args*", "trainer_state*", "scaler*")
"""Names of what a trainer leaves beside weights, and no engine reads."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
"""Names of weights in other formats, which nobody reads where there are safetensors."""


@dataclass(frozen=True, slots=True)
class FolderName:
    """What a host asks the head for: never a path, which the head alone knows."""

    kind: str
    """`weights`, `adapter` or `model`: the model as it was given, before any weights."""
    name: str = ""
    """Of the adapter, or of the model (`rollout`, or an auxiliary one's)."""
    version: int = 0

    def __str__(self) -> str:
        if self.kind == "model":
            return f"the folder of model {self.name!r}"
        return f"version {self.version}" + (f" of adapter {self.name!r}" if self.kind == "adapter" else "")

    @property
    def label(self) -> str:
        """The beginning of the name of its folder on a host."""
        named = hashlib.sha256(self.name.encode()).hexdigest()[:12] + "-" if self.name else ""
        return f"{self.kind}-{named}{self.version}"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file, as its host sees it."""

    name: str
    size: int
    identity: tuple[int, int, int]
    """Its inode, and when its content and its inode changed, in nanoseconds."""


def listing(folder: Path) -> list[FileFacts]:
    """Return the files of a folder that an engine may read, by name. Raises OSError, also where there are none.

    Links are followed: the local cache of Hugging Face's hub consists of them.
    """
    names = sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    left_out = _TRAINER_S + (_OTHER_WEIGHTS if any(n.endswith(".safetensors") for n in names) else ())
    found = []
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in left_out):
            continue
        with (folder / name).open("rb") as file:  # opened: NFS asks its server then for what it knows of the file
            status = os.fstat(file.fileno())
        found.append(FileFacts(name, status.st_size, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)))
    if not found:
        raise FileNotFoundError(f"no files in {folder}")
    return found


async def digests_of(folder: Path, files: Sequence[FileFacts], room: Executor) -> list[str]:
    """Return the SHA-256 of each file, computed in threads of `room`. Raises OSError, also for one that is shorter."""
    loop = asyncio.get_running_loop()
    return list(await asyncio.gather(
        *(loop.run_in_executor(room, _digest, folder / file.name, file.size) for file in files)))


def _digest(path: Path, size: int) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if (read := file.tell()) != size:
            raise OSError(f"{path} has {read} bytes now, where it had {size}")
        return digest
