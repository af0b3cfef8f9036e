"""The reasoning-gym example, run as a user does, and its rewards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, Task, task_from_dict
from trinity_es.projections.reading.log_reader import Log


def play_example(changes: dict[str, object], variables: dict[str, str], folder: Path, *, timeout: float) -> None:
    """Run the example to its end in this folder, with these changes of its config."""
    overrides = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "examples.reasoning_gym", *overrides], cwd=folder,
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr


def rewards(log: Log, batch: BatchId) -> list[tuple[Task, float]]:
    submitted = next(r.event for r in log.events(batch) if isinstance(r.event, ev.BatchSubmitted))
    tasks = [task_from_dict(task) for task in log.tasks_of(submitted)]
    finished = [r.event for r in log.events(batch) if isinstance(r.event, ev.TaskFinished | ev.RunsFinished)]
    return [(tasks[e.task], run.metrics["reward"]) for e in finished for run in e.runs]
