"""A run waits while the log can't be written: a full disk is a pause in it, and no end.

Whoever asks the system is told at once, and a person may give up; a run has nothing better to do than to ask again.
What it waits for is logged, for a request that was taken before is answered when the log is written again.
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

WAIT_SECONDS = 0.5, 5.0
"""Pause before it is asked again: the first, and the longest."""
LOOK_SECONDS = 3.0
"""Interval between two questions to the system whether something can't be written."""
_LOG = logging.getLogger("trinity_es.run")


async def when_written(ask: Callable[[], Awaitable[T]]) -> T:
    """`await ask()`, again and again while it raises LogUnavailable, which is logged once."""
    pauses, told = Backoff(*WAIT_SECONDS), ""
    while True:
        try:
            answer = await ask()
        except LogUnavailable as e:
            if not told:
                _LOG.warning("the run waits: %s", e)
            told = str(e)
            await asyncio.sleep(pauses.next(random.random()))
        else:
            if told:
                _LOG.warning("the run goes on")
            return answer


async def tell_trouble(status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Log what can't be written, as a system's `status` tells it: once, and when it is over. Never ends by itself."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            found = await status()
        except (TrinityError, TimeoutError):
            continue  # it is started again, or is gone: who asked it for something is told
        unstored = [f"{r['runner']} can't store what it finished: {r['trouble']}"
                    for r in found["runners"] if r["trouble"]]
        trouble = found.get("trouble") or "".join(unstored[:1])
        alike = re.sub(r"\d+", "", trouble)  # how much room is left may change
        if alike != said:
            _LOG.warning("the run waits: %s" if trouble else "the run goes on%s", trouble)
        said = alike
