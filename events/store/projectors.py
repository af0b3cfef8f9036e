"""Read models: their update in the transaction of each append, and their rebuild from the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, bindparam, insert, select, update

from trinity_es.events.errors import LogCorrupt, LogTooNew
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.prepared import Prepared
from trinity_es.events.store.database.statements import NEXT_PAGE, PAGE, LockedHead, lock_head
from trinity_es.events.store.records.log_values import Projector, Recorded, from_row

__all__ = ["ReadModels"]

_K = schema.checkpoints.c
_CHECKPOINT = select(schema.checkpoints).where(_K.name == bindparam("n"))
_MOVE_CHECKPOINT = Prepared(
    update(schema.checkpoints)
    .where(_K.name == bindparam("n"), _K.version == bindparam("v"), _K.position == bindparam("before"))
    .values(position=bindparam("p"), hash=bindparam("h"), generation=bindparam("g"))
)


class ReadModels:
    """The projectors of one open log. Each method works in the caller's transaction."""

    def __init__(self, db: Database, projectors: Sequence[Projector]) -> None:
        self._db, self.projectors = db, tuple(projectors)
        if len({p.name for p in projectors}) != len(projectors):
            raise ValueError(f"projectors need different names, not {sorted(p.name for p in projectors)}")

    def prepare(self, connection: Connection) -> None:
        """Create missing tables, and apply the events that a table lacks."""
        head = lock_head(connection, self._db)
        for projector in self.projectors:
            projector.create(connection)
            self._catch_up(connection, projector, head)

    def apply(self, connection: Connection, head: LockedHead, recorded: list[Recorded]) -> None:
        """Apply newly appended events, which follow `head`. A projector's error undoes the append."""
        if not self.projectors:
            return
        last = recorded[-1]
        checkpoint = {"p": last.position, "h": last.hash, "g": head.generation, "before": head.last_position}
        for projector in self.projectors:
            own_checkpoint = checkpoint | {"n": projector.name, "v": projector.version}
            if not _MOVE_CHECKPOINT.change(connection, own_checkpoint):
                # Another process wrote without this projector, or with another version of it.
                self._catch_up(connection, projector, head)
                _MOVE_CHECKPOINT.change(connection, own_checkpoint)
            projector.apply(connection, recorded)

    def begin_generation(self, connection: Connection, generation: str) -> None:
        """Move the checkpoints to the log's new generation, so that the tables stay valid in it."""
        names = [p.name for p in self.projectors]
        connection.execute(update(schema.checkpoints).where(_K.name.in_(names)).values(generation=generation))

    def rebuild(self, connection: Connection, progress: Callable[[int, int], None] | None = None) -> int:
        """Empty the tables and apply the whole log. Return the number of applied events."""
        head = lock_head(connection, self._db)
        applied_count = 0
        for projector in self.projectors:
            projector.create(connection)
            applied_count += self._catch_up(connection, projector, head, progress, from_start=True)
        return applied_count

    def _catch_up(
        self, connection: Connection, projector: Projector, head: LockedHead,
        progress: Callable[[int, int], None] | None = None, from_start: bool = False,
    ) -> int:
        """Apply the events up to `head` that a projector lacks, and return their number.

        With `from_start`, or if the projector's version or the log's generation changed, apply all events.
        """
        stored = connection.execute(_CHECKPOINT, {"n": projector.name}).one_or_none()
        if stored is not None and stored.version > projector.version:
            raise LogTooNew(
                f"{self._db.shown}: the read model {projector.name} is of version {stored.version}, this software "
                f"makes version {projector.version}; upgrade trinity-es"
            )
        start, until = 0, head.last_position
        is_current = stored is not None and (stored.version, stored.generation) == (projector.version, head.generation)
        if stored is not None and is_current and stored.position <= until and not from_start:
            start = stored.position
        else:
            projector.reset(connection)
        after = start
        while after < until:
            values = {"after": after, "until": until, "limit": PAGE}
            rows = [from_row(r) for r in NEXT_PAGE.rows(connection, values)]
            if not rows or rows[0].position != after + 1 or rows[-1].position != after + len(rows):
                problem = f"{self._db.shown}: a position after {after} is missing; run `trinity-es verify`"
                raise LogCorrupt(problem, position=after + 1)
            projector.apply(connection, rows)
            after = rows[-1].position
            if progress:
                progress(after, until)
        checkpoint = {"version": projector.version, "position": until, "hash": head.last_hash,
                      "generation": head.generation}
        if stored is None:
            connection.execute(insert(schema.checkpoints).values(name=projector.name, **checkpoint))
        elif after != stored.position or not is_current:
            connection.execute(update(schema.checkpoints).where(_K.name == projector.name).values(**checkpoint))
        return until - start
