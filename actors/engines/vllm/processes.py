"""Processes of a vLLM engine: finding them, reading their output, noticing that they hang, ending them."""

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
    "ProcessOutput", "blames_other_process", "engine_processes", "last_error_in", "silenced_logger",
    "wait_for_silence", "wait_or_kill", "with_descendants",
]

_STOP_GRACE_SECONDS = 5.0
"""How long a process may take to end by itself, and again after it was killed."""
CHECK_SECONDS = 10.0
SILENT_SECONDS = 600.0
"""How long a call to a process may stay unanswered: much longer than one step takes on a slow CPU."""
_log = logging.getLogger(__name__)


async def wait_for_silence(
    ask: Callable[[], Coroutine[Any, Any, Any]], is_busy: Callable[[], bool], *, interval: float = CHECK_SECONDS,
    limit: float = SILENT_SECONDS,
) -> None:
    """Return once a vLLM process has not answered the call `ask` for `limit` seconds.

    `ask` takes the same way as requests, and the process answers it between two steps. The time while `is_busy()` does
    not count. Checks are counted instead of seconds, so a suspended machine raises no false alarm.
    """
    while True:
        question, check_count = asyncio.ensure_future(ask()), 0
        while not question.done():
            if check_count * interval >= limit:
                question.cancel()
                return
            await asyncio.wait({question}, timeout=interval)
            check_count = 0 if is_busy() else check_count + 1
        if not question.cancelled():
            question.exception()  # retrieved and ignored: the end of the process is noticed elsewhere
        await asyncio.sleep(interval)


class ProcessOutput:
    """Output of this process and its children since this object was made, if stderr is a file: vLLM's errors."""

    def __init__(self) -> None:
        self._path = ""
        with contextlib.suppress(OSError):
            status = os.fstat(2)
            if stat.S_ISREG(status.st_mode):
                self._path, self._begin = os.readlink("/proc/self/fd/2"), status.st_size

    def text(self) -> str:
        """Return the output, at most its last _TAIL_BYTES; empty if stderr is no file."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(max(self._begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


_TAIL_BYTES = 65536
_PREFIX = re.compile(r"\((\w+) pid=(\d+)\)\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\]\s?)?")
"""vLLM's prefix of a line: name and pid of the process; level, time and source of the log record."""
_RAISED = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)?: \S|Fatal Python error: ")
_POINTER = re.compile(r"[Ss]ee (?:root cause|stack trace)")
"""Pattern of errors that only say that another process failed."""


def blames_other_process(error: BaseException) -> bool:
    """Return True if an error only says that another process failed; that process's output has the cause."""
    return bool(_POINTER.search(str(error)))


def last_error_in(printed: str, pids: Collection[int] = ()) -> str:
    """Return the last error line in the output of vLLM's processes, or of those in `pids`; empty if there is none."""
    error = ""
    for line in printed.splitlines():
        prefix = _PREFIX.match(line)
        text = line[prefix.end():] if prefix else line
        is_ours = not pids or (prefix is not None and int(prefix[2]) in pids)
        if is_ours and _RAISED.match(text) and not _POINTER.search(text):
            error = text.strip()[:300]
    return error


def engine_processes(llm: Any, before: set[int]) -> list[psutil.Process]:
    """Return the processes that vLLM lists as its own, or else this process's children that are not in `before`."""
    try:
        pids = {p.pid for p in llm.engine_core.resources.engine_manager.processes}
    except AttributeError:
        children = psutil.Process().children()
        pids = {p.pid for p in children if p.pid not in before and not _is_resource_tracker(p)}
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return True for Python's helper process of multiprocessing, which ends with this process."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are alive, and all their descendants."""
    process_by_pid = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                for p in [process, *process.children(recursive=True)]:
                    process_by_pid[p.pid] = p
    return list(process_by_pid.values())


@contextlib.contextmanager
def silenced_logger(name: str) -> Iterator[None]:
    """Silence a logger within this context, since vLLM logs a traceback for an orderly end."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def wait_or_kill(processes: list[psutil.Process]) -> None:
    """Wait until the processes have ended, and kill those that do not end within _STOP_GRACE_SECONDS."""
    _, alive = psutil.wait_procs(processes, timeout=_STOP_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=_STOP_GRACE_SECONDS)
    if alive:
        _log.error("processes %s of the engine can't be ended", [p.pid for p in alive])
