"""What dies is replaced, and the batch goes on (promises 2, 4 and 10, as far as this release goes)."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import systems
from tests.helpers.systems import StartSystem, finalize_in_thread, pid_of, play_batch, ran, tasks
from trinity_es import Task, Workflow
from trinity_es.actors.rollout import workflow_runner
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.system import running_system
from trinity_es.testing import SleepWorkflow, wait_until


def test_a_killed_runner_is_replaced_and_only_what_was_running_is_run_again(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"max_concurrency": 4, "rollout_model": {"engine_num": 2}})
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(24, count, 0.4), batch_type="train")
    answer = finalize_in_thread(client, 1)
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks to finish")
    finished = set(client.batch(1).statuses)
    killed = pid_of(client, "runner-0")
    os.kill(killed, signal.SIGKILL)
    assert answer.result(60)["finished_task_count"] == 24
    assert all(s.ok for s in client.batch(1).statuses.values())
    assert Counter(e.eid.task for e in client.experiences(1)) == dict.fromkeys(range(24), 1)
    again = [line for line, times in ran(count).items() if times > 1]
    assert not {int(line.split()[1]) for line in again} & finished
    assert [r.type for r in client.log.events() if r.type == "RunnerLost"] == ["RunnerLost"]
    assert pid_of(client, "runner-0") != killed
    wait_until(lambda: [r["state"] for r in client.status()["runners"]] == ["ready"] * 2, "its next life to serve")


class Notes(Workflow):
    """Played in a worker process, whose pid it notes; its first attempt takes long."""

    def run(self) -> list[Experience]:
        note = Path(self.task.workflow_args["note"])
        first = not note.exists()
        with note.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(600 if first else 0)
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


def test_a_killed_worker_costs_an_attempt_and_no_runner(start_system: StartSystem, tmp_path: Path) -> None:
    client, note = start_system(explorer={"max_retry_times": 1}), tmp_path / "pids"
    client.submit_batch(batch_id=1, tasks=[Task(workflow=Notes, workflow_args={"note": str(note)})], batch_type="train")
    before = pid_of(client, "runner-0")
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), "the workflow to run")
    os.kill(int(note.read_text()), signal.SIGKILL)
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 1
    assert client.batch(1).statuses[0].ok
    assert len(set(note.read_text().split())) == 2
    assert [r.type for r in client.log.events() if r.type in ("AttemptFailed", "RunnerLost")] == ["AttemptFailed"]
    assert pid_of(client, "runner-0") == before


def test_a_killed_coordinator_is_replaced_and_nothing_is_run_again(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(16, count, 1.0), batch_type="train")
    answer = finalize_in_thread(client, 1)
    wait_until(lambda: sum(ran(count).values()) >= 8, "eight tasks to run")
    runner, first = pid_of(client, "runner-0"), pid_of(client, "coordinator")
    os.kill(first, signal.SIGKILL)
    assert answer.result(60)["finished_task_count"] == 16
    assert set(ran(count).values()) == {1}
    assert pid_of(client, "runner-0") == runner
    assert pid_of(client, "coordinator") != first


def test_promise_10_a_task_that_kills_its_runners_fails_and_the_others_do_not(start_system: StartSystem) -> None:
    client = start_system(
        explorer={"max_retry_times": 1, "rollout_model": {"engine_num": 2, "script": {
            "rules": [{"prompt": "poison", "exit": True}], "response": "fine",
        }}},
    )
    reward = "tests.main.test_deaths:always_one"
    prompts = ["poison", "bread", "water"]
    given = [Task(workflow="single_turn", raw_task={"prompt": p}, reward_fn=reward) for p in prompts]
    play_batch(client, 1, given[1:])
    play_batch(client, 2, given)
    statuses = client.batch(2).statuses
    assert not statuses[0].ok
    assert "runner_lost" in (statuses[0].message or "")


def always_one(response: str, prompt: str, truth: str | None) -> float:
    return 1.0


def test_when_everything_died_a_new_start_runs_no_ended_task_again(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(16, count, 0.5), batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks to finish")
    systems.kill_system(client)
    finished = set(client.batch(1).statuses)
    again = start_system()
    assert again.finalize_train_batch(1, timeout=60)["finished_task_count"] == 16
    assert Counter(e.eid.task for e in again.experiences(1)) == dict.fromkeys(range(16), 1)
    twice = {int(line.split()[1]) for line, times in ran(count).items() if times > 1}
    assert not twice & finished


class Crashes(Workflow):
    """What a bad C extension does, and before that a warning."""

    is_async = True

    async def run_async(self) -> list[Any]:
        workflow_runner._log.warning("about to crash")  # a logger that was made when its module was imported
        faulthandler._sigsegv()
        return []


def test_last_words_of_a_runner_are_kept_and_its_system_outlives_thespian_s_logger(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_retry_times": 0}, system={"restart_pause": 0.1})
    [logger] = [p for p in running_system.processes(client._link.admin) if p.name().startswith("logger")]
    logger.kill()
    play_batch(client, 1, [Task(workflow=Crashes)])
    [status] = client.batch(1).statuses.values()
    assert "runner_lost" in (status.message or "")
    logs = Path(client.config.system.log_dir)
    assert "about to crash" in (logs / "runner-0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in running_system.output_file(client.config).read_text()
    play_batch(client, 2, [Task(workflow=SleepWorkflow)])


@pytest.mark.parametrize("victims", [systems.guardian, systems.admin, systems.everything])
def test_what_nobody_supervises_is_started_again_and_the_waiting_client_gets_its_answer(
    victims: Callable[[RolloutClient], list[psutil.Process]], start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(system={"keeper": True})
    wait_until(lambda: running_system.keeper(client.config), "the keeper")
    count = tmp_path / "ran"
    client.submit_batch(batch_id=1, tasks=tasks(16, count, 0.5), batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks to finish")
    before = client._link.admin
    family = systems.everything(client)
    finished = set(client.batch(1).statuses)
    answer = finalize_in_thread(client, 1)
    systems.kill_all(victims(client))
    assert answer.result(60)["finished_task_count"] == 16
    assert client._link.admin != before
    assert not running_system.wait_gone(family, 10), "a process of the earlier life is left"
    assert Counter(e.eid.task for e in client.experiences(1)) == dict.fromkeys(range(16), 1)
    twice = {int(line.split()[1]) for line, times in ran(count).items() if times > 1}
    assert not twice & finished
