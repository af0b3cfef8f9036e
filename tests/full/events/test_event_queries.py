"""Rare events are found without the bulk, and are the same events that a reading of the whole log finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Engine

from tests.helpers.faults import Server
from tests.helpers.logs import dropped, trained
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.statements import page_of
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.records.event_queries import RARE
from trinity_es.events.vocabulary import EVENTS, BatchPaused, BatchResumed, Event, TasksDispatched, WeightsPublished
from trinity_es.projections.tables import runner_history

Open = Callable[..., EventLog]


def dispatched(n: int) -> TasksDispatched:
    return TasksDispatched(runner="runner-0", incarnation=n, units=[], model_version=0)


@pytest.fixture
def mixed(open_log: Open) -> EventLog:
    """40 events in two streams, of which ten are rare, of five types."""
    log = open_log()
    a: list[Event] = [dispatched(i) for i in range(10)]
    b: list[Event] = [dispatched(i) for i in range(20)]
    a[3:3] = [*trained(1, 2), dropped(1), BatchPaused(reason="stop")]
    b[15:15] = [*trained(3), BatchResumed(), dropped(2), *trained(4), dropped(3), WeightsPublished(version=1, path="w")]
    log.append([Write(stream="a", expected_version=0, events=a), Write(stream="b", expected_version=0, events=b)],
               commit_id="c")
    return log


def found(log: EventLog, types: list[str] | None, *, after: int = 0, before: int | None = None) -> list[int]:
    chosen = RARE if types is None else types
    return [r.position for r in log.read(after=after) if r.type in chosen and (before is None or r.position < before)]


def test_the_bulk_is_named_once_and_all_else_is_rare() -> None:
    assert {*RARE, *schema.BULK} == EVENTS.keys()
    assert not set(RARE) & set(schema.BULK)
    assert all(f"'{name}'" in str(schema.IS_RARE) for name in schema.BULK)


@pytest.mark.parametrize("page", [1, 3, 1000])
def test_they_are_those_of_a_reading_of_everything(mixed: EventLog, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_es.events.store.log.PAGE", page)
    for types in (None, ["BatchTrained"], ["TaskDropped", "BatchTrained"], ["OutputFailed"], []):
        for after, before in ((0, None), (4, 33), (5, 6), (33, 33), (100, None)):
            expected = found(mixed, types, after=after, before=before)
            up = [r.position for r in mixed.read_rare(types, after=after, before=before)]
            down = [r.position for r in mixed.read_rare(types, after=after, before=before, descending=True)]
            assert (up, down) == (expected, expected[::-1])
            for limit in (1, 4):
                some = mixed.read_rare(types, after=after, before=before, limit=limit)
                last = mixed.read_rare(types, after=after, before=before, limit=limit, descending=True)
                assert [r.position for r in some] == expected[:limit]
                assert [r.position for r in last] == expected[::-1][:limit]
    assert len(found(mixed, None)) == 10
    assert next(mixed.read_rare(["WeightsPublished"])).event == WeightsPublished(version=1, path="w")


def test_a_bulk_type_is_refused(mixed: EventLog) -> None:
    with pytest.raises(ValueError, match="TaskFinished: bulk types have no index"):
        list(mixed.read_rare(["BatchTrained", "TaskFinished"]))


def test_the_query_uses_the_index_and_bulk_is_not_in_it(mixed: EventLog) -> None:
    asked: list[str] = []

    @event.listens_for(mixed.engine, "before_cursor_execute")
    def _note(_c: object, _k: object, statement: str, parameters: tuple[object, ...], *_: object) -> None:
        if "UNION ALL" in statement:
            asked.append(statement)
            bound.append(parameters)

    bound: list[tuple[object, ...]] = []
    list(mixed.read_rare(["BatchTrained", "TaskDropped"], after=3, limit=2))
    with mixed.engine.begin() as connection:
        if mixed.dialect == "sqlite":
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked[0]}", bound[0]).all()
            searches = [str(row[-1]) for row in plan if "es_event" in str(row[-1])]
            assert len(searches) == 2
            assert all("USING COVERING INDEX es_event_rare (type=? AND position>?)" in s for s in searches)
        else:  # a table of 40 rows is read faster as it lies, unless it is forbidden
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            plan = connection.exec_driver_sql(f"EXPLAIN {asked[0]}", bound[0]).all()
            assert sum("es_event_rare" in str(row) for row in plan) >= 2


# --- a page of a stream -----------------------------------------------------------------------------------------------
ROWS = """
    INSERT INTO es_event (position, stream, version, type, schema_version, data, metadata, recorded_at, commit_id,
                          commit_index, hash)
    SELECT n, 'batch/' || n / 100, n % 100 + 1, 'TasksDispatched', 1, convert_to(repeat('x', 500), 'UTF8'), '', 0, '',
           1, ''
    FROM generate_series(100, 30099) AS n
"""
"""So many that the planner weighs one index against the other; what they say is not read."""


@pytest.fixture
def url(own_server: Server) -> str:
    url = own_server.url(own_server.new_database())
    EventLog.open(url, create=True).close()
    with psycopg.connect(url) as connection:
        connection.execute(ROWS)
    return url


def require_index_of_streams(url: str, words: str, given: Any = None, first: Sequence[str] = ()) -> str:
    """See that this query reads that index alone; returns by which conditions. `first` is said before it."""
    with psycopg.connect(url) as connection:
        for told in ("SET enable_seqscan = off", *first):
            connection.execute(told.encode())
        plan = "\n".join(row[0] for row in connection.execute(f"EXPLAIN {words}".encode(), given))
    assert "es_event_stream_version_key" in plan, plan
    assert "es_event_pkey" not in plan, plan
    return "\n".join(line for line in plan.splitlines() if "Index Cond" in line)


@pytest.mark.postgres
@pytest.mark.parametrize("types", [None, ("TaskFinished", "BatchFinalized")], ids=["all", "of_types"])
def test_a_page_of_a_stream_reads_the_index_of_streams_alone(url: str, types: tuple[str, ...] | None) -> None:
    asked = {"stream": "batch/1", "version": 0, "after": 0, "until": 2**62, "limit": 1000}
    query = page_of(True, types)._statement.compile(dialect=postgresql.psycopg.dialect())
    words = str(query) % {name: f"${n}" for n, name in enumerate(query.params, 1)}
    given = ", ".join(repr((query.params | asked)[name]) for name in query.params)
    first = "SET plan_cache_mode = force_generic_plan", f"PREPARE page AS {words}"
    conditions = require_index_of_streams(url, f"EXECUTE page({given})", first=first)
    assert "version >" in conditions, "no page reads again what one before it read"


@pytest.mark.postgres
def test_so_does_the_look_for_what_a_runner_was_given(url: str) -> None:
    said: list[tuple[str, Any]] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def listen(_c: Any, _cursor: Any, words: str, given: Any, _context: Any, _many: bool) -> None:
        if "FROM es_event" in words:
            said.append((words, given))

    try:
        with EventLog.open(url, read_only=True) as log:
            log.query(lambda c: runner_history._dispatch_times(c, "batch/none", 0))
    finally:
        event.remove(Engine, "before_cursor_execute", listen)
    [(words, given)] = said
    require_index_of_streams(url, words, given)
