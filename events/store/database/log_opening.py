"""Opening of a log: checks that it exists and that this software knows its schema, or makes one."""

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
    """Check that the log exists and is readable by this software, or make a missing one with `create`.

    `prepare` makes and updates the tables of read models, for a new log in the same transaction. A new SQLite file is
    filled under another name and then renamed, so readers never see a part of it. Raises LogNotFound, NotALog,
    LogTooNew, LogCorrupt, LogUnavailable, and ConfigError for a database that is not in UTF-8.
    """
    path = db.path
    if path is not None:
        if path.is_dir():
            raise NotALog(f"{path} is a directory; a log is a file, as in {path / 'log.db'}")
        if not path.exists() and not create:
            raise LogNotFound(f"no log at {path}; check store.url, or start a run there to make one")
        if path.exists() and path.stat().st_size == 0 and not create:
            raise NotALog(f"{path} is an empty file, not a log: check store.url, or delete the file")
        if create:
            make_private_folder(path.parent)
    patience = min(5.0, db.patience)
    is_new = False
    if path is not None and create and not path.exists():
        is_new = db.make(lambda new: new.write(lambda c: _create(c, new, prepare), patience=patience))
    exists = db.read(lambda c: _holds_log(c, db, create), patience=patience)
    db.prepare()
    if not exists:
        db.write(lambda c: _create(c, db, prepare), patience=patience)
    elif prepare is not None and not is_new:
        db.write(prepare, patience=patience)


def _holds_log(connection: Connection, db: Database, create: bool) -> bool:
    """Return True if the database holds a log, False if one can be made there.

    Raises NotALog for a SQLite file with other content, LogTooNew, LogCorrupt, and LogNotFound without `create`.
    """
    names = inspect(connection).get_table_names()
    if schema.heads.name in names:
        revs = connection.execute(select(schema.heads.c.schema_rev)).scalars().all()
        if len(revs) != 1 or not isinstance(revs[0], int):
            raise LogCorrupt(
                f"{db.shown}: the table es_log_head holds {len(revs)} rows, instead of one with a schema_rev; "
                "restore the last good copy"
            )
        (rev,) = revs
        if rev > schema.SCHEMA_REV:
            raise LogTooNew(
                f"{db.shown} has log schema {rev}, this version of trinity-es knows up to {schema.SCHEMA_REV}; "
                "upgrade trinity-es", schema_rev=rev,
            )
        return True
    content = f"a database without a log (tables: {', '.join(sorted(names)[:5])})" if names else "an empty database"
    if names and db.dialect == "sqlite":
        raise NotALog(f"{db.shown} is {content}: check store.url")
    if not create:
        raise LogNotFound(f"{db.shown} is {content}; start a run there to make a log")
    if db.dialect == "postgresql":
        require_encoding(db.shown, connection.connection.dbapi_connection)
    return False


def _create(connection: Connection, db: Database, prepare: Callable[[Connection], None] | None) -> None:
    """Create the log's tables, unless another process just did, and call `prepare` for those of read models."""
    if db.dialect == "postgresql":  # IF NOT EXISTS alone collides when two processes create at once
        connection.execute(select(func.pg_advisory_xact_lock(0x7472696E)))
    if schema.heads.name not in inspect(connection).get_table_names():
        schema.tables.create_all(connection)
        connection.execute(
            insert(schema.heads).values(
                id=0, last_position=0, last_hash=schema.GENESIS, recorded_at=0.0, generation=uuid.uuid4().hex,
                schema_rev=schema.FIRST_REV,
            )
        )
        schema.create_triggers(connection)
    if prepare is not None:
        prepare(connection)
