"""A log of a run with many faults, made of simulated schedules one after the other, with their times.

Runners, coordinators and whole systems die, messages are lost, units time out, batches are aborted, ids are reused,
0 and "0" are two batches, and the last system dies at work. Tokens and weights versions, which are uniform in the
simulator, are varied. tests/full/test_figures.py checks the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.sample_run import TimedLog
from tests.simulation import doubles, schedule
from tests.simulation.invariants import Invariants
from tests.simulation.world import World
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded, Write
from trinity_es.events.values import BatchId, FailureKind, batch_stream
from trinity_es.projections.tables.read_models import projectors

IDS = 14
"""Number of schedules in a row with different batch ids. Then the ids are reused."""
DYING = 4
"""Number of last schedules in which the whole system dies at work and is not recovered."""


def troubled(path: Path, seed: int, schedules: int) -> None:
    """Write a new log of this number of schedules, with seeds from `seed` on."""
    chance, versions, began = Random(seed), Counter[str](), 0.0
    moved = _Moved(chance)
    with TimedLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", {"pid": 2**22 - 3, "host": "gone", "admin": {}})
        for number, rows in enumerate(_played(range(seed, seed + schedules))):
            moved.begin(number, versions)
            kept = rows if number < schedules - DYING else _until_it_died(rows)
            for commit, group in groupby(rows, key=lambda row: row.commit_id):
                some = list(group)
                if some[-1].position > kept[-1].position:
                    break
                events = [moved.event(row.event) for row in some]
                streams = [moved.stream(row) for row in some]
                moved.note(some, events)
                log.times = [began + row.recorded_at for row in some]
                writes = []
                for stream, of in groupby(zip(streams, events, strict=True), key=lambda pair: pair[0]):
                    told = [event for _, event in of]
                    writes.append(Write(stream=stream, expected_version=versions[stream], events=told))
                    versions[stream] += len(told)
                log.append(writes, commit_id=f"{number}/{commit}", lease=lease)
            began += rows[-1].recorded_at - rows[0].recorded_at + chance.uniform(1.0, 60.0)
        for stream, events in ((batch_stream("0"), _edges()), ("weights", _published_twice(moved.last_weights + 1)),
                               ("queue", _taken(*moved.delivered)), ("runner/edge", _could_not_load())):
            log.times = [log.times[-1] + 0.5 * n for n in range(len(events))]
            write = Write(stream=stream, expected_version=versions[stream], events=events)
            log.append([write], commit_id=f"edges of {stream}", lease=lease)


def _published_twice(version: int) -> list[ev.Event]:
    """Return publications of a version from memory, of the next one, and of the first again as a checkpoint."""
    return [ev.WeightsPublished(version=v, path=f"{method}/{v}", method=method)
            for v, method in ((version, "memory"), (version + 1, "memory"), (version, "checkpoint"))]


def _could_not_load() -> list[ev.Event]:
    """Return events of a runner that could not load weights, kept its first ones, and is retired."""
    life: dict[str, Any] = {"runner": "edge", "incarnation": 1}
    return [ev.RunnerStarted(**life, pid=2**22 - 4, host="gone", engine="scripted"),
            ev.RunnerReady(**life, places=1, model_version=1, load_seconds=0.5),
            ev.WeightsFailed(**life, version=2, error="no such file"), ev.RunnerRetired(**life)]


def _taken(batch_id: BatchId, version: int) -> list[ev.Event]:
    """Return events of an experience that two steps used, and of a step that was undone."""
    items = [ev.TakenItem(batch_id=batch_id, version=version, first=0, count=1, use_count=1)]
    takes: list[ev.Event] = [ev.ExperiencesTaken(items=items, at=0.0, step=step, request=f"edge {step}")
                             for step in (5, 6, 99)]
    return [*takes, ev.ExperiencesReturned(step=50)]


def _edges() -> list[ev.Event]:
    """Return a batch of cases that simulated schedules rarely have.

    Task 0 is running, 1 lost a run and was dropped, 2 waits for a runner, 3 has its newest tokens in its first unit,
    and 4 failed for two reasons in one attempt.
    """
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}

    def unit(task: int, base: int) -> ev.Unit:
        return ev.Unit(task=task, run_id_base=base, runs=2 if task == 4 else 1, attempt=1)

    def done(task: int, base: int, weights: int, kind: type[ev.RunsFinished] = ev.RunsFinished) -> ev.Event:
        run = ev.RunResult(run=base, metrics={"reward": 0.5}, experiences=1, prompt_tokens=3, response_tokens=600)
        return kind(task=task, run_id_base=base, attempt=1, **life, runs=[run], payload=None, model_version=weights,
                    model_version_end=weights, seconds=0.25)

    def failed(task: int, runs: list[int], kind: FailureKind, retry: bool) -> ev.Event:
        return ev.AttemptFailed(task=task, run_id_base=0, failed_runs=runs, attempt=1, **life, kind=kind,
                                message="no", retry=retry)

    units = [unit(0, 0), unit(0, 1), unit(1, 0), unit(1, 1), unit(2, 0), unit(3, 0), unit(3, 1), unit(4, 0)]
    return [
        ev.BatchSubmitted(batch_id="0", batch_type="train", repeat_times=[2, 2, 1, 2, 2], tasks=[{}] * 5,
                          max_attempts=3, runs_per_unit=1),
        ev.TasksDispatched(**life, units=units, model_version=7), done(0, 0, 8), failed(1, [0], "data", False),
        ev.TaskDropped(tasks=[1], reason="enough"), failed(2, [0], "infra", True), done(3, 1, 9),
        done(3, 0, 7, ev.TaskFinished), failed(4, [0], "data", False), failed(4, [1], "workflow", False),
        ev.BatchFinalizing(), ev.FinalizeFailed(error="disk full"),
    ]


def _until_it_died(rows: list[Recorded]) -> list[Recorded]:
    """Return the events up to the point at which half of the units were sent."""
    sent = [row.position for row in rows if row.type == "TasksDispatched"]
    return rows[: sent[len(sent) // 2]] if sent else rows


def _played(seeds: range) -> Iterator[list[Recorded]]:
    worlds: list[World] = []

    class Kept(Invariants):
        def __init__(self, world: World) -> None:
            super().__init__(world)
            worlds.append(world)

    with pytest.MonkeyPatch.context() as patch, doubles.installed():
        patch.setattr(schedule, "Invariants", Kept)
        for seed in seeds:
            schedule.run(schedule.make(seed, stress=True))
            yield worlds.pop().store.rows


@dataclass(slots=True)
class _Moved:
    """Converter of one schedule's events for the long log: later incarnations, later weights, other batch ids."""

    chance: Random
    number: int = 0
    lives: int = 0
    weights: int = 0
    last_life: int = 0
    last_weights: int = 0
    delivered: tuple[BatchId, int] = (0, 0)
    """(last train batch with a delivery, stream version of its BatchFinalized)."""
    versions: Counter[str] | None = None
    """Stream -> number of its events before this schedule."""

    def begin(self, number: int, versions: Counter[str]) -> None:
        self.number, self.versions = number, versions.copy()
        self.lives, self.weights = self.last_life, self.last_weights

    def note(self, rows: list[Recorded], events: list[ev.Event]) -> None:
        """Set `delivered` from the last BatchFinalized of a train batch."""
        for row, event in zip(rows, events, strict=True):
            if isinstance(event, ev.BatchFinalized) and event.selected and event.result["batch_type"] == "train":
                self.delivered = event.result["batch_id"], row.version + self.versions[self.stream(row)]

    def batch(self, batch_id: BatchId) -> BatchId:
        if isinstance(batch_id, str):
            return f"{self.number % IDS}{batch_id}"
        return 10 * (self.number % IDS) + batch_id

    def stream(self, row: Recorded) -> str:
        if not row.stream.startswith("batch/"):
            return row.stream
        name = row.stream.removeprefix("batch/")
        return batch_stream(self.batch(int(name) if name.isdecimal() else name))

    def event(self, event: ev.Event) -> ev.Event:
        changed: dict[str, Any] = {}
        if hasattr(event, "batch_id"):
            changed["batch_id"] = self.batch(event.batch_id)
        if hasattr(event, "incarnation"):
            changed["incarnation"] = event.incarnation + self.lives
            self.last_life = max(self.last_life, changed["incarnation"])
        if isinstance(event, ev.WeightsPublished | ev.WeightsLoaded | ev.WeightsFailed):
            changed["version"] = event.version + self.weights
            self.last_weights = max(self.last_weights, changed["version"])
        elif hasattr(event, "model_version"):
            changed["model_version"] = event.model_version + self.weights
        match event:
            case ev.RunsFinished():  # or its subclass TaskFinished
                drift = self.chance.choice((0, 0, 0, 1, 2))
                newest = event.model_version_end + self.weights + self.chance.randrange(2)
                changed["model_version"], changed["model_version_end"] = max(0, newest - drift), newest
                changed["runs"] = [replace(r, prompt_tokens=self.chance.randrange(50),
                                           response_tokens=self.chance.randrange(500)) for r in event.runs]
            case ev.BatchFinalized():
                changed["result"] = event.result | {"batch_id": self.batch(event.result["batch_id"])}
                first = self.chance.randint(0, event.selected)
                changed["model_versions"] = [(first, max(0, self.weights - 1)), (event.selected - first, self.weights)]
                changed["dropped"] = event.dropped + (lost := self.chance.randrange(3))
                changed["dropped_by"] = {"filter": [f"x/0/0/0/{n}" for n in range(lost - 1)]} if lost > 1 else {}
            case ev.BatchAborted():
                changed["result"] = event.result | {"batch_id": self.batch(event.result["batch_id"])}
            case ev.CoordinatorStarted():
                changed["open_batches"] = [self.batch(b) for b in event.open_batches]
            case ev.ExperiencesRedelivered() | ev.PayloadsFreed():
                changed["batches"] = [self.batch(b) for b in event.batches]
            case ev.ExperiencesTaken():
                changed["items"] = [replace(item, batch_id=(b := self.batch(item.batch_id)),
                                            version=item.version + self.versions[batch_stream(b)])
                                    for item in event.items]
        return replace(event, **changed) if changed else event
