"""The commands that choose, follow and explain, on logs written by hand: batches, events, show --task, watch."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.sample_log import make
from tests.helpers.handmade import ROOT, cli, history, unit, write
from tests.helpers.timed_logs import told, write_at
from trinity_es.cli.commands.events import _Selection
from trinity_es.dashboard.rendering import clock, moment
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, LogUnavailable
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import wait_until


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a-run") / "log.sqlite"
    write(path, history("d" * 64))
    return path


# --- batches --------------------------------------------------------------------------------------------------------
def test_a_long_list_is_its_end_unless_all_is_asked_for(path: Path) -> None:
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as opened:
        opened.append([
            Write(stream=f"batch/{i}", expected_version=0, events=[
                ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1], tasks=[{}])])
            for i in range(230)
        ], commit_id="all")
    lines = cli("batches", "--log", path).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [str(i) for i in range(180, 230)]
    assert "180 earlier batches" in lines[-1]
    every = cli("batches", "--all", "--log", path).stdout.splitlines()
    assert [line.split()[0] for line in every] == ["id", *map(str, range(230))]
    assert len(told("batches", "--log", path)) == 230


# --- show -----------------------------------------------------------------------------------------------------------
def test_a_payload_that_is_gone_is_named(log: Path, path: Path) -> None:
    write(path, history("d" * 64))
    done = cli("show", "3", "--task", 1, "--run", 0, "--log", path)
    assert done.exit_code == 0, done.output
    assert re.search(r"experiences not here: .*no payload store", done.stdout)
    freed = ev.PayloadsFreed(batches=[3], payloads=1, bytes=9)
    write(path, [("experiences", [freed])])
    assert "was freed" in cli("show", "3", "--task", 1, "--run", 0, "--log", path).stdout


# --- events ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_comes_during_the_reading_is_printed_once(path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    write(path, history("d" * 64))
    with open_log(str(path)) as opened:
        end = opened.head().position
    read = _Selection.last

    def last(chosen: _Selection, count: int, after: int) -> list[Recorded]:
        found = read(chosen, count, after) if when == "after" else []
        write(path, [("weights", [ev.WeightsPublished(version=9, path="late")])])
        return found or read(chosen, count, after)

    monkeypatch.setattr(_Selection, "last", last)
    monkeypatch.setattr(_Selection, "follow", _Selection.read)  # as far as there is something
    lines = cli("events", "-f", "--last", 2, "--json", "--log", path).stdout.splitlines()
    last_two_and_on = [end, end + 1] if when == "before" else [end - 1, end, end + 1]
    assert [json.loads(line)["position"] for line in lines] == last_two_and_on


def test_the_last_events_are_followed_by_the_next(path: Path) -> None:
    write(path, [("weights", [ev.WeightsPublished(version=v, path="x") for v in range(5)])])
    command = [sys.executable, "-m", "trinity_es", "events", "-f", "--last", "1", "-n", "2", "--log", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as following:
        assert "version 4" in following.stdout.readline()
        write(path, [("weights", [ev.WeightsPublished(version=5, path="x")])])
        assert "version 5" in following.stdout.readline()
        assert following.wait(30) == 0


# --- replay, diff, runners ------------------------------------------------------------------------------------------
def write_batch(path: Path, submitted: float, dispatched: float) -> None:
    batch = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2], tasks=[{}])
    sent = ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=0)
    write_at(path, [(submitted, "batch/1", batch), (dispatched, "batch/1", sent)])


def test_a_time_of_day_before_a_batch_began_is_of_the_next_day_where_its_end_is_nearer(path: Path) -> None:
    evening = datetime(2026, 3, 1, 23, 50).timestamp()
    write_batch(path, evening, evening + 1200)
    for at, running in (("23:55:00", 0), ("00:05:00", 0), ("00:10:00", 1), ("00:11:00", 1)):
        assert len(told("replay", "1", "--at", at, "--log", path)["state"]["running"]) == running
    for at in ("23:49:00", "13:00:00"):  # nearer to its beginning than to its end
        assert "was not submitted yet" in cli("replay", "1", "--at", at, "--log", path).stderr


def test_an_hour_that_comes_twice_is_asked_for_with_its_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summer = datetime(2026, 10, 25, 0, 20, tzinfo=UTC).timestamp()  # 02:20+02:00; an hour later it is 02:20+01:00
    write_batch(path, summer, summer + 3600)
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        for at in ("02:30:00", "2026-10-25T02:30:00", "2026-10-25 02:30"):
            refused = cli("replay", "1", "--at", at, "--log", path)
            assert (refused.exit_code, "2026-10-25T02:30:00+02:00" in refused.stderr) == (2, True)
            assert "2026-10-25T02:30:00+01:00" in refused.stderr
        assert "never came" in cli("replay", "1", "--at", "2026-03-29T02:30:00", "--log", path).stderr
        for at, running in (("02:30:00+02:00", 0), ("02:30:00+01:00", 1), ("2026-10-25T02:30:00+0200", 0),
                            ("01:30:00Z", 1), ("03:00:00", 1)):
            assert len(told("replay", "1", "--at", at, "--log", path)["state"]["running"]) == running
        assert "2026-10-25 02:20:00+02:00" in cli("show", "1", "--log", path).stdout
        lines = cli("events", "--log", path).stdout.splitlines()
        assert [line.split()[1] for line in lines[-2:]] == ["02:20:00.000+02:00", "02:20:00.000+01:00"]
        assert moment(summer) == "2026-10-25 02:20:00.000+02:00"
        assert len({clock(at) for at in (summer, summer + 3600)}) == 2, "that of the other offset than now's names it"
        with open_log(str(path)) as opened, pytest.raises(DataError, match="came twice"):
            opened.replay(1, at=datetime(2026, 10, 25, 2, 30))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_who_reads_is_not_told_of_commits() -> None:
    url = "postgresql://nobody@127.0.0.1:1/run"
    for read_only, says in ((True, "check that its server runs"), (False, "the same commit can be tried again")):
        database = Database(url, read_only=read_only, patience=0.0)
        with contextlib.closing(database), pytest.raises(LogUnavailable, match=says):
            database.read(lambda connection: None)


# --- watch ----------------------------------------------------------------------------------------------------------
def test_watch_in_a_pipe_prints_a_picture_when_there_is_news(tmp_path: Path, path: Path) -> None:
    write(path, [("weights", [ev.WeightsPublished(version=1, path="x")])])
    command = [sys.executable, "-m", "trinity_es", "watch", "--every", "0.1", "--log", str(path)]
    pictures = tmp_path / "pictures"
    with pictures.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file) as watch:
        try:
            wait_until(lambda: "position 1 " in pictures.read_text(), "a new picture", 60.0)
            write(path, [("weights", [ev.WeightsPublished(version=2, path="x")])])
            wait_until(lambda: "position 2 " in pictures.read_text(), "a new picture", 60.0)
        finally:
            watch.terminate()
            watch.wait(30)


def test_q_ends_watch_on_a_terminal(log: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trinity_es", "watch", "--every", "60", "--log", str(log)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    seen = b""
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as watch:
        os.close(theirs)
        os.set_blocking(ours, False)

        def drawn() -> bool:
            nonlocal seen
            with contextlib.suppress(OSError):  # nothing yet, or it has ended
                seen += os.read(ours, 65536)
            return b"last events" in seen

        try:
            wait_until(drawn, "the first picture", 60.0)
            os.write(ours, b"q")
            wait_until(lambda: (drawn(), watch.poll() is not None)[1], "its end after q", 60.0)
            assert watch.returncode == 0
        finally:
            watch.kill()
            os.close(ours)


def test_prompts_that_were_dropped_in_one_batch_and_played_in_another_were_tried(path: Path) -> None:
    tasks = [{"raw_task": {"prompt": f"p{i}"}, "index": {"taskset": "t", "index": i}} for i in range(3)]
    write(path, [
        ("batch/1", [
            ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2] * 3, tasks=tasks),
            ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=0),
        ]),
        ("batch/2", [
            ev.BatchSubmitted(batch_id=2, batch_type="train", repeat_times=[2], tasks=tasks[1:2]),
            ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=0),
        ]),
        ("batch/3", [ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[2], tasks=tasks[:1])]),
        ("taskset/t", [ev.TasksetAdvanced(taskset="t", batch_id=1, epoch=0, offset=3)]),
    ])
    found = told("prompts", "--log", path)
    assert [(u["row"], u["batch_id"], u["task"], u["prompt"]) for u in found["never"]] == [(2, 1, 2, "p2")]
    assert (found["tasks"], found["sent"]) == (5, 2)
    assert found["read"] == {"t": {"epoch": 0, "offset": 3}}


def test_a_prompt_that_was_tried_under_an_id_is_tried_when_the_id_is_used_again(path: Path) -> None:
    tasks = [{"raw_task": {}, "index": {"taskset": "t", "index": i}} for i in range(2)]
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2] * 2, tasks=tasks)
    write(path, [("batch/1", [
        submitted, ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(1)], model_version=0),
        ev.BatchAborted(reason="not wanted", result={}), submitted,
    ])])
    found = told("prompts", "--log", path)
    assert [(u["row"], u["task"]) for u in found["never"]] == [(0, 0)]
    assert (found["tasks"], found["sent"]) == (2, 0)


def test_prompts_that_no_batch_ever_held_are_told_where_the_file_is_there(tmp_path: Path) -> None:
    path, file = tmp_path / "log.sqlite", tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(5)))
    taskset = {"name": "t", "path": str(file)}
    config = {"buffer": {"explorer_input": {"tasksets": [taskset]}}}
    write(path, [
        ("system", [ev.SystemConfigured(config=config)]),
        ("taskset/t", [ev.TasksetAdvanced(taskset="t", batch_id=1, epoch=0, offset=3)]),
    ])
    assert told("prompts", "--log", path)["unread"] == {"t": [3, 4]}
    assert "no batch ever held: 3-4" in cli("prompts", "--log", path).stdout


def test_where_two_logs_part_is_marked_with_what_comes_before(log: Path, tmp_path: Path) -> None:
    for file in log.parent.glob(f"{log.name}*"):
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    fork = tmp_path / log.name
    write(fork, [("weights", [ev.WeightsPublished(version=6, path="gone-on-with")])])
    done = cli("diff", log, fork)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    with open_log(str(log)) as opened:
        head = opened.head().position
    assert f"the same up to position {head}" in lines[0]
    assert [int(line.split()[0]) for line in lines[1:4]] == [head - 2, head - 1, head]
    assert "ends here" in lines[4]
    assert re.match(rf"> +{head + 1} .*gone-on-with", lines[6])
    assert told("diff", log, fork, code=1)["after"][0] == []


def test_who_sorts_sees_the_first_of_them_and_not_the_last(path: Path) -> None:
    make(str(path), batches=70, tasks=1, payloads=False)
    for how in (["--sort", "reward", "--descending"], ["--descending"], ["--sort", "response_tokens"]):
        listed = json.loads(cli("batches", *how, "--json", "--log", path).output)
        shown = cli("batches", *how, "--log", path).output
        first = json.dumps(listed[0]["batch_id"]).strip('"')
        assert re.search(rf"^\W*{re.escape(first)}\b", shown, re.M), (how, first)


@pytest.mark.parametrize("command", ["batches", "events"])
def test_a_time_of_day_without_a_batch_is_of_the_log_s_last_day(path: Path, command: str) -> None:
    make(str(path), batches=2, tasks=2, payloads=False)
    assert cli(command, "--since", "00:00:00", "--log", path).exit_code == 0
    done = cli(command, "--since", "half past", "--log", path)
    assert done.exit_code == 2
    assert "--since" in done.output
    assert cli("events", "--after", 10**20, "--log", path).exit_code == 2


def test_watch_keeps_what_it_folded_from_one_picture_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity_es.cli.render import watch

    kept: list[object] = []

    def read_overview(log: object, **more: object) -> watch.RunOverview:
        kept.append(more["followed"])
        if len(kept) == 3:
            raise KeyboardInterrupt
        return watch.RunOverview(url="", position=len(kept), now=0.0, last_at=None)

    monkeypatch.setattr(watch, "read_overview", read_overview)
    watch.show_live(None, interval=0.01)  # type: ignore[arg-type]  # nothing reads it here
    assert kept[0] is not None
    assert [id(one) for one in kept] == [id(kept[0])] * 3
