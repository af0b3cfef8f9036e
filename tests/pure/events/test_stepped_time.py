"""A log whose clock was stepped says so, its time goes on, and how long ago something was stays true."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.records.clock import boot, seconds_set
from trinity_es.events.store.records.log_values import with_true_time
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors

EVENT = ev.BatchAborted(reason="x", result={})


class Machine:
    """A clock that can be set, and the monotonic one beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, self.passed = 0.0, 0.0
        real, steady = time.time, time.monotonic
        monkeypatch.setattr("trinity_es.events.store.database.statements.time.time",
                            lambda: real() + self.passed + self.ahead)
        for module in ("trinity_es.events.store.log", "trinity_es.events.store.records.clock"):
            monkeypatch.setattr(f"{module}.monotonic", lambda: steady() + self.passed)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def log(tmp_path: Path, machine: Machine) -> Iterator[EventLog]:
    with EventLog.open(str(tmp_path / "log.db"), create=True, projectors=projectors()) as found:
        yield found


def append(log: EventLog) -> float:
    version = log.stream_version("batch/1")
    done = log.append([Write(stream="batch/1", expected_version=version, events=[EVENT])], commit_id=f"c{version}")
    assert len(done.recorded) == 1
    assert done.first_position == done.last_position == done.recorded[0].position
    return done.recorded[0].recorded_at


def test_an_append_while_the_clock_was_ahead_is_named_and_log_time_goes_on(log: EventLog, machine: Machine) -> None:
    first = append(log)
    machine.ahead, machine.passed = 3600.0, 60.0
    ahead = append(log)
    machine.ahead, machine.passed = 0.0, 120.0
    back = append(log)
    machine.passed = 180.0
    last = append(log)
    assert ahead - first == pytest.approx(3660, abs=5)
    assert back - first == pytest.approx(120, abs=5)
    assert last - back == pytest.approx(60, abs=5)
    there, and_back = [r.event for r in log.clock_steps()]
    assert (there.seconds, and_back.seconds) == (pytest.approx(3600, abs=1), pytest.approx(-3600, abs=1))
    assert [r.type for r in log.read()] == [
        "BatchAborted", "ClockStepped", "BatchAborted", "ClockStepped", "BatchAborted", "BatchAborted",
    ]
    assert log.position_at(first - 1) == 0
    assert log.position_at(first + 30) == 1
    assert log.position_at(back + 30) == 5
    assert log.position_at(last) == 6
    assert log.position_at(time.time() + 10_000) == 6
    assert log.verify() == []


def test_a_new_writer_notices_a_clock_that_was_set(log: EventLog, machine: Machine, tmp_path: Path) -> None:
    first = append(log)
    for ahead in (-600.0, 7200.0):
        machine.ahead = ahead
        with EventLog.open(str(tmp_path / "log.db")) as other:
            assert append(other) - first == pytest.approx(ahead, abs=5)
    steps = [r.event for r in log.clock_steps()]
    assert [round(e.seconds, -1) for e in steps if isinstance(e, ev.ClockStepped)] == [-600, 7800]
    assert log.verify() == []


def test_a_writer_with_a_steady_clock_goes_on_behind_one_ahead(log: EventLog, machine: Machine, tmp_path: Path) -> None:
    first = append(log)
    machine.ahead = 3600.0
    with EventLog.open(str(tmp_path / "log.db")) as other:
        append(other)
    machine.ahead = 0.0
    assert append(log) - first < 60
    assert log.verify() == []


def test_a_clock_that_is_slewed_or_seen_late_was_not_set() -> None:
    first = 100.0, 0.0, 0.1
    assert seconds_set(None, first, 100.3) == 0.0
    assert seconds_set(first, (1100.9, 1000.0, 1000.2), 100.0) == 0.0
    assert seconds_set(first, (104.0, 0.2, 5.0), 100.0) == 0.0
    assert seconds_set(first, (111.0, 10.0, 10.1), 100.0) == pytest.approx(0.9)
    assert seconds_set(first, (109.0, 10.0, 10.1), 100.0) == pytest.approx(-0.9)


def test_how_long_ago_something_was_is_told_by_the_clock_that_nobody_sets(log: EventLog, machine: Machine) -> None:
    append(log)
    machine.ahead, machine.passed = 3600.0, 60.0
    append(log)
    machine.ahead, machine.passed = 0.0, 120.0
    append(log)
    if not boot():
        pytest.skip("needs the id of this boot, which the system does not tell")
    now = 1_000_000.0
    offset = now - time.monotonic() - machine.passed
    ages = [now - with_true_time(r, offset).recorded_at for r in log.read() if r.type == "BatchAborted"]
    assert ages == [pytest.approx(120, abs=5), pytest.approx(60, abs=5), pytest.approx(0, abs=5)]


def test_why_and_at_are_right_after_an_excursion_of_the_clock(log: EventLog, machine: Machine, tmp_path: Path) -> None:
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", tasks=[{}], repeat_times=[1])
    done = log.append([Write(stream="batch/1", expected_version=0, events=[submitted])], commit_id="first")
    machine.ahead, machine.passed = 3600.0, 60.0
    log.append([Write(stream="pace", expected_version=0, events=[ev.BatchResumed()])], commit_id="ahead")
    machine.ahead, machine.passed = 0.0, 120.0
    resumed = ev.BatchResumed()
    log.append([Write(stream="batch/1", expected_version=1, events=[resumed])], commit_id="back")
    machine.passed = 180.0
    with open_log(str(tmp_path / "log.db")) as reader:
        told = reader.why(1)
        assert told.now - told.moved_at == pytest.approx(60, abs=5)
        began = done.recorded[0].recorded_at
        assert reader.position_of(began + 60) == 1
        assert reader.position_of(began + 150) == 5
        assert reader.clock_note(datetime.fromtimestamp(began + 10)) == ""
        assert "set by +3600 s at position 2" in reader.clock_note(datetime.fromtimestamp(began + 1800))
