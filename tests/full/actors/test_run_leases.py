"""Leases on the run's side: what it tells and when, with providers of all kinds; no actor, no log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.endpoint import until
from tests.helpers.lease_providers import ASKED, LATE, RELEASED
from trinity_es import Experience, Task, Workflow
from trinity_es.actors.engines.interface import Engine, EngineConfig
from trinity_es.actors.message_sizes import ERROR_LENGTH
from trinity_es.actors.messages import LeaseChange, UnitAssignment
from trinity_es.actors.rollout import leases
from trinity_es.actors.rollout.leases import Lease, RunLeases
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.actors.runner.lease_reports import LeaseReports, UnitLeases
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, StartupError, WorkflowError
from trinity_es.events.secrets import SecretFile
from trinity_es.testing import ScriptedEngine, wait_until

PROVIDERS = "tests.helpers.lease_providers"
PROVIDER = f"{PROVIDERS}:Kept"


class Told:
    """A recorder; what is taken is in the log at once, or (`late`) when the test says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.late = False
        self.waiting: list[Future[Any]] = []
        self.earlier: list[str] = []
        """Handles of what lost attempts hold."""

    def report(self, *, lease: str, what: Any, run: int, **more: Any) -> Future[Any]:
        self.said.append(what)
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        if self.late and what == "taken":
            self.waiting.append(done)
        else:
            done.set_result(self.earlier.pop() if what == "taken" and self.earlier else None)
        return done


def lease(told: Told, folder: Path, cls: str = "Kept", how: str = "", **times: float) -> Lease:
    args = {"folder": str(folder), "how": how} if how else {"folder": str(folder)}
    return Lease(RunLeases(told), f"{PROVIDERS}:{cls}", args, **times)


@pytest.mark.parametrize("provider", ["HandedOver", "AsyncHandedOver"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_lost_attempt_held_is_taken_over_or_left(tmp_path: Path, provider: str, is_async: bool) -> None:
    (tmp_path / "box").write_text("es-old")

    def taken(told: Told, **args: Any) -> Lease:
        told.earlier = ["box"]
        args["folder"] = str(tmp_path)
        return Lease(RunLeases(told), f"{PROVIDERS}:{provider}", args, creation_timeout=0.5)

    async def entered(lease: Lease) -> Lease:
        return await lease.__aenter__() if is_async else await asyncio.to_thread(lease.__enter__)

    async def left(lease: Lease) -> None:
        await (lease.__aexit__() if is_async else asyncio.to_thread(lease.__exit__))

    for how in ["can't attach", *["hangs"] * (provider == "AsyncHandedOver")]:
        told = Told()
        first_key = (wanted := taken(told, how=how)).key
        held = await entered(wanted)
        assert held.key != first_key, "what is made has its own key"
        assert (held.attached, held.handle) == (False, held.key)
        await left(held)
        assert told.said == ["taken", "left", "taken", "held", "released"]
        assert (tmp_path / "box").read_text() == "es-old"
    held = await entered(taken(told := Told()))
    assert (held.attached, held.handle, (tmp_path / "box").read_text()) == (True, "box", held.key)
    await left(held)
    assert told.said == ["taken", "held", "released"]
    assert (tmp_path / "box.released").exists()


async def test_nothing_is_made_before_its_lease_is_in_the_log(tmp_path: Path) -> None:
    told = Told()
    told.late = True
    entering = asyncio.ensure_future(lease(told, tmp_path).__aenter__())
    await until(lambda: told.waiting, "it to ask")
    await asyncio.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    told.waiting[0].set_result(None)
    held = await entering
    assert [p.name for p in tmp_path.iterdir()] == [held.key]
    assert held.handle == f"of {held.key}"
    await held.__aexit__()
    assert list(tmp_path.iterdir()) == []
    assert told.said == ["taken", "held", "released"]


def test_nothing_is_made_when_nobody_would_look_for_it_any_more(tmp_path: Path) -> None:
    """The coordinator was away for longer than the creation may take."""
    told = Told()
    told.late = True
    wanted = lease(told, tmp_path, creation_timeout=0.05)
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
    ("AsyncKept", "large", WorkflowError, "the maximum is 8,192"),
    ("AsyncKept", "slow", StartupError, r"nothing within 0.2 s \(creation_timeout\)"),
    ("AsyncKept", "times out", TimeoutError, "its own"),
    ("Kept", "times out", TimeoutError, "its own"),
])
@pytest.mark.parametrize("by", ["async with", "with"])
@pytest.mark.timeout(30)
def test_what_can_not_be_made_is_left_to_be_looked_for(
    tmp_path: Path, by: str, cls: str, how: str, error: type[Exception], says: str
) -> None:
    told = Told()
    wanted = lease(told, tmp_path, cls, how, creation_timeout=0.2)
    with pytest.raises(error, match=says):
        enter(wanted, by)
    assert told.said == ["taken", "left"]


def enter(wanted: Lease, by: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    async def use() -> None:
        async with wanted:
            await asyncio.to_thread(meanwhile)

    if by == "async with":
        asyncio.run(use())
    else:
        with wanted:
            meanwhile()


@pytest.mark.parametrize(("by", "cls", "how"), [
    ("with", "Kept", "takes its time"), ("with", "AsyncKept", "is not stopped"),
    ("async with", "AsyncKept", "is not stopped"),
])
@pytest.mark.timeout(30)
def test_what_is_made_too_late_is_released_by_its_handle(tmp_path: Path, by: str, cls: str, how: str) -> None:
    """`create` can't be stopped in its thread, and need not end when it is cancelled."""
    told = Told()
    wanted = lease(told, tmp_path, cls, how, creation_timeout=0.2)
    with pytest.raises(StartupError, match="creation_timeout"):
        enter(wanted, by)
    assert (wanted.key, f"of {wanted.key}") in RELEASED
    assert told.said == ["taken", "left"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", ["its time is over", "its run is cancelled"])
@pytest.mark.timeout(60)
def test_what_a_thread_makes_when_nobody_waits_any_more_is_released_by_its_handle(tmp_path: Path, why: str) -> None:
    told = Told()
    wanted = lease(told, tmp_path, how="late", creation_timeout=0.2 if why == "its time is over" else 60.0)
    LATE.clear()

    async def work() -> None:
        entering = asyncio.ensure_future(wanted.__aenter__())
        if why == "its run is cancelled":
            await until(lambda: wanted.key in ASKED, "its provider to be asked")
            entering.cancel()
        with pytest.raises((StartupError, asyncio.CancelledError)):
            await entering
        LATE.set()

    asyncio.run(work())
    wait_until(lambda: (wanted.key, f"of {wanted.key}") in RELEASED, "what was made to be released")
    assert told.said == ["taken", "left"]
    assert list(tmp_path.iterdir()) == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lease"]


@pytest.mark.parametrize("by", ["with", "async with"])
def test_what_create_connected_serves_the_rest(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWALS", 500)
    told = Told()
    wanted = lease(told, tmp_path, "Connected", ttl=5.0, creation_timeout=5.0)

    enter(wanted, by, lambda: wait_until(lambda: told.said.count("renewed") >= 2, "two renewals", 10))
    assert told.said[-1] == "released", "not left"
    assert threads() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(30)
def test_a_renewal_that_goes_on_keeps_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "RENEWALS", 500)
    told = Told()
    with lease(told, tmp_path, "Connected", "renews for long", ttl=5.0, creation_timeout=5.0) as held:
        wait_until(lambda: ASKED.count(held.key) == 2, "a renewal to begin")
    assert told.said == ["taken", "held", "released"]
    assert threads() == []
    assert caplog.messages == []


@pytest.mark.timeout(30)
def test_a_provider_that_ends_the_process_ends_it_where_it_is_called(tmp_path: Path) -> None:
    told = Told()
    with pytest.raises(SystemExit), lease(told, tmp_path, "Connected", "ends the process"):
        pass
    assert told.said == ["taken", "left"]
    assert threads() == []


@pytest.mark.timeout(30)
def test_a_workflow_that_is_interrupted_while_it_waits_gives_up(tmp_path: Path) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    told = Told()
    wanted = lease(told, tmp_path, "Connected", "waits")

    def when_it_waits() -> None:
        wait_until(lambda: wanted.key in ASKED, "it to be made")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(when_it_waits)
            with pytest.raises(Interrupted), wanted:
                pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told.said == ["taken", "left"]
    assert threads() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(30)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 of any fork beside a thread
def test_a_process_that_a_workflow_forked_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    with Lease(RunLeases(), f"{PROVIDERS}:AsyncKept", {"folder": str(tmp_path)}) as held:
        if (child := os.fork()) == 0:
            try:
                held.__exit__()
                os._exit(7)
            finally:
                os._exit(1)
        ended = threading.Timer(10, os.kill, (child, signal.SIGKILL))
        ended.start()
        _, status = os.waitpid(child, 0)
        ended.cancel()
        assert os.waitstatus_to_exitcode(status) == 7
    assert threads() == []


class Refused(RunLeases):
    """The leases of a run in a worker process, whose runner finds a secret of its task in each handle."""

    def report(self, lease: str, what: str, **more: Any) -> Future[None]:
        done = super().report(lease, what, **more)
        if what == "held":
            done = Future()
            done.set_exception(WorkflowError("it holds a secret of a task"))
        return done


@pytest.mark.parametrize("by", ["async with", "with"])
@pytest.mark.parametrize("cls", ["Kept", "AsyncKept"])
def test_a_handle_that_must_not_be_told_is_an_error_where_it_is_made(tmp_path: Path, by: str, cls: str) -> None:
    told = Told()
    with pytest.raises(WorkflowError, match="holds a secret"):
        enter(Lease(Refused(told), f"{PROVIDERS}:{cls}", {"folder": str(tmp_path)}), by)
    assert told.said[-1] == "left"


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
    wanted = Lease(FarAway(told), f"{PROVIDERS}:Kept", {"folder": str(tmp_path), "how": trouble})

    with contextlib.suppress(ConnectionError):
        enter(wanted, how)
    assert told.said[-1] == "left"


async def test_a_run_that_ends_leaves_what_it_did_not_release_and_takes_no_more(tmp_path: Path) -> None:
    told = Told()
    run = RunLeases(told)
    await Lease(run, PROVIDER, {"folder": str(tmp_path)}).__aenter__()
    run.close()
    assert told.said == ["taken", "held", "left"]
    with pytest.raises(WorkflowError, match="the run is over and can't take a lease"):
        await Lease(run, PROVIDER, {"folder": str(tmp_path)}).__aenter__()
    assert len(list(tmp_path.iterdir())) == 1, "nothing was made for it"


@pytest.mark.parametrize(("provider", "args", "says"), [
    (f"{PROVIDERS}:Gone", {}, "has no Gone"),
    (f"{PROVIDERS}:Half", {}, "has no release"),
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


async def test_with_stops_no_loop(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="use `async with`"):
        Lease(RunLeases(), PROVIDER, {"folder": str(tmp_path)}).__enter__()


class Alone(Workflow):
    """Takes two at once, and notes what was there meanwhile."""

    def run(self) -> list[Experience]:
        folder = self.task.workflow_args["folder"]
        with self.lease(PROVIDER, {"folder": folder}), self.lease(f"{PROVIDERS}:AsyncKept", {"folder": folder}):
            there = len(list(Path(folder).iterdir()))
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0, metrics={"there": there})]


async def test_without_a_system_the_same_workflow_plays(tmp_path: Path) -> None:
    engine = ScriptedEngine(EngineConfig(model_path=""))
    await engine.start()
    task = Task(workflow=Alone, workflow_args={"folder": str(tmp_path)}, batch_id=1, task_id=0)
    status, experiences = await WorkflowRunner(cast(Engine, engine)).run_task(task, 1)
    assert status.ok, status.message
    assert experiences[0].metrics["there"] == 2
    assert list(tmp_path.iterdir()) == []


# --- on the way to the coordinator ------------------------------------------------------------------------------------
class Owner:
    """A runner, as far as it takes what its runs tell."""

    def __init__(self) -> None:
        self.leases = LeaseReports("runner-0", 1)

    def lease_changed(self, change: LeaseChange, recorded: Future[None]) -> None:
        self.leases.put(change, recorded)

    def sent(self) -> list[LeaseChange]:
        return [change for group in self.leases.next_groups(None, 0.0) for change in group.changes]


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def unit(owner: Owner, tmp_path: Path) -> UnitLeases:
    """Of a task with a secret."""
    secrets = SecretFile(tmp_path)
    assert secrets.reveal(secrets.hide({"api_key": SECRET})) == {"api_key": SECRET}
    item = UnitAssignment(7, "s", ev.Unit(task=0, run_id_base=0, runs=1, attempt=1), None)
    return UnitLeases(owner.lease_changed, item, secrets)


SECRET = "quite plain \"words\""


def test_no_text_of_a_provider_keeps_what_others_tell(owner: Owner, unit: UnitLeases) -> None:
    """A file's name in it need not be UTF-8, and a library may say a lot."""
    unit.report(lease="es-1", what="left", run=0, reason="no file \udcff " + "x" * 100_000)
    unit.report(lease="es-2", what="held", run=0, handle="box")
    left, held = owner.sent()
    assert left.reason.startswith("no file ? xxx")
    assert len(left.reason) == ERROR_LENGTH
    assert held.handle == "box"


def test_no_secret_of_a_task_is_told(owner: Owner, unit: UnitLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_API_KEY", "plainer-words")
    for what, more in (("taken", {"args": {"deep": [f"it is {SECRET}"]}}), ("held", {"handle": {SECRET: 1}})):
        with pytest.raises(WorkflowError, match="secret of a task"):
            unit.report(lease="es-1", what=what, run=0, **more)
    unit.report(lease="es-1", what="left", run=0, reason=f"401: {SECRET}, plainer-words")
    assert [(c.what, c.reason) for c in owner.sent()] == [("left", "401: ***, ***")]


def test_what_could_not_be_sent_is_refused_where_it_is_told(owner: Owner, unit: UnitLeases) -> None:
    for handle in (object(), "x" * 10_000, "\udcff"):
        with pytest.raises(WorkflowError, match="handle"):
            unit.report(lease="es-1", what="held", run=0, handle=handle)
    assert owner.sent() == []
