"""What a log promises, the same on every database."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.helpers.faults import die_after_commit
from tests.helpers.logs import copied, dropped, renamed, trained
from tests.helpers.logs import write_steps as write
from tests.helpers.paths import ROOT
from tests.helpers.projectors import Counts
from trinity_es.events import errors
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import BatchTrained, RunnerRetired
from trinity_es.testing import wait_until

Open = Callable[..., EventLog]


class TestAppend:
    def test_what_was_appended_is_read_back_in_order(self, log: EventLog) -> None:
        before = time.time()
        done = log.append(
            [Write(stream="batch/1", expected_version=0, events=[*trained(1), dropped(3)]),
             Write(stream="runner/0", expected_version=0, events=[RunnerRetired(runner="0", incarnation=2)])],
            commit_id="first", metadata={"cause": "test"},
        )
        assert (done.first_position, done.last_position, done.duplicate) == (1, 3, False)
        assert list(log.read()) == done.recorded
        assert [(r.position, r.stream, r.version, r.type) for r in log.read()] == [
            (1, "batch/1", 1, "BatchTrained"), (2, "batch/1", 2, "TaskDropped"), (3, "runner/0", 1, "RunnerRetired"),
        ]
        assert [r.event for r in log.read()] == [*trained(1), dropped(3), RunnerRetired(runner="0", incarnation=2)]
        assert all(r.metadata["cause"] == "test" and r.commit_id == "first" for r in log.read())
        assert all(before - 1 <= r.recorded_at <= time.time() + 1 for r in log.read())

    def test_a_stale_expected_version_is_refused_and_told(self, log: EventLog) -> None:
        write(log, "a", 0, 1, 2)
        for stale in (0, 1, 3):
            with pytest.raises(errors.ConcurrencyError, match="version 2") as caught:
                write(log, "a", stale, 9)
            assert caught.value.details == {"stream": "a", "expected": stale, "actual": 2}
        assert log.head().position == 2

    def test_an_append_over_several_streams_is_all_or_nothing(self, log: EventLog) -> None:
        write(log, "b", 0, 1)
        with pytest.raises(errors.ConcurrencyError):
            log.append(
                [Write(stream="a", expected_version=0, events=trained(1)),
                 Write(stream="b", expected_version=0, events=trained(2))], commit_id="c",
            )
        assert log.streams() == [("b", 1)]
        assert log.stream_version("a") == 0

    def test_a_write_without_events_holds_a_stream_to_its_version_and_is_none_by_itself(self, log: EventLog) -> None:
        write(log, "guard", 0, 1)
        with pytest.raises(errors.ConcurrencyError):
            log.append([Write(stream="guard", expected_version=0, events=[]),
                        Write(stream="a", expected_version=0, events=trained(1))], commit_id="c")
        log.append([Write(stream="guard", expected_version=1, events=[]),
                    Write(stream="a", expected_version=0, events=trained(1))], commit_id="d")
        assert log.streams() == [("a", 1), ("guard", 1)]
        with pytest.raises(errors.InvalidEvent, match="no event"):
            log.append([Write(stream="guard", expected_version=1, events=[])], commit_id="e")

    def test_the_same_stream_twice_in_one_append_goes_on_from_itself(self, log: EventLog) -> None:
        log.append([Write(stream="a", expected_version=0, events=trained(1)),
                    Write(stream="a", expected_version=1, events=trained(2))], commit_id="c")
        assert [r.version for r in log.read(stream="a")] == [1, 2]
        assert log.stream_version("a") == 2

    @pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "x" * 501])
    def test_names_that_a_database_would_change_are_refused(self, log: EventLog, name: str) -> None:
        with pytest.raises(errors.InvalidEvent, match="printable"):
            write(log, name, 0, 1, commit="c")
        with pytest.raises(errors.InvalidEvent, match="printable"):
            write(log, "a", 0, 1, commit=name or "\0")

    @pytest.mark.parametrize("count", [1, 100])
    def test_a_group_beside_whose_place_another_event_stands_is_a_corrupt_log_and_nothing_is_written(
        self, log: EventLog, open_log: Open, count: int
    ) -> None:
        write(log, "a", 0, *range(5))
        move = "UPDATE es_log_head SET last_position = {0}, last_hash = (SELECT hash FROM es_event WHERE position={0})"
        with log.engine.begin() as connection:
            connection.execute(text(move.format(4)))
        with open_log() as other:  # it has seen nothing, so only the place in the table tells
            with pytest.raises(errors.LogCorrupt, match=r"near position .*es_event"):
                write(other, "b", 0, *range(count))
            with log.engine.begin() as connection:
                connection.execute(text(move.format(5)))
            assert other.streams() == [("a", 5)]
            write(other, "b", 0, *range(count))  # its connection is as good as before
            assert ([r.event for r in other.read(stream="b")], other.verify()) == (trained(*range(count)), [])

    def test_an_event_that_can_not_be_read_back_is_not_written(self, log: EventLog) -> None:
        with pytest.raises(errors.InvalidEvent, match=r"BatchTrained.step"):
            log.append([Write(stream="a", expected_version=0, events=[BatchTrained(step="one")])], commit_id="c")  # type: ignore[arg-type]  # the point of the test
        assert log.head().position == 0


class TestOnce:
    def test_a_repeated_commit_returns_the_first_result(self, log: EventLog) -> None:
        writes = [Write(stream="a", expected_version=0, events=trained(1, 2)),
                  Write(stream="b", expected_version=0, events=trained(3))]
        first = log.append(writes, commit_id="c")
        write(log, "z", 0, 9)
        again = log.append(writes, commit_id="c")
        assert again.duplicate
        assert again.recorded == first.recorded
        assert (again.first_position, again.last_position) == (1, 3)
        assert log.head().position == 4

    def test_a_repeated_commit_is_recognised_from_another_process_by_a_new_writer(self, open_log: Open) -> None:
        write(open_log(), "a", 0, 1, commit="c")
        other = open_log()
        assert other.append(
            [Write(stream="a", expected_version=other.stream_version("a"), events=trained(1))], commit_id="c"
        ).duplicate

    @pytest.mark.parametrize(("first", "stream", "steps"), [
        ((1,), "a", (2,)), ((1,), "b", (1,)), ((1,), "a", (1, 1)), ((1, 2), "a", (1,)),
    ])
    def test_a_commit_id_used_again_for_something_else_is_refused(
        self, log: EventLog, first: tuple[int, ...], stream: str, steps: tuple[int, ...]
    ) -> None:
        write(log, "a", 0, *first, commit="c")
        with pytest.raises(errors.CommitMismatch, match="position 1"):
            write(log, stream, 0, *steps, commit="c")
        assert log.head().position == len(first)

    def test_a_commit_whose_acknowledgement_was_lost_is_not_written_twice(self, open_log: Open) -> None:
        """The connection breaks after the commit and before the answer: the retry inside `append` finds it."""
        log = open_log()
        die_after_commit(log, 1)
        done = log.append([Write(stream="a", expected_version=0, events=trained(1))], commit_id="c")
        assert done.duplicate
        assert [r.commit_id for r in log.read()] == ["c"]
        assert log.verify() == []


class TestLease:
    def test_who_takes_the_lease_fences_who_had_it(self, open_log: Open) -> None:
        old, new = open_log(), open_log()
        first = old.acquire_lease("coordinator", {"pid": 1})
        write(old, "a", 0, 1, lease=first)
        second = new.acquire_lease("coordinator", {"pid": 2})
        assert (first.epoch, second.epoch) == (1, 2)
        with pytest.raises(errors.Fenced, match="epoch 2") as caught:
            write(old, "a", 1, 2, lease=first)
        assert caught.value.details["current"] == 2
        write(new, "a", 1, 2, lease=second)
        assert [{k: r.metadata[k] for k in ("lease", "epoch")} for r in new.read()] == [
            {"lease": "coordinator", "epoch": 1}, {"lease": "coordinator", "epoch": 2}
        ]

    def test_a_lease_of_another_name_does_not_fence(self, log: EventLog) -> None:
        mine = log.acquire_lease("coordinator", {})
        log.acquire_lease("dashboard", {})
        write(log, "a", 0, 1, lease=mine)

    def test_a_released_lease_has_no_owner_and_keeps_its_epoch(self, log: EventLog) -> None:
        assert log.read_lease("coordinator") is None
        lease = log.acquire_lease("coordinator", {"pid": 7, "host": "here"})
        assert log.read_lease("coordinator") == lease
        log.release_lease(lease)
        released = log.read_lease("coordinator")
        assert (released.epoch, released.owner) == (1, {})
        assert log.acquire_lease("coordinator", {}).epoch == 2

    def test_nobody_holds_it_in_a_copy_of_the_store(self, log: EventLog, store_url: str) -> None:
        theirs = log.acquire_lease("coordinator", {"pid": 7, "host": "here"})
        log.close()
        with EventLog.open(copied(store_url, "copy_of_it")) as copy:
            found = copy.read_lease("coordinator")
            assert (found.epoch, found.owner) == (1, {})
            assert str(parse_url(store_url).database) in found.copied_from
            mine = copy.acquire_lease("coordinator", {"pid": 8, "host": "here"})
            assert (mine.epoch, mine.copied_from) == (2, found.copied_from)
            assert copy.read_lease("coordinator") == replace(mine, copied_from="")
            assert copy.acquire_lease("coordinator", {"pid": 9, "host": "here"}).copied_from == ""
        with EventLog.open(store_url) as origin:
            assert origin.read_lease("coordinator") == theirs

    def test_its_holder_has_it_in_a_moved_store_and_in_a_copy_in_its_place(self, log: EventLog, store_url: str) -> None:
        lease = log.acquire_lease("coordinator", {"pid": 7, "host": "here"})
        log.close()
        name = Path(str(parse_url(store_url).database)).name
        copy = copied(store_url, "older_copy")
        with EventLog.open(renamed(store_url, "moved_away")) as moved:
            assert moved.read_lease("coordinator") == lease
        with EventLog.open(renamed(copy, name)) as restored:
            assert restored.read_lease("coordinator") == lease, "its processes are those that work there"

    def test_an_old_holder_can_not_release_the_lease_of_the_new_one(self, log: EventLog) -> None:
        old = log.acquire_lease("coordinator", {"pid": 1})
        new = log.acquire_lease("coordinator", {"pid": 2})
        log.release_lease(old)
        assert log.read_lease("coordinator") == new

    def test_leases_taken_at_the_same_time_have_different_epochs(self, open_log: Open) -> None:
        logs = [open_log() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            epochs = pool.map(lambda log: [log.acquire_lease("l", {}).epoch for _ in range(5)], logs, timeout=60)
        assert sorted(epoch for some in epochs for epoch in some) == list(range(1, 21))


class TestOrder:
    def test_a_reader_does_not_skip_events_of_a_slow_transaction_that_began_earlier(self, open_log: Open) -> None:
        inside, go = threading.Event(), threading.Event()

        def slowly(_recorded: object) -> None:
            inside.set()
            assert go.wait(30)

        slow, fast, reader = open_log(projectors=[Counts(before=slowly)]), open_log(), open_log(read_only=True)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(write, slow, "slow", 0, 1)
            assert inside.wait(30)
            second = pool.submit(write, fast, "fast", 0, 1)
            wait([second], timeout=0.3)
            seen = [r.stream for r in reader.read()]
            go.set()
            assert seen == [], "an event became visible before one that was given its position earlier"
            for done in (first, second):
                done.result(30)
        assert [(r.position, r.stream) for r in reader.read()] == [(1, "slow"), (2, "fast")]

    def test_writers_in_threads_and_processes_leave_no_gap_and_a_reader_beside_them_sees_every_event_once(
        self, open_log: Open, store_url: str
    ) -> None:
        """Two threads on one log, two more processes, one reader that only ever looks after what it has passed."""
        log = open_log()
        code = (
            "import sys\n"
            "from trinity_es.events.store.log import EventLog, Write\n"
            "from trinity_es.events.vocabulary import BatchTrained\n"
            "log = EventLog.open(sys.argv[1], durability='process', patience=60)\n"
            "for i in range(40):\n"
            "    log.append([Write(stream=sys.argv[2], expected_version=i, events=[BatchTrained(step=i)])],"
            " commit_id=f'{sys.argv[2]}-{i}')\n"
            "log.close()\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code, store_url, f"process/{n}"], cwd=ROOT) for n in range(2)
        ]

        def many(name: str) -> None:
            for i in range(40):
                write(log, name, i, i)

        pool = ThreadPoolExecutor(2)
        writers = [pool.submit(many, f"thread/{n}") for n in range(2)]
        reader, seen = open_log(read_only=True), []
        deadline = time.monotonic() + 60
        while len(seen) < 160 and time.monotonic() < deadline:
            seen.extend((r.position, r.stream, r.version) for r in reader.read(after=len(seen)))
        for writer in writers:
            writer.result(60)
        assert [p.wait(60) for p in processes] == [0, 0]
        assert [p for p, _, _ in seen] == list(range(1, 161))
        of_stream: dict[str, list[int]] = defaultdict(list)
        for _, stream, version in seen:
            of_stream[stream].append(version)
        assert all(v == list(range(1, 41)) for v in of_stream.values())
        assert len(of_stream) == 4
        assert log.verify() == []

    def test_time_never_goes_back_in_the_log(self, log: EventLog) -> None:
        for i in range(20):
            write(log, "a", i, i)
        assert all(a.recorded_at <= b.recorded_at for a, b in pairwise(log.read()))


class TestRead:
    @pytest.fixture
    def filled(self, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> EventLog:
        monkeypatch.setattr("trinity_es.events.store.log.PAGE", 3)  # every read goes over several pages
        for i in range(5):
            log.append([Write(stream="a", expected_version=2 * i, events=[*trained(i), dropped(i)]),
                        Write(stream="b", expected_version=i, events=trained(i))], commit_id=f"c{i}")
        return log

    def test_of_all_of_one_stream_of_some_types_between_positions_and_up_to_a_limit(self, filled: EventLog) -> None:
        def positions(**wanted: object) -> list[int]:
            return [r.position for r in filled.read(**wanted)]  # type: ignore[arg-type]  # wanted is read's own

        assert positions() == list(range(1, 16))
        assert positions(after=4, until=8) == [5, 6, 7, 8]
        assert positions(limit=4) == [1, 2, 3, 4]
        assert positions(limit=0) == []
        assert positions(stream="b") == [3, 6, 9, 12, 15]
        assert positions(stream="b", after=6, limit=1) == [9]
        assert positions(stream="a", until=5) == [1, 2, 4, 5]
        assert positions(types=["TaskDropped"]) == [2, 5, 8, 11, 14]
        assert positions(stream="a", types=["TaskDropped"], after=2) == [5, 8, 11, 14]
        assert positions(stream="nobody") == []
        assert positions(after=99) == []

    def test_streams_are_found_by_prefix_to_the_letter(self, log: EventLog) -> None:
        for s in ("batch/1", "batch/2", "batchX", "Batch/3", "b%"):
            write(log, s, 0, 1)
        assert log.streams("batch/") == [("batch/1", 1), ("batch/2", 1)]
        assert log.streams("b%") == [("b%", 1)]
        assert len(log.streams()) == 5

    def test_the_position_at_a_moment_is_the_last_one_recorded_until_then(self, log: EventLog) -> None:
        assert log.position_at(time.time()) == 0
        for i in range(9):
            write(log, "a", i, i)
        times = [r.recorded_at for r in log.read()]
        for at in times:
            assert log.position_at(at) == sum(t <= at for t in times)
        assert log.position_at(times[0] - 1) == 0
        assert log.position_at(times[-1] + 1) == 9

    def test_a_reader_never_writes(self, filled: EventLog, open_log: Open) -> None:
        reader = open_log(read_only=True)
        assert len(list(reader.read())) == 15
        with pytest.raises(errors.LogUnavailable, match="reading only"):
            write(reader, "a", 10, 1)
        with pytest.raises(DBAPIError), reader.engine.begin() as connection:
            connection.execute(text("UPDATE es_stream SET version = 99"))
        assert filled.verify() == []


class TestOpening:
    def test_a_log_that_is_not_there_is_told(self, store_url: str) -> None:
        with pytest.raises(errors.LogNotFound, match="log"):
            EventLog.open(store_url)

    def test_processes_that_create_it_at_the_same_time_all_get_the_same_one(self, store_url: str) -> None:
        def create(_: int) -> EventLog:
            return EventLog.open(store_url, create=True, durability="process")

        with ThreadPoolExecutor(4) as pool:
            opened = list(pool.map(create, range(4), timeout=60))
        assert len({log.head().generation for log in opened}) == 1
        for log in opened:
            log.close()

    def test_who_looks_while_it_is_made_finds_all_of_it_or_none(self, store_url: str) -> None:
        looked: list[str] = []
        made = threading.Event()

        def look() -> None:
            while not made.is_set():
                try:
                    EventLog.open(store_url, read_only=True).close()
                    looked.append("a log")
                except errors.LogNotFound:
                    looked.append("none yet")
                except Exception as e:
                    looked.append(repr(e))

        threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
        for t in threads:
            t.start()
        wait_until(lambda: len(looked) > 10, "a look", 30)
        EventLog.open(store_url, create=True).close()
        seen = len(looked)
        wait_until(lambda: len(looked) > seen + 10, "a look at what was made", 30)
        made.set()
        for t in threads:
            t.join(60)
        assert set(looked) == {"none yet", "a log"}

    def test_a_log_of_a_newer_schema_is_refused(self, log: EventLog, open_log: Open) -> None:
        with log.engine.begin() as connection:
            connection.execute(text("UPDATE es_log_head SET schema_rev = 99"))
        with pytest.raises(errors.LogTooNew, match="schema 99"):
            open_log()
        with pytest.raises(errors.LogTooNew, match="schema 99"):
            write(log, "a", 0, 1)

    def test_an_event_of_a_newer_software_is_told_with_its_position(self, log: EventLog) -> None:
        from trinity_es.events.store.database.schema import drop_triggers

        write(log, "a", 0, 1)
        with log.engine.begin() as connection:
            drop_triggers(connection)
            connection.execute(text("UPDATE es_event SET type = 'BatchTeleported'"))
        with pytest.raises(errors.LogTooNew, match=r"position 1 .*BatchTeleported"):
            _ = next(log.read()).event

    def test_a_log_can_be_closed_and_opened_as_often_as_one_likes(self, open_log: Open) -> None:
        for i in range(5):
            with open_log() as log:
                write(log, "a", i, i)
        assert open_log().stream_version("a") == 5


class TestImmutability:
    @pytest.mark.parametrize("statement", [
        "UPDATE es_event SET data = metadata", "DELETE FROM es_event", "DELETE FROM es_event WHERE position = 1",
        {"postgresql": "TRUNCATE es_event", "sqlite": "INSERT OR REPLACE INTO es_event SELECT * FROM es_event"},
    ], ids=["update", "delete", "delete one", "empty or replace"])
    def test_the_database_refuses_to_change_an_event(self, log: EventLog, statement: str | dict[str, str]) -> None:
        write(log, "a", 0, 1)
        wanted = statement if isinstance(statement, str) else statement[log.dialect]
        with pytest.raises(DBAPIError, match="events never change"), log.engine.begin() as connection:
            connection.execute(text(wanted))
        assert log.verify() == []

    def test_a_missing_event_is_told_to_who_reads_on(self, log: EventLog) -> None:
        from trinity_es.events.store.database.schema import drop_triggers

        for i in range(4):
            write(log, "a", i, i)
        with log.engine.begin() as connection:
            drop_triggers(connection)
            connection.execute(text("DELETE FROM es_event WHERE position = 2"))
        with pytest.raises(errors.LogCorrupt, match="positions 2 to 2"):
            list(log.read())
        with pytest.raises(errors.LogCorrupt, match="no version 2"):
            list(log.read(stream="a"))
