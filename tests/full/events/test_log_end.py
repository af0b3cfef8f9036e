"""What a host, a client or a runner knows of a log, against the log: what is lost is found, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faults import rewind
from tests.helpers.logs import dropped
from trinity_es.events.errors import LogRewound
from trinity_es.events.store.checks.host_memory import SIZE
from trinity_es.events.store.checks.log_end import HERE, Claim, Mark, MemoryFile, acceptance, lost_between
from trinity_es.events.store.database import schema
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import RewindAccepted
from trinity_es.projections.tables.read_models import projectors

Open = Callable[..., EventLog]


def write(log: EventLog, count: int, stream: str = "a") -> list[Mark]:
    marks = []
    for _ in range(count):
        version = log.stream_version(stream)
        log.append([Write(stream=stream, expected_version=version, events=[dropped(version)])],
                   commit_id=f"{stream}-{version}-{os.urandom(4).hex()}")
        assert log.acknowledged is not None
        marks.append(log.acknowledged)
    return marks


def known(mark: Mark) -> list[Claim]:
    return [Claim(mark, "somebody")]


class TestAgainstTheLog:
    def test_every_position_that_was_acknowledged_is_found(self, open_log: Open) -> None:
        log = open_log()
        for mark in write(log, 4):
            open_log().require(known(mark))

    def test_a_shorter_log_is_refused_and_told_with_what_was_lost(self, open_log: Open) -> None:
        log = open_log()
        marks = write(log, 4)
        rewind(open_log(), 2)
        open_log().require(known(marks[1]))
        with pytest.raises(LogRewound, match="was at position 4 and is at 2: somebody knows") as told:
            open_log().require(known(marks[3]))
        assert "knows it up to position 4" in told.value.message
        assert "positions 3 to 4 are lost" in told.value.message
        assert "accept-rewind" in told.value.message
        assert marks[3].hash.hex()[:12] in told.value.message
        assert told.value.details["position"] == 4
        assert told.value.details["found"] == 2

    def test_a_log_that_went_another_way_is_refused(self, open_log: Open) -> None:
        log = open_log()
        marks = write(log, 4)
        rewind(open_log(), 2)
        write(open_log(), 4)
        for mark in marks[2:]:
            with pytest.raises(LogRewound, match="another event is there now, in a log up to 6"):
                open_log().require(known(mark))

    def test_another_log_of_the_same_length_is_refused(self, open_log: Open) -> None:
        log = open_log()
        mark = write(log, 3)[-1]
        with pytest.raises(LogRewound, match="is another log than the one that was acknowledged"):
            log.require(known(mark._replace(generation="other", hash=bytes(32))))

    def test_from_then_on_no_append_goes_on_without_it(self, open_log: Open) -> None:
        mark = write(open_log(), 3)[-1]
        log = open_log()
        log.require(known(mark))
        rewind(open_log(), 1)
        with pytest.raises(LogRewound):
            write(log, 1, "b")
        with pytest.raises(LogRewound):
            log.is_reachable()

    def test_what_a_person_accepts_is_settled_for_everybody_and_the_next_loss_is_noticed(self, open_log: Open) -> None:
        log = open_log(projectors=projectors())
        marks = write(log, 4)
        rewind(open_log(), 2)
        log = open_log(projectors=projectors())
        head, lost = log.lost_claims(known(marks[3]))
        event = acceptance(head, lost, "anew", "me on this host", "the backup of Monday")
        assert (event.first, event.last, event.kept) == (3, 4, 2)
        log.append([Write(stream="system", expected_version=0, events=[event])], commit_id="accept", generation="anew")
        assert log.head().generation == "anew"
        for mark in marks:  # also those of the lost part that nobody named
            open_log().require(known(mark))
        later = write(log, 3)
        assert later[-1].generation == "anew"
        assert log.verify() == []
        stored = next(log.read_rare(["RewindAccepted"])).event
        assert stored == event
        assert isinstance(stored, RewindAccepted)
        rewind(open_log(), 4)
        with pytest.raises(LogRewound, match="was at position 6 and is at 4"):
            open_log().require(known(later[-1]))


def test_who_knows_more_refuses_who_tells_less() -> None:
    mark = Mark("g", 5, b"five", "one life")
    assert lost_between(None, mark) is None
    assert lost_between(mark, None) is None
    assert lost_between(mark, mark._replace(teller="another life")) is None
    assert lost_between(mark, Mark("g", 6, b"six")) is None
    assert lost_between(mark, Mark("another generation", 1, b"one")) is None
    assert "position 5, and the answer says that the log ends at 4" in str(lost_between(mark, Mark("g", 4, b"four")))
    assert "another event at position 5" in str(lost_between(mark, Mark("g", 5, b"other")))


class TestMemory:
    def memory(self, folder: Path, place: str = "log.sqlite") -> MemoryFile:
        return MemoryFile.of(str(folder / place), folder)

    def test_the_last_mark_is_read_back_by_others(self, tmp_path: Path) -> None:
        memory = self.memory(tmp_path)
        assert memory.claims() == []
        for position in range(1, 6):
            memory.note(Mark("g", position, bytes([position]) * 32))
            assert self.memory(tmp_path).claims() == [Claim(Mark("g", position, bytes([position]) * 32), HERE)]
        assert memory.path.stat().st_mode & 0o777 == 0o600
        assert memory.path.stat().st_size == SIZE
        again = self.memory(tmp_path)
        again.note(Mark("g", 6, b"6"))
        assert self.memory(tmp_path).claims()[0].mark.position == 6

    @pytest.mark.parametrize("cut", [0, 1, 9, 60, SIZE - 1])
    def test_a_file_that_is_not_whole_knows_nothing_until_it_is_written_again(self, tmp_path: Path, cut: int) -> None:
        memory = self.memory(tmp_path)
        memory.note(Mark("g", 123, b"x"))
        before = memory.path.read_bytes()
        memory.note(Mark("g", 456, b"y"))
        memory.path.write_bytes(memory.path.read_bytes()[:cut] + before[cut:])
        known = [claim.mark.position for claim in self.memory(tmp_path).claims()]
        assert known == {0: [123], SIZE - 1: [456]}.get(cut, [])
        memory.note(Mark("g", 457, b"z"))
        assert self.memory(tmp_path).claims()[0].mark.position == 457

    def test_what_others_knew_stays_until_it_is_settled(self, tmp_path: Path) -> None:
        memory = self.memory(tmp_path)
        memory.note(Mark("g", 5, b"x"))
        lost = Claim(Mark("g", 9, b"y"), "a client")
        memory.add_claims([lost, lost])
        memory.note(Mark("g", 6, b"x"))
        assert lost in self.memory(tmp_path).claims()
        other = self.memory(tmp_path)
        other.add_claims([Claim(Mark("g", 8, b"z"), "a runner")])
        assert [c.mark.position for c in self.memory(tmp_path).claims()] == [6, 9, 8]
        other.keep_only(Mark("h", 7, b"x"))
        assert [c.mark.position for c in self.memory(tmp_path).claims()] == [7]

    def test_it_never_raises_and_says_what_hindered_it(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        memory = MemoryFile.of(str(tmp_path / "log.sqlite"), tmp_path / "file")
        memory.note(Mark("g", 1, b"x"))
        assert str(memory.path) in memory.trouble
        assert memory.claims() == []

    def test_a_log_that_was_moved_takes_it_along_and_a_copy_beside_the_log_does_not(self, tmp_path: Path) -> None:
        (tmp_path / "a.sqlite").touch()
        self.memory(tmp_path, "a.sqlite").note(Mark("g", 5, b"x"))
        moved = self.memory(tmp_path, "b.sqlite")
        assert moved.claims("g") == []
        (tmp_path / "a.sqlite").rename(tmp_path / "b.sqlite")
        assert [c.mark.position for c in moved.claims("g")] == [5]
        assert moved.claims("another") == []

    @pytest.mark.parametrize(("key", "is_copy"), [
        (("7", 2, 5432, None), True), (("8", 1, 5432, None), True), (("7", 1, 5433, "/data"), False),
        ((None, 1, 5432, None), False), ((None, 2, 5432, None), True), ((), False),
    ])
    def test_a_copy_of_a_database_is_a_log_of_its_own_and_another_address_of_the_same_is_not(
        self, tmp_path: Path, key: tuple[Any, ...], is_copy: bool
    ) -> None:
        origin = MemoryFile.of("postgresql://one/db", tmp_path)
        origin.key = ("7", 1, 5432, None)
        origin.note(Mark("g", 5, b"x"))
        other = MemoryFile.of("postgresql://one/copy", tmp_path)
        other.key = key
        assert [c.mark.position for c in other.claims("g")] == ([] if is_copy else [5])

    def test_logs_of_two_servers_and_of_two_databases_have_one_each(self, tmp_path: Path) -> None:
        urls = ["postgresql://u:secret@one/db", "postgresql://two/db", "postgresql://one/other",
                "postgresql:///db?host=/tmp/one", "postgresql:///db?host=/tmp/two", "postgresql://one:5433/db"]
        memories = [MemoryFile.of(url, tmp_path) for url in urls]
        assert len({memory.path for memory in memories}) == len(urls)
        assert memories[0].path == MemoryFile.of("postgresql+psycopg://another:one@one/db", tmp_path).path
        memories[0].note(Mark("g", 1, b"x"))
        assert b"secret" not in memories[0].path.read_bytes()


def test_an_append_is_noted_before_it_returns(open_log: Open, tmp_path: Path) -> None:
    log = open_log()
    log.memory = MemoryFile.of("sqlite:///somewhere", tmp_path / "host")
    for _ in range(3):
        [mark] = write(log, 1)
        assert log.memory.claims() == [Claim(mark, HERE)]
    assert log.head().hash == log.memory.claims()[0].mark.hash
    assert log.head().hash != schema.GENESIS
