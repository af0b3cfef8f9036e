"""Minimal read models for tests of the log, which fail or wait on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, text

from trinity_es.events.store.log import EventLog, Recorded


class Counts:
    """Read model with the number of events per stream, and the positions of all events."""

    def __init__(self, *, version: int = 1, before: Callable[[Sequence[Recorded]], None] | None = None) -> None:
        self.name, self.version, self.before = "counts", version, before

    def create(self, connection: Connection) -> None:
        connection.execute(text("CREATE TABLE IF NOT EXISTS counts (stream TEXT PRIMARY KEY, n BIGINT NOT NULL)"))
        connection.execute(text("CREATE TABLE IF NOT EXISTS counted (position BIGINT PRIMARY KEY)"))

    def apply(self, connection: Connection, recorded: Sequence[Recorded]) -> None:
        if self.before:
            self.before(recorded)
        for r in recorded:
            connection.execute(text("INSERT INTO counted VALUES (:p)"), {"p": r.position})
            connection.execute(
                text("INSERT INTO counts VALUES (:s, 1) ON CONFLICT (stream) DO UPDATE SET n = counts.n + 1"),
                {"s": r.stream},
            )

    def reset(self, connection: Connection) -> None:
        connection.execute(text("DELETE FROM counts"))
        connection.execute(text("DELETE FROM counted"))


def counts(log: EventLog) -> dict[str, int]:
    with log.engine.connect() as connection:
        return {row.stream: row.n for row in connection.execute(text("SELECT stream, n FROM counts"))}
