"""What is kept of open batches between two questions is what a fold of everything gives, at every position."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sample_log import make
from tests.helpers.handmade import write
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, fold
from trinity_es.projections.history.attempts import fold_timeline
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.why.explain import why
from trinity_es.projections.why.system_state import Followed, SystemSnapshot, observe

T = 1_800_000_000.0
BATCHES: tuple[BatchId, ...] = (1, "two", 3)
RUNNERS = ("a", "b")


class History:
    """A log in memory, by chance: batches that are submitted again, runners that die, a log put back to a copy."""

    def __init__(self, seed: int) -> None:
        self.chance, self.recorded = random.Random(seed), list[Recorded]()
        self.lives = dict.fromkeys(RUNNERS, 0)

    def add(self, stream: str, event: ev.Event) -> None:
        before = self.recorded[-1].hash if self.recorded else b""
        position = len(self.recorded) + 1
        self.recorded.append(Recorded(
            position=position, stream=stream, version=1 + sum(r.stream == stream for r in self.recorded),
            type=type(event).__name__, schema_version=1, data=b"", metadata={}, recorded_at=T + position, commit_id="",
            hash=hashlib.sha256(before + repr(event).encode()).digest(), _event=event,
        ))

    def of(self, batch_id: BatchId, after: int = 0) -> Iterator[Recorded]:
        return (r for r in self.recorded if r.stream == batch_stream(batch_id) and r.position > after)

    def step(self) -> None:
        """One event, or the end of the log is lost."""
        luck = self.chance.random()
        if luck < 0.04 and self.recorded:
            del self.recorded[-self.chance.randint(1, 8):]
        elif luck < 0.12:
            name = self.chance.choice(RUNNERS)
            self.lives[name] += 1
            self.add(f"runner/{name}", ev.RunnerStarted(
                runner=name, incarnation=self.lives[name], pid=1, host="h", engine="scripted"))
        else:
            batch_id = self.chance.choice(BATCHES)
            state = fold(r.event for r in self.of(batch_id))
            if state is None or self.chance.random() < 0.04:
                self.add(batch_stream(batch_id), ev.BatchSubmitted(
                    batch_id=batch_id, batch_type="train", repeat_times=[2] * self.chance.randint(1, 6), tasks=[],
                    runs_per_unit=self.chance.choice([1, 2]), max_attempts=3))
            else:
                self.add(batch_stream(batch_id), self.next_of(state))

    def next_of(self, state: BatchState) -> ev.Event:
        chance, makes = self.chance, list[Callable[[], ev.Event]]()
        if state.pending:
            makes += [lambda: self.dispatched(state)] * 4
        if state.flights:
            makes += [lambda: self.ended(state)] * 6
        makes += [
            lambda: ev.StallDetected(waiting_on="x", since=T), lambda: ev.BatchFinalizing(),
            lambda: ev.FinalizeFailed(error="boom"), lambda: ev.BatchPaused(reason="x"),
            lambda: ev.TasksAdded(request=str(chance.random()), repeat_times=[2], tasks=[]),
            lambda: ev.TaskDropped(tasks=[chance.randrange(len(state.tasks))], reason="enough"),
        ]
        return chance.choice(makes)()

    def dispatched(self, state: BatchState) -> ev.Event:
        units = self.chance.sample(list(state.pending.values()), k=min(2, len(state.pending)))
        name = self.chance.choice(RUNNERS)
        return ev.TasksDispatched(runner=name, incarnation=self.lives[name], units=units, model_version=0)

    def ended(self, state: BatchState) -> ev.Event:
        flight = self.chance.choice(list(state.flights.values()))
        unit, common = flight.unit, {"runner": flight.runner, "incarnation": flight.incarnation}
        runs = list(range(unit.run_id_base, unit.run_id_base + unit.runs))
        if self.chance.random() < 0.3:
            return ev.AttemptFailed(
                task=unit.task, run_id_base=unit.run_id_base, failed_runs=runs, attempt=unit.attempt, kind="workflow",
                message="boom", retry=self.chance.random() < 0.7, **common)
        return ev.RunsFinished(
            task=unit.task, run_id_base=unit.run_id_base, attempt=unit.attempt, payload=None, model_version=0,
            runs=[ev.RunResult(run=r, metrics={"reward": 1.0}, experiences=1) for r in runs], model_version_end=0,
            seconds=self.chance.random(), **common)

    def runners(self) -> SystemSnapshot:
        return observe(SystemSnapshot(), (r for r in self.recorded if r.stream.startswith("runner/")))


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_equals_a_fold_of_everything_at_every_position(seed: int) -> None:
    history, followed, rewound = History(seed), Followed(), 0
    for _ in range(150):
        for _ in range(history.chance.choice([1, 1, 1, 15])):  # what was put back to a copy may be as long again
            before = len(history.recorded)
            history.step()
            rewound += len(history.recorded) < before
        asked = [b for b in BATCHES if history.chance.random() < 0.9]  # one that is left out is forgotten
        kept = followed.follow(history.runners(), asked, history.of)
        anew = history.runners()
        for batch_id in asked:
            observe(anew, history.of(batch_id))
        assert kept.batches == anew.batches
        assert kept.runners == anew.runners
        for batch_id in kept.batches:
            assert why(kept, batch_id, now=T + 999).as_dict() == why(anew, batch_id, now=T + 999).as_dict()
    assert rewound > 0


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_a_batch_are_followed_to_the_same_rows(seed: int) -> None:
    history = History(seed + 100)
    found, read, most = None, 0, 0
    for _ in range(120):
        before = len(history.recorded)
        history.step()
        if len(history.recorded) < before:  # who follows notices by the hash, and begins anew
            found, read = None, 0
        if list(history.of(1)):
            found, read = fold_timeline(history.of(1, read), found), len(history.recorded)
            assert found == fold_timeline(history.of(1))
            most = max(most, len(found.rows))
    assert most > 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams of the events that are read from now on, one by one."""
    import trinity_es.events.store.log

    seen: list[str] = []

    def counted(row: Any) -> Recorded:
        made = real(row)
        seen.append(made.stream)
        return made

    real = trinity_es.events.store.log.from_row
    monkeypatch.setattr(trinity_es.events.store.log, "from_row", counted)
    return seen


def test_a_log_is_asked_again_for_what_is_new_and_notices_that_it_was_put_back(
    tmp_path: Path, reads: list[str]
) -> None:
    path, copy = tmp_path / "log.sqlite", tmp_path / "copy.sqlite"
    make(str(path), batches=1, tasks=300, payloads=False, dead=True)
    shutil.copy(path, copy)
    stall = ev.StallDetected(waiting_on="x", since=T)
    failed = ev.FinalizeFailed(error="the pipeline broke")
    with open_log(str(path)) as log:
        followed = Followed()
        reads.clear()
        assert log.why_open(T, followed=followed) == log.why_open(T)
        whole = reads.count("batch/1") / 2
        assert whole > 300
        for event in (stall, failed):
            write(path, [("batch/1", [event])])
            reads.clear()
            told = log.why_open(T, followed=followed)
            assert reads.count("batch/1") <= 3  # the last that was known, the new one, and the last of the log
            assert told == log.why_open(T)
    for file in tmp_path.glob("log.sqlite*"):
        if file.is_file():
            file.unlink()
    shutil.copy(copy, path)
    with open_log(str(path)) as log:
        assert log.why_open(T, followed=followed) == log.why_open(T)  # shorter than what was folded
        for _ in range(3):
            write(path, [("batch/1", [stall])])  # as long, and another one
        assert log.why(1, T, followed=followed) == log.why(1, T)
        assert log.why_open(T, followed=followed) == log.why_open(T)
