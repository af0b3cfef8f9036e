"""The runner's journal: one write for all that waits, segments that are freed, and a store that can't be written."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from trinity_es.actors.config.run_sections import ProgressConfig
from trinity_es.actors.runner import journal_writer as module
from trinity_es.actors.runner.journal_writer import Journal
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.journal_store import Life

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

    def read(self, life: Life) -> list[bytes]:
        return [self.segments[s] for s in sorted(self.segments)]

    def drop(self, life: Life, segment: int | None = None) -> None:
        if segment is not None:
            del self.segments[segment]

    def lives(self) -> list[Life]:
        return []

    def close(self) -> None:
        pass


def play(test: Callable[[Journal, Memory], Coroutine[Any, Any, None]], quick: bool = False, **settings: Any) -> Memory:
    store = Memory(quick)

    async def run() -> None:
        settled = ProgressConfig(**{"seconds": 3600, **settings})
        journal = Journal(lambda: store, ("runner-0", 3), settled, logging.getLogger("j"))
        running = asyncio.ensure_future(journal.run())
        await asyncio.wait_for(test(journal, store), 30)
        await journal.write([b"."])  # after what was left to the thread
        running.cancel()

    asyncio.run(run())
    return store


def test_what_waits_is_one_write() -> None:
    async def test(journal: Journal, store: Memory) -> None:
        await asyncio.gather(*(journal.write([b"abc"]) for _ in range(50)))

    store = play(test)
    assert store.segments == {0: b"abc" * 50 + b"."}
    assert len(store.writes) < 5


def test_a_quick_store_is_written_on_the_loop_and_synced_by_the_thread() -> None:
    threads = []

    async def test(journal: Journal, store: Memory) -> None:
        append = store.append

        def watched(life: Life, segment: int, data: bytes, *, durable: bool) -> None:
            threads.append((threading.current_thread() is threading.main_thread(), durable, len(data)))
            append(life, segment, data, durable=durable)

        store.append = watched  # type: ignore[method-assign]
        await asyncio.sleep(0.05)  # until it is open
        writing = journal.write([b"end"])
        with pytest.raises(StopIteration):  # it does not wait
            writing.send(None)
        await journal.write([b"step"], durable=True)
        writing = journal.write([b"end"])
        with pytest.raises(StopIteration):
            writing.send(None)
        assert store.segments == {0: b"endstepend"}

    play(test, quick=True)
    assert threads[:4] == [(True, False, 3), (True, False, 4), (False, True, 0), (True, False, 3)]


@pytest.mark.parametrize("quick", [False, True])
def test_ends_of_calls_reach_the_disk_at_the_next_interval(quick: bool) -> None:
    async def test(journal: Journal, store: Memory) -> None:
        await journal.write([b"end"])
        assert store.writes == [(3, False)]
        while len(store.writes) == 1:
            await asyncio.sleep(0.01)
        assert store.writes[1] == (0, True)

    play(test, quick, seconds=0.05)


def test_a_sync_that_fails_is_repeated_at_the_next_interval() -> None:
    async def test(journal: Journal, store: Memory) -> None:
        append, failures = store.append, [OSError("the disk does not answer")]

        def failing(*args: Any, durable: bool) -> None:
            if durable and failures:
                raise failures.pop()
            append(*args, durable=durable)

        store.append = failing  # type: ignore[method-assign]
        await asyncio.sleep(0.02)  # until it is open
        await journal.write([b"end"])
        while len(store.writes) == 1:
            await asyncio.sleep(0.01)
        assert (failures, store.writes) == ([], [(3, False), (0, True)])

    play(test, quick=True, seconds=0.05)


def test_a_segment_is_freed_with_its_last_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10)

    async def test(journal: Journal, store: Memory) -> None:
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

    assert [*play(test).segments.values()] == [b"."]


def test_a_full_journal_loses_its_oldest(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10)

    async def test(journal: Journal, store: Memory) -> None:
        journal.begin(ONE)
        for _ in range(6):
            await journal.write([b"a" * 10])

    assert sum(map(len, play(test, max_bytes=30).segments.values())) <= 31
    assert "explorer.progress.max_bytes" in caplog.text


@pytest.mark.parametrize("quick", [False, True])
def test_work_goes_on_with_a_full_store_and_the_log_says_so(quick: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test(journal: Journal, store: Memory) -> None:
        journal.begin(ONE)
        await journal.write([b"before"])
        store.full = True
        await journal.write([b"lost"], durable=True)
        await journal.write([b"lost"])
        store.full = False
        await journal.write([b"after"])

    store = play(test, quick)
    assert [*store.segments.values()] == [b"before", b"after."], "what follows a torn tail is read too"
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    assert "no space left" in caplog.text


def test_a_store_that_hangs_holds_no_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    answers = threading.Event()

    async def test(journal: Journal, store: Memory) -> None:
        append = store.append

        def hanging(*args: Any, **more: Any) -> None:
            assert answers.wait(30)
            append(*args, **more)

        store.append = hanging  # type: ignore[method-assign]
        await journal.write([b"one"])
        await journal.write([b"two"])
        assert store.segments == {}
        monkeypatch.undo()  # the last write may take longer
        answers.set()

    assert [*play(test).segments.values()] == [b"onetwo."]
