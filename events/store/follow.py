"""Reading the log on and on, from where this reader was: for readers outside the transaction of the append.

A subscription has a name and a checkpoint in the log's database. Delivery is at least once: what was polled and not
committed is polled again, after a crash too, so a reader that must be exact keeps the position beside its own result.
A subscription stops rather than guess: LogRewound where the log is not the one it has read (a restored copy), and
LogCorrupt at a gap. Read models in the log's own database need none of this: they are projectors (`log.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite

from trinity_es.events.errors import LogRewound
from trinity_es.events.store import schema
from trinity_es.events.store.log import EventLog, Recorded

__all__ = ["Subscription"]

_K = schema.checkpoints.c
_E = schema.events.c

FIRST_WAIT, LONGEST_WAIT = 0.01, 0.5
"""Seconds between two looks at a log in which nothing happens: doubled from the first to the longest."""


class Subscription:
    """A named reader. Two that run under one name read the same events twice; neither skips any.

    `batch` is how many events `poll` returns at most.
    """

    def __init__(self, log: EventLog, name: str, *, batch: int = 500) -> None:
        if batch < 1:
            raise ValueError(f"a batch of {batch} events: it must be at least 1")
        self._log, self._batch = log, batch
        self.name = name
        # Projectors keep theirs in the same table under their own names.
        self._key = f"subscription/{name}"
        head = log.head()
        self._position, self._hash, self._generation = 0, schema.GENESIS, head.generation
        row = log._db.read(lambda c: c.execute(select(schema.checkpoints).where(_K.name == self._key)).one_or_none())
        if row is not None:
            self._position, self._hash, self._generation = row.position, bytes(row.hash), row.generation
        self._polled: dict[int, bytes] = {}

    @property
    def position(self) -> int:
        """The last position that was committed; 0 before the first."""
        return self._position

    def poll(self) -> list[Recorded]:
        """Return the events after the last committed position, in order; [] where there is none yet.

        Raises LogRewound, LogCorrupt, LogUnavailable.
        """
        self._check_same_log()
        found = list(islice(self._log.read(after=self._position, limit=self._batch), self._batch))
        self._polled = {r.position: r.hash for r in found}
        return found

    def commit(self, position: int) -> None:
        """Note that what is up to here is done, and not polled again. A position before the last one changes nothing.

        Raises ValueError for a position that was not in the last poll.
        """
        if position <= self._position:
            return
        if position not in self._polled:
            raise ValueError(f"subscription {self.name} can't commit {position}: its last poll did not return it")
        values = {"position": position, "hash": self._polled[position], "generation": self._generation}

        add = {"sqlite": sqlite, "postgresql": postgresql}[self._log.dialect].insert(schema.checkpoints)
        statement = add.values(name=self._key, version=0, **values).on_conflict_do_update(
            index_elements=["name"],
            set_={name: add.excluded[name] for name in values},
            where=_K.position < add.excluded.position,  # a second reader of this name may be further
        )
        self._log._db.write(lambda c: c.execute(statement) and None)
        self._position, self._hash = position, self._polled[position]

    def follow(self, stop: Callable[[], bool], wait: Callable[[float], None]) -> Iterator[list[Recorded]]:
        """Yield batches as they come, until `stop()`. A batch is committed when the next one is asked for.

        `wait(seconds)` is called where there is nothing: time is the caller's (`time.sleep`, an event's wait, a manual
        clock), and so is cutting a wait short. Never longer than 0.5 s between two looks.
        """
        pause = FIRST_WAIT
        while not stop():
            found = self.poll()
            if found:
                pause = FIRST_WAIT
                yield found
                self.commit(found[-1].position)
            else:
                wait(pause)
                pause = min(2 * pause, LONGEST_WAIT)

    def _check_same_log(self) -> None:
        """Check that the log still is the one that this subscription has read, up to where it has read it."""
        head = self._log.head()
        seen = f"subscription {self.name} has read up to position {self._position}"
        way_out = "the log was restored from a copy: build what this reader made of it again, under a new name"
        if head.generation != self._generation:
            raise LogRewound(f"{seen} of generation {self._generation}, the log is {head.generation}; {way_out}")
        if head.position < self._position:
            raise LogRewound(f"{seen}, the log ends at {head.position}; {way_out}")
        if self._position:
            query = select(_E.hash).where(_E.position == self._position)
            stored = self._log._db.read(lambda c: c.execute(query).scalar_one_or_none())
            if stored is None or bytes(stored) != self._hash:
                raise LogRewound(f"{seen}, where another event stands now; {way_out}")
