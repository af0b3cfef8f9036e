"""Retries of a run while the log can't be written, so that a full disk pauses the run and does not end it.

Other clients get LogUnavailable at once.
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

__all__ = ["log_trouble", "retry_until_written"]

T = TypeVar("T")

PAUSE_SECONDS = 0.5, 5.0
"""The first and the longest pause before another try."""
STATUS_SECONDS = 3.0
_LOG = logging.getLogger("trinity_es.run")


async def retry_until_written(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat `ask` as long as it raises LogUnavailable, and return its answer. The first such error is logged."""
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
    """Poll the system's `status` forever; log when it begins to have trouble writing, and when that is over."""
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
