"""Leases, which decide which process may write.

A writer holds a lease until another writer takes it. Each append checks in its transaction that the writer has the
lease's newest epoch, so no clock matters. A lease also records its store, because it does not count in a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import Connection, insert, select, update

from trinity_es.events.errors import Fenced
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.statements import lock_head
from trinity_es.events.store.database.store_identity import StoreIdentity, identity_of
from trinity_es.events.store.records.log_values import Lease

__all__ = ["acquire", "check", "read", "release"]

_L = schema.leases.c
_STORE = "store"
"""Key of the store's identity in the JSON of the owner."""


def acquire(db: Database, name: str, owner: Mapping[str, Any]) -> Lease:
    def work(connection: Connection) -> Lease:
        lock_head(connection, db)
        store = identity_of(db, connection)
        owner_json = orjson.dumps({**owner, _STORE: store.to_dict()}, option=orjson.OPT_SORT_KEYS)
        row = connection.execute(select(schema.leases).where(_L.name == name)).one_or_none()
        copied_from = ""
        if row is None:
            epoch = 1
            connection.execute(insert(schema.leases).values(name=name, epoch=epoch, owner=owner_json))
        else:
            epoch, copied_from = row.epoch + 1, _copied_from(orjson.loads(row.owner), store)
            connection.execute(update(schema.leases).where(_L.name == name).values(epoch=epoch, owner=owner_json))
        return Lease(name=name, epoch=epoch, owner=dict(owner), copied_from=copied_from)

    return db.write(work)


def read(db: Database, name: str) -> Lease | None:
    def work(connection: Connection) -> Lease | None:
        row = connection.execute(select(schema.leases).where(_L.name == name)).one_or_none()
        if row is None:
            return None
        owner = orjson.loads(row.owner)
        copied_from = _copied_from(owner, identity_of(db, connection)) if owner else ""
        owner.pop(_STORE, None)
        return Lease(name=row.name, epoch=row.epoch, owner={} if copied_from else owner, copied_from=copied_from)

    return db.read(work)


def _copied_from(owner: Mapping[str, Any], current: StoreIdentity) -> str:
    """Return the place of the original if the current store is a copy of the owner's; else ""."""
    if _STORE not in owner:  # released, or written by an older release
        return ""
    leased_store = StoreIdentity.from_dict(owner[_STORE])
    return "" if leased_store.is_same(current) else leased_store.place


def release(db: Database, lease: Lease) -> None:
    statement = update(schema.leases).where(_L.name == lease.name, _L.epoch == lease.epoch).values(owner=b"{}")
    db.write(lambda connection: connection.execute(statement) and None)


def check(lease: Lease, epoch: int | None) -> None:
    """Raise Fenced if `epoch`, as the log has it, is not the lease's: another writer took the lease."""
    if epoch != lease.epoch:
        raise Fenced(
            f"lease {lease.name!r} is at epoch {epoch}, this writer holds {lease.epoch}: another writer took over; "
            "this writer must stop", lease=lease.name, epoch=lease.epoch, current=epoch,
        )
