"""The processes that a vLLM engine starts: which they are, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any

import psutil

__all__ = [
    "Printed", "children", "end_processes", "engine_processes", "error_in", "points_elsewhere", "silence",
    "silent", "with_descendants",
]

_STOP_GRACE_SECONDS = 5.0
"""How long a process may take to end by itself, and then after it was killed."""
LOOK_SECONDS = 10.0
"""Interval between two looks at whether an engine's process still takes what it is asked."""
SILENT_SECONDS = 600.0
"""How long it may take nothing, between two steps: much longer than a slow CPU computes at one of them."""
_log = logging.getLogger(__name__)


async def silence(
    ask: Callable[[], Coroutine[Any, Any, Any]], busy: Callable[[], bool], *, interval: float = LOOK_SECONDS,
    limit: float = SILENT_SECONDS,
) -> None:
    """Return when an engine's process has left a small question unanswered for `limit` seconds, though it lives.

    `ask` puts one that goes the way of requests, and is answered between two steps; while `busy()`, no answer is
    expected. Looks are counted, not seconds: where the whole machine stood still, everybody has that time again.
    """
    while True:
        asked, looks = asyncio.ensure_future(ask()), 0
        while not asked.done():
            if looks * interval >= limit:
                asked.cancel()
                return
            await asyncio.wait({asked}, timeout=interval)
            looks = 0 if busy() else looks + 1
        if not asked.cancelled():
            asked.exception()  # the end of the process is noticed by others
        await asyncio.sleep(interval)


class Printed:
    """What this process and its children print from now on, where that goes to a file: vLLM's processes tell there, and
    nowhere else, why they ended.
    """

    def __init__(self) -> None:
        self._file = ""
        with contextlib.suppress(OSError):
            found = os.fstat(2)
            if stat.S_ISREG(found.st_mode):
                self._file, self._begin = os.readlink("/proc/self/fd/2"), found.st_size

    def text(self) -> str:
        """Return it, its last 64 KiB; empty where it can't be read."""
        with contextlib.suppress(OSError), open(self._file, "rb") as file:
            file.seek(max(self._begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


_TAIL_BYTES = 65536
_PREFIX = re.compile(r"\((\w+) pid=(\d+)\)\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\]\s?)?")
"""What vLLM puts before a line: its process, and what a logger says of it."""
_RAISED = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)?: \S|Fatal Python error: ")
_POINTER = re.compile(r"[Ss]ee (?:root cause|stack trace)")
"""What only says that another process failed."""


def points_elsewhere(error: BaseException) -> bool:
    """Return True for an error of vLLM's that only says that another process of it has failed."""
    return bool(_POINTER.search(str(error)))


def error_in(printed: str, pids: Collection[int] = ()) -> str:
    """Return the last error that vLLM's processes printed, in one line: those of `pids` where given. Empty: none."""
    found = ""
    for line in printed.splitlines():
        prefix = _PREFIX.match(line)
        said = line[prefix.end():] if prefix else line
        ours = not pids or (prefix is not None and int(prefix[2]) in pids)
        if ours and _RAISED.match(said) and not _POINTER.search(said):
            found = said.strip()[:300]
    return found


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=False)


def engine_processes(llm: Any, before: set[int]) -> list[psutil.Process]:
    """Return the processes that vLLM spawned: as it names them, else our children that are new since `before`."""
    try:
        pids = {p.pid for p in llm.engine_core.resources.engine_manager.processes}
    except AttributeError:
        pids = {p.pid for p in children() if p.pid not in before and not _is_resource_tracker(p)}
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return True for Python's own helper, one for all spawned children of this process: it ends with us."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those of these processes that live, and all that came of them."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                for p in [process, *process.children(recursive=True)]:
                    found[p.pid] = p
    return list(found.values())


@contextlib.contextmanager
def silent(logger: str) -> Iterator[None]:
    """Have a logger say nothing: vLLM logs a traceback for its own orderly end."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        found.setLevel(level)


def end_processes(processes: list[psutil.Process]) -> None:
    """Wait for the end of these processes; kill those that don't."""
    _, alive = psutil.wait_procs(processes, timeout=_STOP_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=_STOP_GRACE_SECONDS)
    if alive:
        _log.error("processes %s of the engine can't be ended", [p.pid for p in alive])
