"""The processes that a vLLM engine starts: which they are, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import psutil

__all__ = ["children", "end_processes", "engine_processes", "silence", "silent", "with_descendants"]

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


def children() -> list[psutil.Process]:
    """Return the processes that this one started."""
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
