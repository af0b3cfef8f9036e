"""Random histories of batches, queue and runners, in any order that a log accepts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import BatchId, BatchType, FailureKind, batch_stream

BATCHES: tuple[BatchId, ...] = (1, 1, "2/letters")
TEXTS = ("", "why not", "a\0b", "x" * 3000, "<b>\x1b[2J", "\ufffd")
KINDS: tuple[FailureKind, ...] = ("data", "workflow", "timeout", "runner_lost", "runner_lost", "infra")
METRICS: tuple[dict[str, float], ...] = ({}, {"rollout/reward/mean": 0.25}, {"eval/letters/reward/mean@2": 0.75})


def history(chance: random.Random, length: int) -> list[tuple[str, ev.Event]]:
    """Draw random events, except that a batch begins with its submission. Ids are few, so that they often collide."""
    out: list[tuple[str, ev.Event]] = [(batch_stream(b), submitted(chance, b)) for b in BATCHES]
    for _ in range(length):
        room = chance.choices(("batch", "runner", "weights", "queue"), (10, 4, 1, 2))[0]
        if room == "batch":
            batch_id = chance.choice(BATCHES)
            out.append((batch_stream(batch_id), of_batch(chance, batch_id)))
        elif room == "runner":
            runner = chance.choice(("runner-0", "judge-1"))
            out.append((f"runner/{runner}", of_runner(chance, runner)))
        elif room == "queue":
            out.append(of_queue(chance, out))
        else:
            version, path = chance.randrange(4), chance.choice(TEXTS)
            out.append(("weights", ev.WeightsPublished(version=version, path=path)))
    return out


def submitted(chance: random.Random, batch_id: BatchId) -> ev.Event:
    kind: BatchType = "eval" if isinstance(batch_id, str) else chance.choice(("train", "collect"))
    return ev.BatchSubmitted(batch_id=batch_id, batch_type=kind, repeat_times=[2] * chance.randrange(4))


def of_batch(chance: random.Random, batch_id: BatchId) -> ev.Event:
    few, say = chance.randrange, chance.choice(TEXTS)
    life: dict[str, Any] = {"runner": chance.choice(("runner-0", "judge-1")), "incarnation": 1 + few(3)}
    unit = {"task": few(4), "run_id_base": 0, "attempt": 1}
    runs = [ev.RunResult(run=n, metrics={}, experiences=few(3), prompt_tokens=few(9), response_tokens=few(9))
            for n in range(few(3))]
    finished: dict[str, Any] = {**unit, **life, "runs": runs, "payload": None, "model_version": few(4),
                                "model_version_end": few(4), "seconds": 1.0}
    result = {"batch_id": batch_id, "batch_type": "train", "metrics": chance.choice(METRICS)}
    events: list[tuple[int, Callable[[], ev.Event]]] = [
        (2, lambda: submitted(chance, batch_id)),
        (1, lambda: ev.TasksAdded(repeat_times=[1] * few(3))),
        (8, lambda: ev.TasksDispatched(**life, units=[ev.Unit(task=n, run_id_base=0, runs=1, attempt=1)
                                                      for n in range(few(4))], model_version=few(4))),
        (2, lambda: ev.RunsFinished(**finished)),
        (4, lambda: ev.TaskFinished(**finished)),
        (8, lambda: ev.AttemptFailed(**unit, **life, failed_runs=[0], kind=chance.choice(KINDS), message=say,
                                     retry=few(2) == 0)),
        (3, lambda: ev.TaskDropped(tasks=list(range(few(4))), reason=say)),
        (1, ev.BatchFinalizing),
        (1, lambda: ev.FinalizeFailed(error=say)),
        (4, lambda: ev.BatchFinalized(
            result=result, selected=few(6), dropped=few(6),
            dropped_by={chance.choice(TEXTS): ["1/0/0/0/a"] * few(3) for _ in range(2)},
            model_versions=[(few(4), few(4)) for _ in range(few(3))])),
        (1, lambda: ev.BatchAborted(reason=say, result=result)),
        (2, lambda: ev.BatchTrained(step=few(4))),
    ]
    return chance.choices([make_it for _, make_it in events], [weight for weight, _ in events])[0]()


def of_queue(chance: random.Random, before: list[tuple[str, ev.Event]]) -> tuple[str, ev.Event]:
    """Draw an event of a trainer that takes delivered experiences, or goes back to a checkpoint."""
    delivered, versions = list[tuple[BatchId, int, int]](), Counter[str]()
    for stream, event in before:
        versions[stream] += 1
        if isinstance(event, ev.BatchFinalized) and event.selected:
            delivered.append((event.result["batch_id"], versions[stream], event.selected))
    back = chance.randrange(8)
    if back == 0 or not delivered:
        return "queue", ev.ExperiencesReturned(step=chance.randrange(4))
    if back == 1:
        batches = [b for b in set(BATCHES) if chance.randrange(2)]
        return "experiences", ev.ExperiencesRedelivered(step=chance.randrange(4), batches=batches)
    items = []
    for batch_id, version, selected in chance.sample(delivered, min(len(delivered), 1 + chance.randrange(2))):
        first = chance.randrange(selected)
        items.append(ev.TakenItem(batch_id=batch_id, version=version, first=first, use_count=1,
                                  count=1 + chance.randrange(selected - first)))
    return "queue", ev.ExperiencesTaken(items=items, at=1.0, step=chance.choice((None, 0, 1, 2, 3)), request="x")


def of_runner(chance: random.Random, runner: str) -> ev.Event:
    few, say = chance.randrange, chance.choice(TEXTS)
    life: dict[str, Any] = {"runner": runner, "incarnation": 1 + few(3)}
    return chance.choice([
        ev.RunnerStarted(**life, pid=few(9), host=say, engine=chance.choice(TEXTS), model=say),
        ev.RunnerReady(**life, places=few(4), model_version=few(4), load_seconds=0.5),
        ev.ConcurrencyChanged(**life, places=few(4), kv_share=0.5, waiting=few(3)),
        ev.RunnerFailed(**life, reason=say), ev.RunnerLost(**life, reason=say), ev.RunnerRetired(**life),
        ev.RunnerQuarantined(**life, deaths=3, period_seconds=60.0, reason=say),
        ev.WeightsLoaded(**life, version=few(4), seconds=0.25), ev.WeightsFailed(**life, version=few(4), error=say),
    ])


def append(log: EventLog, history: Iterable[tuple[str, ev.Event]], size: Callable[[], int]) -> None:
    """Append a history in commits of `size()` events each."""
    entries = [(s, e) for s, e in history]
    versions, number = Counter[str](), 0
    while entries:
        some, entries = entries[: (n := size())], entries[n:]
        writes = []
        for stream, group in groupby(some, key=lambda entry: entry[0]):
            events = [event for _, event in group]
            writes.append(Write(stream=stream, expected_version=versions[stream], events=events))
            versions[stream] += len(events)
        number += 1
        log.append(writes, commit_id=f"c{number}")
