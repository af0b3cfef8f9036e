"""Waiting of a run while the log can't be written: a full disk pauses a run and does not end it.

Other callers get LogUnavailable at once. A run tries again, and logs the reason of its wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from trinity_es.events.errors import LogUnavailable, TrinityError
from trinity_es.events.store.database.retry import Backoff

__all__ = ["log_trouble", "when_written"]

T = TypeVar("T")

PAUSE_SECONDS = 0.5, 5.0
"""The first and the longest pause before another try."""
STATUS_SECONDS = 3.0
"""Interval between two status requests."""
_LOG = logging.getLogger("trinity_es.run")


async def when_written(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask` until it doesn't raise LogUnavailable, which is logged once, and return its answer."""
    pauses = Backoff(*PAUSE_SECONDS)
    has_waited = False
    while True:
        try:
            answer = await ask()
        except LogUnavailable as e:
            if not has_waited:
                _LOG.warning("the run waits: %s", e)
            has_waited = True
            await asyncio.sleep(pauses.next(random.random()))
        else:
            if has_waited:
                _LOG.warning("the run goes on")
            return answer


async def log_trouble(status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Log once, from the system's `status`, that something can't be written, and once when it can again. Never ends."""
    logged_text = ""
    while True:
        await asyncio.sleep(STATUS_SECONDS)
        try:
            answer = await status()
        except (TrinityError, TimeoutError):
            continue  # the system is being started again, or is gone, which the run's own requests report
        runner_troubles = [f"{r['runner']} can't store its finished runs: {r['trouble']}"
                           for r in answer["runners"] if r["trouble"]]
        trouble = answer.get("trouble") or "".join(runner_troubles[:1])
        text = re.sub(r"\d+", "", trouble)  # without numbers, since the free space in the text may change
        if text != logged_text:
            _LOG.warning("the run waits: %s" if trouble else "the run goes on%s", trouble)
        logged_text = text
