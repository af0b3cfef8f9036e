"""The coordinator's hold on the log, phase by phase: a real log, its threads, and a coordinator that takes notes."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.timers import Timers
from trinity_es.actors.config.run_sections import StoreConfig
from trinity_es.actors.coordinator.log_session import LogSession, Phase
from trinity_es.actors.coordinator.log_writer import UnitOfWork
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogRewound, LogUnavailable
from trinity_es.events.store.log import EventLog, Lease
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors


class Host(Timers):
    """The coordinator, as far as a session needs it. `until` runs its loop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.log = url, logging.getLogger("test")
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.notes: list[str] = []
        self.trouble: Exception | None = None
        """What opening the store raises."""
        self.fenced_by: Lease | None = None
        self.session = LogSession(
            self, StoreConfig(url=url, durability="process", retry_for=0.001), {"pid": 1, "host": "here", "admin": {}},
            queue_capacity=100, memory=None, claims=(), unheard_runners=(),
        )

    # --- what the session calls ---
    def post(self, call: Callable[[], None]) -> None:
        self.posted.put(call)

    def now(self) -> float:
        return time.monotonic()

    def chance(self) -> float:
        return 0.0

    def send(self, to: Any, message: Any) -> None:
        raise AssertionError("a session sends nothing")

    def open_store(self) -> tuple[EventLog, Any]:
        if self.trouble is not None:
            raise self.trouble
        return EventLog.open(self.url, durability="process", projectors=projectors()), open_payloads(self.url)

    def begin(self) -> None:
        self.recover()

    def recover(self) -> None:
        self.notes.append("recover")
        self.record("recovered")
        self.session.start_writer()
        self.session.live.when_durable(lambda: setattr(self.session, "start_is_durable", True))

    def forget(self) -> None:
        self.notes.append("forget")

    def serve(self, again: bool) -> None:
        self.notes.append("serve again" if again else "serve")

    def announce_waiting(self) -> None:
        self.notes.append("waits")

    def refuse(self, error: Exception) -> None:
        self.notes.append("refuse")

    def on_rewound(self, error: LogRewound) -> None:
        self.notes.append("stopped")

    def on_fenced(self, lease: Lease | None) -> None:
        self.notes.append("fenced")
        self.fenced_by = lease

    # --- what a test does ---
    def record(self, what: str) -> list[str]:
        """One event in this turn; the list says what became of it."""
        told: list[str] = []
        self.session.live.record(ev.TasksetAdvanced(batch_id=1, taskset=what, epoch=0, offset=1))
        self.session.live.when_durable(lambda: told.append("durable"))
        self.session.live.turn.failure_calls.append(lambda error: told.append(type(error).__name__))
        return told

    def write(self, what: str) -> list[str]:
        """As `record`, and the turn ends."""
        told = self.record(what)
        self.session.end_turn()
        return told

    def close(self) -> None:
        done: list[None] = []
        self.session.close(lambda: done.append(None))
        self.until("its end", lambda: bool(done))
        self.session.has_live_state = False

    def until(self, what: str, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not met():
            assert time.monotonic() < deadline, f"waited for {what}: {self.session.phase}, {self.notes}"
            try:
                self.posted.get(timeout=0.05)()
            except queue.Empty:
                continue
            self.session.end_turn()

    def until_phase(self, phase: Phase) -> None:
        self.until(f"phase {phase}", lambda: self.session.phase is phase)

    def types(self) -> list[str]:
        return [r.type for r in self.session.events.read()]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    EventLog.open(url, create=True, durability="process", projectors=projectors()).close()
    one = Host(url)
    yield one
    if one.session.has_live_state:
        one.close()


def opened(host: Host) -> Host:
    host.session.open()
    host.until("the first write", lambda: host.session.start_is_durable)
    return host


def broken(error: Exception) -> Any:
    def append(*_: Any, **__: Any) -> Any:
        raise error

    return append


def test_it_opens_and_writes(host: Host) -> None:
    opened(host)
    assert (host.session.phase, host.notes) == (Phase.OPEN, ["recover", "serve"])
    told = host.write("a")
    host.until("the write", lambda: told == ["durable"])
    assert host.types() == ["TasksetAdvanced", "TasksetAdvanced"]


def test_a_turn_without_events_waits_for_those_before_it(host: Host) -> None:
    opened(host)
    told: list[int] = []
    host.session.live.when_durable(lambda: told.append(1))
    host.session.end_turn()
    assert told == [1]  # there is nothing to wait for
    host.write("a")
    host.session.live.when_durable(lambda: told.append(2))
    host.session.end_turn()
    assert told == [1]
    host.until("the write", lambda: told == [1, 2])


@pytest.mark.parametrize(("passing", "phase", "notes", "types"), [
    (True, Phase.OPENING, ["refuse"], ["TasksetAdvanced"]),  # nothing could not be written
    (False, Phase.CLOSED, ["waits", "refuse"], ["TasksetAdvanced", "WritingResumed"]),
], ids=["it is away", "it can not be opened"])
def test_a_log_that_is_not_there_is_waited_for_and_clients_know_where_that_may_be_long(
    host: Host, passing: bool, phase: Phase, notes: list[str], types: list[str]
) -> None:
    host.trouble = LogUnavailable("not here", passing=passing)
    host.session.open()
    host.until("another try", lambda: host.has_timer("reload"))
    assert (host.session.phase, host.notes) == (phase, notes)
    assert (host.session.failure is None) == passing
    host.trouble = None
    host.timers.pop("reload")()
    host.until("the first write", lambda: host.session.start_is_durable)
    assert sorted(host.types()) == types


def test_what_could_not_be_written_is_undone_and_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(host)
    monkeypatch.setattr(host.session.events, "append", broken(LogUnavailable("the disk is full")))
    lost = host.write("a")
    host.until("another try", lambda: host.has_timer("reload"))
    assert (lost, host.session.phase, host.notes[-1]) == (["LogUnavailable"], Phase.CLOSED, "refuse")
    assert host.session.trouble == "the log can't be written: the disk is full"
    meanwhile = host.write("b")
    assert meanwhile == ["LogUnavailable"]
    monkeypatch.undo()
    host.timers.pop("reload")()
    host.until_phase(Phase.RESUMING)
    host.until_phase(Phase.OPEN)
    assert host.notes[-2:] == ["forget", "serve again"]
    assert host.types() == ["TasksetAdvanced", "WritingResumed"]
    assert host.session.live.versions["taskset/recovered"] == 1
    assert "taskset/a" not in host.session.live.versions


def test_a_second_trouble_while_it_resumes_closes_it_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(host)
    monkeypatch.setattr(host.session.events, "append", broken(LogUnavailable("the disk is full")))
    host.write("a")
    for _ in range(2):
        host.until("another try", lambda: host.has_timer("reload"))
        host.timers.pop("reload")()
        host.until_phase(Phase.RESUMING)
        host.until_phase(Phase.CLOSED)
    monkeypatch.undo()
    host.until("another try", lambda: host.has_timer("reload"))
    host.timers.pop("reload")()
    host.until_phase(Phase.OPEN)
    assert host.types() == ["TasksetAdvanced", "WritingResumed"]


def test_a_full_disk_is_tried_less_and_less_and_told_once(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    opened(host)
    full, told = LogUnavailable("the disk is full"), list[Exception]()
    host.delays.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            host.session.write_failed(full, [UnitOfWork(failure_calls=[told.append])])
    assert host.delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0])
    assert told == [full] * 9
    assert [r.getMessage() for r in caplog.records] == ["log not written: the disk is full"]


def test_what_was_read_while_it_was_closed_is_handed_over_when_it_is_open(host: Host) -> None:
    opened(host)
    found: list[Any] = []
    host.session.live.run_in_thread(lambda: 1, found.append)
    host.until("the read", lambda: found == [1])
    host.session.phase = Phase.CLOSED
    host.session.live.run_in_thread(lambda: 2, found.append)
    host.until("the read", lambda: bool(host.session._held_results))
    assert found == [1]
    host.session.phase = Phase.OPEN
    host.session.deliver_held_results()
    assert found == [1, 2]


def test_a_writer_whose_lease_was_taken_ends_and_hears_by_whom(host: Host) -> None:
    opened(host)
    other = EventLog.open(host.url, durability="process", projectors=projectors())
    lease = other.acquire_lease("coordinator", {"pid": 2, "host": "there", "admin": {}})
    host.write("a")
    host.until("who it was", lambda: "fenced" in host.notes)
    assert (host.session.phase, host.fenced_by) == (Phase.ENDED, lease)
    assert host.has_timer("fenced")  # should the database not say
    assert not host.has_timer("reload")
    assert host.types() == ["TasksetAdvanced"]
    other.close()


def test_a_log_that_lost_what_was_acknowledged_ends_it_once(host: Host) -> None:
    opened(host)
    error = LogRewound("it ends before what was acknowledged")
    for _ in range(2):
        host.session.stop(error)
    assert host.notes[-2:] == ["refuse", "stopped"]
    assert (host.session.phase, host.notes.count("stopped")) == (Phase.ENDED, 1)
    assert host.write("a") == ["LogRewound"]
    host.session.write_failed(LogUnavailable("the database is away", passing=True), [])
    assert (host.session.phase, host.session.failure) == (Phase.ENDED, error), "what fails later does not hide why"
    assert not host.has_timer("reload")


def test_what_was_on_its_way_when_it_was_closed_does_not_open_it_again(host: Host) -> None:
    opened(host)
    host.session._set_failure(LogUnavailable("the disk is full"))
    host.session.start_writer()
    assert host.session.phase is Phase.RESUMING
    host.close()
    assert (host.session.phase, host.notes.count("serve again")) == (Phase.ENDED, 0)


def test_closed_it_has_written_what_was_queued_and_gives_the_lease_back(host: Host) -> None:
    opened(host)
    told = host.write("a")
    host.close()
    assert told == ["durable"]
    again = EventLog.open(host.url, durability="process", projectors=projectors())
    assert [r.type for r in again.read()] == ["TasksetAdvanced", "TasksetAdvanced"]
    lease = again.read_lease("coordinator")
    assert lease is None or lease.owner == {}
    again.close()
