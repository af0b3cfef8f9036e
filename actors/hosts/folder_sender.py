"""The head's end of a pull: sends the files of a folder to a host, over a connection of their own.

    head -> host   ("files", names, sizes and identities)
    host -> head   ("digests", True): it has not the same files; or it ends the connection
    head -> host   ("wait", None) each second, then ("digests", one SHA-256 a file)
    host -> head   ("send", (number of the file, from which byte on) of each that it lacks)
    head -> host   their bytes, in frames

Files are read, hashed and sealed in threads; of each host one frame is in memory besides the one that is on its way.
A host that takes nothing for a while is hung up on; it comes again, for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from trinity_es.actors.hosts.folder_files import FileFacts, digests_of, listing
from trinity_es.actors.hosts.sealed_stream import NotOurs, SealedStream

__all__ = ["FRAME_BYTES", "SILENT_SECONDS", "FolderSender"]

FRAME_BYTES = 1024 * 1024
"""Maximum size of a frame of a file."""
SILENT_SECONDS = 30.0
"""How long a frame may take, and a host to say what it wants next where it hashes nothing meanwhile."""
WAIT_SECONDS = 1.0
"""Interval between two signs of life while files are hashed."""
ASK_SECONDS = 3600.0
"""How long a host may take to hash its own files before it asks for others."""
REMEMBERED = 64
"""Maximum number of folders whose digests are kept."""
THREADS = 4


class FolderSender:
    """See the module. For one event loop."""

    def __init__(self) -> None:
        self._room = ThreadPoolExecutor(THREADS, thread_name_prefix="folders")
        self._digests: OrderedDict[tuple[str, tuple[FileFacts, ...]], asyncio.Task[list[str]]] = OrderedDict()

    async def send(self, stream: SealedStream, folder: Path) -> None:
        """Send what a host wants of a folder. Raises OSError, EOFError, NotOurs, TimeoutError, ValueError."""
        try:
            try:
                files = await asyncio.get_running_loop().run_in_executor(self._room, listing, folder)
            except OSError as e:
                await stream.send([("unreadable", e.strerror or str(e))])
                return
            await stream.send([("files", files)])
            if await _asked(stream, "digests") is None:
                return
            found = self._digests_of(folder, files)
            while not (await asyncio.wait({found}, timeout=WAIT_SECONDS))[0]:
                await asyncio.wait_for(stream.send([("wait", None)]), SILENT_SECONDS)
            try:
                digests = found.result()
            except OSError as e:
                await stream.send([("unreadable", str(e))])
                return
            await stream.send([("digests", digests)])
            for number, start in _found(await _asked(stream, "send") or [], files):
                with (folder / files[number].name).open("rb") as file:
                    file.seek(start)
                    await self._send_rest(stream, file, files[number].size - start)
            with contextlib.suppress(EOFError, ConnectionResetError):  # it ends the connection when it has all
                await asyncio.wait_for(stream.receive(), SILENT_SECONDS)
        finally:
            stream.close()

    def _digests_of(self, folder: Path, files: Sequence[FileFacts]) -> asyncio.Task[list[str]]:
        """Return the digests of these files: once for all hosts, and again when one of them changed."""
        key = str(folder), tuple(files)
        known = self._digests.get(key)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = self._digests[key] = asyncio.ensure_future(digests_of(folder, files, self._room))
            while len(self._digests) > REMEMBERED:
                self._digests.popitem(last=False)
        return known

    async def _send_rest(self, stream: SealedStream, file: BinaryIO, size: int) -> None:
        """Send the next `size` bytes. While one frame is on its way, the next is read and sealed."""
        loop = asyncio.get_running_loop()

        def made(left: int) -> asyncio.Future[bytes]:
            return loop.run_in_executor(self._room, _frame, stream, file, min(FRAME_BYTES, left))

        coming = made(size) if size else None
        try:
            while coming is not None:
                frame = await asyncio.shield(coming)
                size -= min(FRAME_BYTES, size)
                coming = made(size) if size else None
                await asyncio.wait_for(stream.write(frame), SILENT_SECONDS)
        finally:
            if coming is not None:  # it reads from a file that would be closed
                await asyncio.wait({coming})
                coming.cancelled() or coming.exception()


def _frame(stream: SealedStream, file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise OSError(f"{file.name} was cut off while it was sent")
    return stream.seal(data)


def _found(asked: Any, files: Sequence[FileFacts]) -> list[tuple[int, int]]:
    """Return (number of a file, from which byte on) as a host asks for them. Raises NotOurs for what there is not."""
    try:
        found = [(int(number), int(start)) for number, start in asked]
        if all(0 <= number < len(files) and 0 <= start <= files[number].size for number, start in found):
            return found
    except (TypeError, ValueError):
        pass
    raise NotOurs(f"it asks for {str(asked)[:100]!r}, which there is not")


async def _asked(stream: SealedStream, what: str) -> Any:
    """Return what the host asks for, which is to be this; None: it wants no more, and ended the connection."""
    try:
        said = await asyncio.wait_for(stream.receive(), ASK_SECONDS)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    if len(said) != 1 or said[0][0] != what:
        raise NotOurs(f"it says {[name for name, _ in said]}, where {what!r} is expected")
    return said[0][1]
