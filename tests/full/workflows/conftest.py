"""Processes that play the workflows of this folder's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from trinity_es.actors.rollout.workers.pool import WorkerPool


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    await pool.close()
