"""A step of the clock changes nothing: processes are named by what no clock has a part in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers.stepped import SteppedClock
from tests.helpers.systems import StartSystem
from trinity_es.system import running_system


def test_commands_find_and_spare_a_system_after_a_step_of_the_clock(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    before = running_system.processes(client._link.admin)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(client.config.to_dict()))
    clock = SteppedClock(tmp_path)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            clock.command(sys.executable, "-m", "trinity_es", *words), capture_output=True, text=True, timeout=120,
            check=False,
        )

    for seconds in (1, -3600):
        clock.step(seconds)
        status = command("status", "--config", str(file), "--json")
        assert status.returncode == 0, status.stderr
        again = command("up", str(file))
        assert "runs on this store already" in again.stderr, again.stderr
    assert running_system.wait_gone(before, 0) == before, "a process of the healthy system was ended"
    client.submit_batch(batch_id=1, tasks=[], batch_type="train")


_WORKER = """
import sys, time
from trinity_es.actors.base import process_start_time
from trinity_es.actors.engines.vllm.weights import WorkerExtension
WorkerExtension().trinity_end_with(int(sys.argv[1]), process_start_time(int(sys.argv[1])))
for looks in range(1_000_000):
    print(looks, flush=True)
    time.sleep(0.1)
"""


def test_an_engine_core_goes_on_after_a_step_of_the_clock_and_ends_with_its_runner(tmp_path: Path) -> None:
    clock = SteppedClock(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as runner:
        try:
            core = subprocess.Popen(
                clock.command("sh", "-c", '"$@"; true', "core", sys.executable, "-c", _WORKER, str(runner.pid)),
                stdout=subprocess.PIPE, text=True,
            )
            core.stdout.readline()
            clock.step(1)
            lines = [core.stdout.readline() for _ in range(30)]
            assert all(lines), "the core ended, and its runner lives"
        finally:
            runner.kill()
    assert core.wait(timeout=10) == -signal.SIGKILL
    core.stdout.close()
