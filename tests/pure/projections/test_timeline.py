"""The course of a batch, where its time went, and how `show` tells it: what waits is not told to run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.handmade import cli, recorded
from tests.helpers.story import Story, configured
from trinity_es.cli.render.batch_tables import print_timeline
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.projections.history import attempts, critical_path
from trinity_es.projections.history.attempts import BatchTimeline, evolve_timeline
from trinity_es.projections.history.task_history import follow_task

RUNNER: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}


def unit(task: int, base: int = 0, attempt: int = 1) -> ev.Unit:
    return ev.Unit(task=task, run_id_base=base, runs=1, attempt=attempt)


def done(task: int, base: int, version: int, cls: type[ev.RunsFinished] = ev.RunsFinished) -> ev.Event:
    run = ev.RunResult(run=base, metrics={}, experiences=1, response_tokens=5)
    return cls(task=task, run_id_base=base, attempt=1, **RUNNER, runs=[run], payload=None, model_version=1,
               model_version_end=version, seconds=0.5)


def failed(task: int, base: int, retry: bool = True) -> ev.Event:
    return ev.AttemptFailed(task=task, run_id_base=base, failed_runs=[base], attempt=1, **RUNNER, kind="infra",
                            message="busy", retry=retry)


def batch(folder: Path, *events: ev.Event) -> list[Recorded]:
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2, 1], tasks=[{}, {}], max_attempts=3,
                                  runs_per_unit=1)
    sent = ev.TasksDispatched(**RUNNER, units=[unit(0), unit(0, 1), unit(1)], model_version=1)
    return recorded(folder, 1, submitted, sent, *events)


def test_a_task_that_waits_for_another_attempt_is_pending(tmp_path: Path) -> None:
    again = ev.TasksDispatched(runner="runner-1", incarnation=2, units=[unit(1, attempt=2)], model_version=1)
    events = batch(tmp_path, failed(0, 0), failed(1, 0), again, done(0, 1, 1))
    seen = [(number + 1, *(task.state for task in attempts.fold_timeline(events[: number + 1]).tasks),
             *(follow_task(events[: number + 1], n).state for n in (0, 1))) for number in range(len(events))]
    assert seen == [
        (1, "pending", "pending", "pending", "pending"),
        (2, "running", "running", "running", "running"),
        (3, "running", "running", "running", "running"),  # its other unit runs on
        (4, "running", "pending", "running", "pending"),
        (5, "running", "running", "running", "running"),
        (6, "pending", "running", "pending", "running"),
    ]
    told = cli("show", 1, "--log", tmp_path / "log.sqlite").stdout
    assert "tasks       2: 1 running, 1 pending; 2 failed attempts" in told


def test_what_a_batch_waits_for_holds_it_up_also_while_no_runner_has_it(tmp_path: Path) -> None:
    story = attempts.fold_timeline(batch(
        tmp_path, failed(1, 0), done(0, 0, 1), done(0, 1, 1, ev.TaskFinished),
        ev.StallDetected(waiting_on="a runner", since=0.0)))
    *_, waits = critical_path.segments(story)
    assert waits.what == "task 1 waited for a runner"
    assert sum(p.seconds for p in critical_path.segments(story)) == pytest.approx(story.last_at - story.submitted_at)


def test_the_time_before_a_task_was_added_and_the_wait_for_others_are_no_wait_for_a_runner(tmp_path: Path) -> None:
    added = ev.TasksAdded(request="r", repeat_times=[1], tasks=[{}])
    sent = ev.TasksDispatched(**RUNNER, units=[unit(2)], model_version=1)
    left = ev.TaskDropped(tasks=[0], reason="enough")
    story = attempts.fold_timeline(batch(
        tmp_path, done(1, 0, 1, ev.TaskFinished), added, sent, done(2, 0, 1, ev.TaskFinished), left,
        ev.BatchFinalizing()))
    assert "1 task added" in [text for _, text in story.turns]
    assert [segment.what for segment in critical_path.segments(story)] == [
        "its earlier tasks, before task 2 was added", "task 2 waited for a runner",
        "task 2 attempt 1 on runner-0 #1", "enough tasks had settled, and it waited for others, or to be finalized"]


def test_the_newest_weights_of_a_task_are_not_those_of_its_last_unit(tmp_path: Path) -> None:
    events = batch(tmp_path, done(0, 1, 3), done(0, 0, 2, ev.TaskFinished), failed(1, 0, retry=False))
    assert attempts.fold_timeline(events).versions == {3: 1}
    first = attempts.fold_timeline(events[:3])
    assert (first.versions, first.tasks[0].version) == ({3: 1}, 3)


def test_an_error_is_told_once_a_task_and_the_seconds_are_said_to_be_of_the_last_attempt() -> None:
    story = Story().add("system", configured()).runner().batch(tasks=1).dispatch(0)
    error = "no such file: " + "x" * 300
    for attempt in (1, 2):
        story.at(attempt).fail(0, message=error, attempt=attempt, seconds=0.25 * attempt)
        story.dispatch(0, attempt=attempt + 1)
    story.at(5).fail(0, message="another", attempt=3, seconds=0.75, retry=False)
    told: BatchTimeline | None = None
    for item in story.recorded:
        told = evolve_timeline(told, item) if item.stream == "batch/3" else told
    assert told is not None
    out = io.StringIO()
    print_timeline(Console(file=out, width=10_000), told, [""], None)
    lines = out.getvalue().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("task "))
    head, line = lines[at : at + 2]
    assert line.count("no such file") == 1
    assert line.count(": the same") == 1
    assert len(line.rstrip()) < 300
    assert "seconds" not in head
    assert " last attempt " in head
    assert " 0.75 s " in line
