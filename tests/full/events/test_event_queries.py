"""Rare events are found without the bulk, and are the same events that a reading of the whole log finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import event, text

from tests.helpers.logs import dropped, trained
from trinity_es.events.store.database import schema
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.records.event_queries import RARE
from trinity_es.events.vocabulary import EVENTS, BatchPaused, BatchResumed, Event, TasksDispatched, WeightsPublished

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
    """The answer of a reading of everything."""
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
            up = [r.position for r in mixed.rare(types, after=after, before=before)]
            down = [r.position for r in mixed.rare(types, after=after, before=before, descending=True)]
            assert (up, down) == (expected, expected[::-1])
            for limit in (1, 4):
                some = mixed.rare(types, after=after, before=before, limit=limit)
                last = mixed.rare(types, after=after, before=before, limit=limit, descending=True)
                assert [r.position for r in some] == expected[:limit]
                assert [r.position for r in last] == expected[::-1][:limit]
    assert len(found(mixed, None)) == 10
    assert next(mixed.rare(["WeightsPublished"])).event == WeightsPublished(version=1, path="w")


def test_a_bulk_type_is_refused(mixed: EventLog) -> None:
    with pytest.raises(ValueError, match="TaskFinished: bulk types have no index"):
        list(mixed.rare(["BatchTrained", "TaskFinished"]))


def test_the_query_uses_the_index_and_bulk_is_not_in_it(mixed: EventLog) -> None:
    asked: list[str] = []

    @event.listens_for(mixed.engine, "before_cursor_execute")
    def _note(_c: object, _k: object, statement: str, parameters: tuple[object, ...], *_: object) -> None:
        if "UNION ALL" in statement:
            asked.append(statement)
            bound.append(parameters)

    bound: list[tuple[object, ...]] = []
    list(mixed.rare(["BatchTrained", "TaskDropped"], after=3, limit=2))
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
