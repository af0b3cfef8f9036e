"""Dead, hung and slow are three things, and a process that can't be helped is left alone (issue of promise 4 and 7)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from benchmarks.compared import family_of
from tests.helpers.systems import StartSystem, child, events, finalize_in_thread, pid_of, play_batch, ran, tasks
from trinity_es import Task
from trinity_es.client import health
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.system import running_system
from trinity_es.testing import SleepWorkflow, wait_until

QUICK = {"heartbeat_timeout": 4.0, "hang_timeout": 3.0, "restart_pause": 0.1}


def test_a_runner_that_ends_too_often_is_quarantined_and_the_others_go_on(start_system: StartSystem) -> None:
    client = start_system(explorer={"rollout_model": {"engine_num": 2}}, system={"restarts": 1, "restart_pause": 0.05})
    for life in range(2):
        pid = pid_of(client, "runner-0")
        wait_until(lambda: child(client, "runner-0")["state"] == "ready", f"life {life} to serve")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: child(client, "runner-0")["pid"] != pid or  # type: ignore[misc]  # a lambda's default
                   child(client, "runner-0")["state"] == "quarantined", "the guardian to notice")
    wait_until(lambda: events(client, ev.RunnerQuarantined), "the event")
    told = events(client, ev.RunnerQuarantined)
    assert [(e.runner, e.deaths) for e in told] == [("runner-0", 2)]
    assert "ended" in told[0].reason
    play_batch(client, 1, [Task(workflow=SleepWorkflow)] * 20)
    # the next coordinator hears of it again, and writes it down once
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    play_batch(client, 2, [Task(workflow=SleepWorkflow)])
    assert len(events(client, ev.RunnerQuarantined)) == 1


def test_a_system_whose_processes_are_stopped_is_told_as_that_and_how_it_goes_on(start_system: StartSystem) -> None:
    client = start_system()
    play_batch(client, 1, [Task(workflow=SleepWorkflow)] * 4)
    family = family_of(pid_of(client, "coordinator"))
    for process in family:
        process.suspend()
    try:
        told = health.read_health(client.config)
    finally:
        for process in reversed(family):
            process.resume()
    [problem] = told["problems"]
    assert problem.startswith("its processes are stopped (SIGSTOP) and answer nothing: `kill -CONT ")
    assert {str(p.pid) for p in family} == set(problem.partition("kill -CONT ")[2].partition("`")[0].split())
    assert {row["state"] for row in told["runners"]} == {"stopped"}
    play_batch(client, 2, [Task(workflow=SleepWorkflow)] * 4)


def test_a_keeper_that_ended_is_told(start_system: StartSystem) -> None:
    client = start_system(system={"keeper": True})
    assert health.read_health(client.config)["problems"] == []
    keeper = running_system.keeper(client.config)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: running_system.keeper(client.config) is None, "the end of the keeper")
    [problem] = health.read_health(client.config)["problems"]
    assert problem.startswith(f"its keeper (pid {keeper}) has ended: batches go on")


def test_a_stopped_coordinator_is_replaced_and_ends_when_it_wakes(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(system=QUICK)
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(24, count, 1.0), batch_type="train")
    answer = finalize_in_thread(client, 1)
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks")
    stopped = psutil.Process(pid_of(client, "coordinator"))
    stopped.suspend()
    assert answer.result(60)["finished_task_count"] == 24
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    assert set(ran(count).values()) == {1}
    assert "no sign of life" in child(client, "coordinator")["reason"]


def test_a_coordinator_that_was_fenced_writes_nothing_more(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(system={"heartbeat_timeout": 60.0})
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(8, count, 1.0), batch_type="train")
    wait_until(lambda: sum(ran(count).values()) == 8, "all tasks to run")
    old = psutil.Process(pid_of(client, "coordinator"))
    old.suspend()
    with EventLog.open(client.config.store.url) as log:
        lease = log.acquire_lease("coordinator", {"pid": os.getpid(), "host": "elsewhere", "admin": {"pid": 1}})
        last = max(r.position for r in log.read())
        old.resume()
        wait_until(lambda: not old.is_running() or old.status() == psutil.STATUS_ZOMBIE, "the fenced one to end")
        late = list(log.read(after=last))
    assert late == []
    assert lease.epoch > 1
    # It is another system's store now: this one ends its runners instead of taking it back.
    status = wait_until(lambda: client._link.where().status.get("fenced"), "the guardian to stand down")
    assert "elsewhere" in status
    assert {c["state"] for c in client._link.where().status["children"]} == {"down"}


def test_a_stopped_runner_is_ended_and_its_work_done_elsewhere(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"max_concurrency": 4, "rollout_model": {"engine_num": 2}}, system=QUICK)
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(8, count, 1.0), batch_type="train")
    wait_until(lambda: sum(ran(count).values()) == 8, "all tasks to run")
    psutil.Process(pid_of(client, "runner-0")).suspend()
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 8
    assert "no sign of life" in events(client, ev.RunnerLost)[0].reason


def test_a_runner_whose_loop_is_blocked_beats_on_and_is_ended_all_the_same(start_system: StartSystem) -> None:
    client = start_system(
        explorer={"max_retry_times": 1, "max_timeout": 600.0, "rollout_model": {
            "script": {"rules": [{"prompt": "block", "block": True}], "response": "fine"},
        }},
        system=QUICK,
    )
    task = Task(workflow="single_turn", raw_task={"prompt": "block"}, reward_fn="tests.main.test_deaths:always_one")
    play_batch(client, 1, [task])
    assert not client.batch(1).statuses[0].ok
    assert "blocked the engine's loop" in events(client, ev.RunnerLost)[0].reason
