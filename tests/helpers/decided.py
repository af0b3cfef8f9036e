"""Short functions for events and outcomes of a batch."""

from __future__ import annotations

from typing import Any

from trinity_es.actors.messages import UnitOutcome
from trinity_es.events import vocabulary as ev


def submitted(tasks: int = 2, runs: int = 1, **changes: Any) -> ev.BatchSubmitted:
    values: dict[str, Any] = {
        "batch_id": 1, "batch_type": "train", "repeat_times": [runs] * tasks, "tasks": [{}] * tasks,
        "max_attempts": 2, "submission": "s1",
    }
    return ev.BatchSubmitted(**(values | changes))


def dispatched(*units: ev.Unit, runner: str = "runner-0") -> ev.TasksDispatched:
    return ev.TasksDispatched(runner=runner, incarnation=1, units=list(units), model_version=0)


def unit(task: int = 0, base: int = 0, runs: int = 1, attempt: int = 1) -> ev.Unit:
    return ev.Unit(task=task, run_id_base=base, runs=runs, attempt=attempt)


def result(run: int = 0, reward: float = 1.0) -> ev.RunResult:
    return ev.RunResult(run=run, metrics={"reward": reward}, experiences=1)


def finished(task: int = 0, runs: int = 1, cls: type[ev.RunsFinished] = ev.TaskFinished, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "task": task, "run_id_base": 0, "attempt": 1, "runner": "runner-0", "incarnation": 1,
        "runs": [result(i) for i in range(runs)], "payload": ev.PayloadRef(digest="d", first=0, count=runs),
        "model_version": 0, "model_version_end": 0, "seconds": 1.0,
    }
    return cls(**(values | changes))


def outcome(u: ev.Unit, *, ok: list[int] | None = None, failed: list[tuple[int, Any, str]] | None = None,
            submission: str = "s1") -> UnitOutcome:
    runs = list(range(u.run_id_base, u.run_id_base + u.runs)) if ok is None and failed is None else ok or []
    return UnitOutcome(
        batch_id=1, submission=submission, unit=u, results=[result(r) for r in runs], failures=failed or [],
        payload=ev.PayloadRef(digest="d", first=0, count=len(runs)) if runs else None, seconds=1.0,
    )


SUBMIT: dict[str, Any] = {
    "batch_id": 1, "batch_type": "train", "repeat_times": [1, 1], "tasks": [{}, {}], "tasks_digest": None,
    "min_wait_num": None, "max_attempts": 2, "runs_per_unit": None, "detailed_stats": False, "submission": "s1",
}
