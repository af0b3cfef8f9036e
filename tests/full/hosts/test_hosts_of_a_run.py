"""A run over several hosts: its head here, the others joined, each a system of its own on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import trinity_es
from benchmarks.chaos_hosts_account import SHARE
from tests.helpers.handmade import cli
from tests.helpers.hosts import KEY, Head, StartHead, has_settled, head_of, host_joins, ready, with_host
from tests.helpers.links import Network, network
from tests.helpers.of_the_day import of_the_day
from tests.helpers.s3_server import BUCKET, S3Server
from tests.helpers.servers import free_port
from tests.helpers.systems import end, kill_system, pid_of, scripted, sleepers
from trinity_es import Task
from trinity_es.client import health
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AlreadyRunning, HostNotFound, NotRunning
from trinity_es.events.processes import process_start_time
from trinity_es.events.store.database.leader_lock import is_led, wait_until_leaderless
from trinity_es.projections.host_states import host_of
from trinity_es.system import lifecycle, running_system
from trinity_es.testing import SleepWorkflow, wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]

TIMEOUT = 4.0
"""Seconds after which a host that is not heard of is lost."""


def test_a_host_that_joins_in_a_batch_gets_its_share_and_one_that_leaves_loses_nothing(start_head: StartHead) -> None:
    head = start_head()
    head.submit(1, 512, 0.5)
    with host_joins(head.url, "b", head.folder) as b:
        ready(head.client, "b")
        wait_until(lambda: head.client.status()["hosts"][0]["units"] > 0, "work for the new host", 5)
        [host] = head.client.status()["hosts"]
        assert (host["host"], host["epoch"], host["state"], host["connected"]) == ("b", 1, "joined", True)
        assert b.drain() == 0
        assert head.settled() < 512, "it got work to the end"
        assert b.left() == []
    head.finish(1, 512)
    assert head.ran_on(1)["b"] > 0
    assert head.client.status()["hosts"] == []
    assert head.events(ev.AttemptFailed) == []
    kinds = [type(e).__name__ for e in head.events(ev.HostJoined, ev.HostDraining, ev.HostLost, ev.HostLeft)]
    assert kinds == ["HostJoined", "HostDraining", "HostLeft"]
    assert [type(e).__name__ for e in head.events(ev.RunnerLost, ev.RunnerRetired)] == ["RunnerRetired"]


def test_a_host_that_dies_is_lost_in_time_and_its_work_is_done_elsewhere_unblamed(start_head: StartHead) -> None:
    head = start_head()
    with host_joins(head.url, "b", head.folder) as b, host_joins(head.url, "c", head.folder):
        ready(head.client, "b")
        ready(head.client, "c")
        head.submit(1, 96, 0.5)
        wait_until(lambda: all(h["units"] for h in head.client.status()["hosts"]), "work for both", 20)
        b.kill()
        wait_until(lambda: bool(head.events(ev.HostLost)), "the loss of b", TIMEOUT + 5)
        head.finish(1, 96)
        [lost] = head.events(ev.HostLost)
        assert (lost.host, lost.epoch) == ("b", 1)
        failed = head.events(ev.AttemptFailed)
        assert failed
        assert {(e.runner, e.kind, e.blamed) for e in failed} == {("runner-0@b", "runner_lost", False)}
        assert head.ran_on(1)["c"] > 0
        with host_joins(head.url, "b", head.folder):
            ready(head.client, "b")
            head.submit(2, 64, 0.2)
            head.finish(2, 64)
            assert head.ran_on(2)["b"] > 0
        assert [e.epoch for e in head.events(ev.HostJoined) if e.host == "b"] == [1, 2]


@contextmanager
def over_a_network(start_head: StartHead) -> Iterator[tuple[Head, Network]]:
    """Give a head, and what is between it and host b, which has begun with 64 tasks."""
    with network(free_port()) as between:
        head = start_head(between.port)
        between.to(head.port)
        with host_joins(head.url, "b", head.folder):
            ready(head.client, "b")
            head.submit(1, 64, 0.5)
            wait_until(partial(has_settled, head, 8), "8 tasks", 30)
            yield head, between


def test_a_connection_that_breaks_and_is_made_again_in_time_costs_nothing(start_head: StartHead) -> None:
    with over_a_network(start_head) as (head, between):
        between.cut()
        wait_until(partial(has_settled, head, 24), "24 tasks", 30)
        between.cut()
        head.finish(1, 64)
    assert head.events(ev.AttemptFailed, ev.HostLost) == []
    assert len(head.events(ev.HostJoined)) == 1


@pytest.mark.parametrize("lost", of_the_day(["both ways", "to head", "to host"]))
def test_a_host_without_network_is_lost_and_comes_back_as_another_epoch(start_head: StartHead, lost: str) -> None:
    """And nothing that its first life says counts any more."""
    with over_a_network(start_head) as (head, between):
        if lost == "both ways":
            between.away()
        else:
            between.one_way(lost)
        wait_until(lambda: bool(head.events(ev.HostLost)), "the loss of b", 3 * TIMEOUT + 5)
        between.heal()
        wait_until(lambda: len(head.events(ev.HostJoined)) == 2, "b is back", 60)
        ready(head.client, "b")
        head.finish(1, 64)
        batches = itertools.count(2)

        def takes_part() -> bool:
            batch = next(batches)
            head.submit(batch, 64, 0.2)
            head.finish(batch, 64)
            return head.ran_on(batch)["b"] > 0

        wait_until(takes_part, "a batch that b takes part in", 120)
    assert {e.runner for e in head.events(ev.AttemptFailed)} <= {"runner-0@b"}


def test_a_host_told_to_leave_while_its_network_is_away_leaves_in_order_when_back(start_head: StartHead) -> None:
    with network(free_port()) as between:
        head = start_head(between.port)
        between.to(head.port)
        with host_joins(head.url, "b", head.folder, "--drain", "60") as b:
            ready(head.client, "b")
            head.submit(1, 96, 0.5)
            wait_until(partial(has_settled, head, 8), "8 tasks", 30)
            between.away()
            b.process.send_signal(signal.SIGTERM)
            time.sleep(1.5)  # it has said so, and nobody heard it
            between.cut()
            between.heal()
            wait_until(lambda: bool(head.events(ev.HostDraining)), "the head to hear of it", 20)
            head.finish(1, 96)
            assert b.process.wait(60) == 0
    assert head.events(ev.AttemptFailed, ev.HostLost) == []
    assert [e.host for e in head.events(ev.HostDraining)] == ["b"], "once, however often it was said"
    assert len(head.events(ev.HostLeft)) == 1


def test_tasks_whose_module_a_host_lacks_are_played_by_others_and_it_is_given_few(
    start_head: StartHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in {"here": LACKED, "empty": ""}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lacked_by_a_host.py").write_text(text)
    (tmp_path / "empty" / "lacked_by_a_host.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    head = start_head(code_path=str(tmp_path / "here"))
    options = ["--set", f"code_path={tmp_path / 'empty'}"]
    with host_joins(head.url, "b", head.folder, *options), host_joins(head.url, "c", head.folder, *options):
        ready(head.client, "b")
        ready(head.client, "c")
        tasks = [Task(workflow="lacked_by_a_host:Lacked", raw_task={"i": i}) for i in range(64)]
        head.client.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
        head.finish(1, 64)
        failed = head.events(ev.AttemptFailed)
        assert {e.kind for e in failed} == {"infra"}
        assert all("lacked_by_a_host" in e.message for e in failed)
        assert not any(e.blamed for e in failed)
        assert {host_of(e.runner) for e in failed} == {"b", "c"}
        assert head.ran_on(1) == {"": 64}


def test_tasks_whose_secret_stays_on_the_head_are_played_there(start_head: StartHead) -> None:
    with with_host(start_head) as (head, _):
        tasks = [Task(workflow=SleepWorkflow, workflow_args={"seconds": 0.2},
                      raw_task={"i": i, "api_key": f"sk-{i:032}"}) for i in range(48)]
        head.client.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
        head.finish(1, 48)
        failed = head.events(ev.AttemptFailed)
        assert {(e.runner, e.kind, e.blamed, e.retry) for e in failed} == {("runner-0@b", "infra", False, True)}
        assert all("secret" in e.message for e in failed)
        assert head.ran_on(1) == {"": 48}


LACKED = """
import asyncio
from trinity_es.testing import SleepWorkflow

class Lacked(SleepWorkflow):
    async def run_async(self):
        await asyncio.sleep(0.2)
        return await super().run_async()
"""


def test_a_coordinator_that_dies_leaves_the_hosts_to_the_next_one(start_head: StartHead) -> None:
    with with_host(start_head) as (head, _):
        head.submit(1, 96, 0.5)
        wait_until(lambda: head.settled() >= 8, "8 tasks", 30)
        psutil.Process(pid_of(head.client, "coordinator")).kill()
        head.finish(1, 96)
        wait_until(lambda: bool(head.client.status()["hosts"][0]["connected"]), "b finds the next coordinator", 30)
        assert head.ran_on(1)["b"] > 0
    assert head.events(ev.AttemptFailed, ev.HostLost) == []
    assert [e.epoch for e in head.events(ev.HostJoined)] == [1]


def test_a_host_is_drained_by_a_person_and_its_join_ends(start_head: StartHead) -> None:
    with with_host(start_head) as (head, b):
        head.submit(1, 64, 0.5)
        wait_until(lambda: head.client.status()["hosts"][0]["units"] > 0, "work for b", 20)
        with pytest.raises(HostNotFound, match="no host 'c' has joined; joined hosts: b"):
            head.client.drain_host("c")
        done = head.client.drain_host("b", reason="its disk is replaced")
        assert (done["host"], done["epoch"]) == ("b", 1)
        assert b.process.wait(60) == 0
        assert b.left() == []
        assert "left: pid" in b.said.read_text()
        head.finish(1, 64)
        [left] = head.events(ev.HostLeft)
        assert left.reason.endswith("its disk is replaced")
    assert head.events(ev.AttemptFailed, ev.HostLost) == []


def test_what_a_host_has_that_ends_before_its_tasks_do_is_attempted_elsewhere(start_head: StartHead) -> None:
    with with_host(start_head, "--drain", "0") as (head, b):
        head.submit(1, 64, 2.0)
        wait_until(lambda: head.client.status()["hosts"][0]["units"] > 0, "work for b", 20)
        assert b.drain() == 0
        head.finish(1, 64)
    failed = head.events(ev.AttemptFailed)
    assert {(e.runner, e.kind, e.blamed) for e in failed} == {("runner-0@b", "runner_lost", False)}
    assert head.events(ev.HostLost) == []


def test_a_runner_of_another_host_is_restarted(start_head: StartHead) -> None:
    with with_host(start_head) as (head, _):
        [before] = [r for r in head.client.status()["runners"] if r["host"] == "b"]
        begun = head.client.restart_runner("runner-0@b")
        assert begun["incarnation"] > before["incarnation"]
        ready(head.client, "b")
        head.submit(1, 32, 0.1)
        head.finish(1, 32)


def test_a_second_head_is_refused_and_one_that_stands_by_takes_over(
    start_head: StartHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as on another host: one of this store does not see the other's processes."""
    head = start_head()
    port = free_port()
    second = scripted(
        tmp_path / "second", store={"url": head.url}, hosts={"address": f"127.0.0.1:{port}", "timeout": TIMEOUT})
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("trinity_es.system.running_system.find_head", lambda config: None)
        with pytest.raises(AlreadyRunning, match=r"take part with .*join.*--standby"):
            lifecycle.start(second)
    with host_joins(head.url, "b", head.folder):
        ready(head.client, "b")
        head.submit(1, 96, 0.5)
        waits = threading.Thread(target=wait_until_leaderless, args=(head.url, TIMEOUT))
        waits.start()
        psutil.Process(pid_of(head.client, "coordinator")).kill()  # comes back on its own host
        wait_until(lambda: head.settled() >= 16, "16 tasks", 30)
        assert waits.is_alive()
        kill_system(head.client)
        waits.join(60)
        assert not waits.is_alive()
        lifecycle.start(second)
        client = trinity_es.connect(second)
        try:
            client.wait_ready(60)
            taken = Head(client, head.url, tmp_path, port)
            wait_until(lambda: bool(client.status()["hosts"][0]["connected"]), "b finds the new head", 60)
            taken.finish(1, 96)
            assert [e.epoch for e in taken.events(ev.HostJoined)] == [1]
        finally:
            end(client)


def test_on_a_machine_that_takes_no_part_who_leads_is_told_and_nobody_is_sent_to_start_another(
    start_head: StartHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = start_head()
    config = scripted(tmp_path / "elsewhere", store={"url": head.url})
    monkeypatch.setattr("trinity_es.system.running_system.find_head", lambda config: None)
    wait_until(lambda: is_led(head.url), "the lock of who leads", 20)
    with pytest.raises(NotRunning, match=rf"is led by pid \d+ on {socket.gethostname()}.*trinity-es join"):
        trinity_es.connect(config)
    found = health.read_health(config)
    assert found["led_by"].startswith("pid ")
    [problem] = found["problems"]
    assert "is led by pid" in problem
    assert "resume" not in problem
    assert "down" not in {r["state"] for r in found["runners"]}


def test_a_client_finds_any_host_of_its_machine_taking_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = scripted(tmp_path / "logs", store={"url": "postgresql://nobody@127.0.0.1:1/run"})
    monkeypatch.setattr("trinity_es.system.running_system.find_head", lambda config: None)
    alive = {"pid": os.getpid(), "started": process_start_time(os.getpid()), "port": 1}
    for name, admin in {"a": alive | {"pid": 2**22 + 1}, "b": alive, "c": alive | {"started": "before"}}.items():
        place = running_system.joined_file(config.store.url, name)
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(admin))
    assert running_system.find(config) == alive
    running_system.joined_file(config.store.url, "b").unlink()
    assert running_system.find(config) is None


def join_says(url: str, *options: str) -> str:
    command = [sys.executable, "-m", "trinity_es", "join", url, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_what_can_t_be_joined_is_refused_with_the_way_out(
    start_head: StartHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = join_says(f"sqlite:///{tmp_path / 'log.sqlite'}", "--name", "b")
    assert "SQLite file, which only one host can use" in said
    assert "PostgreSQL" in said
    assert "--name" in join_says("postgresql://nowhere/x", "--name", "two words")
    head = start_head()
    monkeypatch.delenv("TRINITY_ES_KEY")
    assert "no key" in join_says(head.url, "--name", "b", "--log-dir", str(tmp_path / "b"),
                                 "--key-file", str(tmp_path / "missing"))


def test_a_host_puts_payloads_into_s3(s3: S3Server, start_head: StartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach the same bucket by an address of their own, and that of the head is shut while the host works."""
    of_head = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", of_head.endpoint)
    head = start_head(store={"payloads": f"s3://{BUCKET}/{uuid.uuid4().hex}"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    try:
        [told] = [f for f in json.loads(cli("doctor", "--host", head.url, "--json").stdout)["findings"]
                  if f["what"] == "payloads"]
        assert (told["verdict"], "written, read and deleted" in told["told"]) == ("ok", True)
        with host_joins(head.url, "b", head.folder):
            ready(head.client, "b")
            head.submit(1, 16, 1.0)
            of_head.stop()
            wait_until(lambda: head.ran_on(1)["b"] > 0, "a task of the host whose payload is stored", 30)
            assert head.ran_on(1)[""] == 0
            of_head.start()
            head.finish(1, 16)
    finally:
        if of_head.is_up:
            of_head.stop()


# --- how work spreads over hosts: to each its share, and no place idle while work waits -------------------------------
HOSTS = ("b", "c", "d")
PLACES = 8
"""Of each host, as of the head."""
SECONDS = 1.0
"""How long a task takes."""


def idle_beside_overfull(url: str, batch: int) -> list[str]:
    """Return when a place was idle, by the log, while a unit waited for one: not dispatched, or behind others.

    For half a task, at least: what a runner says takes its time to the log, on a busy machine above all.
    """
    found: list[str] = []
    load, waiting, behind, since = dict.fromkeys(("", *HOSTS), 0), 0, 0, float("inf")
    with trinity_es.open_log(url) as log:
        commits: dict[float, list[ev.Event]] = {}
        for item in log.events(batch):
            commits.setdefault(item.recorded_at, []).append(item.event)
    for at, events in commits.items():
        if at - since >= SECONDS / 2:
            found.append(f"{waiting} waited, {behind} behind others for {at - since:.2f} s: {load}")
        for event in events:
            match event:
                case ev.BatchSubmitted():
                    waiting += len(event.repeat_times)
                case ev.TasksDispatched():
                    waiting -= len(event.units)
                    load[host_of(event.runner)] += len(event.units)
                case ev.RunsFinished():
                    load[host_of(event.runner)] -= 1
        behind = sum(max(0, units - PLACES) for units in load.values())
        now = waiting + behind > 0 and min(load.values()) < PLACES
        since = min(since, at) if now else float("inf")
    return found


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_f3_four_hosts_get_their_shares_and_no_place_is_idle_while_work_waits(
    postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    url = postgres()
    with head_of(url, tmp_path) as head, contextlib.ExitStack() as stack:
        for name in HOSTS:
            stack.enter_context(host_joins(url, name, tmp_path))
        for name in HOSTS:
            ready(head.client, name)
        head.submit(1, 320, SECONDS)
        head.finish(1, 320)
        ran = head.ran_on(1)
        assert all(abs(ran[name] / 80 - 1) <= SHARE for name in ("", *HOSTS)), ran
        assert idle_beside_overfull(url, 1) == []

        # Short units, of which some wait in a runner, and then long ones
        short, long = sleepers(400, seconds=0.01), sleepers(96, seconds=1.0)
        head.client.submit_batch(batch_id=2, tasks=[*short, *long], batch_type="train")
        head.finish(2, 496)
        assert idle_beside_overfull(url, 2) == []
