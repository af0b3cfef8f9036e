"""`verify` compares every table with the events, names table, row and column, and accuses no live run."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text, update

from benchmarks import sample_log
from tests.helpers.handmade import history
from tests.helpers.logs import answers, dropped, trained
from trinity_es.events import vocabulary as ev
from trinity_es.events.codec import check
from trinity_es.events.errors import LogNotFound, NotALog
from trinity_es.events.store.database.schema import body_hash, chain_hash, drop_triggers, events
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import Verification, verify_log


def fill(url: str) -> str:
    store = open_payloads(url, durability="process")
    digest = store.put(b"four experiences")
    store.close()
    with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", {"pid": 1, "host": "here"})
        weights: list[ev.Event] = [ev.WeightsPublished(version=1, path="/w/1")]
        loaded: list[ev.Event] = [ev.WeightsLoaded(runner="runner-0", incarnation=1, version=1, seconds=0.25)]
        for i, (stream, events) in enumerate([*history(digest), ("weights", weights), ("answers", answers(digest)),
                                              ("runner/runner-0", loaded)]):
            write = Write(stream=stream, expected_version=log.stream_version(stream), events=events)
            log.append([write], commit_id=f"c{i}", lease=lease)
    found = verify_log(url)
    assert (found.problems, found.notes, found.payloads) == ([], [], 1)
    return url


@pytest.fixture
def url(store_url: str) -> str:
    return fill(store_url)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fill(str(tmp_path_factory.mktemp("filled") / "log.db")))


def tampered(url: str, *statements: str) -> Verification:
    with EventLog.open(url, durability="process") as log, log.engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    return verify_log(url)


ROWS = [
    ("UPDATE rm_batch SET state = 'running' WHERE stream = 'batch/3'",
     "table rm_batch, row 'batch/3': state is 'running', by the events it is 'finalized'"),
    ("DELETE FROM rm_batch WHERE stream = 'batch/3'", "table rm_batch: its row 'batch/3' is missing"),
    ("DROP TABLE rm_answer", "table rm_answer is missing"),
    ("DELETE FROM es_lease", "lease 'coordinator' is missing"),
    ("UPDATE es_checkpoint SET position = position - 1 WHERE name = 'read_models'",
     "checkpoint 'read_models': it stands at position"),
    ("UPDATE es_checkpoint SET version = 1 WHERE name = 'read_models'", "it has version 1"),
    ("DELETE FROM es_checkpoint WHERE name = 'read_models'", "checkpoint 'read_models' is missing"),
]
"""Statements that change more than one value (test_changed_values.py), and what is told of each."""


@pytest.mark.parametrize(("statement", "told"), ROWS)
def test_a_changed_row_is_named_by_table_and_column(filled: Path, tmp_path: Path, statement: str, told: str) -> None:
    shutil.copytree(filled.parent, tmp_path, dirs_exist_ok=True)
    problems = tampered(str(tmp_path / filled.name), statement).problems
    assert any(told in problem for problem in problems), problems
    assert len(problems) <= 3, problems


def test_a_lease_that_nobody_wrote_under_is_a_note(url: str) -> None:
    with EventLog.open(url, durability="process") as log:
        log.acquire_lease("coordinator", {"pid": 2, "host": "here"})
    found = verify_log(url)
    assert found.problems == []
    assert found.notes[0].startswith("lease 'coordinator': it is at epoch 2, and the last that wrote events is 1")


def test_an_event_that_can_not_be_read_is_one_problem_and_the_tables_are_not_accused(url: str) -> None:
    with EventLog.open(url, durability="process") as log, log.engine.begin() as connection:
        drop_triggers(connection)
        connection.execute(text("UPDATE es_event SET type = 'Nonsense' WHERE stream = 'batch/3' AND version = 2"))
    found = verify_log(url)
    assert [p.partition(" (")[0] for p in found.problems if "trigger" not in p] == ["position 9"] * 2
    assert "the read models were not compared: not every event could be read" in found.notes


def test_payloads_that_are_missing_are_named_with_who_needs_them(url: str) -> None:
    store = open_payloads(url)
    (digest,) = store.digests()
    store.delete(digest)
    spare = store.put(b"nobody names this")
    store.close()
    found = verify_log(url)
    assert found.problems == [f"answer chatcmpl-0: payload {digest} is missing"]
    assert spare in found.notes[0]


def test_files_that_are_no_payloads_are_notes(tmp_path: Path) -> None:
    sample_log.make(str(tmp_path / "log.db"), batches=1, tasks=2)
    folder = Path(f"{tmp_path / 'log.db'}.payloads")
    (folder / "README").write_text("not ours")
    one = next(p for p in folder.rglob("*") if p.is_file() and len(p.name) == 64)
    shutil.copy(one, folder / one.parent.name / ".put-x")
    found = verify_log(str(tmp_path / "log.db"))
    assert found.problems == []
    (remark,) = found.notes
    assert remark.startswith("2 files in the payload store are not payloads: ")
    assert f"{one.parent.name}/.put-x" in remark
    assert "README" in remark


def test_a_store_that_is_gone_is_one_problem(tmp_path: Path) -> None:
    sample_log.make(str(tmp_path / "log.db"), batches=1, tasks=2)
    shutil.rmtree(f"{tmp_path / 'log.db'}.payloads")
    (problem,) = verify_log(str(tmp_path / "log.db")).problems
    assert "no payload store at" in problem
    assert "payloads are needed, among them" in problem


def test_what_never_was_a_log_is_an_error_and_a_damaged_one_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(LogNotFound):
        verify_log(str(tmp_path / "none.db"))
    (tmp_path / "notes.txt").write_text("no database")
    with pytest.raises(NotALog):
        verify_log(str(tmp_path / "notes.txt"))
    sample_log.make(str(tmp_path / "log.db"), batches=1, tasks=2)
    whole = (tmp_path / "log.db").read_bytes()
    (tmp_path / "log.db").write_bytes(whole[: len(whole) // 2 + 99])
    assert verify_log(str(tmp_path / "log.db")).problems
    (tmp_path / "log.db").write_bytes(b"X" + whole[1:])
    assert verify_log(str(tmp_path / "log.db")).problems


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), alive=st.booleans(), hostile=st.booleans(), tasks=st.integers(1, 12))
def test_a_log_that_nobody_touched_has_no_problems(
    tmp_path_factory: pytest.TempPathFactory, seed: int, alive: bool, hostile: bool, tasks: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.db"
    sample_log.make(str(path), batches=5, tasks=tasks, seed=seed, alive=alive, hostile=hostile, keep=3)
    found = verify_log(str(path))
    assert found.problems == []
    assert found.events > 10


def test_a_writer_at_work_is_not_accused(store_url: str, open_log: Callable[..., EventLog]) -> None:
    """Commits, read models, a lease and payloads change all the time; every answer is of one moment."""
    log = open_log(projectors=projectors())
    store = open_payloads(store_url, durability="process")
    lease = log.acquire_lease("coordinator", {"pid": 1, "host": "here"})
    stop, written = threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            i = written[0] = written[0] + 1
            store.put(f"payload {i}".encode())
            opened = ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1], tasks=[{}])
            sent = ev.TasksDispatched(runner="r", incarnation=1, model_version=0,
                                      units=[ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)])
            log.append([Write(stream=f"batch/{i}", expected_version=0, events=[opened, sent])], commit_id=f"b{i}",
                       lease=lease)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        seen, until = [], time.monotonic() + 30
        while len(seen) < 6 or seen[-1] < seen[0] + 30:
            assert time.monotonic() < until, f"the writer wrote {written} batches in 30 s"
            found = verify_log(store_url)
            assert found.problems == []
            seen.append(found.events)
    finally:
        stop.set()
        writer.join(30)
        store.close()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def of_file(filled: Path, tmp_path: Path, *statements: str) -> list[str]:
    """What is found after these statements, in a copy whose events can be changed; but for the guard that is off."""
    shutil.copytree(filled.parent, tmp_path, dirs_exist_ok=True)
    path = str(tmp_path / filled.name)
    with EventLog.open(path, durability="process") as log, log.engine.begin() as connection:
        drop_triggers(connection)
    return [p for p in tampered(path, *statements).problems if not p.startswith("trigger ")]


@pytest.mark.parametrize(("statements", "told"), [
    (["UPDATE es_event SET stream = CAST(stream AS BLOB) WHERE position = 7"],
     [r"position 7 \(b'.*its stream is of type bytes, not str: it was changed"]),
    # The driver would raise an error for a text that is no UTF-8 that says neither position nor table.
    (["UPDATE es_event SET commit_id = CAST(x'63ff' AS TEXT) WHERE position = 7",
      "UPDATE rm_life SET host = CAST(x'63ff' AS TEXT)"],
     [r"position 7 \(.*its hash does not match",
      r"table rm_life, row 'runner-0', 1: host is 'c\\\\xff', by the events it is 'here'$"]),
    (["PRAGMA writable_schema = ON",
      "UPDATE sqlite_master SET sql = replace(sql, 'method TEXT', 'method TEXX') WHERE name = 'rm_weights'"],
     ["table rm_weights is defined as .*TEXX"]),
], ids=["another type", "no UTF-8", "a definition"])
def test_what_sqlite_takes_though_no_writer_of_ours_does_is_named(
    filled: Path, tmp_path: Path, statements: list[str], told: list[str]
) -> None:
    problems = of_file(filled, tmp_path, *statements)
    assert all(any(re.match(wanted, problem, re.DOTALL) for problem in problems) for wanted in told), problems


def test_payloads_that_were_freed_are_not_needed_and_later_ones_are(tmp_path: Path) -> None:
    sample_log.make(str(tmp_path / "log.db"), batches=4, tasks=3, keep=2)
    found = verify_log(str(tmp_path / "log.db"))
    assert found.problems == []
    store = open_payloads(str(tmp_path / "log.db"))
    kept = list(store.digests())
    for digest in kept:
        store.delete(digest)
    problems = verify_log(str(tmp_path / "log.db")).problems
    assert 0 < len(problems) <= len(kept)
    assert all("is missing" in p for p in problems)


@pytest.fixture
def log(open_log: Callable[..., EventLog]) -> EventLog:
    log = open_log()
    for i in range(4):
        log.append(
            [Write(stream="a", expected_version=2 * i, events=[*trained(i), dropped(i)]),
             Write(stream="b", expected_version=i, events=trained(i))], commit_id=f"c{i}",
        )
    assert log.verify() == []
    return log


def changed(log: EventLog, *statements: str) -> list[str]:
    with log.engine.begin() as connection:
        drop_triggers(connection)
        for statement in statements:
            connection.execute(text(statement))
    return log.verify()


def swap(column: str, one: int, other: int) -> list[str]:
    """Statements that give two events each other's value; by way of free ones, because some columns are unique."""
    return [
        f"UPDATE es_event SET {column} = {one + 1000} WHERE {column} = {one}",
        f"UPDATE es_event SET {column} = {one} WHERE {column} = {other}",
        f"UPDATE es_event SET {column} = {other} WHERE {column} = {one + 1000}",
    ]


def test_one_changed_byte_is_one_problem(log: EventLog) -> None:
    other = trained(7)[0]
    stored = check(other)[0].hex()
    value = f"x'{stored}'" if log.dialect == "sqlite" else f"decode('{stored}', 'hex')"
    problems = changed(log, f"UPDATE es_event SET data = {value} WHERE position = 7")
    assert problems == [
        "position 7 (a 5, BatchTrained): its hash does not match it and the event before it: one of them was changed"
    ]


def test_an_event_rewritten_together_with_its_hash_breaks_the_chain_at_the_next_one(log: EventLog) -> None:
    with log.engine.connect() as connection:
        before, row = connection.execute(
            select(events).where(events.c.position.in_([6, 7])).order_by(events.c.position)
        ).all()
    forged = {**row._mapping, "data": check(trained(7)[0])[0]}
    outside = ("position", "recorded_at", "hash")
    body = body_hash(**{name: value for name, value in forged.items() if name not in outside})
    with log.engine.begin() as connection:
        drop_triggers(connection)
        connection.execute(
            update(events).where(events.c.position == 7)
            .values(data=forged["data"], hash=chain_hash(bytes(before.hash), 7, row.recorded_at, body))
        )
    problems = log.verify()
    assert [p.split(" (")[0] for p in problems] == ["position 8"]


COLUMNS = "stream, type, schema_version, data, metadata, recorded_at, commit_id, hash"
DELETED = "DELETE FROM es_event WHERE position = 12"


@pytest.mark.parametrize(("statements", "told"), [
    (["DELETE FROM es_event WHERE position = 6"], ["position 6: missing", ...]),
    ([DELETED], ["position 12: missing, the log's head is at 12", "stream b:"]),
    # Only the hash in the head row can tell of it: everything else agrees.
    ([DELETED, "UPDATE es_log_head SET last_position = 11", "UPDATE es_stream SET version = 3 WHERE stream = 'b'"],
     ["position 11: its hash is not the one in the log's head"]),
    (swap("position", 4, 5), ["position 4", ...]),
    ([f"INSERT INTO es_event (position, version, commit_index, {COLUMNS}) SELECT 13, 9, 5, {COLUMNS} FROM es_event "
      "WHERE position = 11"], ["positions 13 to 13: they lie after the log's head"]),
    (["UPDATE es_stream SET version = 7 WHERE stream = 'b'"],
     ["stream b: 4 is its last version among the events, 7 in the table of streams"]),
], ids=["deleted", "the last deleted", "the head moved back too", "changed places", "added", "a stream's version"])
def test_what_was_changed_is_found(log: EventLog, statements: list[str], told: list[Any]) -> None:
    problems = changed(log, *statements)
    wanted = [start for start in told if start is not ...]
    assert all(any(problem.startswith(start) for problem in problems) for start in wanted), problems
    assert ... in told or len(problems) == len(wanted), problems


def test_progress_is_told_and_ends_at_the_end(log: EventLog) -> None:
    told: list[tuple[int, int]] = []
    assert log.verify(lambda done, total: told.append((done, total))) == []
    assert told[-1] == (12, 12)
