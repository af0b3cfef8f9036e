"""Texts of commands and pages: `python -m tests.full.test_views` writes tests/golden/views.txt again, a diff to read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.sample_run import START, TimedLog
from tests.helpers.handmade import cli, history, unit
from tests.helpers.paths import GOLDEN
from tests.helpers.several_hosts import several_hosts
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.store.log import Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.tables.read_models import projectors

FILE = GOLDEN / "views.txt"
SECTIONS = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", FILE.read_text(), re.M)
VARIES = re.compile(r'(?<= in )[\d.]+ s \([\d,]+ events/s\)|(?<="seconds": )[\d.e-]+(?=}$)', re.M)


def experiences() -> bytes:
    made = [
        Experience(eid=EID(batch=3, task=task, run=run, suffix=f"{task}{run}"), tokens=[1, 2, 3, 4], prompt_length=2,
                   logprobs=[-0.5, -1.0], reward=0.5, prompt_text="two and two?", response_text="four\n\x1b[2Jfive",
                   info={"model_version": 4, "model_version_drift": 1})
        for task in range(2) for run in range(2)
    ]
    made[0].advantages = [1.0, -1.0]
    return Experience.serialize_many(made)


def hand(path: Path) -> list[tuple[str, list[ev.Event]]]:
    life: dict[str, Any] = {"runner": "runner-1", "incarnation": 1}
    return [
        *history(open_payloads(str(path), durability="process").put(experiences())),
        ("weights", [ev.WeightsPublished(version=v, path=f"step-{v}") for v in (4, 5)]),
        ("runner/runner-1", [ev.RunnerStarted(**life, pid=5, host="here", engine="vllm"),
                             ev.WeightsLoaded(**life, version=5, seconds=0.5),
                             ev.RunnerLost(**life, reason="signal 9")]),
        ("batch/open", [ev.StallDetected(waiting_on="runner-0 to come up", since=START)]),
    ]


def odd() -> list[tuple[str, list[ev.Event]]]:
    """Rows of tasksets, an error with its frames, a batch and its namesake."""
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    frames = "".join(f'\n  File "/x/{name}.py", line 9, in run' for name in ("framework", "mine"))
    broke = f"KeyError: 'stok'\nTraceback (most recent call last):{frames}"
    rows = [{"index": {"taskset": "legs", "index": 7}}, {"index": {"taskset": "gcd", "index": 12}}, {}]
    failed = ev.AttemptFailed(**life, task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, kind="workflow",
                              message=broke, retry=False)
    return [
        ("runner/runner-0", [ev.RunnerStarted(**life, pid=7, host="here", engine="scripted")]),
        ("batch/1", [ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2] * 3, tasks=rows),
                     ev.TasksDispatched(**life, units=[unit(0)], model_version=0), failed]),
        ("runner/runner-0", [ev.RunnerFailed(**life, reason=broke)]),
        *((batch_stream(i), [ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[runs], tasks=[{}])])
          for i, runs in ((7, 1), ("7", 2), (10, 1))),
    ]


def adapters() -> list[tuple[str, list[ev.Event]]]:
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1, "adapter": "math"}
    files: dict[str, Any] = {"path": "/a<b>", "rank": 8, "size": 12_345, "digest": "d"}
    story = [
        ev.AdapterPublished(adapter="math", version=1, **files), ev.AdapterLoaded(**life, version=1, seconds=0.25),
        *(ev.AdapterPublished(adapter=name, version=version, **files) for name, version in (("code", 1), ("math", 2))),
        ev.AdapterFailed(**life, version=2, error="no <file>"), ev.AdapterRemoved(adapter="code", version=1),
    ]
    return [(event.own_stream(), [event]) for event in story]


@contextmanager
def views() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        logs = {"hand": hand(Path(folder, "hand")), "hosts": several_hosts(), "odd": odd(), "adapters": adapters()}
        for name, chapters in logs.items():
            with TimedLog.open(f"{folder}/{name}", create=True, durability="process", projectors=projectors()) as log:
                for position, (stream, event) in enumerate((s, e) for s, events in chapters for e in events):
                    log.times, version = [START + position], log.stream_version(stream)
                    write = Write(stream=stream, expected_version=version, events=[event])
                    log.append([write], commit_id=str(position))
        patch.setenv("TZ", "UTC")
        patch.setattr(time, "time", lambda: START + 3600)
        time.tzset()
        yield Path(folder)
    time.tzset()


def page(log: Path, path: str) -> str:
    """The text of a page of the dashboard, a row a line."""
    with TestClient(create_app(str(log)), base_url="http://localhost") as client:
        answer = client.get(path)
    status = f"status {answer.status_code}\n" * (answer.status_code != 200)
    if "<main" not in answer.text:
        return status + answer.text
    html = re.sub(r"(?s)^.*?<main[^>]*>|</main>.*", "", answer.text)
    lines = (unescape(re.sub(r"<[^>]*>", " ", x)) for x in re.split(r"</(?:tr|p|h\d|li|dd|div|g|title)>", html))
    return status + "".join(f"{' '.join(line.split())}\n" for line in lines if line.strip())


def shown(folder: Path, command: str) -> str:
    log, *words = shlex.split(command)
    if words[0] == "GET":
        return page(folder / log, words[1]).replace(str(folder), "DIR")
    done = cli(*(w.replace("DIR", str(folder)) for w in words), "--log", folder / log)
    out = done.stdout
    if "--json" in words and done.exit_code < 2 and words[0] != "events":
        out = json.dumps(json.loads(out)) + "\n"
    told = out + f"exit code {done.exit_code}\n" * bool(done.exit_code) + done.stderr
    return VARIES.sub("…", "".join(f"{line.rstrip()}\n" for line in told.replace(str(folder), "DIR").splitlines()))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with views() as found:
        yield found


@pytest.mark.parametrize(("command", "text"), SECTIONS, ids=[command for command, _ in SECTIONS])
def test_a_view_is_as_it_was(folder: Path, command: str, text: str) -> None:
    assert shown(folder, command) == text


if __name__ == "__main__":
    os.environ.pop("COLUMNS", None)
    with views() as found:
        FILE.write_text("".join(f"$ {command}\n{shown(found, command)}" for command, _ in SECTIONS))
    sys.stdout.write(f"{FILE}: {len(SECTIONS)} commands\n")
