"""The runner's journal: one write for all that waits, segments that are freed, and a store that can't be written."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from trinity_es.actors.config.run_sections import ProgressConfig
from trinity_es.actors.runner import journal_writer as module
from trinity_es.actors.runner.journal_writer import Journal
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.journal_store import Life

pytestmark = pytest.mark.timeout(60)
ONE, TWO = (1, "s", 0, 0), (1, "s", 1, 0)


class Memory:
    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self.segments: dict[int, bytes] = {}
        self.writes: list[tuple[int, bool]] = []
        self.full = False

    def append(self, life: Life, segment: int, data: bytes, *, durable: bool) -> None:
        assert life == ("runner-0", 3)
        if self.full and data:  # a file of a full disk can be synced
            raise LogUnavailable("no space left on device")
        self.writes.append((len(data), durable))
        if data:
            self.segments[segment] = self.segments.get(segment, b"") + data

    def drop(self, life: Life, segment: int | None = None) -> None:
        if segment is not None:
            del self.segments[segment]


@asynccontextmanager
async def opened(store: Memory, **settings: Any) -> AsyncIterator[Journal]:
    """Run a journal on this store for this block; its last write is a full stop."""
    journal = Journal(lambda: store, ("runner-0", 3), ProgressConfig(**{"seconds": 3600, **settings}),
                      logging.getLogger("j"))
    running = asyncio.ensure_future(journal.run())
    try:
        yield journal
        await journal.write([b"."])  # after what was left to the thread
    finally:
        running.cancel()


async def test_what_waits_is_one_write() -> None:
    async with opened(store := Memory()) as journal:
        await asyncio.gather(*(journal.write([b"abc"]) for _ in range(50)))
    assert store.segments == {0: b"abc" * 50 + b"."}
    assert len(store.writes) < 5


async def test_a_quick_store_is_written_on_the_loop_and_synced_by_the_thread() -> None:
    threads, store = [], Memory(quick=True)
    append = store.append

    def watched(life: Life, segment: int, data: bytes, *, durable: bool) -> None:
        threads.append((threading.current_thread() is threading.main_thread(), durable, len(data)))
        append(life, segment, data, durable=durable)

    async with opened(store) as journal:
        store.append = watched  # type: ignore[method-assign]
        await asyncio.sleep(0.05)  # until it is open
        with pytest.raises(StopIteration):  # it does not wait
            journal.write([b"end"]).send(None)
        await journal.write([b"step"], durable=True)
        with pytest.raises(StopIteration):
            journal.write([b"end"]).send(None)
        assert store.segments == {0: b"endstepend"}
    assert threads[:4] == [(True, False, 3), (True, False, 4), (False, True, 0), (True, False, 3)]


@pytest.mark.parametrize("quick", [False, True])
async def test_ends_of_calls_reach_the_disk_at_the_next_interval(quick: bool) -> None:
    async with opened(store := Memory(quick), seconds=0.05) as journal:
        await journal.write([b"end"])
        assert store.writes == [(3, False)]
        while len(store.writes) == 1:
            await asyncio.sleep(0.01)
        assert store.writes[1] == (0, True)


async def test_a_sync_that_fails_is_repeated_at_the_next_interval() -> None:
    store, failures = Memory(quick=True), [OSError("the disk does not answer")]
    append = store.append

    def failing(*args: Any, durable: bool) -> None:
        if durable and failures:
            raise failures.pop()
        append(*args, durable=durable)

    store.append = failing  # type: ignore[method-assign]
    async with opened(store, seconds=0.05) as journal:
        await asyncio.sleep(0.02)  # until it is open
        await journal.write([b"end"])
        while len(store.writes) == 1:
            await asyncio.sleep(0.01)
        assert (failures, store.writes) == ([], [(3, False), (0, True)])


async def test_an_idle_journal_records_the_tokens_of_the_next_unit_within_an_interval() -> None:
    async with opened(store := Memory(), seconds=0.05) as journal:
        await asyncio.sleep(0.2)  # idle for longer than an interval
        journal.begin(ONE)
        journal.open.add(Mock(progress=lambda: [b"token "]))
        async with asyncio.timeout(10):
            while store.segments.get(0, b"").count(b"token ") < 2:
                await asyncio.sleep(0.01)


async def test_a_segment_is_freed_with_its_last_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10)
    async with opened(store := Memory()) as journal:
        journal.begin(ONE)
        await journal.write([b"a" * 10])
        journal.begin(TWO)
        await journal.write([b"b" * 10])
        await journal.write([b"c"])
        assert [*store.segments] == [0, 1, 2]
        journal.release(ONE)
        await journal.write([b"d"])
        assert [*store.segments] == [1, 2]
        journal.release(TWO)
    assert [*store.segments.values()] == [b"."]


async def test_a_full_journal_loses_its_oldest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10)
    async with opened(store := Memory(), max_bytes=30) as journal:
        journal.begin(ONE)
        for _ in range(6):
            await journal.write([b"a" * 10])
    assert sum(map(len, store.segments.values())) <= 31
    assert "explorer.progress.max_bytes" in caplog.text


@pytest.mark.parametrize("quick", [False, True])
async def test_work_goes_on_with_a_full_store_and_the_log_says_so(
    quick: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store := Memory(quick)) as journal:
        journal.begin(ONE)
        await journal.write([b"before"])
        store.full = True
        await journal.write([b"lost"], durable=True)
        await journal.write([b"lost"])
        store.full = False
        await journal.write([b"after"])
    assert [*store.segments.values()] == [b"before", b"after."], "what follows a torn tail is read too"
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    assert "no space left" in caplog.text


async def test_a_store_that_hangs_holds_no_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    answers, store = threading.Event(), Memory()
    append = store.append

    def hanging(*args: Any, **more: Any) -> None:
        assert answers.wait(30)
        append(*args, **more)

    store.append = hanging  # type: ignore[method-assign]
    async with opened(store) as journal:
        await journal.write([b"one"])
        await journal.write([b"two"])
        assert store.segments == {}
        monkeypatch.undo()  # the last write may take longer
        answers.set()
    assert [*store.segments.values()] == [b"onetwo."]
