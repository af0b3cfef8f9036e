"""Handmade logs, and the command line in this process, for tests of code that reads logs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from typer.testing import CliRunner, Result

from tests.helpers.paths import ROOT as ROOT
from trinity_es.cli import app
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Recorded, Write
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors

EVIL = "\x1b[2J\x1b]0;owned\x07[red]no markup[/red]\nsecond line"


def cli(*args: object, cwd: Path | None = None) -> Result:
    before = Path.cwd()
    os.chdir(cwd or before)
    try:
        return CliRunner().invoke(app, [str(a) for a in args], env={"TRINITY_ES_LOG": None, "COLUMNS": "200"})
    finally:
        os.chdir(before)


def unit(task: int, attempt: int = 1) -> ev.Unit:
    return ev.Unit(task=task, run_id_base=0, runs=2, attempt=attempt)


def finished(task: int, digest: str | None, attempt: int = 1, reward: float = 0.5) -> ev.TaskFinished:
    runs = [ev.RunResult(run=r, metrics={"reward": reward + r / 3}, experiences=1, prompt_tokens=3, response_tokens=7)
            for r in range(2)]
    payload = None if digest is None else ev.PayloadRef(digest=digest, first=2 * task, count=2)
    return ev.TaskFinished(
        task=task, run_id_base=0, attempt=attempt, runner="runner-1", incarnation=1, runs=runs, payload=payload,
        model_version=4, model_version_end=5, seconds=1.25,
    )


def history(digest: str) -> list[tuple[str, list[ev.Event]]]:
    """Return events of batches 3 (one of two tasks fails once), "0/letters" (eval), "open" (not ended), 4 (aborted)."""
    three: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[2, 2], tasks=[{}, {}], max_attempts=2),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0), unit(1)], model_version=4),
        ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-0", incarnation=1,
                         kind="workflow", message=EVIL, retry=True, seconds=0.5),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0, 2)], model_version=5),
        finished(1, digest),
        finished(0, digest, attempt=2, reward=0.1),
    ]
    state = fold(three)
    metrics = {"experience_pipeline/time": 0.1 + 0.2}
    three += [
        ev.BatchFinalizing(),
        ev.BatchFinalized(result=batch_result(state, metrics), pipeline_metrics=metrics, selected=4,
                          model_versions=[(4, 0)], experiences=[ev.PayloadRef(digest=digest, first=0, count=4)]),
        ev.BatchTrained(step=3, metrics={"loss": 0.25}),
    ]
    evals: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="0/letters", batch_type="eval", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0)], model_version=0),
        finished(0, None),
    ]
    state = fold(evals)
    evals.append(ev.BatchFinalized(result=batch_result(state)))
    opened: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="open", batch_type="train", repeat_times=[2, 2], tasks=[{}, {}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0)], model_version=5),
    ]
    aborted: list[ev.Event] = [ev.BatchSubmitted(batch_id=4, batch_type="train", repeat_times=[2], tasks=[{}])]
    state = fold(aborted)
    aborted.append(ev.BatchAborted(reason="no longer wanted", result=batch_result(state)))
    return [
        ("system", [ev.CoordinatorStarted(epoch=1, pid=1, host="here", version="0")]),
        ("runner/runner-0", [ev.RunnerStarted(runner="runner-0", incarnation=1, pid=2, host="here", engine="vllm"),
                             ev.RunnerReady(runner="runner-0", incarnation=1, places=8, model_version=4,
                                            load_seconds=12.5)]),
        (batch_stream("0/letters"), evals), (batch_stream(3), three), (batch_stream("open"), opened),
        (batch_stream(4), aborted),
    ]


def write(path: Path, chapters: Sequence[tuple[str, list[ev.Event]]]) -> None:
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        for stream, events in chapters:
            for event in events:  # one commit for each event, so that times differ
                version = log.stream_version(stream)
                log.append([Write(stream=stream, expected_version=version, events=[event])],
                           commit_id=f"{stream}/{version}")


def recorded(folder: Path, batch_id: BatchId, *events: ev.Event) -> list[Recorded]:
    """Write the events of a batch into a log, one commit each, and read them."""
    write(folder / "log.sqlite", [(batch_stream(batch_id), list(events))])
    with open_log(str(folder / "log.sqlite")) as log:
        return list(log.events(batch_id))


def copied(log: Path, to: Path) -> None:
    """Copy the present content of `log` into one file."""
    with closing(sqlite3.connect(log)) as one, closing(sqlite3.connect(to)) as other:
        one.backup(other)
        other.execute("PRAGMA journal_mode=DELETE")


def put_back(copy: Path, log: Path) -> None:
    """Replace the log by the copy, as when a backup is restored."""
    for beside in ("-wal", "-shm"):
        Path(f"{log}{beside}").unlink(missing_ok=True)
    again = log.with_name("again")
    again.write_bytes(copy.read_bytes())
    again.replace(log)
