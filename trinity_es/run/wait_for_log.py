"""A run waits while the log can't be written: a full disk is a pause in it, and no end.

Whoever asks the system is told at once, and a person may give up; a run has nothing better to do than to ask again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.retry import Backoff

__all__ = ["when_written"]

T = TypeVar("T")

WAIT_SECONDS = 0.5, 5.0
"""Pause before it is asked again: the first, and the longest."""
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
