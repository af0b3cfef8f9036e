"""The host's side of a pull, which copies a folder of the head to this host.

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from aiohttp import ClientSession

from trinity_es.actors.hosts.folder_files import FileFacts, FolderName, hash_files, list_files
from trinity_es.actors.hosts.head_client import READ_BYTES, HeadDialer, NotOurs, Refused, raise_refusal
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
    """Return the folder in which a host keeps pulled files: below `chosen`, by default in shared memory. Each store,
    machine and host on it has its own, because `chosen` may be on a shared file system."""
    owner = hashlib.sha256(f"{socket.gethostname()} {os.getuid()} {url} {log_dir}".encode()).hexdigest()[:16]
    return Path(chosen or SHARED_MEMORY) / f"trinity_es-host-{owner}"


@dataclass(slots=True)
class _Pull:

    name: FolderName
    local: Path | None
    """Path where the folder may be on this host already."""
    tell: Callable[[str], None]
    """Called with progress and trouble, as a phrase."""
    progress_at: float
    """Time at which bytes, or the first digests, last arrived, in monotonic seconds."""
    has_digests: bool = False
    has_differed: bool = False
    """True if a pulled file did not match its digest once."""
    reported_at: float = float("-inf")
    """Time of the last progress message, in monotonic seconds."""

    def report(self, progress: str) -> None:
        """Pass the progress to `tell`, at most once in TELL_SECONDS."""
        now = time.monotonic()
        if now - self.reported_at >= TELL_SECONDS:
            self.reported_at = now
            self.tell(f"{self.name}, which it pulls from the head: {progress}")


class FolderPuller:
    """Client that pulls folders from the head, for one event loop."""

    def __init__(self, folder: Path, dialer: HeadDialer) -> None:
        """Make a puller whose pulls fail if no bytes arrive for the dialer's `timeout`. `folder` gets the files."""
        self._folder, self._dialer = folder, dialer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pull")
        self._digests_by_file: dict[Path, str] = {}
        """Digest of each local file that was found equal to the head's."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pulled_folders: dict[FolderName, Path] = {}

    async def pull(self, name: FolderName, local: Path | None, tell: Callable[[str], None]) -> Path:
        """Return the path on this host of the head's folder `name`. It is pulled first unless it is here already.

        `local` is a path where it may be already. `tell` is called with progress and trouble. Raises SyncError, with
        the detail `refused` if the head refuses the folder.
        """
        async with self._locks[name.label]:  # a cancelled pull may still be ending
            return await self._pull(_Pull(name, local, tell, time.monotonic()))

    async def _pull(self, pull: _Pull) -> Path:
        """Attempt a pull until it succeeds, the head refuses it, or no bytes arrive for the dialer's `timeout`."""
        name, pauses = pull.name, Backoff(*PAUSE_SECONDS)
        while True:
            last_progress_at = pull.progress_at
            try:
                async with self._dialer.session() as session:
                    return await self._attempt_pull(pull, session)
            except Refused as e:
                raise SyncError(f"{name} can't be pulled from the head: {e.args[0]}", refused=True) from e
            except (SyncError, WrongKey):
                raise
            except Exception as e:  # also of `find`: a database that does not answer
                why = str(e) or "the head did not answer in time"
            if time.monotonic() - pull.progress_at > self._dialer.timeout:
                raise SyncError(f"{name} can't be pulled from the head: {why}; the bytes that arrived are kept")
            if pull.progress_at > last_progress_at:
                pauses.reset()
            pull.tell(f"{name}, which can't be pulled from the head now: {why}")
            await asyncio.sleep(pauses.next(0.5))

    async def delete_all_but(self, labels: Collection[str]) -> None:
        """Delete all pulled weights and adapters except those with these labels. Leaves other folders alone."""
        await self._in_thread(self._delete_all_but, labels)

    def _delete_all_but(self, labels: Collection[str]) -> None:
        for folder in [*self._folder.glob("*-*"), *self._folder.glob(".*-*.part")]:
            label = folder.name.removeprefix(".").rpartition("-")[0]
            if label.startswith(("weights-", "adapter-")) and label not in labels:
                shutil.rmtree(folder, ignore_errors=True)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread. If this call is cancelled, it still waits, since `work` may use the caller's file."""
        future = asyncio.ensure_future(asyncio.wrap_future(self._threads.submit(work, *args, **kwargs)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    # --- one attempt ------------------------------------------------------------------------------------------------
    async def _attempt_pull(self, pull: _Pull, session: ClientSession) -> Path:
        """Return the local folder if it equals the head's, otherwise pull the files that it lacks. Raises SyncError."""
        async with session.post("/folders", json={"fetch": asdict(pull.name), "build": VERSION}) as answer:
            reply = raise_refusal(await answer.json())
        local_files = await self._in_thread(_listing_or_empty, pull.local)
        if "unreadable" in reply:
            if local_files and pull.local is not None:  # hosts may share a file system that the head lacks
                return pull.local
            pulled_folder = self._pulled_folders.get(pull.name)
            if pulled_folder is not None and pulled_folder.is_dir():
                return pulled_folder
            raise SyncError(
                f"the head does not find {pull.name} where it was published: {reply['unreadable']}. Publish it on the "
                "head's host, or on a file system that the head reads", refused=True,
            )
        files = [_parse_file(*facts) for facts in reply["files"]]
        if local_files == files and pull.local is not None:
            return pull.local
        digests = await self._head_digests(pull, session, reply["id"])
        if not pull.has_digests:
            pull.has_digests, pull.progress_at = True, time.monotonic()
        if pull.local is not None and [(f.name, f.size) for f in local_files] == [(f.name, f.size) for f in files]:
            with suppress(OSError):  # a folder that can't be read is pulled
                if await hash_files(pull.local, files, self._threads) == digests:
                    return pull.local
        id = hashlib.sha256(repr([(f.name, f.size, d) for f, d in zip(files, digests, strict=True)]).encode())
        target = self._folder / f"{pull.name.label}-{id.hexdigest()[:12]}"
        try:
            digest_by_file = dict(zip(files, digests, strict=True))
            await self._fill_folder(pull, session, f"/folders/{reply['id']}", digest_by_file, target)
        except _LocalProblem as e:
            raise SyncError(f"{pull.name} can't be pulled into {self._folder}: {e.args[0]}") from e
        self._pulled_folders[pull.name] = target
        return target

    async def _head_digests(self, pull: _Pull, session: ClientSession, id: str) -> list[str]:
        """Return the SHA-256 of each file of the head's folder; wait while the head computes them. Raises SyncError."""
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

    async def _fill_folder(
        self, pull: _Pull, session: ClientSession, url: str, files: dict[FileFacts, str], target: Path
    ) -> None:
        """Pull files from `url` into the folder `target` and compare their digests. `files` has the digest of each.
        Raises _LocalProblem, SyncError, NotOurs."""
        partial = target.with_name(f".{target.name}.part")
        await self._in_thread(_make_private, self._folder)
        if target.is_dir() and not await self._in_thread(self._incomplete_files, target, files):
            return
        await self._in_thread(_prepare_partial, target, partial)
        with _lock_folder(partial):
            incomplete = await self._in_thread(self._incomplete_files, partial, files)
            missing_bytes = sum(file.size - start for _, file, start, _ in incomplete)
            total_bytes = sum(file.size for file in files)
            if incomplete and missing_bytes + SPARE_BYTES > (free := shutil.disk_usage(self._folder).free):
                raise _LocalProblem(
                    f"the files take {_size_text(missing_bytes)}, but {self._folder} has {_size_text(free)} free: free "
                    "space, or set hosts.weights_dir of this host to another folder")
            for number, file, start, hasher in incomplete:
                path = partial / file.name
                with _open_at(path, start) as output:
                    if start < file.size:
                        async with session.get(f"{url}/{number}", headers={"Range": f"bytes={start}-"}) as answer:
                            async for data in answer.content.iter_chunked(READ_BYTES):
                                await self._in_thread(_write_all, output, hasher, data)
                                missing_bytes, pull.progress_at = missing_bytes - len(data), time.monotonic()
                                pull.report(f"{_size_text(total_bytes - missing_bytes)} of {_size_text(total_bytes)}")
                if hasher.hexdigest() != files[file]:
                    path.unlink(missing_ok=True)
                    problem = f"{file.name} does not match the SHA-256 digest that the head sent"
                    if pull.has_differed:
                        raise SyncError(
                            f"{pull.name} can't be pulled from the head: {problem}, twice: check its disk")
                    pull.has_differed = True
                    raise NotOurs(problem)
                self._digests_by_file[path] = files[file]
            await self._in_thread(_finish_folder, partial, target, {file.name for file in files})
        for file, digest in files.items():
            self._digests_by_file.pop(partial / file.name, None)
            self._digests_by_file[target / file.name] = digest

    def _incomplete_files(self, folder: Path, files: dict[FileFacts, str]) -> list[tuple[int, FileFacts, int, Any]]:
        """Return the files that are incomplete in `folder`, each as (number, file, bytes here, hash of these bytes)."""
        incomplete = []
        for number, (file, digest) in enumerate(files.items()):
            path, hasher = folder / file.name, hashlib.sha256()
            local_size = path.stat().st_size if path.is_file() else -1
            if local_size == file.size and self._digests_by_file.get(path) == digest:
                continue
            self._digests_by_file.pop(path, None)
            if 0 <= local_size <= file.size:
                with path.open("rb") as content:
                    while data := content.read(READ_BYTES):
                        hasher.update(data)
            if local_size == file.size and hasher.hexdigest() == digest:
                self._digests_by_file[path] = digest
            elif 0 < local_size < file.size:
                incomplete.append((number, file, local_size, hasher))
            else:
                incomplete.append((number, file, 0, hashlib.sha256()))
        return incomplete


class _LocalProblem(Exception):
    """A problem on this host's side of a pull, such as a full disk. Its argument is a sentence."""


@contextmanager
def _as_local_problem() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _LocalProblem(str(e)) from e


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other process truncates its files. Raises _LocalProblem if another one has the lock."""
    with _as_local_problem():
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise _LocalProblem("another process is pulling the same files there; this process tries again") from e
        except OSError:
            pass  # a file system without folder locks, such as NFS: the machine's name is in the path
        yield
    finally:
        os.close(descriptor)


def _parse_file(name: str, size: int, identity: Sequence[int]) -> FileFacts:
    """Return a file that the head listed. Raises NotOurs for a name that is no file name, such as `../x`."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise NotOurs(f"the head listed a file named {name!r}, which is not a plain file name")
    inode, content_changed_at, inode_changed_at = identity
    return FileFacts(name, size, (inode, content_changed_at, inode_changed_at))


def _listing_or_empty(folder: Path | None) -> list[FileFacts]:
    try:
        return [] if folder is None else list_files(folder)
    except OSError:
        return []


@_as_local_problem()
def _make_private(folder: Path) -> None:
    """Create a folder that only this user can read. Raises _LocalProblem if another user has created it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid():
        raise _LocalProblem("another user owns the folder and could change its files: change hosts.weights_dir")
    folder.chmod(0o700)


@_as_local_problem()
def _prepare_partial(target: Path, partial: Path) -> None:
    """Create the folder `partial` for incoming files. If `target` exists, it is incomplete and is renamed to it."""
    if target.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        target.rename(partial)
    partial.mkdir(mode=0o700, exist_ok=True)


@_as_local_problem()
def _open_at(path: Path, start: int) -> FileIO:
    """Open a file, truncate it to `start` bytes, and return it for writing at its end. Raises _LocalProblem."""
    file = path.open("r+b" if start else "wb", buffering=0)
    file.seek(start)
    file.truncate()
    return file


@_as_local_problem()
def _write_all(file: FileIO, hasher: Any, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, and add it to the hash. Raises _LocalProblem."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[file.write(unwritten):]
    hasher.update(data)


@_as_local_problem()
def _finish_folder(partial: Path, target: Path, names: Collection[str]) -> None:
    """Delete all files but those in `names` from `partial`, and rename it to `target`. Raises _LocalProblem."""
    for path in partial.iterdir():
        if path.name not in names:
            path.unlink()
    partial.rename(target)


def _size_text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
