"""Open a log: look whether one is there, of a schema that this software knows, or make one."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from sqlalchemy import Connection, func, insert, inspect, select

from trinity_es.events.errors import LogCorrupt, LogNotFound, LogTooNew, NotALog
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.postgres import require_encoding

__all__ = ["open_schema"]


def open_schema(db: Database, create: bool, prepare: Callable[[Connection], None] | None) -> None:
    """Make sure that the log is there, and make it with `create`.

    `prepare` makes and brings up to date what else belongs into its database: of a new log in the same transaction, so
    that nobody ever reads a log without its tables. A SQLite log gets its name when it is whole: who reads finds all of
    it, or none. Raises LogNotFound, NotALog, LogTooNew, LogCorrupt, LogUnavailable, and ConfigError for a database that
    is not in UTF-8.
    """
    path = db.path
    if path is not None:
        if path.is_dir():
            raise NotALog(f"{path} is a directory; a log is a file, as in {path / 'log.db'}")
        if not path.exists() and not create:
            raise LogNotFound(f"no log at {path}; check store.url, or start a run there to make one")
        if path.exists() and path.stat().st_size == 0 and not create:
            raise NotALog(f"{path} is an empty file, not a log")
        if create:
            make_private_folder(path.parent)
    soon = min(5.0, db.patience)
    made = False
    if path is not None and create and not path.exists():
        made = db.make(lambda new: new.write(lambda c: _create(c, new, prepare), patience=soon))
    there = db.read(lambda c: _is_there(c, db, create), patience=soon)
    db.prepare()
    if not there:
        db.write(lambda c: _create(c, db, prepare), patience=soon)
    elif prepare is not None and not made:
        db.write(prepare, patience=soon)


def _is_there(connection: Connection, db: Database, create: bool) -> bool:
    """Return True if the log is there; raises for what is something else, or newer than this software."""
    names = inspect(connection).get_table_names()
    if schema.heads.name in names:
        revs = connection.execute(select(schema.heads.c.schema_rev)).scalars().all()
        if len(revs) != 1 or not isinstance(revs[0], int):
            raise LogCorrupt(
                f"{db.shown}: the table es_log_head holds {len(revs)} rows, where one with a schema_rev belongs; "
                "restore the last good copy"
            )
        (rev,) = revs
        if rev > schema.SCHEMA_REV:
            raise LogTooNew(
                f"{db.shown} has log schema {rev}, this version of trinity-es knows up to {schema.SCHEMA_REV}; "
                "upgrade trinity-es", schema_rev=rev,
            )
        return True
    what = f"a database without a log in it (tables: {', '.join(sorted(names)[:5])})" if names else "an empty database"
    if names and db.dialect == "sqlite":
        raise NotALog(f"{db.shown} is {what}")
    if not create:
        raise LogNotFound(f"{db.shown} is {what}; start a run there to make a log")
    if db.dialect == "postgresql":
        require_encoding(db.shown, connection.connection.dbapi_connection)
    return False


def _create(connection: Connection, db: Database, prepare: Callable[[Connection], None] | None) -> None:
    if db.dialect == "postgresql":  # two processes that create at once: IF NOT EXISTS alone collides
        connection.execute(select(func.pg_advisory_xact_lock(0x7472696E)))
    if schema.heads.name not in inspect(connection).get_table_names():
        schema.tables.create_all(connection)
        connection.execute(
            insert(schema.heads).values(
                id=0, last_position=0, last_hash=schema.GENESIS, recorded_at=0.0, generation=uuid.uuid4().hex,
                schema_rev=schema.SCHEMA_REV,
            )
        )
        schema.create_triggers(connection)
    if prepare is not None:
        prepare(connection)
