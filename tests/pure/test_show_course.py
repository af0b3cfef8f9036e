"""What `show` tells of a task that was attempted several times."""

from __future__ import annotations

import io

from rich.console import Console

from tests.helpers.story import Story, configured
from trinity_es.cli.render.batch_tables import print_timeline
from trinity_es.projections.history.attempts import BatchTimeline, evolve_timeline


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
