"""Leases on a real log without processes: whose turn records what; and the process that releases, with providers of all
kinds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from trinity_es import Experience, Task, Workflow, open_log
from trinity_es.actors.coordinator.fleet import lease_releases
from trinity_es.actors.coordinator.fleet.leases import LeaseFleet
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.engines.interface import Engine, EngineConfig
from trinity_es.actors.messages import LeaseChange, LeaseReport
from trinity_es.actors.rollout.leases import Lease, RunLeases
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, StartupError, WorkflowError
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads import open_payloads
from trinity_es.projections.leases import OpenLease
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import ScriptedEngine, wait_until

UNIT = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
PROVIDER = f"{__name__}:Kept"


class Kept:
    """A provider that keeps what it made in a folder: a file for each, named by its key."""

    def __init__(self, folder: str, how: str = "") -> None:
        self.folder, self.how = Path(folder), how

    def create(self, key: str, ttl: float) -> str:
        (self.folder / key).touch()
        if self.how == "refuses":
            raise ConnectionError("no sandbox today")
        return {"secret": "hf_" + "a" * 24, "large": "x" * 10_000}.get(self.how, f"of {key}")

    def release(self, key: str, handle: str | None) -> None:
        print("released", key)  # noqa: T201  # a provider may
        match self.how:
            case "hangs":
                time.sleep(60)
            case "exits":
                os._exit(3)
            case "fails" | "refuses to end":
                raise ConnectionError("out of order")
        (self.folder / key).unlink(missing_ok=True)


class AsyncKept(Kept):
    """The same, to be awaited."""

    async def create(self, key: str, ttl: float) -> str:  # type: ignore[override]  # either is a provider
        if self.how == "slow":
            await asyncio.sleep(60)
        return super().create(key, ttl)

    async def release(self, key: str, handle: str | None) -> None:  # type: ignore[override]
        if self.how == "hangs":
            await asyncio.sleep(60)
        super().release(key, handle)


class Half:
    """No provider."""

    def create(self, key: str, ttl: float) -> str:
        return key


# --- the coordinator's side -------------------------------------------------------------------------------------------
class Place:
    """A live state with one attempt on one runner, and what is around it. A turn is written when it ends."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'log.sqlite'}"
        self.log = EventLog.open(url, create=True, durability="process", projectors=projectors())
        self.time, self.commits = 1000.0, 0
        self.timers: dict[str, Callable[[], None]] = {}
        self.sent: list[Any] = []
        self.asked: list[tuple[list[str], Callable[[dict[str, str]], None]]] = []
        self.live = LiveState(self.log, open_payloads(url))
        self.fleet = self.new_fleet()
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

    def new_fleet(self) -> LeaseFleet:
        return LeaseFleet(RunnerRegistry(self.live, self, lambda: self.time), self, self)

    def now(self) -> float:
        return self.time

    def send(self, to: Any, message: Any) -> None:
        self.sent.append(message)

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None:
        self.timers[name] = call

    def cancel(self, name: str) -> None:
        self.timers.pop(name, None)

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def start(self, leases: Sequence[OpenLease], done: Callable[[dict[str, str]], None]) -> None:
        self.asked.append(([lease.taken.lease for lease in leases], done))

    def turn(self) -> list[str]:
        """End the turn; the types of events that it wrote."""
        self.fleet.look()
        turn = self.live.close_turn()
        if turn.writes:
            self.commits += 1
            self.log.append(turn.writes, commit_id=str(self.commits))
        for call in turn.then:
            call()
        more = self.turn() if self.live.turn.writes or self.live.turn.then else []
        return [type(e).__name__ for w in turn.writes for e in w.events] + more

    def tell(self, what: Any, lease: str = "es-1", **more: Any) -> list[str]:
        change = LeaseChange(
            lease=lease, what=what, batch_id=7, submission="s", unit=UNIT, run=0, provider=PROVIDER, ttl=100.0,
            creation_timeout=60.0, **more,
        )
        self.fleet.on_report(LeaseReport("runner-0", 1, 1, [change]), "runner-0")
        return self.turn()

    def fail(self) -> list[str]:
        self.live.record_batch(7, [ev.AttemptFailed(
            task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1, kind="workflow",
            message="", retry=True,
        )])
        return self.turn()

    def answer(self, **errors: str) -> list[str]:
        """The last process ends: with these errors, and none for the others."""
        keys, done = self.asked.pop()
        done({key: errors.get(key.replace("-", "_"), "") for key in keys})
        return self.turn()

    def tick(self, seconds: float) -> list[str]:
        self.time += seconds
        self.timers.pop("leases")()
        return self.turn()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.log.close()


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
    assert place.sent[-1].refused == {"es-1": "no lease for a run that is over: its attempt is over"}


def test_the_end_of_a_runner_orphans_what_its_units_hold(place: Place) -> None:
    place.tell("taken")
    place.live.record(ev.RunnerRetired(runner="runner-0", incarnation=1))
    assert place.turn() == ["RunnerRetired", "LeaseOrphaned"]
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


def test_the_next_coordinator_finds_what_is_open_and_releases_what_is_nobody_s(place: Place, tmp_path: Path) -> None:
    place.tell("taken")
    place.tell("held", handle="box")
    place.tell("taken", lease="es-2")
    place.fail()
    before = dict(place.live.leases)
    assert [lease.state for lease in before.values()] == ["orphaned", "orphaned"]
    place.live = LiveState(place.log, place.live.payloads)
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


# --- the process that releases ----------------------------------------------------------------------------------------
def lease(folder: Path, key: str = "es-1", provider: str = PROVIDER, **args: Any) -> OpenLease:
    taken = ev.LeaseTaken(
        lease=key, batch_id=7, submission="s", unit=UNIT, run=0, runner="runner-0", incarnation=1, provider=provider,
        args={"folder": str(folder), **args}, ttl=10.0, expires=10.0, creation_timeout=5.0,
    )
    (folder / key).touch()
    return OpenLease(taken=taken, orphaned="r", expires=10.0)


@pytest.mark.parametrize("cls", ["Kept", "AsyncKept"])
def test_a_process_releases_with_the_class_that_the_log_names(tmp_path: Path, cls: str) -> None:
    leases = [lease(tmp_path, f"es-{i}", f"{__name__}:{cls}") for i in range(3)]
    assert lease_releases.released(leases) == {"es-0": "", "es-1": "", "es-2": ""}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("cls", "how", "says"), [
    ("Kept", "fails", "ConnectionError: out of order"),
    ("AsyncKept", "fails", "ConnectionError: out of order"),
    ("Kept", "hangs", "had not ended after 1 s"),
    ("AsyncKept", "hangs", "had not ended after 1 s"),
    ("Kept", "exits", "ended with status 3"),
    ("Gone", "", "can't be imported"),
    ("Half", "", "can't be built"),
])
def test_a_provider_that_does_not_release_is_told_and_costs_nothing_else(
    tmp_path: Path, cls: str, how: str, says: str
) -> None:
    [error] = lease_releases.released([lease(tmp_path, provider=f"{__name__}:{cls}", how=how)], seconds=1.0).values()
    assert says in error


def test_one_that_hangs_keeps_no_other(tmp_path: Path) -> None:
    hangs, ends = lease(tmp_path, "es-1", how="hangs"), lease(tmp_path, "es-2")
    found = lease_releases.released([hangs, ends], seconds=1.0)
    assert found == {"es-1": "it had not ended after 1 s", "es-2": ""}


def test_a_process_that_does_not_even_begin_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = tmp_path / "asleep"
    asleep.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    asleep.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(asleep))
    [error] = lease_releases.released([lease(tmp_path)], seconds=0.5, more_seconds=0.5).values()
    assert error == "the process that was to release it had not ended after 1 s"


# --- the run's side ---------------------------------------------------------------------------------------------------
class Told:
    """A recorder; what is taken is in the log at once, or (`late`) when the test says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.late = False
        self.waiting: list[Future[None]] = []

    def report(self, *, lease: str, what: Any, run: int, **more: Any) -> Future[None]:
        self.said.append(what)
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if self.late and what == "taken":
            self.waiting.append(done)
        else:
            done.set_result(None)
        return done


def test_nothing_is_made_before_its_lease_is_in_the_log(tmp_path: Path) -> None:
    async def work() -> None:
        told = Told()
        told.late = True
        entering = asyncio.ensure_future(Lease(RunLeases(told), PROVIDER, {"folder": str(tmp_path)}).__aenter__())
        while not told.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert list(tmp_path.iterdir()) == []
        told.waiting[0].set_result(None)
        held = await entering
        assert [p.name for p in tmp_path.iterdir()] == [held.key]
        assert held.handle == f"of {held.key}"
        await held.__aexit__()
        assert list(tmp_path.iterdir()) == []
        assert told.said == ["taken", "held", "released"]

    asyncio.run(work())


def test_nothing_is_made_when_nobody_would_look_for_it_any_more(tmp_path: Path) -> None:
    """The coordinator was away for longer than the creation may take."""
    told = Told()
    told.late = True
    wanted = Lease(RunLeases(told), PROVIDER, {"folder": str(tmp_path)}, creation_timeout=0.05)
    with ThreadPoolExecutor(1) as thread:
        entering = thread.submit(wanted.__enter__)
        wait_until(lambda: told.waiting, "it to be taken")
        time.sleep(0.1)
        told.waiting[0].set_result(None)
        with pytest.raises(StartupError, match="creation_timeout"):
            entering.result(10)
    assert told.said == ["taken", "left"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("cls", "how", "error", "says"), [
    ("Kept", "refuses", ConnectionError, "no sandbox today"),
    ("AsyncKept", "refuses", ConnectionError, "no sandbox today"),
    ("AsyncKept", "secret", WorkflowError, "looks like a secret"),
    ("AsyncKept", "large", WorkflowError, "8,192 are the most"),
    ("AsyncKept", "slow", StartupError, r"nothing within 0.2 s \(creation_timeout\)"),
])
def test_what_can_not_be_made_is_left_to_be_looked_for(
    tmp_path: Path, cls: str, how: str, error: type[Exception], says: str
) -> None:
    told = Told()
    wanted = Lease(
        RunLeases(told), f"{__name__}:{cls}", {"folder": str(tmp_path), "how": how}, creation_timeout=0.2
    )

    async def work() -> None:
        with pytest.raises(error, match=says):
            async with wanted:
                pass

    asyncio.run(work())
    assert told.said == ["taken", "left"]


class FarAway(RunLeases):
    """The leases of a run in a worker process: what is told is there a moment later, or never where nobody waits."""

    def report(self, lease: str, what: str, **more: Any) -> Future[None]:
        done: Future[None] = Future()
        threading.Timer(0.1, lambda: done.set_result(super(FarAway, self).report(lease, what, **more).result())).start()
        return done


@pytest.mark.parametrize("how", ["async with", "with"])
@pytest.mark.parametrize("trouble", ["refuses", "fails"])
def test_what_is_left_was_heard_before_its_run_goes_on_to_its_end(tmp_path: Path, how: str, trouble: str) -> None:
    told = Told()
    wanted = Lease(FarAway(told), f"{__name__}:Kept", {"folder": str(tmp_path), "how": trouble})

    async def use() -> None:
        async with wanted:
            pass

    with contextlib.suppress(ConnectionError):
        if how == "async with":
            asyncio.run(use())
        else:
            with wanted:
                pass
    assert told.said[-1] == "left"


def test_a_run_that_ends_leaves_what_it_did_not_release_and_takes_no_more(tmp_path: Path) -> None:
    told = Told()
    run = RunLeases(told)

    async def work() -> None:
        await Lease(run, PROVIDER, {"folder": str(tmp_path)}).__aenter__()
        run.close()
        assert told.said == ["taken", "held", "left"]
        with pytest.raises(WorkflowError, match="it can take no lease"):
            await Lease(run, PROVIDER, {"folder": str(tmp_path)}).__aenter__()

    asyncio.run(work())
    assert len(list(tmp_path.iterdir())) == 1, "nothing was made for it"


@pytest.mark.parametrize(("provider", "args", "says"), [
    (f"{__name__}:Gone", {}, "can't be imported"),
    (f"{__name__}:Half", {}, "has no release"),
    (PROVIDER, {}, "can't be built"),
])
def test_a_class_that_is_no_provider_takes_no_lease(provider: str, args: dict[str, Any], says: str) -> None:
    told = Told()
    with pytest.raises(ConfigError, match=says), Lease(RunLeases(told), provider, args):
        pass
    assert told.said == []


@pytest.mark.parametrize(("ttl", "creation_timeout"), [(1.0, 1.0), (60.0, 61.0), (60.0, 0.0), (float("nan"), 1.0)])
def test_times_that_can_not_be_are_refused(ttl: float, creation_timeout: float) -> None:
    with pytest.raises(WorkflowError, match="creation_timeout"):
        Lease(RunLeases(), PROVIDER, ttl=ttl, creation_timeout=creation_timeout)


def test_with_stops_no_loop(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(WorkflowError, match="use `async with`"):
            Lease(RunLeases(), PROVIDER, {"folder": str(tmp_path)}).__enter__()

    asyncio.run(work())


class Alone(Workflow):
    """Takes two at once, and notes what was there meanwhile."""

    def run(self) -> list[Experience]:
        folder = self.task.workflow_args["folder"]
        with self.lease(PROVIDER, {"folder": folder}), self.lease(f"{__name__}:AsyncKept", {"folder": folder}):
            there = len(list(Path(folder).iterdir()))
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0, metrics={"there": there})]


def test_without_a_system_the_same_workflow_plays(tmp_path: Path) -> None:
    async def work() -> None:
        engine = ScriptedEngine(EngineConfig(model_path=""))
        await engine.start()
        task = Task(workflow=Alone, workflow_args={"folder": str(tmp_path)}, batch_id=1, task_id=0)
        status, experiences = await WorkflowRunner(cast(Engine, engine)).run_task(task, 1)
        assert status.ok, status.message
        assert experiences[0].metrics is not None
        assert experiences[0].metrics["there"] == 2

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


# --- the log ----------------------------------------------------------------------------------------------------------
def test_verify_knows_what_a_lease_can_be(place: Place, tmp_path: Path) -> None:
    """What a coordinator that broke the rules would have written is found."""
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
    assert "LeaseHeld): it can't follow what came before it: LeaseHeld of lease es-1, which is held" in problems
    assert "LeaseReleased of lease es-2, which is not taken" in problems
    assert "LeaseTaken): the attempt that took it was not with its runner" in problems


def test_a_row_of_the_table_of_leases_that_was_changed_is_found(place: Place, tmp_path: Path) -> None:
    place.tell("taken")
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    for statement, says in (
        ("UPDATE rm_lease SET data = '{}'", "table rm_lease, row 'es-1': data is '{}'"),
        ("DELETE FROM rm_lease", "table rm_lease: its row 'es-1' is missing"),
        ("DROP TABLE rm_lease", "table rm_lease lacks altogether"),
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
