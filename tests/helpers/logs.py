"""Logs with events, and copies of logs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from sqlalchemy import create_engine, inspect, text

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database.urls import file_of, parse_url
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import BatchTrained, TaskDropped


def trained(*steps: int) -> list[BatchTrained]:
    return [BatchTrained(step=s) for s in steps]


def dropped(*tasks: int, reason: str = "enough") -> TaskDropped:
    return TaskDropped(tasks=list(tasks), reason=reason)


def answers(digest: str) -> list[ev.Event]:
    given = [
        ev.Answer(message=f"chatcmpl-{i}", runner="runner-0", incarnation=1, model_version=i, model_version_end=i,
                  payload=ev.PayloadRef(digest=digest, first=0, count=1))
        for i in range(3)
    ]
    return [ev.AnswersRecorded(answers=given), ev.AnswersRewarded(messages=["chatcmpl-1"], reward=0.5, task="t", run=2)]


def copied(url: str, to: str) -> str:
    """Copy a log under another name beside it, and return the copy's URL. A PostgreSQL log must have no connections."""
    file = file_of(url)
    if file is None:
        return _database(url, to, f"CREATE DATABASE {to} TEMPLATE {parse_url(url).database}")
    copy = file.with_name(to)
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return f"sqlite:///{copy}"


def renamed(url: str, to: str) -> str:
    """Rename a log without connections, replacing a log of that name, and return the new URL."""
    file = file_of(url)
    if file is None:
        _database(url, to, f"DROP DATABASE IF EXISTS {to}")
        return _database(url, to, f"ALTER DATABASE {parse_url(url).database} RENAME TO {to}")
    return f"sqlite:///{file.rename(file.with_name(to))}"


def _database(url: str, name: str, statement: str) -> str:
    parsed = parse_url(url)
    engine = create_engine(parsed.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()
    return parsed.set(database=name).render_as_string(hide_password=False)


def write(log: EventLog, stream: str, expected: int, *, size: int = 1, commit: str = "") -> None:
    event = dropped(0, reason="x" * size)
    log.append(
        [Write(stream=stream, expected_version=expected, events=[event])], commit_id=commit or f"{stream}-{expected}"
    )


def tables(log: EventLog) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all read models, sorted."""
    with log.engine.connect() as connection:
        names = [n for n in inspect(connection).get_table_names() if n.startswith("rm_")]
        return {n: sorted((tuple(r) for r in connection.execute(text(f"SELECT * FROM {n}"))), key=repr) for n in names}


def write_steps(
    log: EventLog, stream: str, expected: int, *steps: int, commit: str | None = None, **options: object
) -> None:
    """Append steps to a stream that has `expected` events, by default with a commit id made of the arguments."""
    commit = commit or f"{stream}-{expected}-{steps}"
    log.append(
        [Write(stream=stream, expected_version=expected, events=trained(*steps))], commit_id=commit, **options  # type: ignore[arg-type]  # options are append's own
    )
