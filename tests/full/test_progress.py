"""The live view: it says what the log says, a line a step in a pipe, a panel on a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from trinity_es.cli.render.progress import RunView
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import wait_until

STARTED = ev.RunnerStarted(runner="runner-0", incarnation=1, pid=2, host="here", engine="vllm")
READY = ev.RunnerReady(runner="runner-0", incarnation=1, places=8, model_version=0, load_seconds=12.5)
LOST = ev.RunnerLost(runner="runner-0", incarnation=1, reason="\x1b[2J[red]killed[/red]")


def step(number: int) -> list[ev.Event]:
    unit = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[1], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit], model_version=number - 1),
        ev.TaskFinished(
            task=0, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, payload=None, seconds=0.1,
            runs=[ev.RunResult(run=0, metrics={"reward": 0.25}, response_tokens=700)], model_version=number - 1,
            model_version_end=number - 1,
        ),
    ]
    state = fold(events)
    assert state is not None
    return [*events, ev.BatchFinalized(result=batch_result(state))]


def append(path: Path, stream: str, events: list[ev.Event]) -> int:
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        version = log.stream_version(stream)
        write = Write(stream=stream, expected_version=version, events=events)
        return log.append([write], commit_id=f"{stream}/{version}").last_position


def view_of(path: Path, terminal: bool) -> tuple[RunView, io.StringIO]:
    out = io.StringIO()
    return RunView(str(path), Console(file=out, force_terminal=terminal, width=160), total_steps=2), out


def test_a_pipe_gets_a_line_a_step_and_a_runner_that_changes(path: Path) -> None:
    view, out = view_of(path, terminal=False)
    with view:  # the log is not there yet
        append(path, "runner/runner-0", [STARTED, READY])
        append(path, batch_stream(1), step(1))
        append(path, "runner/runner-0", [LOST])
        last = append(path, batch_stream(2), step(2))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["runner-0: loading engine vllm (pid 2)", "runner-0: ready after 12.5 s"]
    assert lines[2].startswith("step 1/2  1/1 tasks  reward 0.250  700 tokens  ")
    assert "  version 0  " in lines[2]
    assert lines[3] == "runner-0: lost: \\x1b[2J[red]killed[/red]"
    assert lines[4].startswith("step 2/2")
    assert len(lines) == 5
    assert view.position == last


def test_a_run_that_goes_on_says_what_is_trained_without_being_generated(path: Path) -> None:
    append(path, "runner/runner-0", [STARTED, READY])
    before = append(path, batch_stream(1), step(1))
    out = io.StringIO()
    with RunView(str(path), Console(file=out, width=160), total_steps=2, after=before):
        append(path, batch_stream(1), [ev.BatchTrained(step=1)])
        append(path, batch_stream(2), [*step(2), ev.BatchTrained(step=2)])
    first, second = out.getvalue().splitlines()
    assert first == "step 1/2  trained on the experiences that the log had"
    assert second.startswith("step 2/2  1/1 tasks")


def test_a_terminal_shows_the_engine_that_loads_and_then_the_step(path: Path) -> None:
    view, out = view_of(path, terminal=True)
    with view:
        append(path, "runner/runner-0", [STARTED])
        wait_until(lambda: "runner-0 #1" in out.getvalue() and "loading" in out.getvalue(), "the runner in the view")
        append(path, "runner/runner-0", [READY])
        append(path, batch_stream(1), step(1))
        wait_until(lambda: "reward 0.250" in out.getvalue(), "the reward in the view")
        wait_until(lambda: "step 1/2" in out.getvalue(), "the step in the view")
        wait_until(lambda: "700 tokens" in out.getvalue(), "the tokens in the view")
        failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1,
                                  kind="workflow", message="boom", retry=True)
        append(path, batch_stream(2), [*step(2)[:2], failed])
        wait_until(lambda: " s   1 failed attempts" in out.getvalue(), "the failure in the view")


def test_a_run_that_never_began_ends_its_view_at_once(tmp_path: Path) -> None:
    view, out = view_of(tmp_path / "none.sqlite", terminal=False)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the run failed"), view:
        raise RuntimeError("the run failed")
    assert time.monotonic() - started < 5
    assert out.getvalue() == ""
