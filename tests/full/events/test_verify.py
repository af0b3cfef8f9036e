"""`verify` finds whatever was changed behind the log's back, and says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text, update

from tests.helpers.logs import dropped, trained
from trinity_es.events.codec import check
from trinity_es.events.store.database.schema import body_hash, chain_hash, drop_triggers, events
from trinity_es.events.store.log import EventLog, Write


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


def tamper(log: EventLog, *statements: str) -> list[str]:
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
    problems = tamper(log, f"UPDATE es_event SET data = {value} WHERE position = 7")
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
    problems = tamper(log, *statements)
    wanted = [start for start in told if start is not ...]
    assert all(any(problem.startswith(start) for problem in problems) for start in wanted), problems
    assert ... in told or len(problems) == len(wanted), problems


def test_progress_is_told_and_ends_at_the_end(log: EventLog) -> None:
    told: list[tuple[int, int]] = []
    assert log.verify(lambda done, total: told.append((done, total))) == []
    assert told[-1] == (12, 12)
