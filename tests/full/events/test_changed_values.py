"""One value changed in any column of any table, with SQL, is found by `verify` and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text

from benchmarks import sample_log
from tests.helpers.logs import answers
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database.schema import drop_triggers
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import Verification, verify_log

SAID = {
    "es_event": "position ", "es_stream": "stream ", "es_log_head": "the log's head", "es_lease": "lease ",
    "es_checkpoint": "checkpoint ", "es_payload": "payload ",
    ("es_log_head", "generation"): "the log has ", ("es_log_head", "schema_rev"): "log schema ",
    ("es_log_head", "last_hash"): "the log's head", ("es_log_head", "last_position"): "the log's head",
}
"""How a problem names a table, or a column of it; those of the read models are named as they are."""


def fill(url: str) -> None:
    """A small log with a row in every table; its run died."""
    sample_log.make(url, batches=2, tasks=3, runs=1, seed=3, dead=True)
    store = open_payloads(url, durability="process")
    digest = store.put(b"what the proxy answered")
    store.close()
    failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1,
                              kind="workflow", message="boom", retry=False)
    lone: list[ev.Event] = [ev.BatchSubmitted(batch_id="lone", batch_type="train", repeat_times=[1], tasks=[{}])]
    unit = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
    plays: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="plays", batch_type="train", repeat_times=[1], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit], model_version=0),
    ]
    far = ev.TaskFinished(task=0, run_id_base=0, attempt=1, runner="runner-0@b", incarnation=1,
                          runs=[ev.RunResult(run=0, metrics={})], payload=None, model_version=0, model_version_end=0,
                          seconds=0.5)
    on_host: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="far", batch_type="eval", repeat_times=[1], tasks=[{}], evals=[0]),
        ev.TasksDispatched(runner="runner-0@b", incarnation=1, units=[unit], model_version=0), far,
    ]
    taken = ev.LeaseTaken(
        lease="es-1", batch_id="plays", submission="", unit=unit, run=0, runner="runner-0", incarnation=1,
        provider="boxes:Boxes", ttl=60.0, expires=160.0, creation_timeout=60.0,
    )
    with EventLog.open(url, durability="process", projectors=projectors()) as log:
        runner = "runner/runner-0"
        loaded = ev.WeightsLoaded(runner="runner-0", incarnation=1, version=1, seconds=0.25)
        log.append([Write(stream="batch/1", expected_version=log.stream_version("batch/1"),
                          events=[ev.BatchTrained(step=1)]),
                    Write(stream="answers", expected_version=0, events=answers(digest)),
                    Write(stream="weights", expected_version=log.stream_version("weights"),
                          events=[ev.WeightsPublished(version=1, path="/w/1")]),
                    Write(stream="batch/plays", expected_version=0, events=plays),
                    Write(stream="batch/far", expected_version=0, events=on_host),
                    Write(stream="leases", expected_version=0, events=[taken]),
                    Write(stream=runner, expected_version=log.stream_version(runner), events=[loaded]),
                    Write(stream="batch/lone", expected_version=0, events=[*lone, failed])], commit_id="more")
    assert verify_log(url).problems == []


def another(value: Any, kind: str) -> Any:
    if isinstance(value, bytes | memoryview):
        value = bytes(value)
        return value.replace(b'"pid":', b'"pid":1') if b'"pid":' in value else bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, str):
        return value[:-1] + ("y" if value[-1:] == "x" else "x")
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value + 1e-6
    if isinstance(value, int):
        return value + 1000  # nobody else has that one
    return "x" if "CHAR" in kind or "TEXT" in kind else 1


def rounds(connection: Connection) -> list[list[tuple[str, dict[str, str], list[str], str]]]:
    """What is changed at once: table, types of its columns, its key and the column that is changed.

    A column of the log's own tables alone; of every read model one, since each is compared for itself.
    """
    there, alone, together = inspect(connection), [], []
    for table in sorted(there.get_table_names()):
        key = list(there.get_pk_constraint(table)["constrained_columns"])
        kinds = {column["name"]: str(column["type"]).upper() for column in there.get_columns(table)}
        todo = [(table, kinds, key, column) for column in kinds if (table, column) != ("es_log_head", "id")]
        if table.startswith("es_"):
            alone += [[one] for one in todo]
        else:
            together.append(todo)
    return alone + [[one for one in some if one is not None] for some in zip_longest(*together)]


def put(connection: Connection, table: str, column: str, key: dict[str, Any], value: Any) -> None:
    where = " AND ".join(f"{name} = :k{i}" for i, name in enumerate(key))
    keys = {f"k{i}": part for i, part in enumerate(key.values())}
    done = connection.execute(text(f"UPDATE {table} SET {column} = :v WHERE {where}"), {**keys, "v": value})
    assert done.rowcount == 1, (table, column, key)


def named(table: str, column: str, is_key: bool, found: Verification) -> bool:
    if (table, column) == ("es_lease", "epoch"):  # its holder may have written nothing yet: docs/OBSERVABILITY.md
        return any("lease 'coordinator': it is at epoch" in note for note in found.notes)
    if table.startswith("es_"):
        return any(SAID.get((table, column), SAID[table]) in problem for problem in found.problems)
    if is_key:
        return any(f"table {table}: no event makes its row" in problem for problem in found.problems)
    return any(f"table {table}, row" in problem and f": {column} is " in problem for problem in found.problems)


def test_a_changed_value_in_any_column_is_found_and_named(store_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = store_url
    fill(url)
    missed, done = [], 0
    with EventLog.open(url, durability="process") as log:
        with log.engine.begin() as connection:
            drop_triggers(connection)  # it refuses
            todo = rounds(connection)
        guard = verify_log(url).problems
        assert guard
        assert all(p.startswith("trigger es_event_no_") for p in guard)
        for some in todo:
            changed = []
            with log.engine.begin() as connection:
                for table, kinds, key, column in some:
                    query = text(f"SELECT * FROM {table} ORDER BY {', '.join(key)} LIMIT 1")
                    row = connection.execute(query).mappings().one()
                    value = another(row[column], kinds[column])
                    before = {name: row[name] for name in key}
                    put(connection, table, column, before, value)
                    after = before | ({column: value} if column in key else {})
                    changed.append((table, column, after, row[column], column in key))
            found = verify_log(url)
            missed += [(table, column, old, found.problems) for table, column, _, old, is_key in changed
                       if not named(table, column, is_key, found)]
            with log.engine.begin() as connection:
                for table, column, after, old, _ in changed:
                    put(connection, table, column, after, old)
            done += len(changed)
    assert missed == []
    assert verify_log(url).problems == guard
    with capsys.disabled():
        sys.stdout.write(f"\n{done} columns changed, each found and named\n")


@pytest.mark.postgres
@pytest.mark.parametrize(("statement", "told"), [
    ("CREATE OR REPLACE FUNCTION es_event_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
     "trigger es_event_no_change"),
    ("CREATE OR REPLACE TRIGGER es_event_no_change BEFORE TRUNCATE ON es_event EXECUTE FUNCTION es_event_refuse()",
     "trigger es_event_no_change"),
    ("ALTER TABLE es_event DISABLE TRIGGER es_event_no_change", "trigger es_event_no_change"),
    ("ALTER TABLE es_event DROP CONSTRAINT es_event_stream_version_key", "index es_event_stream_version_key"),
    ("DROP INDEX es_event_commit", "index es_event_commit"),
])
def test_what_keeps_events_from_changing_is_looked_at(postgres: Callable[[], str], statement: str, told: str) -> None:
    url = postgres()
    with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        assert verify_log(url).problems == []
        with log.engine.begin() as connection:
            connection.execute(text(statement))
    (problem,) = verify_log(url).problems
    assert problem.startswith(told)
