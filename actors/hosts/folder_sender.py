"""The head's side of a pull, which sends the files of a folder to hosts over HTTP.

    POST /folders               name of the folder -> an id, and names, sizes and identities of its files
    GET /folders/ID/digests     -> one SHA-256 a file; {} while they are computed, and the host asks again
    GET /folders/ID/NUMBER      -> the bytes of a file, from the start that the header Range names

Digests are computed once for all hosts. A folder whose file changed has another id.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

from aiohttp import web

from trinity_es.actors.hosts.folder_files import FileFacts, hash_files, list_files

__all__ = ["FolderSender"]

READ_BYTES = 2**20
"""Bytes of a file that are read at once."""
WAIT_SECONDS = 2.0
"""Time limit for computing digests, after which the host gets an empty answer."""
REMEMBERED = 64
"""Maximum number of folders whose ids are kept."""
THREADS = 4


class FolderSender:
    """Request handlers that send folders to hosts, for one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="folders")
        self._folders: OrderedDict[str, tuple[Path, Sequence[FileFacts]]] = OrderedDict()
        """Id -> folder and its files, the most recently requested last."""
        self._digest_tasks: dict[str, asyncio.Task[list[str]]] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes from which hosts fetch a folder, by the id in its `listing_response`."""
        digests = web.get("/folders/{id}/digests", self._send_digests)
        return [digests, web.get(r"/folders/{id}/{number:\d+}", self._send_file)]

    async def listing_response(self, folder: Path) -> web.Response:
        """Return a response with a folder's id and its files, or with the reason why it can't be read."""
        try:
            files = await asyncio.get_running_loop().run_in_executor(self._threads, list_files, folder)
        except OSError as e:
            return web.json_response({"unreadable": e.strerror or str(e)})
        id = hashlib.sha256(repr((folder, files)).encode()).hexdigest()[:32]
        self._folders[id] = folder, files
        self._folders.move_to_end(id)
        if len(self._folders) > REMEMBERED:
            oldest_id, _ = self._folders.popitem(last=False)
            self._digest_tasks.pop(oldest_id, None)
        return web.json_response({"id": id, "files": [astuple(file) for file in files]})

    def _folder_and_files(self, request: web.Request) -> tuple[Path, Sequence[FileFacts]]:
        """Return the folder whose id is in the path of a request, and its files. Raises HTTPNotFound."""
        try:
            return self._folders[request.match_info["id"]]
        except KeyError as e:  # an id of an earlier head, or an old one: the host asks for the folder again
            raise web.HTTPNotFound from e

    async def _send_digests(self, request: web.Request) -> web.Response:
        id, (folder, files) = request.match_info["id"], self._folder_and_files(request)
        task = self._digest_tasks.get(id)
        if task is None:
            task = self._digest_tasks[id] = asyncio.ensure_future(hash_files(folder, files, self._threads))
        await asyncio.wait({task}, timeout=WAIT_SECONDS)
        if not task.done():
            return web.json_response({})
        try:
            return web.json_response({"digests": task.result()})
        except OSError as e:
            self._digest_tasks.pop(id, None)
            return web.json_response({"unreadable": str(e)})

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        folder, files = self._folder_and_files(request)
        number, start = int(request.match_info["number"]), request.http_range.start or 0
        if number >= len(files) or start > files[number].size:
            raise web.HTTPNotFound
        # not web.FileResponse: in TLS asyncio reads 16 KiB at a time for it, each in a thread
        response, loop = web.StreamResponse(status=206), asyncio.get_running_loop()
        response.content_length = remaining = files[number].size - start
        with (folder / files[number].name).open("rb") as file:
            file.seek(start)
            await response.prepare(request)
            while remaining:
                data = await loop.run_in_executor(self._threads, file.read, min(READ_BYTES, remaining))
                if not data:
                    break
                await response.write(data)
                remaining -= len(data)
        if remaining and request.transport is not None:
            request.transport.abort()  # the file was truncated meanwhile: the host asks again
        return response
