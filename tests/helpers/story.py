"""A handmade log with a manual clock, for tests of `why`, and statuses of a running system."""

from __future__ import annotations

from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import batch_stream
from trinity_es.projections.why.answer import Why
from trinity_es.projections.why.explain import why
from trinity_es.projections.why.system_state import SystemSnapshot, observe

T = 1_800_000_000.0


class Story:
    """Handmade log. `at(seconds)` sets the clock, `add(stream, events)` records events."""

    def __init__(self) -> None:
        self.now, self.recorded = T, list[Recorded]()

    def at(self, seconds: float) -> Story:
        self.now = T + seconds
        return self

    def add(self, stream: str, *events: ev.Event) -> Story:
        for event in events:
            version = 1 + sum(r.stream == stream for r in self.recorded)
            self.recorded.append(Recorded(
                position=len(self.recorded) + 1, stream=stream, version=version, type=type(event).__name__,
                schema_version=1, data=b"", metadata={}, recorded_at=self.now, commit_id="", hash=b"", _event=event,
            ))
        return self

    def runner(self, name: str = "runner-0", incarnation: int = 1, places: int = 8, version: int = 0) -> Story:
        started = ev.RunnerStarted(runner=name, incarnation=incarnation, pid=7, host="here", engine="scripted")
        ready = ev.RunnerReady(
            runner=name, incarnation=incarnation, places=places, model_version=version, load_seconds=1.0
        )
        return self.add(f"runner/{name}", started, ready)

    def batch(self, batch_id: int | str = 3, tasks: int = 8, runs: int = 4, **more: Any) -> Story:
        submitted = ev.BatchSubmitted(
            batch_id=batch_id, batch_type=more.pop("batch_type", "train"), repeat_times=[runs] * tasks,
            tasks=[{}] * tasks, max_attempts=3, **more,
        )
        return self.add(batch_stream(batch_id), submitted)

    def dispatch(
        self, *tasks: int, batch: int | str = 3, runner: str = "runner-0", incarnation: int = 1, attempt: int = 1
    ) -> Story:
        units = [ev.Unit(task=t, run_id_base=0, runs=4, attempt=attempt) for t in tasks]
        return self.add(batch_stream(batch), ev.TasksDispatched(
            runner=runner, incarnation=incarnation, units=units, model_version=0
        ))

    def finish(self, *tasks: int, batch: int | str = 3, seconds: float = 0.2) -> Story:
        for task in tasks:
            runs = [ev.RunResult(run=r, metrics={"reward": 1.0}, experiences=1) for r in range(4)]
            self.add(batch_stream(batch), ev.TaskFinished(
                task=task, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, runs=runs, payload=None,
                model_version=0, model_version_end=0, seconds=seconds,
            ))
        return self

    def fail(self, task: int, kind: Any = "workflow", message: str = "boom", **more: Any) -> Story:
        return self.add("batch/3", ev.AttemptFailed(**{
            "task": task, "run_id_base": 0, "failed_runs": [0, 1, 2, 3], "attempt": 1, "runner": "runner-0",
            "incarnation": 1, "kind": kind, "message": message, "retry": True, **more,
        }))

    def why(self, after: float, batch_id: int | str = 3, **facts: Any) -> Why:
        return why(observe(SystemSnapshot(), self.recorded), batch_id, now=T + after, **facts)


def configured(**explorer: Any) -> ev.SystemConfigured:
    return ev.SystemConfigured(config={"explorer": {"max_timeout": 60.0, "stall_after": 120.0, **explorer}})


def status(*runners: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the status of a running system with these rows of runners, healthy by default."""
    well = {"runner": "runner-0", "incarnation": 1, "state": "ready", "places": 8, "model_version": 0, "reason": ""}
    rows = [well | r for r in runners or [{}]]
    children = [{"name": r["runner"], "state": "ready", "incarnation": r["incarnation"]} for r in rows]
    system = {"children": more.pop("children", children)}
    return {"system": system, "weights_version": 0, "batches": [], "runners": rows, **more}
