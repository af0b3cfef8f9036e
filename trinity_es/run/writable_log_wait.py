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

__all__ = ["tell_trouble", "when_written"]

T = TypeVar("T")

PAUSE_SECONDS = 0.5, 5.0
"""The first and the longest pause before another try."""
STATUS_SECONDS = 3.0
"""Interval between two status requests."""
_LOG = logging.getLogger("trinity_es.run")


async def when_written(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of `ask`, called again while it raises LogUnavailable, which is logged once."""
    pauses, has_waited = Backoff(*PAUSE_SECONDS), False
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


async def tell_trouble(status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Log once, from the system's `status`, that something can't be written, and once when it can again. Never ends."""
    logged = ""
    while True:
        await asyncio.sleep(STATUS_SECONDS)
        try:
            answer = await status()
        except (TrinityError, TimeoutError):
            continue  # it is being started again, or is gone, which the run's own requests report
        unstored = [f"{r['runner']} can't store its finished runs: {r['trouble']}"
                    for r in answer["runners"] if r["trouble"]]
        trouble = answer.get("trouble") or "".join(unstored[:1])
        text = re.sub(r"\d+", "", trouble)  # the free space in it may change
        if text != logged:
            _LOG.warning("the run waits: %s" if trouble else "the run goes on%s", trouble)
        logged = text
