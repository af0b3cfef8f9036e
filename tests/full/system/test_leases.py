"""What a run holds open outside of the system is a lease in the log, and is released however the run ends (J3)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import trinity_es
from benchmarks.chaos_faults import by_kind, kill
from benchmarks.chaos_hosts_trainer import repeat_until_answered
from tests.helpers.handmade import cli
from tests.helpers.parity_rows import NewId
from tests.helpers.sandboxes import AsyncUses, Service, Uses
from tests.helpers.systems import StartSystem, events, kill_system, pid_of, play_batch, scripted
from trinity_es import Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.client.teardown import end_system
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AlreadyRunning, StartupError
from trinity_es.system import lifecycle, running_system
from trinity_es.testing import wait_until

_log = logging.getLogger(__name__)
KILLS = int(os.environ.get("TRINITY_ES_LEASE_KILLS", "5"))
SEED = int(os.environ.get("TRINITY_ES_LEASE_SEED", "1"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    one = Service(tmp_path / "service", SEED)
    yield one
    one.stop()


def uses(service: Service, seconds: float, cls: type[Workflow] = Uses, **args: Any) -> Task:
    return Task(workflow=cls, workflow_args={"url": service.url, "seconds": seconds, **args})


@pytest.fixture
def system(system_for: StartSystem) -> RolloutClient:
    """One for all tests that leave its processes alive."""
    return system_for(explorer={"max_retry_times": 1})


def of_batch(client: RolloutClient, batch: int, *kinds: type[ev.Event]) -> list[Any]:
    found = [r.event for r in client.log.read(stream="leases")]
    leases = {event.lease for event in found if isinstance(event, ev.LeaseTaken) and event.batch_id == batch}
    return [event for event in found if event.lease in leases and isinstance(event, kinds or ev.Event)]  # type: ignore[attr-defined]  # all of this stream have one


def holds(service: Service, n: int = 1) -> list[dict[str, Any]]:
    wait_until(lambda: len([b for b in service.alive() if b["users"]]) >= n, f"{n} sandboxes to be used", 120)
    return service.alive()


def all_released(client: RolloutClient, service: Service, seconds: float = 60) -> None:
    wait_until(lambda: client.log.leases() == [], "every lease to be released, by the log", seconds)
    assert service.alive() == []


@pytest.mark.parametrize("cls", [Uses, AsyncUses])
def test_a_run_takes_and_releases(system: RolloutClient, new_id: NewId, service: Service, cls: type[Workflow]) -> None:
    batch = new_id()
    play_batch(system, batch, [uses(service, 0.2, cls)])
    assert system.batch(batch).statuses[0].ok, system.batch(batch).statuses[0].message
    taken, held, released = of_batch(system, batch)
    assert [type(e) for e in (taken, held, released)] == [ev.LeaseTaken, ev.LeaseHeld, ev.LeaseReleased]
    assert (taken.batch_id, taken.unit.task, taken.unit.attempt, taken.run) == (batch, 0, 1, 0)
    [box] = service.boxes()
    assert (box["key"], box["handle"]) == (taken.lease, held.handle)
    assert released.by == "owner"
    assert box["ended"] is not None
    assert system.log.verify() == []


def test_runs_that_share_an_attempt_have_each_their_own(system: RolloutClient, new_id: NewId, service: Service) -> None:
    batch, task = new_id(), uses(service, 0.2)
    task.repeat_times = 3
    play_batch(system, batch, [task])
    assert sorted(e.run for e in of_batch(system, batch, ev.LeaseTaken)) == [0, 1, 2]
    assert [len(box["users"]) for box in service.boxes()] == [1, 1, 1]
    assert len(of_batch(system, batch, ev.LeaseReleased)) == 3


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_run_that_fails_leaves_nothing(system: RolloutClient, new_id: NewId, service: Service, how: str) -> None:
    """An error releases on its way out; of a process that ended the coordinator releases it."""
    batch = new_id()
    play_batch(system, batch, [uses(service, 5.0, how=how)])
    all_released(system, service)
    assert [len(box["users"]) for box in service.boxes()] == [1, 1], "each attempt had its own"
    by = "owner" if how == "raise" else "coordinator"
    assert [e.by for e in of_batch(system, batch, ev.LeaseReleased)] == [by, by]
    assert system.log.verify() == []


@pytest.mark.parametrize("cls", [Uses, AsyncUses])
def test_a_run_that_takes_too_long_leaves_nothing(
    system_for: StartSystem, new_id: NewId, service: Service, cls: type[Workflow]
) -> None:
    client, batch = system_for(explorer={"max_retry_times": 0, "max_timeout": 2.5}), new_id()
    play_batch(client, batch, [uses(service, 60.0, cls)])
    all_released(client, service)
    assert len(service.boxes()) == 1


def test_a_batch_that_is_given_up_leaves_nothing(system: RolloutClient, new_id: NewId, service: Service) -> None:
    batch = new_id()
    system.submit_batch(batch_id=batch, tasks=[uses(service, 60.0), uses(service, 60.0, AsyncUses)], batch_type="train")
    holds(service, 2)
    system.abort_batch(batch, reason="not wanted")
    all_released(system, service)
    assert system.log.verify() == []


def test_what_a_killed_runner_held_is_released_and_the_next_attempt_has_its_own(
    system: RolloutClient, new_id: NewId, service: Service
) -> None:
    batch = new_id()
    system.submit_batch(batch_id=batch, tasks=[uses(service, 3.0), uses(service, 3.0, AsyncUses)], batch_type="train")
    first = {box["handle"] for box in holds(service, 2)}
    os.kill(pid_of(system, "runner-0"), signal.SIGKILL)
    assert system.finalize_train_batch(batch, timeout=60)["finished_task_count"] == 2
    assert all(s.ok for s in system.batch(batch).statuses.values())
    all_released(system, service)
    boxes = service.boxes()
    assert len(boxes) == 4
    assert all(len(box["users"]) == 1 for box in boxes)
    orphaned = {e.lease for e in of_batch(system, batch, ev.LeaseOrphaned)}
    assert orphaned == {box["key"] for box in boxes if box["handle"] in first}
    ended = {r.commit_id for r in system.log.events(batch) if r.type == "AttemptFailed"}
    let_go = [r for r in system.log.read(types=["LeaseOrphaned"]) if r.event.lease in orphaned]  # type: ignore[attr-defined]  # a LeaseOrphaned
    assert {r.commit_id for r in let_go} <= ended, "one transaction with what ended their attempts"


def test_a_killed_coordinator_costs_no_lease(system: RolloutClient, new_id: NewId, service: Service) -> None:
    batch = new_id()
    system.submit_batch(batch_id=batch, tasks=[uses(service, 3.0)], batch_type="train")
    holds(service)
    os.kill(pid_of(system, "coordinator"), signal.SIGKILL)
    assert system.finalize_train_batch(batch, timeout=60)["finished_task_count"] == 1
    assert [type(e) for e in of_batch(system, batch)] == [ev.LeaseTaken, ev.LeaseHeld, ev.LeaseReleased]
    assert [e.by for e in of_batch(system, batch, ev.LeaseReleased)] == ["owner"]


def test_when_everything_died_what_it_held_is_released_by_the_next_system(
    start_system: StartSystem, service: Service
) -> None:
    client = start_system()
    client.submit_batch(batch_id=1, tasks=[uses(service, 600.0), uses(service, 600.0, AsyncUses)], batch_type="train")
    held = {box["handle"] for box in holds(service, 2)}
    kill_system(client)
    assert {box["handle"] for box in service.alive()} == held
    again = start_system()
    wait_until(lambda: not held & {box["handle"] for box in service.alive()}, "the sandboxes of the dead to end", 30)
    again.abort_batch(1, reason="enough")
    all_released(again, service)


def test_a_copy_of_a_run_that_is_up_releases_nothing_that_the_run_holds(
    system: RolloutClient, new_id: NewId, service: Service, tmp_path: Path
) -> None:
    batch = new_id()
    system.submit_batch(batch_id=batch, tasks=[uses(service, 600.0)], batch_type="train")
    held = [box["handle"] for box in holds(service)]
    shutil.copytree(system.config.code_path, tmp_path / "copy")
    copy = scripted(tmp_path / "copy")
    with trinity_es.running(copy) as client:
        wait_until(lambda: len(service.alive()) == 2, "the copy's own attempt to have a sandbox", 60)
        client.abort_batch(batch, reason="enough")
        wait_until(lambda: client.log.leases() == [], "every lease of the copy to be released, by its log")
        assert [box["handle"] for box in service.alive()] == held
    system.abort_batch(batch, reason="enough")
    all_released(system, service)


def test_a_system_stopped_in_order_releases_what_its_runs_hold(start_system: StartSystem, service: Service) -> None:
    client = start_system()
    client.submit_batch(batch_id=1, tasks=[uses(service, 600.0), uses(service, 600.0, AsyncUses)], batch_type="train")
    holds(service, 2)
    client.shutdown()
    assert service.alive() == []
    with trinity_es.open_log(client.config.store.url) as log:
        assert log.leases() == []


def test_a_release_that_fails_is_tried_again_and_told(system: RolloutClient, new_id: NewId, service: Service) -> None:
    batch, url = new_id(), system.config.store.url
    service.refuse(True)
    play_batch(system, batch, [uses(service, 0.1)])
    assert system.batch(batch).statuses[0].ok, "that is nothing that the run did wrong"
    wait_until(lambda: len(of_batch(system, batch, ev.LeaseReleaseFailed)) >= 2, "two tries to be recorded")
    [lease] = system.log.leases()
    assert "could not be released by its run" in lease.orphaned
    assert "the service is out of order" in lease.error
    told = system.status()["leases"]
    assert (told["open"], told["orphaned"], told["failing"]) == (1, 1, 1)
    status = cli("status", "--log", url)
    assert status.exit_code == 1
    assert f"lease {lease.taken.lease}" in status.stdout
    assert "out of order" in cli("leases", "--log", url).stdout
    [row] = json.loads(cli("leases", "--log", url, "--json").stdout)
    assert (row["state"], row["batch_id"], row["task"], row["attempt"]) == ("orphaned", batch, 0, 1)
    service.refuse(False)
    all_released(system, service)
    assert system.status()["leases"]["open"] == 0
    assert system.log.verify() == []


def test_a_lease_is_renewed_while_its_run_plays_and_expires_where_nobody_does(
    start_system: StartSystem, service: Service
) -> None:
    """A worker that is stopped is not dead, and renews nothing."""
    client = start_system()
    client.submit_batch(batch_id=1, tasks=[uses(service, 120.0, ttl=12.0)], batch_type="train")
    [box] = holds(service)
    wait_until(lambda: len(events(client, ev.LeaseRenewed)) >= 2, "two renewals", 60)
    assert service.alive()[0]["renewed"] >= 2
    runner = psutil.Process(pid_of(client, "runner-0"))
    [worker] = [p for p in runner.children(recursive=True) if p.name() == "worker"]
    worker.suspend()
    all_released(client, service)
    [orphaned] = events(client, ev.LeaseOrphaned)
    assert orphaned.reason == "it expired: it was not renewed"
    assert client.batch(1).completed_task_count == 0, "its run goes on"
    assert [b["handle"] for b in service.boxes()] == [box["handle"]]


# --- kills at random --------------------------------------------------------------------------------------------------
class _Kills:
    """A run whose environment takes sandboxes, and the faults."""

    def __init__(self, folder: Path, service: Service, chance: random.Random) -> None:
        self.service, self.chance = service, chance
        self.config = scripted(
            folder,
            explorer={"max_retry_times": 1000, "max_concurrency": 4, "rollout_model": {"engine_num": 2}},
            system={"restarts": 10_000, "restart_pause": 0.1},
        )
        self.batches = 0
        self.done: list[str] = []

    def ask(self, call: Callable[[RolloutClient], Any], seconds: float = 120) -> Any:
        """What a system says that may be gone at any moment; it is started again then."""
        return repeat_until_answered(self.config, call, seconds, self.start)

    def start(self) -> None:
        if running_system.find(self.config) is None:
            with contextlib.suppress(AlreadyRunning, StartupError):
                lifecycle.start(self.config)

    def submit(self) -> None:
        self.batches += 1
        cls = Uses if self.batches % 2 else AsyncUses
        tasks = [uses(self.service, self.chance.uniform(0.0, 1.2), cls) for _ in range(8)]
        self.ask(lambda c: c.submit_batch(batch_id=self.batches, tasks=tasks, batch_type="train"))

    def unfinished(self) -> int:
        with trinity_es.open_log(self.config.store.url) as log:
            return sum(b.tasks - b.finished for b in log.batches())

    def kill(self) -> None:
        victims = self.chance.choice(["worker", "worker", "runner", "coordinator", "guardian", "all"])
        if len(self.done) == KILLS - 1:
            victims = "all"  # which surely meets a run with a sandbox
        self.done.append(victims)
        there = by_kind(self.config)
        if victims == "all":
            kill([p for group in there.values() for p in group])
        else:
            of_a_kind = there.get(victims, [])
            kill(self.chance.sample(of_a_kind, min(1, len(of_a_kind))))


@pytest.mark.chaos
@pytest.mark.timeout(120 + 40 * KILLS)
def test_j3_kills_at_random_leave_no_sandbox_alive_and_none_is_used_by_two_runs(tmp_path: Path) -> None:
    service = Service(tmp_path / "service", SEED, slow=0.3)
    kills = _Kills(tmp_path, service, random.Random(SEED))
    try:
        kills.submit()
        while len(kills.done) < KILLS:
            while kills.unfinished() < 16:
                kills.submit()
            kills.ask(lambda c: c.wait_ready(60))
            before = len(service.boxes())
            wait_until(lambda: len(service.boxes()) > before, "another sandbox to be made", 60)  # noqa: B023
            time.sleep(kills.chance.uniform(0.0, 1.0))
            kills.kill()
        for batch in range(1, kills.batches + 1):
            done = kills.ask(lambda c: c.finalize_train_batch(batch, timeout=60), 180)  # noqa: B023
            assert done["finished_task_count"] == 8
        with trinity_es.open_log(kills.config.store.url) as log:
            wait_until(lambda: log.leases() == [], "every lease to be released", 60)
            recorded = list(log.read(stream="leases"))
            assert log.verify() == []
        boxes = service.boxes()
    finally:
        end_system(kills.config)
        service.stop()
    _account(boxes, recorded, kills)


def _account(boxes: list[dict[str, Any]], recorded: list[Any], kills: _Kills) -> None:
    taken = {r.event.lease: r.recorded_at for r in recorded if isinstance(r.event, ev.LeaseTaken)}
    released = {r.event.lease: r.recorded_at for r in recorded if isinstance(r.event, ev.LeaseReleased)}
    by = [r.event.by for r in recorded if isinstance(r.event, ev.LeaseReleased)]
    _log.info("%d kills (%s): %d leases, %d sandboxes, %d released by the coordinator",
              len(kills.done), Counter(kills.done), len(taken), len(boxes), by.count("coordinator"))
    assert taken.keys() == released.keys()
    assert [box for box in boxes if box["key"] not in taken] == [], "made without a lease"
    assert [box for box in boxes if box["made"] < taken[box["key"]]] == [], "made before its lease was in the log"
    alive = [box for box in boxes if box["ended"] is None or box["ended"] > released[box["key"]]]
    assert alive == [], "alive after their lease"
    assert [box for box in boxes if len(box["users"]) > 1] == [], "used by two runs"
    assert len({box["key"] for box in boxes}) == len(boxes), "two of one lease"
    assert by.count("coordinator") >= 1, "no kill met a run with a sandbox"
