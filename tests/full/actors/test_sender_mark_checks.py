"""What clients and runners know of the log is looked up before anything is done for them, once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.logs import dropped
from trinity_es.actors.coordinator.sender_mark_checks import SenderMarkChecks
from trinity_es.events.errors import LogRewound, LogUnavailable
from trinity_es.events.store.checks.log_end import Mark
from trinity_es.events.store.log import EventLog, Write


class Place:
    """A log with five events, and the mark checks of a coordinator that has just opened it."""

    def __init__(self, path: Path, told: tuple[str, ...] = ()) -> None:
        with EventLog.open(str(path), create=True) as log:
            for n in range(5):
                log.append([Write(stream="a", expected_version=n, events=[dropped(n)])], commit_id=f"c{n}")
            assert log.acknowledged is not None
            self.mark = log.acknowledged
        self.log = EventLog.open(str(path))
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.errors: list[LogRewound] = []
        self.acted: list[str] = []
        self.replaced = 0
        self.mark_checks = SenderMarkChecks(self.log, told, self.posted.put, self.errors.append, self.replace)

    def replace(self) -> None:
        self.replaced += 1

    def admit(self, known: Mark | None, name: str, *, if_unreadable: bool = False) -> None:
        self.mark_checks.admit(known, name, lambda: self.acted.append(name), if_unreadable=if_unreadable)

    def run(self) -> None:
        """What one look-up posts, when it is done."""
        self.posted.get(timeout=10)()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path / "log.sqlite", ("runner-0", "runner-1"))
    yield one
    one.log.close()


def test_who_knows_nothing_and_who_was_told_here_is_not_looked_up(place: Place) -> None:
    place.admit(None, "new")
    place.log.require([])
    place.admit(place.mark, "old")
    assert place.acted == ["new"]
    place.run()
    assert place.acted == ["new", "old"]
    end = place.mark_checks.log_end()
    assert (end.position, end.hash) == (5, place.mark.hash)
    place.admit(end, "told here")
    place.admit(place.mark, "old")  # found before
    assert place.acted == ["new", "old", "told here", "old"]
    assert place.posted.empty()


def test_those_that_come_while_one_is_looked_up_wait_their_turn(place: Place) -> None:
    for name in ("one", "two", "three"):
        place.admit(place.mark._replace(teller=name), name)
    assert place.acted == []
    place.run()
    place.run()
    assert place.acted == ["one", "two", "three"]


def test_a_mark_that_the_log_has_not_stops_the_work_before_anything_is_done(place: Place) -> None:
    place.admit(place.mark._replace(position=7), "a client of old")
    place.run()
    assert [e.details["lost"][0]["by"] for e in place.errors] == ["a client of old"]
    assert "was at position 7 and is at 5" in place.errors[0].message


def test_promise_5_a_coordinator_that_hears_what_a_later_one_told_does_nothing_more(place: Place) -> None:
    """It was stopped while the other took over, and a client asks it that the other has answered."""
    place.log.append([Write(stream="b", expected_version=0, events=[dropped(0)])], commit_id="ours")
    with EventLog.open(place.log.url) as another:
        another.append([Write(stream="c", expected_version=0, events=[dropped(0)])], commit_id="theirs")
        later = another.acknowledged
    place.admit(place.mark, "a client that this one told")
    place.run()
    place.admit(later, "a client of the other")
    place.run()
    assert (place.acted, place.replaced) == (["a client that this one told"], 1)


def test_while_the_log_can_not_be_read_nothing_is_changed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: object) -> None:
        raise LogUnavailable("away", passing=True)

    monkeypatch.setattr(place.log, "require", away)
    place.admit(place.mark, "submit")
    place.run()
    place.admit(place.mark, "status", if_unreadable=True)
    place.run()
    assert (place.acted, place.errors) == (["status"], [])


def test_clients_wait_for_runners_that_were_told_more_and_not_for_ever(place: Place) -> None:
    place.mark_checks.after_runners(lambda: place.acted.append("client"))
    place.mark_checks.note_runner("runner-0")
    assert place.acted == []
    place.mark_checks.note_runner("runner-1")
    assert place.acted == ["client"]
    place.mark_checks.after_runners(lambda: place.acted.append("another"))
    assert place.acted == ["client", "another"]
    silent = Place(Path(place.log._db.path or "").with_name("other.sqlite"), ("runner-0",))
    silent.mark_checks.after_runners(lambda: silent.acted.append("client"))
    silent.mark_checks.stop_waiting_for_runners()
    assert silent.acted == ["client"]
    silent.log.close()
