"""The host's end of a pull: copies a folder of the head to this host, or says why it can't.

If the head's path exists on this host too, on a shared disk or with equal files, the folder is used as it is.
Otherwise its files are pulled into a folder of this host, which is renamed once it is complete. Bytes that arrived
before a connection broke stay, and the pull continues after them. Each file's SHA-256 is compared with the head's; a
file that differs is pulled once more.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from aiohttp import ClientSession

from trinity_es.actors.hosts.folder_files import FileFacts, FolderName, digests_of, listing
from trinity_es.actors.hosts.head_client import READ_BYTES, HeadDialer, NotOurs, Refused, require_taken
from trinity_es.events.errors import SyncError, WrongKey
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.database.retry import Backoff

__all__ = ["FolderPuller", "pulled_dir"]

P = ParamSpec("P")
T = TypeVar("T")

SHARED_MEMORY = "/dev/shm"
SPARE_BYTES = 64 * 2**20
"""Bytes of disk that stay free for other programs."""
PAUSE_SECONDS = 0.2, 5.0
"""Shortest and longest pause between two attempts."""
TELL_SECONDS = 0.5
"""Interval between two progress messages of a pull."""
THREADS = 4


def pulled_dir(chosen: str, url: str, log_dir: str) -> Path:
    """Return the folder in which a host keeps pulled files: below `chosen`, by default in shared memory.

    Each store, machine and host on it has its own, because `chosen` may be on a shared file system.
    """
    owner = hashlib.sha256(f"{socket.gethostname()} {os.getuid()} {url} {log_dir}".encode()).hexdigest()[:16]
    return Path(chosen or SHARED_MEMORY) / f"trinity_es-host-{owner}"


@dataclass(slots=True)
class _Pull:

    name: FolderName
    own: Path | None
    tell: Callable[[str], None]
    moved: float
    """Time of the last progress, in monotonic seconds: bytes came, or digests for the first time."""
    compared: bool = False
    has_differed: bool = False
    """A file arrived with other bytes once."""
    reported: float = float("-inf")
    """Time of the last progress message, in monotonic seconds."""

    def report(self, progress: str) -> None:
        """Pass on the progress if the last message is old."""
        now = time.monotonic()
        if now - self.reported >= TELL_SECONDS:
            self.reported = now
            self.tell(f"{self.name}, which it pulls from the head: {progress}")


class FolderPuller:
    """Puller of folders, for one event loop."""

    def __init__(self, folder: Path, dialer: HeadDialer) -> None:
        """Make a puller whose pulls fail if nothing arrives for the dialer's `timeout`."""
        self._folder, self._dialer = folder, dialer
        self._room = ThreadPoolExecutor(THREADS, thread_name_prefix="pull")
        self._equal: dict[Path, str] = {}
        """Digest of each local file that was compared with the head's."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._had: dict[FolderName, Path] = {}

    async def pull(self, name: FolderName, own: Path | None, tell: Callable[[str], None]) -> Path:
        """Return where the head's folder is on this host.

        `own` is a path where it may be already. `tell` gets the progress and any trouble. Raises SyncError, with the
        detail `refused` if the head refuses the folder.
        """
        async with self._turns[name.label]:  # a cancelled pull may still be ending
            return await self._pull(_Pull(name, own, tell, time.monotonic()))

    async def _pull(self, pull: _Pull) -> Path:
        name, pauses = pull.name, Backoff(*PAUSE_SECONDS)
        while True:
            before = pull.moved
            try:
                async with self._dialer.session() as session:
                    return await self._once(pull, session)
            except Refused as e:
                raise SyncError(f"{name} can't be pulled from the head: {e.args[0]}", refused=True) from e
            except (SyncError, WrongKey):
                raise
            except Exception as e:  # also of `find`: a database that does not answer
                why = str(e) or "the head did not answer in time"
            if time.monotonic() - pull.moved > self._dialer.timeout:
                raise SyncError(f"{name} can't be pulled from the head: {why}; what came so far is kept")
            if pull.moved > before:
                pauses.reset()
            pull.tell(f"{name}, which can't be pulled from the head now: {why}")
            await asyncio.sleep(pauses.next(0.5))

    async def forget_but(self, labels: Collection[str]) -> None:
        """Remove all weights and adapters here except those with these labels. Leaves other folders alone."""
        await self._in_thread(self._forget_but, labels)

    def _forget_but(self, labels: Collection[str]) -> None:
        for folder in [*self._folder.glob("*-*"), *self._folder.glob(".*-*.part")]:
            label = folder.name.removeprefix(".").rpartition("-")[0]
            if label.startswith(("weights-", "adapter-")) and label not in labels:
                shutil.rmtree(folder, ignore_errors=True)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work` in a thread. A cancelled call still waits for it: it may use the caller's file.
        """
        future = asyncio.ensure_future(asyncio.wrap_future(self._room.submit(work, *args, **kwargs)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    # --- one try ----------------------------------------------------------------------------------------------------
    async def _once(self, pull: _Pull, session: ClientSession) -> Path:
        async with session.post("/folders", json={"fetch": asdict(pull.name), "build": VERSION}) as answer:
            reply = require_taken(await answer.json())
        own = await self._in_thread(_listed, pull.own)
        if "unreadable" in reply:
            if own and pull.own is not None:  # hosts may share a file system that the head lacks
                return pull.own
            if (had := self._had.get(pull.name)) is not None and had.is_dir():
                return had
            raise SyncError(
                f"the head does not find {pull.name} where it was published: {reply['unreadable']}. Publish it on the "
                "head's host, or on a file system that the head reads", refused=True,
            )
        files = [_file(*facts) for facts in reply["files"]]
        if own == files and pull.own is not None:
            return pull.own
        digests = await self._digests(pull, session, reply["id"])
        if not pull.compared:
            pull.compared, pull.moved = True, time.monotonic()
        if pull.own is not None and [(f.name, f.size) for f in own] == [(f.name, f.size) for f in files]:
            try:
                if await digests_of(pull.own, files, self._room) == digests:
                    return pull.own
            except OSError:
                pass  # it can't be read, so it is pulled
        id = hashlib.sha256(repr([(f.name, f.size, d) for f, d in zip(files, digests, strict=True)]).encode())
        whole = self._folder / f"{pull.name.label}-{id.hexdigest()[:12]}"
        try:
            await self._fill(pull, session, f"/folders/{reply['id']}", dict(zip(files, digests, strict=True)), whole)
        except _Local as e:
            raise SyncError(f"{pull.name} can't be pulled into {self._folder}: {e.args[0]}") from e
        self._had[pull.name] = whole
        return whole

    async def _digests(self, pull: _Pull, session: ClientSession, id: str) -> list[str]:
        pull.report("its files are compared")
        while True:
            async with session.get(f"/folders/{id}/digests") as answer:
                reply = await answer.json()
            if "unreadable" in reply:
                raise SyncError(
                    f"{pull.name} can't be pulled from the head, which can't read it: {reply['unreadable']}")
            if "digests" in reply:
                digests: list[str] = reply["digests"]
                return digests
            pull.report("the head hashes its files")

    async def _fill(
        self, pull: _Pull, session: ClientSession, url: str, files: dict[FileFacts, str], whole: Path
    ) -> None:
        """Bring all files into `whole`, each with its digest. Raises _Local if this host can't write one."""
        beside = whole.with_name(f".{whole.name}.part")
        await self._in_thread(_make_own, self._folder)
        if whole.is_dir() and not await self._in_thread(self._lacks, whole, files):
            return
        await self._in_thread(_prepared, whole, beside)
        with _alone(beside):
            lacks = await self._in_thread(self._lacks, beside, files)
            need, size = sum(file.size - has for _, file, has, _ in lacks), sum(file.size for file in files)
            if lacks and need + SPARE_BYTES > (free := shutil.disk_usage(self._folder).free):
                raise _Local(f"it takes {_shown(need)}, and {_shown(free)} are free: enlarge it, or set "
                             "hosts.weights_dir of this host to another folder")
            for number, file, has, hashed in lacks:
                path = beside / file.name
                with _opened(path, has) as to:
                    if has < file.size:
                        async with session.get(f"{url}/{number}", headers={"Range": f"bytes={has}-"}) as answer:
                            async for part in answer.content.iter_chunked(READ_BYTES):
                                await self._in_thread(_take, to, hashed, part)
                                need, pull.moved = need - len(part), time.monotonic()
                                pull.report(f"{_shown(size - need)} of {_shown(size)}")
                if hashed.hexdigest() != files[file]:
                    path.unlink(missing_ok=True)
                    problem = f"{file.name} came with other bytes than the head's digest of it says"
                    if pull.has_differed:
                        raise SyncError(
                            f"{pull.name} can't be pulled from the head: {problem}, twice: is its disk sound?")
                    pull.has_differed = True
                    raise NotOurs(problem)
                self._equal[path] = files[file]
            await self._in_thread(_finished, beside, whole, {file.name for file in files})
        for file, digest in files.items():
            self._equal.pop(beside / file.name, None)
            self._equal[whole / file.name] = digest

    def _lacks(self, folder: Path, files: dict[FileFacts, str]) -> list[tuple[int, FileFacts, int, Any]]:
        """Return each incomplete file of this folder: its number, itself, the bytes that are here, and their hash."""
        lacks = []
        for number, (file, digest) in enumerate(files.items()):
            path, hashed = folder / file.name, hashlib.sha256()
            there = path.stat().st_size if path.is_file() else -1
            if there == file.size and self._equal.get(path) == digest:
                continue
            self._equal.pop(path, None)
            if 0 <= there <= file.size:
                with path.open("rb") as opened:
                    while part := opened.read(READ_BYTES):
                        hashed.update(part)
            if there == file.size and hashed.hexdigest() == digest:
                self._equal[path] = digest
            elif 0 < there < file.size:
                lacks.append((number, file, there, hashed))
            else:
                lacks.append((number, file, 0, hashlib.sha256()))
        return lacks


class _Local(Exception):
    """A problem of this host, as a sentence."""


@contextmanager
def _here() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _Local(str(e)) from e


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, which would truncate its files. Raises _Local if another has it."""
    with _here():
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise _Local("another process pulls it there now; this one tries again") from e
        except OSError:
            pass  # a file system without folder locks, such as NFS: the machine's name is in the path
        yield
    finally:
        os.close(descriptor)


def _file(name: str, size: int, identity: Sequence[int]) -> FileFacts:
    """Return a file that the head named. Raises NotOurs for a name that is not directly inside the folder."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise NotOurs(f"the head names a file {name!r}")
    inode, changed, moved = identity
    return FileFacts(name, size, (inode, changed, moved))


def _listed(own: Path | None) -> list[FileFacts]:
    try:
        return [] if own is None else listing(own)
    except OSError:
        return []


@_here()
def _make_own(folder: Path) -> None:
    """Make this folder for this user alone. Raises _Local if another user made it, since its name can be guessed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid():
        raise _Local("it belongs to another user, who could change what is in it")
    folder.chmod(0o700)


@_here()
def _prepared(whole: Path, beside: Path) -> None:
    """Make the folder for incoming files; an incomplete `whole` becomes it. Raises _Local."""
    if whole.is_dir():
        shutil.rmtree(beside, ignore_errors=True)
        whole.rename(beside)
    beside.mkdir(mode=0o700, exist_ok=True)


@_here()
def _opened(path: Path, has: int) -> FileIO:
    """Open a file to continue it after `has` bytes. Raises _Local."""
    file = path.open("r+b" if has else "wb", buffering=0)
    file.seek(has)
    file.truncate()
    return file


@_here()
def _take(file: FileIO, hashed: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left):]
    hashed.update(data)


@_here()
def _finished(beside: Path, whole: Path, names: Collection[str]) -> None:
    for path in beside.iterdir():
        if path.name not in names:
            path.unlink()
    beside.rename(whole)


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
