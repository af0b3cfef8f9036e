"""P13 and P14: a runner is restarted by whoever asks, and tells what it does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.systems import StartSystem, child, events, finalize_in_thread, pid_of, play_batch, sleepers
from trinity_es import Task
from trinity_es.actors.commands import RestartRunner
from trinity_es.cli import app
from trinity_es.client.async_client import RolloutCoordinator
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import RunnerNotFound
from trinity_es.testing import wait_until
from trinity_es.workflows.workflow import Workflow


class Sleeps(Workflow):
    def run(self) -> list[object]:  # type: ignore[override]  # it never returns
        time.sleep(self.task.workflow_args["seconds"])
        raise AssertionError("it was to be stopped")


def busy(client: RolloutClient, count: int) -> None:
    def look() -> bool:
        states = client.get_all_state().values()
        return sum(s["running_count"] for s in states if s["model"] == "rollout") >= count

    wait_until(look, f"{count} runs to play")


# --- P13 ------------------------------------------------------------------------------------------------------------
def test_p13_a_restarted_runner_loses_nothing_and_nothing_is_blamed(start_system: StartSystem) -> None:
    # No retries: an attempt that was blamed for its runner's end would be the last.
    client = start_system(explorer={"max_concurrency": 4, "max_retry_times": 0, "rollout_model": {"engine_num": 2}})
    before = child(client, "runner-0")
    client.submit_batch(batch_id=1, tasks=sleepers(12, 0.5), batch_type="train")
    answer = finalize_in_thread(client, 1)
    busy(client, 8)
    done = client.restart_runner("runner-0", reason="its fan is loud")
    assert answer.result(60)["finished_task_count"] == 12
    assert all(s.ok for s in client.batch(1).statuses.values())
    after = child(client, "runner-0")
    assert (done["runner"], done["incarnation"]) == ("runner-0", after["incarnation"])
    assert after["incarnation"] > before["incarnation"]
    assert after["pid"] != before["pid"]
    [lost] = events(client, ev.RunnerLost)
    assert (lost.runner, lost.incarnation) == ("runner-0", before["incarnation"])
    assert lost.reason.startswith(f"pid {os.getpid()} on ")
    assert lost.reason.endswith(": its fan is loud")
    failed = [r.event for r in client.log.events(1) if isinstance(r.event, ev.AttemptFailed)]
    assert failed
    assert {(e.runner, e.kind, e.blamed, e.retry) for e in failed} == {("runner-0", "runner_lost", False, True)}
    # The next task does not notice, and the slot's slate is clean.
    wait_until(lambda: child(client, "runner-0")["state"] == "ready", "the new life to serve")
    assert child(client, "runner-0")["deaths"] == 0
    play_batch(client, 2, sleepers(16, 0.05))
    assert client.batch(2).failed_attempts == 0


async def test_p13_asked_twice_for_one_life_one_life_ends_and_others_may_ask_too(start_system: StartSystem) -> None:
    client = start_system(explorer={"auxiliary_models": [{"name": "judge", "engine_type": "scripted"}]})
    life = child(client, "judge-0")["incarnation"]
    command = RestartRunner(runner="judge-0", incarnation=life, reason="asked")
    first = client._link.call(command, 60)
    assert client._link.call(command, 60) == first  # as a client whose coordinator died asks again
    assert len(events(client, ev.RunnerLost)) == 1
    with pytest.raises(RunnerNotFound, match="judge-0, runner-0") as unknown:
        client.restart_runner("runner-7")
    assert isinstance(unknown.value, KeyError)
    coordinator = await RolloutCoordinator.get_actor(client.config)
    again = await coordinator.restart_runner("judge-0")
    assert again["incarnation"] > first["incarnation"]
    await coordinator.shutdown()
    told = CliRunner().invoke(app, ["restart-runner", "judge-0", "--log", client.config.store.url, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["incarnation"] > again["incarnation"]
    client.wait_ready(60)
    assert {e.runner for e in events(client, ev.RunnerLost)} == {"judge-0"}


def test_p13_a_runner_that_hangs_and_one_that_was_given_up_are_started_again(start_system: StartSystem) -> None:
    client = start_system(explorer={"rollout_model": {"engine_num": 2}}, system={"restarts": 0})
    os.kill(pid_of(client, "runner-0"), signal.SIGSTOP)
    client.restart_runner("runner-0")
    wait_until(lambda: child(client, "runner-0")["state"] == "ready", "runner-0 to serve again")
    assert events(client, ev.RunnerQuarantined) == [], "an end that was asked for is no sign of trouble"
    os.kill(pid_of(client, "runner-1"), signal.SIGKILL)
    wait_until(lambda: events(client, ev.RunnerQuarantined), "runner-1 to be given up")
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)  # its successor knows of it from the log
    client.restart_runner("runner-1", reason="mended")
    client.wait_ready(60)
    last = events(client, ev.RunnerLost)[-1]
    assert last.runner == "runner-1"
    assert last.reason.endswith(": mended")
    play_batch(client, 1, sleepers(32, 0.1))
    given = {r.event.runner for r in client.log.events(1) if isinstance(r.event, ev.TasksDispatched)}
    assert given == {"runner-0", "runner-1"}


# --- P14 ------------------------------------------------------------------------------------------------------------
REPORTING = {"rollout_model": {"engine_num": 2}, "runner_state_report_interval": 0.2}


async def test_p14_every_runner_tells_what_it_plays(start_system: StartSystem) -> None:
    client = start_system(explorer={
        "max_concurrency": 4, "rollout_model": {"engine_num": 2},
        "auxiliary_models": [{"name": "judge", "engine_type": "scripted"}],
    })
    idle = client.get_all_state()
    assert sorted(idle) == ["judge-0", "runner-0", "runner-1"]
    assert {(s["model"], s["state"], s["workflow_id"], s["running_count"], s["answered"]) for s in idle.values()} == {
        ("rollout", "ready", None, 0, True), ("judge", "ready", None, 0, True),
    }
    started = time.time()
    given = [*sleepers(3, 30.0), Task(workflow=Sleeps, workflow_args={"seconds": 30.0})]
    client.submit_batch(batch_id="7/mine", tasks=given, batch_type="eval")
    busy(client, 4)
    states = client.get_all_state()
    rows = [row for name in ("runner-0", "runner-1") for row in states[name]["running"]]
    assert sorted(row["workflow_id"] for row in rows) == [f"7/mine/{task}/0" for task in range(4)]
    now = time.time()
    for row in rows:
        assert row["model_version"] == 0
        assert started - 1 <= row["begin_time"] <= now
        assert 0 <= row["running_time"] <= now - started + 1
    assert sum(states[name]["units"] for name in ("runner-0", "runner-1")) == 4
    one = client.get_runner_state("runner-0")
    assert one["workflow_id"] in {row["workflow_id"] for row in rows}
    assert one["end_time"] is None
    assert client.get_runner_state("runner-7") == {}
    assert client.get_key_state("workflow_id").keys() == states.keys()
    assert client.get_key_state("workflow_id")["runner-0"] == one["workflow_id"]
    assert client.get_key_state("nothing") == {}
    coordinator = await RolloutCoordinator.get_actor(client.config)
    assert (await coordinator.get_runner_state("runner-0"))["workflow_id"] == one["workflow_id"]
    assert (await coordinator.get_key_state("model"))["judge-0"] == "judge"
    assert sorted(await coordinator.get_all_state()) == sorted(states)
    await coordinator.shutdown()
    client.abort_batch("7/mine", reason="seen enough")

    def ended() -> bool:
        s = client.get_runner_state("runner-0")
        return s["running_count"] == 0 and s["end_time"] is not None

    wait_until(ended, "the last run to be told with its end")
    last = client.get_runner_state("runner-0")
    assert last["running_time"] == pytest.approx(last["end_time"] - last["begin_time"])
    assert last["workflow_id"] in {row["workflow_id"] for row in rows}


def test_p14_the_coordinators_log_has_a_table_of_it(system_for: StartSystem, new_id: Callable[[], int]) -> None:
    client, batch = system_for(explorer=REPORTING), new_id()
    client.submit_batch(batch_id=batch, tasks=sleepers(1, 30.0), batch_type="train")
    log = Path(client.config.system.log_dir) / "coordinator.log"
    wait_until(lambda: f"{batch}/0/0" in log.read_text(), "the run in the table")
    line = next(line for line in log.read_text().splitlines() if f"{batch}/0/0" in line)
    assert line.split()[0] in ("runner-0", "runner-1")
    assert line.split()[1:6] == ["rollout", "ready", "0", "1", "1"]
    client.abort_batch(batch, reason="seen enough")
