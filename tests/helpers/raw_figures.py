"""Figures of a run, counted from its events by SQL and JSON without code of trinity_es, to compare with commands.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    position: int
    stream: str
    version: int
    type: str
    data: dict[str, Any]
    at: float


@dataclass(slots=True)
class Sent:
    """Unit that was sent to a runner, and its outcome."""

    task: int
    base: int
    runs: int
    attempt: int
    runner: str
    life: int
    at: float
    done: int = 0
    failed: int = 0
    ended: float | None = None
    outcome: str = "running"
    seconds: float | None = None


@dataclass(slots=True)
class Task:
    runs: int
    rewards: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    dropped: bool = False
    tokens: int = 0
    newest: int | None = None
    ended: float | None = None

    @property
    def settled(self) -> bool:
        return len(self.done | self.lost) == self.runs


@dataclass(slots=True)
class Batch:
    """Batch since its last submission."""

    batch_id: int | str
    kind: str
    position: int
    submitted: float
    tasks: list[Task]
    state: str
    last: int = 0
    last_at: float = 0.0
    ended: float | None = None
    sent: list[Sent] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    experiences: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    delivered: int = 0
    filtered: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    staleness: float | None = None
    step: int | None = None
    trained: float | None = None

    def task_state(self, number: int) -> str:
        task = self.tasks[number]
        if task.dropped:
            return "dropped"
        if task.settled:
            return "failed" if task.lost else "finished"
        return "running" if any(s.task == number and s.outcome == "running" for s in self.sent) else "pending"

    def states(self) -> Counter[str]:
        return Counter(self.task_state(n) for n in range(len(self.tasks)))

    @property
    def reward(self) -> float | None:
        """Mean over settled tasks of the mean reward over their runs; for an eval, over tasks with the most runs."""
        means = [(t.runs, sum(t.rewards.values()) / len(t.rewards))
                 for t in self.tasks if t.settled and not t.dropped and t.rewards]
        if self.kind == "eval":
            means = [m for m in means if m[0] == max(n for n, _ in means)]
        return sum(m for _, m in means) / len(means) if means and self.state == "finalized" else None


def read(path: Path) -> list[Event]:
    """Return all events of a SQLite log."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(
            "SELECT position, stream, version, type, data, recorded_at FROM es_event ORDER BY position").fetchall()
    finally:
        connection.close()
    return [Event(position, stream, version, kind, json.loads(data), at)
            for position, stream, version, kind, data, at in rows]


def count(events: list[Event], until: int | None = None) -> dict[str, Batch]:
    """Return {stream: batch} with the figures of each batch up to a position."""
    found: dict[str, Batch] = {}
    weights = 0
    for event in events:
        if until is not None and event.position > until:
            break
        if event.type == "WeightsPublished":
            weights = event.data["version"]
        elif event.type == "BatchSubmitted":
            tasks = [Task(n) for n in event.data["repeat_times"]]
            found[event.stream] = Batch(event.data["batch_id"], event.data["batch_type"], event.position, event.at,
                                        tasks, "running" if tasks else "pending", event.position, event.at)
        elif event.stream.startswith("batch/"):
            batch = found[event.stream]
            batch.last, batch.last_at = event.position, event.at
            _take(batch, event, weights)
    return found


def _take(batch: Batch, event: Event, weights: int) -> None:
    data = event.data
    match event.type:
        case "TasksAdded":
            batch.tasks += [Task(n) for n in data["repeat_times"]]
        case "TasksDispatched":
            batch.state = "running"
            batch.sent += [Sent(u["task"], u["run_id_base"], u["runs"], u["attempt"], data["runner"],
                                data["incarnation"], event.at) for u in data["units"]]
        case "RunsFinished" | "TaskFinished":
            task, sent = batch.tasks[data["task"]], _sent(batch, data)
            for run in data["runs"]:
                task.done.add(run["run"])
                if "reward" in run["metrics"]:
                    task.rewards[run["run"]] = run["metrics"]["reward"]
                task.tokens += run["response_tokens"]
                batch.tokens += run["response_tokens"]
                batch.prompt_tokens += run["prompt_tokens"]
                batch.experiences += run["experiences"]
            task.newest = max(data["model_version_end"], -1 if task.newest is None else task.newest)
            task.ended = event.at if task.settled else None
            sent.done += len(data["runs"])
            _end(sent, event.at, "finished", data["seconds"])
        case "AttemptFailed":
            task, sent = batch.tasks[data["task"]], _sent(batch, data)
            batch.failures[data["kind"]] += 1
            if not data["retry"]:
                task.lost |= set(data["failed_runs"])
                task.ended = event.at if task.settled else None
            sent.failed += len(data["failed_runs"])
            _end(sent, event.at, data["kind"], data["seconds"] or None)
        case "TaskDropped":
            for number in data["tasks"]:
                batch.tasks[number].dropped, batch.tasks[number].ended = True, event.at
            for sent in batch.sent:
                if sent.task in data["tasks"] and sent.ended is None:
                    sent.ended, sent.outcome = event.at, "dropped"
        case "BatchFinalizing":
            batch.state = "finalizing"
        case "FinalizeFailed":
            batch.state = "running" if batch.tasks else "pending"
        case "BatchFinalized":
            batch.state, batch.ended = "finalized", event.at
            batch.delivered, batch.filtered = sum(ref["count"] for ref in data["experiences"]), data["dropped"]
            batch.versions = [(n, v) for n, v in data["model_versions"] if n]
            made = sum(n for n, _ in batch.versions)
            batch.staleness = weights - sum(n * v for n, v in batch.versions) / made if made else None
        case "BatchAborted":
            batch.state, batch.ended = "aborted", event.at
        case "BatchTrained":
            batch.step, batch.trained = data["step"], event.at


def _sent(batch: Batch, data: dict[str, Any]) -> Sent:
    return next(s for s in reversed(batch.sent) if (s.task, s.base, s.attempt, s.runner, s.life) == (
        data["task"], data["run_id_base"], data["attempt"], data["runner"], data["incarnation"]))


def _end(sent: Sent, at: float, what: str, seconds: float | None) -> None:
    sent.ended, sent.seconds = at, seconds
    if sent.done + sent.failed == sent.runs or what != "finished":
        sent.outcome = what
