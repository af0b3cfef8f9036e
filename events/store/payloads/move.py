"""Move of a log's payloads to another place (a folder or bucket): copy, read back, then record the new place.

The place is recorded last. So a move that was killed can be repeated, and skips payloads that were copied before. If it
was killed while it deleted old copies at the log's default place, a repeated move deletes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

from sqlalchemy import Connection, select

from trinity_es.events.errors import AlreadyRunning, ConfigError, CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.payloads.payload_place import (
    folder_of,
    original_of,
    place_below,
    read_place,
    write_place,
)
from trinity_es.events.store.payloads.payload_store import PayloadStore, digest_of
from trinity_es.events.store.payloads.payloads import open_place

__all__ = ["Moved", "move_payloads"]

MOST_COPIES = 8
"""Number of payloads that are copied in parallel."""


@dataclass
class Moved:
    """Result of a move."""

    place: str
    """New recorded place; "" for the default one, the folder beside the log or the table in its database."""
    payloads: int = 0
    copied: int = 0
    """Number of payloads that were not at the new place before."""
    bytes: int = 0
    """Total size of all payloads."""
    problems: list[str] = field(default_factory=list)
    """Errors about corrupt payloads, which were not moved."""


def move_payloads(
    url: str, wanted: str, *, delete: bool = False, progress: Callable[[int], None] = lambda done: None,
    say: Callable[[str], None] = lambda text: None,
) -> Moved:
    """Move the payloads of the log at `url` to the log's own folder below `wanted`; "" stands for the default place.

    If the log is a copy of another log, the payloads are copied and the original keeps its own. But if `wanted` is the
    place that the copy has recorded, which is the original's, nothing is copied, and the copy owns that place. No
    system may run on the log: if one starts meanwhile, the move fails. With `delete`, delete the old payloads after
    the switch, unless one is corrupt; `say` gets a message about this. Raises AlreadyRunning, ConfigError, LogError.
    """
    if (folder := folder_of(wanted)) is not None and not folder.is_dir():
        raise ConfigError(f"{wanted} is no folder: mount or make it")
    with closing(Database(url)) as database:
        place, original, epoch = database.read(lambda c: (read_place(c), original_of(database, c), _lease_epoch(c)))
        if original and delete:
            raise ConfigError(f"--delete would delete the payloads of {original}, of which this log is a copy: run "
                              "this without --delete")
        if place and place == wanted and original:
            database.write(lambda c: _record_place(database, c, place, epoch))
            return Moved(place)
        new_place = database.read(lambda c: place_below(c, wanted)) if wanted else ""
        if original and place == new_place:
            new_place += f"-{digest_of(database.place.encode())[:8]}"
        if not original and (place in (wanted, new_place) or (wanted and place.rpartition("/")[0] == wanted)):
            if not (delete and place):
                return Moved(place)
            place, new_place = "", place  # a move that was killed may have left copies in the log's own place
        moved = Moved(new_place)
        try:
            source = open_place(url, place, create=False)
        except LogNotFound:  # no payload was stored yet
            source = None
        with closing(open_place(url, new_place, create=True)) as target:
            if source is not None:
                _copy_all(source, target, moved, progress)
            database.write(lambda c: _record_place(database, c, new_place, epoch))
        if source is not None:
            with closing(source):
                if delete and moved.problems:
                    say(f"the old copies in {place or 'the own store of the log'} stay, since not all could be moved")
                elif delete:
                    say(f"the log names the new place: deleting the old copies in {place or 'its own store'}")
                    for digest in source.digests():
                        source.delete(digest)
    return moved


def _copy_all(source: PayloadStore, target: PayloadStore, moved: Moved, progress: Callable[[int], None]) -> None:
    def copy(digest: str) -> tuple[int, bool] | CorruptPayload | PayloadNotFound:
        try:
            return _copy_if_missing(source, target, digest)
        except (CorruptPayload, PayloadNotFound) as e:
            return e

    digests = source.digests()
    with ThreadPoolExecutor(MOST_COPIES, thread_name_prefix="move") as threads:
        while part := list(islice(digests, 4 * MOST_COPIES)):
            for outcome in threads.map(copy, part):
                if isinstance(outcome, Exception):
                    moved.problems.append(outcome.message)
                    continue
                size, was_copied = outcome
                moved.payloads, moved.bytes = moved.payloads + 1, moved.bytes + size
                moved.copied += was_copied
            progress(moved.payloads)


def _copy_if_missing(source: PayloadStore, target: PayloadStore, digest: str) -> tuple[int, bool]:
    """Copy a payload unless the target has it. Return its size, and True if it was copied. Reads check its digest."""
    try:
        return len(target.get(digest)), False
    except (PayloadNotFound, CorruptPayload):
        target.put(source.get(digest))
        return len(target.get(digest)), True


def _lease_epoch(connection: Connection) -> int:
    """Return the epoch of the coordinator's lease, or 0 if it was never taken."""
    lease = select(schema.leases.c.epoch).where(schema.leases.c.name == "coordinator")
    return connection.execute(lease).scalar_one_or_none() or 0


def _record_place(database: Database, connection: Connection, place: str, epoch: int) -> None:
    """Record the new place. Raises AlreadyRunning if the coordinator's lease no longer has this epoch."""
    if _lease_epoch(connection) != epoch:
        raise AlreadyRunning("a system was started on this log while its payloads were copied, so they stay where they "
                             "were: end it with `trinity-es down`, and run this again")
    write_place(database, connection, place)
