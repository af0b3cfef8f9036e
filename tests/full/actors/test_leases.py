"""Leases on a real log without processes: whose turn records what; and the process that releases, with providers of all
kinds."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.live_log import LiveLog
from trinity_es import open_log
from trinity_es.actors.coordinator.fleet import lease_releases
from trinity_es.actors.coordinator.fleet.lease_tracker import LeaseTracker
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.release_main import MAX_CONCURRENT
from trinity_es.actors.messages import LeaseChange, LeaseReport
from trinity_es.actors.runner.lease_reports import LeaseReports
from trinity_es.events import vocabulary as ev
from trinity_es.events.processes import process_start_time
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.leases import OpenLease
from trinity_es.testing import wait_until

UNIT = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
PROVIDERS = "tests.helpers.lease_providers"
PROVIDER = f"{PROVIDERS}:Kept"


# --- the coordinator's side -------------------------------------------------------------------------------------------
def change(what: Any, lease: str = "es-1", **more: Any) -> LeaseChange:
    return LeaseChange(
        lease=lease, what=what, batch_id=7, submission="s", unit=UNIT, run=0, provider=PROVIDER, ttl=100.0,
        creation_timeout=60.0, **more,
    )


class Place(LiveLog):
    """One attempt on one runner, and the leases."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.clock = 1000.0
        self.asked: list[tuple[list[str], Callable[[dict[str, str], str], None]]] = []
        self.fleet = self.new_fleet()
        self.fleet.begin()
        self.live.record(
            ev.RunnerStarted(runner="runner-0", incarnation=1, pid=1, host="h", engine="scripted"),
            ev.RunnerReady(runner="runner-0", incarnation=1, places=4, model_version=0, load_seconds=0.0),
        )
        self.live.record_batch(7, [
            ev.BatchSubmitted(batch_id=7, batch_type="train", repeat_times=[1], tasks=[{}], submission="s",
                              max_attempts=5),
            ev.TasksDispatched(runner="runner-0", incarnation=1, units=[UNIT], model_version=0),
        ])
        self.turn()

    def new_fleet(self) -> LeaseTracker:
        return LeaseTracker(RunnerRegistry(self.live, self, lambda: self.clock), self.release)

    def release(self, leases: Sequence[OpenLease], done: Callable[[dict[str, str], str], None]) -> None:
        self.asked.append(([lease.taken.lease for lease in leases], done))

    def look(self) -> None:
        self.fleet.record_orphans_of_turn()

    def ended(self) -> list[str]:
        """End the turn; the types of events that it wrote."""
        return [type(event).__name__ for event in self.turn()]

    def tell(self, what: Any, lease: str = "es-1", **more: Any) -> list[str]:
        return self.report(LeaseReport("runner-0", 1, 1, [change(what, lease, **more)]))

    def report(self, group: LeaseReport) -> list[str]:
        self.fleet.on_report(group, "runner-0")
        return self.ended()

    def fail(self) -> list[str]:
        self.live.record_batch(7, [ev.AttemptFailed(
            task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1, kind="workflow",
            message="", retry=True,
        )])
        return self.ended()

    def answer(self, **errors: str) -> list[str]:
        """The last process ends: with these errors, and none for the others."""
        keys, done = self.asked.pop()
        done({key: errors.get(key.replace("-", "_"), "") for key in keys}, "")
        return self.ended()

    def orphan(self, n: int) -> list[str]:
        """So many leases are taken, made and left; one process is asked to release them."""
        keys = [f"es-{i}" for i in range(n)]
        for what in ("taken", "held", "left"):
            self.report(LeaseReport("runner-0", 1, 1, [change(what, key, handle="box", reason="r") for key in keys]))
        return keys

    def tick(self, seconds: float) -> list[str]:
        self.clock += seconds
        self.timers.pop("leases")()
        return self.ended()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.close()


def test_the_end_of_an_attempt_and_the_orphaning_of_its_lease_are_one_transaction(place: Place) -> None:
    assert place.tell("taken") == ["LeaseTaken"]
    assert place.tell("held", handle="box") == ["LeaseHeld"]
    assert place.asked == []
    assert place.fail() == ["AttemptFailed", "LeaseOrphaned"]
    commits = [r.commit_id for r in place.log.read() if r.type in ("AttemptFailed", "LeaseOrphaned")]
    assert len(set(commits)) == 1
    assert [keys for keys, _ in place.asked] == [["es-1"]], "released when that was durable"
    assert place.answer() == ["LeaseReleased"]
    assert place.live.leases == {}
    assert place.timers == {} or place.tick(1) == []
    assert place.timers == {}, "nothing is looked at where nothing is open"


def test_a_lease_of_an_attempt_that_is_over_is_refused(place: Place) -> None:
    place.fail()
    assert place.tell("taken") == []
    assert place.sent[-1][1].refused == {"es-1": "this run is over and can't take a lease: its attempt is over"}


def test_the_end_of_a_runner_orphans_what_its_units_hold(place: Place) -> None:
    place.tell("taken")
    place.live.record(ev.RunnerRetired(runner="runner-0", incarnation=1))
    assert place.ended() == ["RunnerRetired", "LeaseOrphaned"]
    assert place.fleet.is_busy()


def test_a_release_that_fails_is_tried_again_after_pauses_that_double(place: Place) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.fail()
    recorded = []
    for pause in (1.0, 2.0, 4.0, 8.0):
        recorded += place.answer(es_1="out of order")
        assert not place.fleet.is_busy()
        place.tick(pause * 0.9)
        assert place.asked == [], "not yet"
        place.tick(pause * 0.2)
        assert len(place.asked) == 1
    assert recorded == ["LeaseReleaseFailed"] * 3, "the third try told nothing new"
    assert place.fleet.status()["first_failing"][0]["error"] == "out of order"
    assert place.answer() == ["LeaseReleased"]


def test_a_creation_without_an_end_is_released_twice(place: Place) -> None:
    place.tell("taken")
    place.fail()
    assert place.answer() == []
    assert place.tick(30) == []
    assert place.asked == []
    place.tick(31)
    assert place.answer() == ["LeaseReleased"]


def test_a_lease_that_is_not_renewed_is_released(place: Place) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.tick(90)
    place.tell("renewed")
    assert place.tick(20) == []
    assert place.tick(90) == ["LeaseOrphaned"]
    assert len(place.asked) == 1


def test_a_lease_in_use_outlives_an_outage_in_which_it_could_not_be_renewed(place: Place) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.clock += 500  # the coordinator is dead, and then the log can't be read
    place.fleet, place.timers = place.new_fleet(), {}
    place.turn()
    assert place.tick(500) == [], "no runner knows of this coordinator yet"
    place.fleet.begin()
    place.turn()
    assert place.tick(5) == []
    assert place.tell("renewed") == ["LeaseRenewed"]
    assert place.tick(90) == []
    place.fleet.forget()  # the log was away
    place.turn()
    assert place.tick(90) == []
    place.fleet.begin()
    place.turn()
    assert place.tick(29) == []
    assert place.tick(2) == ["LeaseOrphaned"], "nobody renewed it"


def test_a_release_that_proves_nothing_is_followed_by_another(place: Place) -> None:
    """It was begun while the thing was being made, without its handle; it ended when that was long over."""
    place.tell("taken")
    place.fail()
    place.tell("held", handle="late")
    place.clock += 61
    assert place.answer() == []
    assert len(place.asked) == 1, "tried again at once, with the handle"
    assert place.answer() == ["LeaseReleased"]


def test_what_is_sent_again_takes_no_lease_that_was_released(place: Place) -> None:
    """Its run was cancelled while it waited for the log, whose answer was lost."""
    reports = LeaseReports("runner-0", 1)
    types = []
    for what in ("taken", "left"):
        reports.put(change(what, reason="r"), Future())
        [group] = reports.next_groups(None, 0.0)
        types += place.report(group)
    place.clock += 61
    assert types + place.answer() + place.answer() == ["LeaseTaken", "LeaseOrphaned", "LeaseReleased"]
    again = reports.due(0.0, resend_all=True)
    assert len(again) == 2
    assert [place.report(group) for group in again] == [[], []]


def test_what_is_known_of_tries_is_forgotten_with_the_lease(place: Place) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.fail()
    place.answer(es_1="out of order")
    assert place.tell("released") == ["LeaseReleased"], "by its owner after all"
    assert (place.fleet._tries, place.fleet._due_at) == ({}, {})


def test_the_next_coordinator_finds_what_is_open_and_releases_what_is_nobody_s(place: Place, tmp_path: Path) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.tell("taken", lease="es-2")
    place.fail()
    before = dict(place.live.leases)
    assert [lease.state for lease in before.values()] == ["orphaned", "orphaned"]
    place.live = LiveState(place.log, place.payloads)
    assert place.live.leases == before
    place.fleet, place.asked, place.timers = place.new_fleet(), [], {}
    place.turn()
    place.tick(1)
    assert [keys for keys, _ in place.asked] == [["es-1", "es-2"]]


def test_a_provider_has_one_process_at_a_time(place: Place) -> None:
    for number in range(3):
        place.tell("taken", lease=f"es-{number}")
        place.tell("held", lease=f"es-{number}", handle="box")
    place.tell("left", lease="es-0", reason="r")
    place.tell("left", lease="es-1", reason="r")
    assert [keys for keys, _ in place.asked] == [["es-0"]]
    place.answer()
    assert [keys for keys, _ in place.asked] == [["es-1"]]


def test_one_that_ends_every_process_keeps_no_neighbour_for_long(place: Place) -> None:
    keys, processes, began = place.orphan(200), 0, place.clock
    bad = keys[70]
    while list(place.live.leases) != [bad]:
        assert processes < 40, f"{len(place.live.leases)} are left after {place.clock - began:g} s"
        if not place.asked:
            place.tick(1)
            continue
        given, done = place.asked.pop()
        assert len(given) == len(set(given))
        processes += 1
        done({} if bad in given else dict.fromkeys(given, ""), "it ended with status 9")
        place.turn()
    assert place.clock - began < 10


def test_those_that_a_provider_refused_stay_together(place: Place) -> None:
    """It was away, and answers again: nothing is wrong with them, and a process costs its start."""
    keys = place.orphan(20)
    for _ in range(2):
        given, done = place.asked.pop()
        assert given == keys
        done(dict.fromkeys(given, "ConnectionError: away"), "")
        place.turn()
        place.tick(4)


def test_a_new_lease_waits_only_for_those_that_were_due_before(place: Place) -> None:
    """However many there are that end each process, in the time of each of which the next is due again."""
    place.orphan(3)
    order: list[str] = []
    for number in range(30):
        if number == 20:
            place.tell("taken", lease="es-new")
            place.tell("held", lease="es-new", handle="box")
            place.tell("left", lease="es-new", reason="r")
        if not place.asked:
            place.tick(1)
        given, done = place.asked.pop()
        order += given
        place.clock += 400
        done({}, "it had not ended")
        place.turn()
    assert order.index("es-new") <= 3 + 20 + 3
    assert all(key in order[-8:] for key in ("es-0", "es-1", "es-2", "es-new"))


# --- the process that releases ----------------------------------------------------------------------------------------
def lease(folder: Path, key: str = "es-1", provider: str = PROVIDER, **args: Any) -> OpenLease:
    taken = ev.LeaseTaken(
        lease=key, batch_id=7, submission="s", unit=UNIT, run=0, runner="runner-0", incarnation=1, provider=provider,
        args={"folder": str(folder), **args}, ttl=10.0, expires=10.0, creation_timeout=5.0,
    )
    (folder / key).touch()
    return OpenLease(taken=taken, orphaned="r", expires=10.0)


def errors_of(leases: Sequence[OpenLease], **times: float) -> dict[str, str]:
    answers, trouble = lease_releases.release_in_process(leases, **times)
    return {e.taken.lease: answers.get(e.taken.lease, trouble) for e in leases}


@pytest.mark.parametrize("cls", ["Kept", "AsyncKept"])
def test_a_process_releases_with_the_class_that_the_log_names(tmp_path: Path, cls: str) -> None:
    leases = [lease(tmp_path, f"es-{i}", f"{PROVIDERS}:{cls}") for i in range(3)]
    assert errors_of(leases) == {"es-0": "", "es-1": "", "es-2": ""}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("cls", "how", "says"), [
    ("AsyncKept", "fails", "ConnectionError: out of order"),
    ("AsyncKept", "hangs", "had not ended after 1 s"),
    ("Gone", "", "has no Gone"),
    ("Half", "", "can't be built"),
])
def test_a_failing_release_is_told_and_costs_nothing_else(tmp_path: Path, cls: str, how: str, says: str) -> None:
    [error] = errors_of([lease(tmp_path, provider=f"{PROVIDERS}:{cls}", how=how)], seconds=1.0).values()
    assert says in error


def test_many_that_hang_keep_no_other(tmp_path: Path) -> None:
    """More than go on at the same time, and than there are threads for what asyncio is asked to do in one."""
    hang = [lease(tmp_path, f"es-{i}", how="hangs") for i in range(MAX_CONCURRENT + 1)]
    found = errors_of([*hang, lease(tmp_path, "es-good")], seconds=1.0)
    assert found.pop("es-good") == ""
    assert set(found.values()) == {"it had not ended after 1 s"}


def test_what_a_process_said_of_a_lease_is_told_apart_from_its_end(tmp_path: Path) -> None:
    fails, exits = lease(tmp_path, "es-1", how="fails"), lease(tmp_path, "es-2", how="exits")
    assert lease_releases.release_in_process([fails])[0] == {"es-1": "ConnectionError: out of order"}
    assert lease_releases.release_in_process([exits]) == ({}, "the process that was to release it ended with status 3")


def test_what_a_provider_started_ends_with_its_process(tmp_path: Path) -> None:
    [error] = errors_of(
        [lease(tmp_path, how="hangs with a child")], seconds=600.0, start_seconds=-597.0
    ).values()
    assert error == "the process that was to release it had not ended after 3 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: process_start_time(child) is None, "the provider's child to end")


@pytest.mark.timeout(60)
def test_what_goes_on_after_its_process_is_not_waited_for(tmp_path: Path) -> None:
    try:
        assert errors_of([lease(tmp_path, how="leaves a child")]) == {"es-1": ""}
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_no_key_stands_in_the_error_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_API_KEY", "quite-plain-words")
    [error] = errors_of([lease(tmp_path, how="says a key")]).values()
    assert error == "ConnectionError: 401: *** *** https://me:***@host/x"


def test_a_process_that_does_not_even_begin_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = tmp_path / "asleep"
    asleep.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    asleep.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(asleep))
    [error] = errors_of([lease(tmp_path)], seconds=0.5, start_seconds=0.5).values()
    assert error == "the process that was to release it had not ended after 1 s"


# --- the log ----------------------------------------------------------------------------------------------------------
def test_verify_knows_what_a_lease_can_be(place: Place, tmp_path: Path) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    with open_log(url) as log:
        assert log.verify() == []
        assert [e.as_dict()["state"] for e in log.leases()] == ["held"]
    [mine] = [lease.taken for lease in place.live.leases.values()]
    wrong: list[ev.Event] = [
        ev.LeaseHeld(lease="es-1", handle="another"),
        ev.LeaseReleased(lease="es-2", by="owner"),
        replace(mine, lease="es-3", unit=replace(UNIT, attempt=2)),
    ]
    with EventLog.open(url) as writer:
        version = place.live.versions["leases"]
        writer.append([Write(stream="leases", expected_version=version, events=wrong)], commit_id="w")
    with open_log(url) as log:
        problems = "\n".join(log.verify())
    assert "LeaseHeld): it can't follow what came before it: LeaseHeld does not fit lease es-1" in problems
    assert "LeaseReleased is of lease es-2, which no LeaseTaken" in problems
    assert "LeaseTaken): the attempt that took it was not running on that runner" in problems


def test_a_row_of_the_table_of_leases_that_was_changed_is_found(place: Place, tmp_path: Path) -> None:
    place.tell("taken")
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    for statement, says in (
        ("UPDATE rm_lease SET data = '{}'", "table rm_lease, row 'es-1': data is '{}'"),
        ("DELETE FROM rm_lease", "table rm_lease: its row 'es-1' is missing"),
        ("DROP TABLE rm_lease", "table rm_lease is missing"),
    ):
        with closing(sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)) as connection:
            connection.execute(statement)
        with open_log(url) as log:
            assert any(says in problem for problem in log.verify()), statement


def test_a_log_of_before_leases_has_no_table_of_them_and_is_sound(place: Place, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)) as connection:
        connection.execute("DROP TABLE rm_lease")
    with open_log(f"sqlite:///{tmp_path / 'log.sqlite'}") as log:
        assert log.verify() == []
        assert log.leases() == []
