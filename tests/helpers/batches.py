"""Batches folded from events."""

from __future__ import annotations

import random

from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.messages import UnitOutcome
from trinity_es.events import vocabulary as ev
from trinity_es.projections.batch import BatchState, batch_result, evolve, fold


def result_of(task: int, run: int) -> ev.RunResult:
    """Return a result whose metrics use all bits of a float, so that their sum depends on the order."""
    value = random.Random(f"{task}/{run}").random()
    return ev.RunResult(run=run, metrics={"reward": value, "steps:sum": 1.0 + value, "x:last": value}, experiences=1)


def live(seed: int, tasks: int, runs: int, split: int | None, batch_type: str) -> tuple[BatchState, list[ev.Event]]:
    """Play a batch with the real decisions, and random failures and deaths from `seed`."""
    chance = random.Random(seed)
    events: list[ev.Event] = list(
        batches.submit(None, ev.BatchSubmitted(
            batch_id="5/x", batch_type=batch_type, repeat_times=[runs] * tasks,  # type: ignore[arg-type]
            tasks=[{}] * tasks, max_attempts=3, runs_per_unit=split, submission="s",
        ))
    )
    state = fold(events)
    lives = {"a": 1, "b": 1}

    def record(new: list[ev.Event]) -> None:
        nonlocal state
        for event in new:
            events.append(event)
            state = evolve(state, event)

    while not state.is_complete:
        capacities = [
            batches.Capacity(name=n, incarnation=i, model_version=1, places=3, limit=3,
                               load=sum((f.runner, f.incarnation) == (n, i) for f in state.flights.values()))
            for n, i in lives.items()
        ]
        for _, event in batches.dispatch([state], capacities):
            record([event])
        flight = chance.choice(list(state.flights.values()))
        fate = chance.random()
        if fate < 0.1:
            record(batches.lose_runner(state, flight.runner, flight.incarnation, "killed"))
            lives[flight.runner] += 1
            continue
        unit = flight.unit
        failed = [r for r in range(unit.run_id_base, unit.run_id_base + unit.runs) if chance.random() < 0.2]
        done = [r for r in range(unit.run_id_base, unit.run_id_base + unit.runs) if r not in failed]
        outcome = UnitOutcome(
            batch_id="5/x", submission="s", unit=unit, results=[result_of(unit.task, r) for r in done],
            failures=[(r, "workflow", "x") for r in failed], seconds=1.0,
        )
        record(batches.apply_outcome(state, flight.runner, flight.incarnation, outcome))
        record(batches.apply_outcome(state, flight.runner, flight.incarnation, outcome))  # a message may come twice
    record(batches.start_finalizing(state))
    if batch_type == "train":
        record([ev.BatchFinalized(result=batch_result(state))])
    return state, events
