"""Whether an engine's process that lives still takes what it is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trinity_es.actors.engines.vllm_processes import silence


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_process_that_answers_nothing_is_told_after_a_while() -> None:
    asked: list[asyncio.Task[Any] | None] = []

    async def ask() -> Any:
        asked.append(asyncio.current_task())
        await (asyncio.sleep(0) if len(asked) < 3 else never())

    await asyncio.wait_for(silence(ask, lambda: False, interval=0.001, limit=0.005), 10)
    assert len(asked) == 3
    assert asked[-1].cancelling()


@pytest.mark.parametrize("error", [True, False])
async def test_one_that_answers_somehow_or_is_known_to_be_busy_is_not(error: bool) -> None:
    count = 0

    async def ask() -> Any:
        nonlocal count
        count += 1
        if error:
            raise RuntimeError("it ended")
        await asyncio.sleep(0.004)

    watching = asyncio.create_task(silence(ask, lambda: False, interval=0.002, limit=0.1))
    loading = asyncio.create_task(silence(never, lambda: True, interval=0.001, limit=0.001))
    while count < 20:
        await asyncio.sleep(0.001)
    assert not watching.done()
    assert not loading.done()
    for task in (watching, loading):
        task.cancel()
