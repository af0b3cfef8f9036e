"""`export`: every experience with all of it, every event, and a trace that adds up; what can't be exported is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sample_log import make
from tests.helpers.handmade import cli, history, write
from trinity_es.audit.perfetto import trace_events
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.events.experience_rows import COLUMNS
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.reading.log_reader import Log, open_log

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a-run") / "log.sqlite"
    make(str(path), batches=6, tasks=12, seed=3, dead=True)
    return path


def exported(log: Path, *args: object, code: int = 0) -> Any:
    done = cli("export", *args, "--json", "--log", log)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def delivered(log: Log) -> list[Experience]:
    """What finalized batches delivered, read by another way than the export's."""
    store = log.payloads()
    return [e for r in log.read(types=["BatchFinalized"]) if isinstance(r.event, ev.BatchFinalized)
            for ref in r.event.experiences
            for e in read_experiences(store, [ref])]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_every_delivered_experience_is_in_the_file_with_all_of_it(log: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"all.{ending}"
    told = exported(log, "--experiences", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if ending == "jsonl" \
        else pq.read_table(file).to_pylist()
    with open_log(str(log)) as opened:
        wanted = delivered(opened)
        runners = {(r.stream, r.event.task): r.event.runner for r in opened.read(types=["TaskFinished"])
                   if isinstance(r.event, ev.TaskFinished)}
    assert told["experiences"]["written"] == len(rows) == len(wanted) > 50
    for row, e in zip(rows, wanted, strict=True):
        assert set(row) == set(COLUMNS)
        assert row["eid"] == e.eid.uid
        assert (row["run"], row["step"], row["prompt"], row["completion"]) == \
            (e.eid.run, e.eid.step, e.prompt_text, e.response_text)
        assert row["tokens"] == e.tokens.tolist()
        assert row["action_mask"] == e.action_mask.tolist()
        for name in ("logprobs", "advantages"):
            np.testing.assert_array_equal(np.asarray(row[name], np.float32), getattr(e, name))
        assert row["reward"] == e.reward
        version = e.info["model_version"]
        assert (row["oldest_version"], row["newest_version"]) == (version, version + e.info["model_version_drift"])
        assert row["runner"] == runners[f"batch/{e.eid.batch}", e.eid.task]
        assert row["trained_step"] in (e.eid.batch, None)


def test_what_runners_made_of_a_batch_that_goes_on_can_be_had_too(log: Path, tmp_path: Path) -> None:
    assert exported(log, 6, "--experiences", tmp_path / "a.jsonl")["experiences"]["written"] == 0
    made = exported(log, 6, "--as-made", "--experiences", tmp_path / "b.jsonl")["experiences"]["written"]
    assert made > 0


def with_experiences(folder: Path) -> Path:
    path = folder / "log.sqlite"
    made = [Experience(eid=EID(batch=3, task=i // 2, run=i % 2, suffix=str(i)), tokens=[1, 2], prompt_length=1)
            for i in range(4)]
    write(path, history(open_payloads(str(path), durability="process").put(Experience.serialize_many(made))))
    return path


def test_text_that_was_not_kept_is_null_and_the_span_is_the_events(tmp_path: Path) -> None:
    path, file = with_experiences(tmp_path), tmp_path / "out.jsonl"
    exported(path, 3, "--experiences", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["eid"] for row in rows] == ["3/0/0/0/0", "3/0/1/0/1", "3/1/0/0/2", "3/1/1/0/3"]
    assert {(row["prompt"], row["completion"], row["reward"]) for row in rows} == {(None, None, None)}
    assert {(row["oldest_version"], row["newest_version"]) for row in rows} == {(4, 5)}


def test_what_was_delivered_before_a_batch_id_was_submitted_again_is_in_the_file_too(tmp_path: Path) -> None:
    path, file = with_experiences(tmp_path), tmp_path / "out.jsonl"
    again = ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[2], tasks=[{}])
    write(path, [(batch_stream(3), [again])])
    for chosen in ((), (3,)):
        assert exported(path, *chosen, "--experiences", file, "--force")["experiences"]["written"] == 4
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["eid"], row["trained_step"]) for row in rows] == [
            (f"3/{i // 2}/{i % 2}/0/{i}", 3) for i in range(4)]
    assert exported(path, 3, "--as-made", "--experiences", file, "--force")["experiences"]["written"] == 4


def test_a_missing_payload_is_named_and_exits_1_and_a_freed_one_is_named(tmp_path: Path) -> None:
    path, file = tmp_path / "log.sqlite", tmp_path / "out.jsonl"
    open_payloads(str(path))
    write(path, history("d" * 64))
    told = exported(path, "--experiences", file, code=1)
    assert "batch 3: no payload dddd" in told["experiences"]["missing"][0]
    assert file.read_text() == ""
    write(path, [("experiences", [ev.PayloadsFreed(batches=[3], payloads=1, bytes=9)])])
    told = exported(path, "--experiences", file, "--force")
    assert (told["experiences"]["freed"], told["experiences"]["missing"]) == ([3], [])
    assert "because they were freed" in cli("export", "--experiences", file, "--force", "--log", path).stderr


def test_an_eval_that_is_named_is_told_to_keep_no_experiences(tmp_path: Path) -> None:
    make(str(log := tmp_path / "log.sqlite"), batches=10, tasks=4, seed=3)
    with open_log(str(log)) as opened:
        [name, *_] = [row.batch_id for row in opened.batches(batch_type="eval")]
    done = cli("export", name, "--experiences", tmp_path / "eval.jsonl", "--log", log)
    assert f"not in the file, because evals keep no experiences: {name}" in done.stderr
    assert "eval.jsonl: 0 experiences" in done.stdout


def test_a_file_is_there_whole_or_not_at_all(log: Path, tmp_path: Path) -> None:
    wrong = cli("export", "--experiences", tmp_path / "out.csv", "--log", log)
    assert wrong.exit_code == 2
    assert ".parquet or .jsonl" in wrong.stderr
    bare = tmp_path / "bare.sqlite"
    write(bare, history("d" * 64))
    assert cli("export", "--experiences", tmp_path / "out.jsonl", "--log", bare).exit_code == 2  # no payload store
    assert [f.name for f in tmp_path.iterdir() if "out" in f.name or "unfinished" in f.name] == []
    assert cli("export", "--log", log).exit_code == 2
    assert cli("export", "--events", tmp_path / "nowhere" / "e.jsonl", "--log", log).exit_code == 2


def test_events_are_a_document_a_line(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    exported(log, "--events", file)
    with open_log(str(log)) as opened:
        recorded = list(opened.events())
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["position"], r["type"], r["hash"]) for r in rows] == \
        [(r.position, r.type, r.hash.hex()) for r in recorded]
    assert all(json.loads(r.data) == row["data"] for r, row in zip(recorded, rows, strict=True))


def test_what_is_under_way_is_drawn_up_to_the_last_event(log: Path) -> None:
    with open_log(str(log)) as opened:
        entries = list(trace_events(opened.events()))
    running = [e for e in entries if e["ph"] == "X" and e["args"].get("outcome") == "running"]
    assert {e["name"] for e in running} >= {"train 6"}
    end = max(e["ts"] + e["dur"] for e in entries if e["ph"] == "X")
    assert all(abs(e["ts"] + e["dur"] - end) < 1.0 for e in running)


def test_what_began_before_the_first_event_of_a_trace_begins_with_it(tmp_path: Path) -> None:
    """Perfetto drops what has a negative time."""
    write(tmp_path / "log.sqlite", [
        ("batch/1", [ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])]),
        ("runner/r", [ev.WeightsLoaded(runner="r", incarnation=1, version=3, seconds=60.0)]),
    ])
    with open_log(str(tmp_path / "log.sqlite")) as log:
        loaded = next(e for e in trace_events(log.events()) if e.get("cat") == "weights")
    assert loaded["ts"] == 0
    assert 0 <= loaded["dur"] < 60e6


def test_a_trace_of_some_batches_has_these_alone(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    exported(log, 2, "--trace", file)
    entries = json.loads(file.read_text())["traceEvents"]
    batches = {e["name"] for e in entries if e["ph"] == "X" and e["cat"] == "batch" and e["name"] != "finalize"}
    assert batches == {"train 2"}
    assert any(e["cat"] == "weights" for e in entries if e["ph"] != "M")
    with open_log(str(log)) as opened:
        row, head = opened.batch_row(2), opened.head().position
    told = {e["args"]["position"] for e in entries if "position" in e.get("args", {})}
    assert told
    assert row.first_position <= min(told) <= max(told) <= row.last_position < head


def test_nothing_that_is_there_is_written_over_by_mistake(tmp_path: Path) -> None:
    path, there = tmp_path / "log.sqlite", tmp_path / "there.jsonl"
    write(path, history("d" * 64))
    there.write_text("mine")
    (tmp_path / "link.jsonl").symlink_to(there)
    before = path.read_bytes()
    for wrong, why in (
        (["--events", path, "--force"], "the log itself"), (["--events", there], "--force overwrites it"),
        (["--events", tmp_path / "link.jsonl", "--force"], "not a regular file"),
        (["--events", tmp_path / "a.jsonl", "--experiences", tmp_path / "a.jsonl"], "named twice"),
    ):
        done = cli("export", *wrong, "--log", path)
        assert (done.exit_code, why in " ".join(done.output.split())) == (2, True), done.output
    assert path.read_bytes() == before
    assert there.read_text() == "mine"
    assert exported(path, "--events", there, "--force")["events"]["written"] == len(there.read_text().splitlines())
