"""Logs of events at given times, a batch of long texts, and documents of commands, for tests of reading code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.sample_run import TimedLog
from tests.helpers.handmade import cli
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.store.log import Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors


def told(*args: object, code: int = 0) -> Any:
    """Run a command with `--json` and return its document."""
    done = cli(*args, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def write_at(path: Path, entries: Iterable[tuple[float, str, ev.Event]]) -> None:
    """Append events to streams, each at its time and in a commit of its own."""
    with TimedLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        for number, (at, stream, event) in enumerate(entries):
            log.times = [at]
            write = Write(stream=stream, expected_version=log.stream_version(stream), events=[event])
            log.append([write], commit_id=str(number))


def long_batch(url: str, long: str) -> list[ev.Event]:
    """Store the experiences of a batch "long" and return its events, which have this text wherever there is one."""
    store = open_payloads(url, durability="process")
    made = [Experience(eid=EID(batch="long", task=0, run=run, suffix=str(run)), tokens=[1, 2], prompt_length=1,
                       response_text=long if run == 0 else "short") for run in range(2)]
    digest = store.put(Experience.serialize_many(made))
    store.close()
    unit = {"task": 0, "run_id_base": 0, "runs": 2}
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    return [
        ev.BatchSubmitted(batch_id="long", batch_type="train", repeat_times=[2], max_attempts=2,
                          tasks=[{"raw_task": {"prompt": long}, "index": {"taskset": long[:5000], "index": 0}}]),
        ev.TasksDispatched(**life, model_version=4, units=[ev.Unit(**unit, attempt=1)]),
        ev.AttemptFailed(**life, task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, kind="workflow", message=long,
                         retry=True),
        ev.TasksDispatched(**life, model_version=4, units=[ev.Unit(**unit, attempt=2)]),
        ev.StallDetected(waiting_on=long, since=1.0),
        ev.TaskFinished(**life, task=0, run_id_base=0, attempt=2, seconds=1.0, model_version=4, model_version_end=4,
                        runs=[ev.RunResult(run=r, metrics={"reward": 0.5}) for r in range(2)],
                        payload=ev.PayloadRef(digest=digest, first=0, count=2)),
    ]
