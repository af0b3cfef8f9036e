"""The log's writer: one thread, groups of turns, trouble that is waited out and trouble that is not."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trinity_es.actors.coordinator.log_writer import LogWriter, Undone, UnitOfWork
from trinity_es.events.errors import ConcurrencyError, Fenced, InvalidEvent, LogUnavailable
from trinity_es.events.store.log import Committed, EventLog, Write
from trinity_es.events.vocabulary import BatchTrained
from trinity_es.testing import wait_until

AWAY = LogUnavailable("the database is away", passing=True)
FULL = LogUnavailable("the disk is full")


class Flaky:
    """A log whose appends fail: each fault is the error, and whether it comes before or after the commit."""

    def __init__(self, log: EventLog, faults: Iterator[tuple[str, Exception]] | None = None) -> None:
        self.log, self.faults = log, iter(faults or ())
        self.commits: list[str] = []
        self.tried = threading.Event()

    def require_place(self) -> None:
        self.log.require_place()

    def append(self, writes: Sequence[Write], *, commit_id: str, **options: Any) -> Committed:
        self.commits.append(commit_id)
        self.tried.set()
        when, error = next(self.faults, ("", None))
        if when == "before" and error is not None:
            raise error
        done = self.log.append(writes, commit_id=commit_id, **options)
        if error is not None:
            raise error
        return done


class Bench:
    """A writer, and the loop of its actor."""

    def __init__(self, log: EventLog) -> None:
        self.log, self.calls = log, queue.Queue[Callable[[], None]]()
        self.flaky = Flaky(log)
        self.failures: list[tuple[Exception, list[UnitOfWork]]] = []
        self.done: list[int] = []
        self.versions = itertools.count()
        self.lease = log.acquire_lease("coordinator", {})
        self.writers: list[LogWriter] = []

    def start(self, *faults: tuple[str, Exception], retry_for: float = 30.0, forever: bool = False) -> LogWriter:
        self.flaky.faults = itertools.cycle(faults) if forever else iter(faults)
        self.writers.append(LogWriter(
            self.flaky, self.lease, self.calls.put, self.fail, {}, itertools.count(1),  # type: ignore[arg-type]  # enough of a log
            retry_for=retry_for, chance=lambda: 0.9,
        ))
        return self.writers[-1]

    def fail(self, error: Exception, lost: Sequence[UnitOfWork]) -> None:
        self.failures.append((error, list(lost)))

    def turn(self) -> UnitOfWork:
        number = next(self.versions)
        write = Write(stream="a", expected_version=number, events=[BatchTrained(step=number)])
        return UnitOfWork(writes=[write], durable_calls=[lambda: self.done.append(number)])

    def held(self) -> threading.Event:
        """Append nothing before this is set: what comes after the first turn is one group."""
        gate, append = threading.Event(), self.flaky.append

        def held(writes: Sequence[Write], **options: Any) -> Committed:
            assert gate.wait(20)
            return append(writes, **options)

        self.flaky.append = held  # type: ignore[method-assign]
        return gate

    def loop(self, until: Callable[[], bool]) -> None:
        while not until():
            self.calls.get(timeout=20)()

    def steps(self) -> list[int]:
        return [r.event.step for r in self.log.read(stream="a") if isinstance(r.event, BatchTrained)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with EventLog.open(str(tmp_path / "log.db"), create=True, durability="process") as log:
        one = Bench(log)
        yield one
        for writer in one.writers:
            writer.stop()


def test_turns_are_written_in_order_and_acted_on_afterwards(bench: Bench) -> None:
    writer = bench.start()
    for _ in range(20):
        writer.submit(bench.turn())
    bench.loop(lambda: len(bench.done) == 20)
    assert bench.done == bench.steps() == list(range(20))
    assert (writer.in_flight, bench.failures, writer.trouble) == (0, [], None)
    assert writer.written == len(bench.flaky.commits) <= 20


def test_a_turn_waits_for_the_one_that_follows_from_it_so_both_are_one_append(bench: Bench) -> None:
    writer = bench.start()
    first = bench.turn()
    first.follow_up_seconds = 20.0
    writer.submit(first)
    time.sleep(0.1)
    assert writer.written == 0
    writer.submit(bench.turn())
    bench.loop(lambda: len(bench.done) == 2)
    assert writer.written == 1
    late = bench.turn()
    late.follow_up_seconds = 0.05
    writer.submit(late)
    bench.loop(lambda: len(bench.done) == 3)  # nothing follows
    assert bench.done == bench.steps() == [0, 1, 2]


def test_what_was_written_after_all_is_not_written_twice(bench: Bench) -> None:
    """The commit was done, its answer got lost; and the same again at the next try."""
    writer = bench.start(("after", AWAY), ("after", AWAY), ("before", AWAY))
    writer.submit(bench.turn())
    bench.loop(lambda: bench.done == [0])
    writer.submit(bench.turn())
    bench.loop(lambda: bench.done == [0, 1])
    assert bench.flaky.commits == ["coordinator:1:1"] * 4 + ["coordinator:1:2"]
    assert bench.steps() == [0, 1]
    assert bench.failures == []


def test_what_is_waited_out_can_be_seen(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """And is told once, not at every try."""
    with caplog.at_level(logging.WARNING):
        writer = bench.start(*[("before", AWAY)] * 5)
        writer.submit(bench.turn())
        wait_until(lambda: writer.trouble, "the writer to tell its trouble")
        assert "trying again: the database is away" in str(writer.trouble)
        bench.loop(lambda: bench.done == [0])
    assert writer.trouble is None
    told = [r.getMessage() for r in caplog.records]
    assert [t.partition(",")[0] for t in told] == ["the log can't be written", "the log is written again"]


@pytest.mark.parametrize("error", [FULL, Fenced("taken"), ConcurrencyError("old")])
def test_trouble_that_stays_fails_at_once_with_all_that_came_behind(bench: Bench, error: Exception) -> None:
    writer = bench.start(("before", error))
    turns = [bench.turn() for _ in range(3)]
    for turn in turns:
        writer.submit(turn)
    bench.loop(lambda: writer.in_flight == 0)
    assert len(bench.flaky.commits) == 1
    assert [e for e, _ in bench.failures] == [error] * len(bench.failures)
    assert [t for _, lost in bench.failures for t in lost] == turns
    assert (bench.done, bench.steps(), writer.written) == ([], [], 0)


def test_trouble_that_does_not_pass_in_time_fails(bench: Bench) -> None:
    writer = bench.start(("before", AWAY), forever=True, retry_for=0.3)
    started = time.monotonic()
    writer.submit(bench.turn())
    bench.loop(lambda: writer.in_flight == 0)
    assert 0.3 <= time.monotonic() - started < 5
    assert len(bench.flaky.commits) > 3
    assert len(set(bench.flaky.commits)) == 1
    assert bench.failures[0][0] is AWAY
    assert bench.done == []


def test_a_writer_that_waits_ends_promptly(bench: Bench) -> None:
    writer = bench.start(("before", AWAY), forever=True)
    for _ in range(3):
        writer.submit(bench.turn())
    wait_until(lambda: len(bench.flaky.commits) > 6, "some tries")  # the pause is long by now
    started = time.monotonic()
    writer.stop()
    assert time.monotonic() - started < 0.5
    bench.loop(lambda: writer.in_flight == 0)
    assert bench.failures[0][0] is AWAY
    assert bench.steps() == []


def test_a_writer_that_is_stopped_writes_what_is_queued(bench: Bench) -> None:
    writer = bench.start()
    for _ in range(50):
        writer.submit(bench.turn())
    writer.stop()
    assert bench.steps() == list(range(50))


def test_a_group_keeps_the_order_of_the_decisions_across_streams(bench: Bench) -> None:
    """What was decided first stands first in the log, also where one commit holds several turns of several streams."""
    gate, writer = bench.held(), bench.start()
    order = ["a", "b", "a", "c", "b", "a"]
    versions = dict.fromkeys(order, 0)
    writer.submit(UnitOfWork(writes=[Write(stream="first", expected_version=0, events=[BatchTrained(step=0)])]))
    wait_until(lambda: not writer._queue, "the first turn to be in the writer's hands")
    for stream in order:
        step = BatchTrained(step=versions[stream])
        writer.submit(UnitOfWork(writes=[Write(stream=stream, expected_version=versions[stream], events=[step])]))
        versions[stream] += 1
    gate.set()
    wait_until(lambda: writer.written == 2, "the group to be written")
    assert [r.stream for r in bench.log.read()] == ["first", *order]


def test_what_the_log_can_not_hold_fails_its_own_turn_and_undoes_those_behind_it(bench: Bench) -> None:
    gate, writer = bench.held(), bench.start()
    writer.submit(bench.turn())
    wait_until(lambda: not writer._queue, "the first turn to be in the writer's hands")
    bad = UnitOfWork(writes=[Write(stream="a\0", expected_version=0, events=[BatchTrained(step=9)])])
    turns = [bench.turn(), bad, bench.turn(), bench.turn()]
    for turn in turns:
        writer.submit(turn)
    gate.set()
    bench.loop(lambda: writer.in_flight == 0)
    assert bench.done == bench.steps() == [0, 1]
    assert [(type(error), lost) for error, lost in bench.failures] == [(InvalidEvent, [bad]), (Undone, turns[2:])]
    late = bench.turn()
    writer.submit(late)
    bench.loop(lambda: writer.in_flight == 0)
    assert [type(error) for error, lost in bench.failures if lost == [late]] == [Undone]
