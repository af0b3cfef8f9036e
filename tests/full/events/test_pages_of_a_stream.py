"""What a page of a stream costs does not grow with the log: PostgreSQL reads the stream's own index and no other."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.dialects import postgresql

from tests.helpers.faults import Server
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.statements import page_of

ROWS = """
    INSERT INTO es_event (position, stream, version, type, schema_version, data, metadata, recorded_at, commit_id,
                          commit_index, hash)
    SELECT n, 'batch/' || n / 100, n % 100 + 1, 'TaskFinished', 1, '', '', 0, '', 1, ''
    FROM generate_series(100, 30099) AS n
"""
"""So many that the planner weighs one index against the other; what they say is not read."""


@pytest.mark.postgres
@pytest.mark.parametrize("types", [None, ("TaskFinished", "BatchFinalized")], ids=["all", "of_types"])
def test_a_page_of_a_stream_reads_the_index_of_streams_alone(own_server: Server, types: tuple[str, ...] | None) -> None:
    url = own_server.url(own_server.new_database())
    EventLog.open(url, create=True).close()
    asked = {"stream": "batch/1", "after": 0, "until": 2**62, "limit": 1000}
    query = page_of(True, types)._statement.compile(dialect=postgresql.psycopg.dialect())
    with psycopg.connect(url) as connection:
        connection.execute(ROWS)
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        words = str(query) % {name: f"${n}" for n, name in enumerate(query.params, 1)}
        connection.execute(f"PREPARE page AS {words}".encode())
        given = ", ".join(repr((query.params | asked)[name]) for name in query.params)
        plan = "\n".join(row[0] for row in connection.execute(f"EXPLAIN EXECUTE page({given})".encode()))
    assert "es_event_stream_version_key" in plan, plan
    assert "es_event_pkey" not in plan, plan
