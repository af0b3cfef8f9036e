"""The host's end of a pull: has a folder of the head's on this host, equal to the last byte, or says why not.

Where the path that the head names is there on this host too, with the same files or equal ones, it is used as it is.
Else the files are pulled into a folder of this host's own, where a version has its name when it is whole. What a
connection that broke has brought stays, and is gone on from. Every file's SHA-256 is compared with the head's; a file
that differs is pulled once more.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity_es.actors.hosts.folder_files import FileFacts, FolderName, digests_of, hash_rest, in_thread, listing
from trinity_es.actors.hosts.folder_sender import SILENT_SECONDS
from trinity_es.actors.hosts.head_dialer import HeadDialer
from trinity_es.actors.hosts.sealed_stream import NotOurs, Refused, SealedStream
from trinity_es.events.errors import SyncError, WrongKey
from trinity_es.events.store.database.retry import Backoff

__all__ = ["FolderPuller", "pulled_dir"]

SHARED_MEMORY = "/dev/shm"
SPARE_BYTES = 64 * 2**20
"""Bytes that are left free for others."""
PAUSE_SECONDS = 0.2, 5.0
"""Pause before the head is asked again: the first, and the longest."""
TELL_SECONDS = 0.5
"""Interval between two words on how far a pull is."""
THREADS = 4


def pulled_dir(chosen: str, url: str, log_dir: str) -> Path:
    """Return where a host keeps what it pulls: below `chosen`, by default in shared memory.

    One for each store, machine, and host on it: `chosen` may be on a file system that machines share.
    """
    told = hashlib.sha256(f"{socket.gethostname()} {os.getuid()} {url} {log_dir}".encode()).hexdigest()[:16]
    return Path(chosen or SHARED_MEMORY) / f"trinity_es-host-{told}"


@dataclass(slots=True)
class _Pull:
    """What one call of `pull` knows."""

    name: FolderName
    own: Path | None
    tell: Callable[[str], None]
    moved: float
    """When it got on last, monotonic seconds: bytes came, or digests for the first time."""
    compared: bool = False
    """Digests have come."""
    twice: bool = False
    """A file differed already."""
    told: float = float("-inf")
    """When `tell` was called last, monotonic seconds."""

    def does(self, what: str) -> None:
        """Tell what is done now, where the last word is old."""
        now = time.monotonic()
        if now - self.told >= TELL_SECONDS:
            self.told = now
            self.tell(f"{self.name}, which it pulls from the head: {what}")


class FolderPuller:
    """See the module. For one event loop."""

    def __init__(self, folder: Path, hello: Mapping[str, Any], dialer: HeadDialer) -> None:
        """For the dialer's `timeout` nothing may come until a pull has failed."""
        self._folder, self._hello, self._dialer = folder, hello, dialer
        self._room = ThreadPoolExecutor(THREADS, thread_name_prefix="pull")
        self._equal: dict[Path, str] = {}
        """Digest of each file here that was compared with the head's."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._had: dict[FolderName, Path] = {}
        """What was pulled."""

    async def pull(self, name: FolderName, own: Path | None, tell: Callable[[str], None]) -> Path:
        """Return where a folder of the head's is on this host. Raises SyncError, which says why it can't be had;
        `refused` in its details: the head does not give it.

        `own`: where it may be already. `tell` is told how far it is, and what keeps it.
        """
        async with self._turns[name.label]:  # one that was given up may have a last piece of work to end
            return await self._pull(_Pull(name, own, tell, time.monotonic()))

    async def _pull(self, pull: _Pull) -> Path:
        name, pauses = pull.name, Backoff(*PAUSE_SECONDS)
        while True:
            before = pull.moved
            try:
                return await self._once(pull)
            except Refused as e:
                raise SyncError(f"{name} can't be pulled from the head: {e.args[0]}", refused=True) from e
            except (NotOurs, OSError, EOFError, TimeoutError) as e:
                why = str(e) or "the head did not answer in time"
            except (SyncError, WrongKey):
                raise
            except Exception as e:  # of `find`: a database that does not answer
                why = str(e)
            if time.monotonic() - pull.moved > self._dialer.timeout:
                raise SyncError(f"{name} can't be pulled from the head: {why}; what came so far is kept")
            if pull.moved > before:
                pauses.reset()
            pull.tell(f"{name}, which can't be pulled from the head now: {why}")
            await asyncio.sleep(pauses.next(0.5))

    async def forget_but(self, labels: Collection[str]) -> None:
        """Remove the weights and adapters that are here, but those of these labels."""
        await asyncio.get_running_loop().run_in_executor(self._room, self._forget_but, labels)

    def _forget_but(self, labels: Collection[str]) -> None:
        for found in [*self._folder.glob("*-*"), *self._folder.glob(".*-*.part")]:
            label = found.name.removeprefix(".").rpartition("-")[0]
            if label.startswith(("weights-", "adapter-")) and label not in labels:
                shutil.rmtree(found, ignore_errors=True)

    # --- one connection ---------------------------------------------------------------------------------------------
    async def _once(self, pull: _Pull) -> Path:
        _, stream, _ = await self._dialer.connect({**self._hello, "fetch": asdict(pull.name)})
        try:
            return await self._talk(pull, stream)
        finally:
            stream.close()

    async def _talk(self, pull: _Pull, stream: SealedStream) -> Path:
        loop = asyncio.get_running_loop()
        what, value = await _heard(stream)
        own = await loop.run_in_executor(self._room, _listed, pull.own)
        if what == "unreadable":
            if own and pull.own is not None:  # as on a file system that hosts share, and the head has not
                return pull.own
            if (had := self._had.get(pull.name)) is not None and had.is_dir():
                return had
            raise SyncError(
                f"{pull.name} is not where it was published, for the head: {value}. Publish it on the head's host, or "
                "on a file system that the head reads", refused=True,
            )
        files: list[FileFacts] = _checked(value)
        if own == files and pull.own is not None:
            return pull.own
        pull.does("its files are compared")
        await stream.send([("digests", True)])
        while (said := await _heard(stream))[0] == "wait":
            pull.does("the head hashes its files")
        if said[0] == "unreadable":
            raise SyncError(f"{pull.name} can't be pulled from the head, which can't read it: {said[1]}")
        digests: list[str] = said[1]
        if not pull.compared:
            pull.compared, pull.moved = True, time.monotonic()
        if pull.own is not None and _alike(own, files):
            try:
                if await digests_of(pull.own, files, self._room) == digests:
                    return pull.own
            except OSError:
                pass  # it can't be read: it is pulled
        id = hashlib.sha256(repr([(f.name, f.size, d) for f, d in zip(files, digests, strict=True)]).encode())
        whole = self._folder / f"{pull.name.label}-{id.hexdigest()[:12]}"
        try:
            self._had[pull.name] = await self._fill(pull, stream, files, digests, whole)
            return whole
        except _Local as e:
            raise SyncError(f"{pull.name} can't be pulled into {self._folder}: {e.args[0]}") from e

    async def _fill(
        self, pull: _Pull, stream: SealedStream, files: Sequence[FileFacts], digests: Sequence[str], whole: Path
    ) -> Path:
        """Have all files in `whole`, and return it. Raises _Local for what this host can't write."""
        beside = whole.with_name(f".{whole.name}.part")
        await in_thread(self._room, _make_own, self._folder)
        lacks = await self._lacks(whole, files, digests)
        if not lacks and whole.is_dir():
            return whole
        await in_thread(self._room, _prepared, whole, beside)
        with _alone(beside):
            await self._fill_alone(pull, stream, files, digests, beside)
            await in_thread(self._room, _finished, beside, whole, {f.name for f in files})
        for path in [p for p in self._equal if p.parent == beside]:
            self._equal[whole / path.name] = self._equal.pop(path)
        return whole

    async def _fill_alone(
        self, pull: _Pull, stream: SealedStream, files: Sequence[FileFacts], digests: Sequence[str], beside: Path
    ) -> None:
        """Have all files in the folder where they gather. Raises as `_fill` does."""
        lacks = await self._lacks(beside, files, digests)
        need, size = sum(files[n].size - has for n, has, _ in lacks), sum(file.size for file in files)
        if lacks:
            free = shutil.disk_usage(self._folder).free
            if need + SPARE_BYTES > free:
                raise _Local(
                    f"it takes {_shown(need)}, and {_shown(free)} are free: enlarge it, or set hosts.weights_dir of "
                    "this host to another folder"
                )
            await stream.send([("send", [(number, has) for number, has, _ in lacks])])
        for number, has, hashed in lacks:
            path = beside / files[number].name
            with _opened(path, has) as file:
                left = files[number].size - has
                while left:
                    frame = await asyncio.wait_for(stream.read(), SILENT_SECONDS)
                    part = await in_thread(self._room, _taken, stream, frame, file, hashed, left)
                    left, need = left - part, need - part
                    pull.moved = time.monotonic()
                    pull.does(f"{_shown(size - need)} of {_shown(size)}")
            if hashed.hexdigest() != digests[number]:
                path.unlink(missing_ok=True)
                said = f"{files[number].name} came with other bytes than the head's digest of it says"
                if pull.twice:
                    raise SyncError(f"{pull.name} can't be pulled from the head: {said}, twice: is its disk sound?")
                pull.twice = True
                raise NotOurs(said)
            self._equal[path] = digests[number]

    async def _lacks(
        self, folder: Path, files: Sequence[FileFacts], digests: Sequence[str]
    ) -> list[tuple[int, int, Any]]:
        """Return (its number, how many bytes are here, their hash) of each file that is not whole in this folder."""
        lacks = []
        for number, (file, digest) in enumerate(zip(files, digests, strict=True)):
            has, hashed = await self._has(folder / file.name, file.size, digest)
            if self._equal.get(folder / file.name) != digest:
                lacks.append((number, has, hashed))
        return lacks

    async def _has(self, path: Path, size: int, digest: str) -> tuple[int, Any]:
        """Return how many bytes of a file are here, and their hash: none of one that is whole and differs."""
        hashed = hashlib.sha256()
        try:
            there = path.stat().st_size
        except OSError:
            there = -1
        if there == size and self._equal.get(path) == digest:
            return size, hashed
        self._equal.pop(path, None)
        if 0 < there <= size:
            with path.open("rb") as file:
                await hash_rest(file, there, hashed, self._room)
        if there == size and hashed.hexdigest() == digest:
            self._equal[path] = digest
            return size, hashed
        return (there, hashed) if 0 < there < size else (0, hashlib.sha256())


class _Local(Exception):
    """What is wrong on this host, in words."""


async def _heard(stream: SealedStream) -> tuple[str, Any]:
    said = await asyncio.wait_for(stream.receive(), SILENT_SECONDS)
    if len(said) != 1:
        raise NotOurs(f"it says {len(said)} things at once")
    return said[0]


def _checked(files: Sequence[FileFacts]) -> list[FileFacts]:
    """Return the files that the head names, each in the folder itself. Raises NotOurs."""
    for file in files:
        if Path(file.name).name != file.name or file.name in ("", ".", ".."):
            raise NotOurs(f"the head names a file {file.name!r}")
    return list(files)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder: each would cut off what the other wrote. Raises _Local where one is in."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise _Local(str(e)) from e
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise _Local("another process pulls it there now: it is looked for again") from e
        except OSError:
            pass  # a file system that locks no folders, as NFS: the machine's name is in the path
        yield
    finally:
        os.close(descriptor)


def _listed(own: Path | None) -> list[FileFacts]:
    try:
        return [] if own is None else listing(own)
    except OSError:
        return []


def _alike(own: Sequence[FileFacts], files: Sequence[FileFacts]) -> bool:
    return [(f.name, f.size) for f in own] == [(f.name, f.size) for f in files]


def _make_own(folder: Path) -> None:
    """Make this folder, for this user alone. Raises _Local where another has it: its name can be guessed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.geteuid():
            raise _Local("it belongs to another user, who could change what is in it")
        folder.chmod(0o700)
    except OSError as e:
        raise _Local(str(e)) from e


def _prepared(whole: Path, beside: Path) -> None:
    """Make the folder that files come into: of what has its name already, and is not whole any more. Raises _Local."""
    try:
        if whole.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
            whole.rename(beside)
        beside.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise _Local(str(e)) from e


def _opened(path: Path, has: int) -> Any:
    """Open a file to go on with it after `has` bytes."""
    try:
        file = path.open("r+b" if has else "wb", buffering=0)
        file.seek(has)
        file.truncate()
    except OSError as e:
        raise _Local(str(e)) from e
    return file


def _taken(stream: SealedStream, frame: tuple[bytes, bytes], file: Any, hashed: Any, most: int) -> int:
    """Write what is in a frame; returns how many bytes. Raises NotOurs, _Local."""
    data = stream.opened(frame)
    if not data or len(data) > most:
        raise NotOurs(f"a frame has {len(data)} bytes, where 1 to {most} are to come")
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left):]
    except OSError as e:
        raise _Local(str(e)) from e
    hashed.update(data)
    return len(data)


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def _finished(beside: Path, whole: Path, names: Collection[str]) -> None:
    try:
        for found in beside.iterdir():
            if found.name not in names:
                found.unlink()
        beside.rename(whole)
    except OSError as e:
        raise _Local(str(e)) from e
