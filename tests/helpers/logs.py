"""Logs with something in them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect, text

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import BatchTrained, TaskDropped

__all__ = ["answers", "dropped", "tables", "trained", "write", "write_steps"]


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


def write(log: EventLog, stream: str, expected: int, *, size: int = 1, commit: str = "") -> None:
    event = dropped(0, reason="x" * size)
    log.append(
        [Write(stream=stream, expected_version=expected, events=[event])], commit_id=commit or f"{stream}-{expected}"
    )


def tables(log: EventLog) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every read model, in an order of its own."""
    with log.engine.connect() as connection:
        names = [n for n in inspect(connection).get_table_names() if n.startswith("rm_")]
        return {n: sorted((tuple(r) for r in connection.execute(text(f"SELECT * FROM {n}"))), key=repr) for n in names}


def write_steps(
    log: EventLog, stream: str, expected: int, *steps: int, commit: str | None = None, **options: object
) -> None:
    """Append steps to a stream that has `expected` events, under a commit id made of all that."""
    commit = commit or f"{stream}-{expected}-{steps}"
    log.append(
        [Write(stream=stream, expected_version=expected, events=trained(*steps))], commit_id=commit, **options  # type: ignore[arg-type]  # options are append's own
    )
