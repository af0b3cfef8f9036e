"""P12: sync workflows play in processes of their own, and what they do to those ends nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.parity_rows import NewId, recorded
from tests.helpers.systems import StartSystem, pid_of, play_batch
from tests.helpers.ways_to_end import WAYS
from trinity_es import Task, Workflow
from trinity_es.actors.base import process_start_time
from trinity_es.actors.guardian.log_size_limit import MAX_BYTES
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.events.vocabulary import AttemptFailed
from trinity_es.system import running_system
from trinity_es.system.leftovers import leftovers
from trinity_es.testing import SleepWorkflow, wait_until


class Misbehaves(Workflow):
    """`workflow_args`: `note`, the file that gets a line with the pid for each attempt; `how`."""

    def run(self) -> list[Experience]:
        args = self.task.workflow_args
        with open(args["note"], "a") as f:
            f.write(f"{os.getpid()}\n")
        if args["how"]:
            WAYS[args["how"]]()
        self.logger.info("this went well in %s", os.getpid())
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


def attempts(note: Path | str) -> list[int]:
    return [int(line) for line in Path(note).read_text().split()] if Path(note).exists() else []


def workers(runner: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in runner.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone
            if process.name() == "worker":
                found.append(process)
    return found


def gone(pids: list[int]) -> bool:
    return all(process_start_time(pid) is None for pid in pids)


@pytest.fixture
def system(system_for: StartSystem) -> RolloutClient:
    """One for all tests that leave the runner alive."""
    return system_for(explorer={"max_concurrency": 3, "max_timeout": 2.0, "max_retry_times": 1})


@pytest.mark.parametrize(("how", "kind", "says"), [
    ("sleep", "timeout", "no end after 2.0 s (max_timeout)"),
    ("loop", "timeout", "no end after 2.0 s (max_timeout)"),
    ("C", "timeout", "no end after 2.0 s (max_timeout)"),
    ("_exit", "workflow", "exit status 3"),
    ("segfault", "workflow", "SIGSEGV"),
])
def test_p12_what_a_sync_workflow_does_to_its_process_fails_its_task_only(
    system: RolloutClient, new_id: NewId, tmp_path: Path, how: str, kind: str, says: str
) -> None:
    runner, batch, note = psutil.Process(pid_of(system, "runner-0")), new_id(), tmp_path / "note"
    bad = Task(workflow=Misbehaves, workflow_args={"note": str(note), "how": how})
    good = [Task(workflow=Misbehaves, workflow_args={"note": str(tmp_path / "good"), "how": ""}) for _ in range(4)]
    play_batch(system, batch, [bad, *good, Task(workflow=SleepWorkflow)])
    statuses = system.batch(batch).statuses
    assert [statuses[i].ok for i in range(6)] == [False, *[True] * 5]
    failed = recorded(system, batch, AttemptFailed)
    assert [(f.task, f.kind) for f in failed] == [(0, kind)] * 2
    assert says in failed[0].message
    assert says in (statuses[0].message or "")
    pids = attempts(note)
    assert len(pids) == 2, "it was attempted again"
    wait_until(lambda: gone(pids), "the end of the workers that misbehaved", 5)
    assert pid_of(system, "runner-0") == runner.pid
    assert runner.is_running()
    assert len(workers(runner)) <= 3
    log = Path(system.config.system.log_dir) / "runner-0.log"
    assert f"this went well in {attempts(tmp_path / 'good')[0]}" in log.read_text()


class LeavesADaemon(Workflow):
    """Leaves a process in a session of its own, whose parent is gone."""

    def run(self) -> list[Experience]:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(300)
            os._exit(0)
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


def test_a_process_that_a_workflow_left_ends_with_the_system(start_system: StartSystem) -> None:
    client = start_system()
    play_batch(client, 1, [Task(workflow=LeavesADaemon)])
    assert client.shutdown() == 1
    assert leftovers(client.config) == []


class PrintsMuch(Workflow):
    """By a logger, by print, straight to the descriptor, and from a process that it starts; 60 MiB."""

    def run(self) -> list[Experience]:
        line = "y" * 1023
        for _ in range(15 * 1024):
            self.logger.warning(line)
        for _ in range(15):
            print(line * 1024)  # noqa: T201
            os.write(1, b"z" * 1024 * 1024)
        subprocess.run(["head", "-c", str(15 << 20), "/dev/zero"], check=True)
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


class PrintsMuchOnTheLoop(PrintsMuch):
    is_async = True

    async def run_async(self) -> list[Experience]:
        return self.run()


def cut_short(file: Path) -> bool:
    # Whoever prints meanwhile may come before the line that says so.
    return file.stat().st_size <= MAX_BYTES and b"this file was cut" in file.read_bytes()


def test_n6_what_workflows_print_is_kept_to_its_end_and_stays_small(system: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    tasks = [Task(workflow=kind) for kind in (PrintsMuch, PrintsMuchOnTheLoop) for _ in range(2)]
    play_batch(system, batch, tasks)
    folder = Path(system.config.system.log_dir)
    files = [folder / "runner-0.log", running_system.output_file(system.config)]
    wait_until(lambda: all(cut_short(f) for f in files), "the logs to be cut")
    for file in files:
        assert file.with_name(f"{file.name}.1").stat().st_size == MAX_BYTES
    said = folder / "guardian.log"  # once, when all files have been looked at
    wait_until(lambda: said.read_text().count("runner-0.log grew too long") == 1, "the guardian to say that it cut")
    found = leftovers(system.config)  # which are known by the file that they print to
    assert {p.pid for p in workers(psutil.Process(pid_of(system, "runner-0")))} <= {p.pid for p in found}


def test_a_runner_imports_its_config_s_workflows_before_a_task(start_system: StartSystem, tmp_path: Path) -> None:
    note = tmp_path / "imported"
    (tmp_path / "warmed_before.py").write_text(
        "import os\n"
        f"with open({str(note)!r}, 'a') as f:\n"
        "    print(os.getpid(), file=f)\n"
        "from tests.full.system.test_workers import Misbehaves as W\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    taskset = {"name": "t", "path": "tasks.jsonl", "workflow": "warmed_before:W"}
    start_system(buffer={"explorer_input": {"tasksets": [taskset]}})
    wait_until(lambda: set(attempts(note)) - {os.getpid()}, "a process of the runner's to import it")
