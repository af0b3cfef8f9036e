"""Environments in a whole system: their processes die, the step ends, and nothing is doubled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.of_the_day import EXAMPLES, by_turns
from tests.helpers.systems import StartSystem, pid_of
from trinity_es.environments.installs import Installed
from trinity_es.events.values import Task
from trinity_es.tasksets.taskset import Taskset
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

TASKS, RUNS = 6, 4


def players(runner: int) -> list[psutil.Process]:
    """The processes of environments below a runner's, those that play."""
    found = [p for p in psutil.Process(runner).children(recursive=True) if "verifiers_main.py" in " ".join(p.cmdline())]
    return [p for p in found if p.parent() in found]


@by_turns(EXAMPLES[1], EXAMPLES)
def test_a_step_ends_though_its_environment_and_then_its_runner_is_killed_and_nothing_is_doubled(
    letters: Installed, start_system: StartSystem, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    line = {"name": "letters", "path": "verifiers:letters-env", "repeat_times": RUNS,
            "workflow_args": {"config": {"taskset": {"rows": TASKS}}}}
    client = start_system(
        buffer={"batch_size": TASKS, "explorer_input": {"tasksets": [line]}},
        explorer={"max_timeout": 300.0, "max_retry_times": 5, "max_concurrency": 4, "rollout_model": {
            "engine_type": "scripted", "script": {"latency_seconds": 0.3}, "max_response_tokens": 6}})
    [config] = client.config.buffer.explorer_input.tasksets
    tasks: list[Task] = Taskset(config).all()
    for task in tasks:
        task.raw_task = {**(task.raw_task or {}), "note": str(note)}
    client.submit_batch(batch_id=1, tasks=tasks, batch_type="train")

    def over() -> int:
        return note.read_text().count("over") if note.exists() else 0

    def kinds() -> set[str]:
        failed: list[Any] = [r.event for r in client.log.read(types=["AttemptFailed"])]
        return {f.kind for f in failed}

    wait_until(lambda: over() >= 3, "some episodes", 240)
    first = pid_of(client, "runner-0")
    [player] = players(first)
    player.kill()
    # A unit's outcome is told when all of its runs are over: what this end failed is to be in the log before another.
    wait_until(lambda: "infra" in kinds(), "what it played to have failed", 240)
    wait_until(lambda: over() >= 10, "more of them, played by another process", 240)
    family = [psutil.Process(first), *psutil.Process(first).children(recursive=True)]
    psutil.Process(first).kill()
    assert client.finalize_train_batch(1, timeout=400)["finished_task_count"] == TASKS
    assert Counter((e.eid.task, e.eid.run) for e in client.experiences(1)) == {
        (task, run): 1 for task in range(TASKS) for run in range(RUNS)}
    assert kinds() == {"infra", "runner_lost"}
    assert client.log.verify() == []
    wait_until(lambda: not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE],
               "what the runner had started to end with it")

