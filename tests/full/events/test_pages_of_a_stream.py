"""What it costs to read a stream does not grow with the log: PostgreSQL reads the stream's own index and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Engine

from tests.helpers.faults import Server
from trinity_es.events.store.database.statements import page_of
from trinity_es.events.store.log import EventLog
from trinity_es.projections.tables import runner_history

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
