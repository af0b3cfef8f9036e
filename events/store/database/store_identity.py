"""Identity of a store (a log's file or database), which tells the store from its copies.

A log names the processes that work on it, and so does a copy of it. They count only in the original store: the same
file or database, even if it was moved, or a backup restored at the same path or address.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import Connection, text

from trinity_es.events.store.database.database import Database

__all__ = ["StoreIdentity", "identity_of"]


_DATABASE = text(
    "SELECT oid::bigint, current_setting('port')::int,"
    " CASE WHEN pg_has_role('pg_read_all_settings', 'usage') THEN current_setting('data_directory') END"
    " FROM pg_database WHERE datname = current_database()"
)


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identity of a store, as one process sees it."""

    place: str
    """Host, and path of the file or address of the database."""
    key: tuple[Any, ...]
    """SQLite: device and inode of the file. PostgreSQL: system identifier, oid of the database, port and data folder of
    the server; None for a part that this user may not read."""

    def is_same(self, other: StoreIdentity) -> bool:
        """Return True if both are the same file or database, or have the same place."""
        return self.place == other.place or all(
            a == b for a, b in zip(self.key, other.key, strict=False) if None not in (a, b)
        )

    def to_dict(self) -> dict[str, Any]:
        return {"place": self.place, "key": list(self.key)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(place=data["place"], key=tuple(data["key"]))


def identity_of(db: Database, connection: Connection) -> StoreIdentity:
    place = f"{socket.gethostname()} {db.place}"
    if db.file is not None:
        return StoreIdentity(place, db.file)
    system_id = None
    if connection.execute(text("SELECT has_function_privilege('pg_control_system()', 'EXECUTE')")).scalar():
        system_id = connection.execute(text("SELECT system_identifier::text FROM pg_control_system()")).scalar()
    return StoreIdentity(place, (system_id, *connection.execute(_DATABASE).one()))
