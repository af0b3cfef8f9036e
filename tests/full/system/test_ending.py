"""A system ends by itself: with the process that it was started for, and when its store is gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

import trinity_es
from tests.helpers.faults import Server
from tests.helpers.handmade import cli
from tests.helpers.of_the_day import of_the_day
from tests.helpers.paths import ROOT
from tests.helpers.runs import command, make_config
from tests.helpers.systems import StartSystem, scripted
from trinity_es import Task
from trinity_es.client import health, teardown
from trinity_es.config.config import load_config
from trinity_es.errors import AlreadyRunning
from trinity_es.events.errors import NotRunning
from trinity_es.system import leftovers, running_system
from trinity_es.system.run_lock import RunLock, hold, holders, killed
from trinity_es.testing import SleepWorkflow, wait_until

_SCRIPT = """
import json, sys, trinity_es
from trinity_es.system import lifecycle
config = trinity_es.Config.from_dict(json.loads(sys.argv[1]), folder="/")
lifecycle.start(config)
print("up", flush=True)
sys.stdin.readline()
raise RuntimeError("the script fails")
"""

Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start a system from a script that fails without stopping it, when a line comes."""
    begun: list[tuple[subprocess.Popen[str], trinity_es.Config]] = []

    def start(config: trinity_es.Config) -> subprocess.Popen[str]:
        script = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, json.dumps(config.to_dict())], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        begun.append((script, config))
        if script.stdout.readline() != "up\n":
            raise AssertionError(script.communicate()[1])
        return script

    yield start
    for script, config in begun:
        script.kill()
        script.communicate()
        teardown.end_system(config)


def ended(config: trinity_es.Config) -> bool:
    return not leftovers.leftovers(config) and running_system.keeper(config) is None


@pytest.mark.parametrize("how", of_the_day(["it fails", "kill -9"]))  # in turns; ALL=1 plays both
def test_what_a_script_started_ends_with_it_its_keeper_too_and_other_clients_are_told(
    how: str, begin: Begin, tmp_path: Path
) -> None:
    config = scripted(tmp_path, system={"keeper": True})
    script = begin(config)
    with trinity_es.connect(config) as other:
        other.wait_ready(60)
        assert running_system.keeper(config)
        script.kill() if how == "kill -9" else script.communicate("\n", timeout=30)
        wait_until(lambda: ended(config), "the end of the system and its keeper", timeout=40)
        with pytest.raises(NotRunning, match=f"process {script.pid}, which had started it, has ended"):
            other.status()
    assert "the system ends: process" in (Path(config.system.log_dir) / "guardian.log").read_text()


def test_a_system_that_ends_with_who_started_it_is_said_to_end_and_not_to_come_again(
    begin: Begin, tmp_path: Path
) -> None:
    config = scripted(tmp_path, system={"keeper": True})
    script = begin(config)
    with trinity_es.connect(config) as client:
        client.wait_ready(60)
        task = Task(workflow=SleepWorkflow, workflow_args={"seconds": 60.0})
        client.submit_batch(batch_id=1, tasks=[task], batch_type="train")
    found = running_system.find(config)
    guardian, keeper = psutil.Process(found["guardian"]), psutil.Process(running_system.keeper(config))
    guardian.suspend()  # so that it lasts
    keeper.suspend()
    script.kill()
    script.wait(timeout=10)
    try:
        ends = f"the actor system ends: process {script.pid}, which had started it, has ended"
        told = health.read_health(config)
        [problem] = told["problems"]
        assert problem.startswith(f"{ends}; `trinity-es up CONFIG` goes on with what is open")
        assert (told["up"], told["batches"][0]["cause"]) == (False, "ending")
        assert [w.line for w in health.explain(config)] == [f"batch 1 is running, 0 of 1 tasks settled; {ends}"]
        guardian.resume()
        wait_until(lambda: running_system.last_known(config) is None, "the lease to be given back", timeout=40)
        [problem] = health.read_health(config)["problems"]
        assert problem.startswith(ends), "its keeper lives, and does not start it again"
    finally:
        for process in (guardian, keeper):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    wait_until(lambda: ended(config), "the end of the system and its keeper", timeout=40)
    [problem] = health.read_health(config)["problems"]
    assert problem.startswith("no actor system runs on this store, though 1 batch is open: `trinity-es up CONFIG`")


def test_whose_a_system_is_outlives_a_restart_by_its_keeper(begin: Begin, tmp_path: Path) -> None:
    config = scripted(tmp_path, system={"keeper": True})
    script = begin(config)
    first = running_system.find(config)
    psutil.Process(first["pid"]).kill()
    wait_until(lambda: (running_system.find(config) or first)["pid"] != first["pid"], "the next life", timeout=60)
    script.kill()
    wait_until(lambda: ended(config), "the end of the system and its keeper", timeout=40)


def test_another_starts_at_once_what_ends_with_its_owner(begin: Begin, tmp_path: Path) -> None:
    config = scripted(tmp_path, system={"keeper": True})
    first = begin(config)
    first.kill()
    first.wait(timeout=10)
    begin(config)
    found = running_system.find(config)
    assert found["owner"]["pid"] != first.pid
    assert running_system.keeper(config)


def test_a_system_whose_folder_is_deleted_ends_and_stays_ended(start_system: StartSystem, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    client = start_system(folder=folder, system={"keeper": True})
    family = running_system.processes(client._link.admin)
    kept = psutil.Process(running_system.keeper(client.config))
    with (Path(client.config.system.log_dir) / "guardian.log").open() as words:
        shutil.rmtree(folder)
        assert not running_system.wait_gone([*family, kept], 60), "a process of the system is left"
        assert "was deleted" in words.read()
    assert not (folder / "log.sqlite").exists()


@pytest.mark.postgres
def test_a_system_whose_database_is_dropped_ends_by_itself(own_server: Server, start_system: StartSystem) -> None:
    database = own_server.new_database()
    client = start_system(store={"url": own_server.url(database).replace("postgresql://", "postgresql+psycopg://")})
    family = running_system.processes(client._link.admin)
    own_server.execute(f"DROP DATABASE {database} WITH (FORCE)")
    assert not running_system.wait_gone(family, 60), "a process of the system is left"
    words = (Path(client.config.system.log_dir) / "guardian.log").read_text()
    assert "was dropped" in words or "is gone" in words or "no database" in words


def test_running_ends_what_it_started_and_not_what_it_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trinity_es.client")
    config = scripted(tmp_path, system={"keeper": True})
    with trinity_es.running(config) as client:
        [starts, ready] = caplog.messages
        assert starts.startswith(f"starting the actor system of {config.store.url}; engines may take minutes")
        assert re.fullmatch(r"the engines are ready after \d+ s", ready)
        assert client.status()["runners"][0]["state"] == "ready"
        with trinity_es.running(config) as other:
            assert "joining the running actor system" in caplog.messages[3]
            other.submit_batch(batch_id=1, tasks=[Task(workflow=SleepWorkflow)], batch_type="train")
        assert client.finalize_train_batch(1, timeout=30)["finished_task_count"] == 1
    assert ended(config)
    assert running_system.find(config) is None
    with pytest.raises(ZeroDivisionError), trinity_es.running(config):
        raise ZeroDivisionError
    assert leftovers.leftovers(config) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_ended_by_a_signal_says_how_to_go_on_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    config = make_config(tmp_path, trainer={}, mode="explore", explorer={
        "max_concurrency": 2, "rollout_model": {"engine_type": "scripted", "script": {"latency_seconds": 60}}})
    settings = load_config(config)
    run = command("run", config, cwd=tmp_path)
    assert "loading engine" in run.stdout.readline()
    run.send_signal(number)
    while number == signal.SIGINT and run.poll() is None:  # the later ones meet what ends the run
        run.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(0.2)
    _, told = run.communicate(timeout=60)
    assert "interrupted: `trinity-es resume runs/trinity/run/log.sqlite` continues the run" in told
    assert "Traceback" not in told
    assert run.returncode == (-number if number == signal.SIGINT else 128 + number)
    wait_until(lambda: ended(settings), "the end of the system", timeout=40)


# --- the lock of who trains on a run: one process has it, and it ends with that process -------------------------------
HOLD = """
import os, sys, time
from pathlib import Path
from tests.helpers.systems import scripted
from trinity_es.system.run_lock import hold

for _ in range(2):
    hold(scripted(Path(sys.argv[1])), "trainer")
child = os.fork()
if child:
    print(child, flush=True)
    sys.stdin.readline()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "in order"])
def test_a_process_holds_a_lock_once_and_until_it_ends_whatever_it_forked(tmp_path: Path, how: str) -> None:
    config = scripted(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        start_new_session=True)
    assert holder.stdin is not None
    try:
        child = int(holder.stdout.readline())
        assert (killed(config), holders(config)) == ({}, {"trainer": holder.pid})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
        down = cli("down", tmp_path / "config.yaml")
        assert f"its `trinity-es run` (pid {holder.pid}) is still there" in down.stdout
        with pytest.raises(AlreadyRunning, match=rf"a trainer runs on sqlite://\S+ already \(process {holder.pid} "):
            hold(config, "trainer")
        if how == "killed":
            holder.kill()
        else:
            holder.stdin.close()
        holder.wait()
        assert holders(config) == {}
        assert psutil.Process(child).is_running()
        assert killed(config) == ({"trainer": holder.pid} if how == "killed" else {})
        RunLock(config, "trainer").release()
        assert killed(config) == {}
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
