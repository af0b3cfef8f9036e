"""Place of a log's payloads: the URL of a folder or bucket, recorded in a row of the log's database.

So a process with the log's URL finds the payloads. A log without this row has its payloads at the default place: in a
folder beside the SQLite file, or in a table of PostgreSQL.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import orjson
from sqlalchemy import Connection, delete, insert, inspect, select, update

from trinity_es.events.errors import ConfigError
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.store_identity import StoreIdentity, identity_of
from trinity_es.events.store.database.urls import file_of

__all__ = [
    "folder_of", "original_of", "place_below", "read_place", "recorded_place", "require_place_url", "write_place",
]

_SCHEMES = ("s3", "gs", "az", "file")


def require_place_url(url: str) -> str:
    """Check the URL of a place for payloads, and return it without a slash at its end. Raises ConfigError."""
    wanted = "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"the payloads' URL can't be read: {wanted}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:  # the URL itself may contain a password
        raise ConfigError("the payloads' URL holds a user, a password or options: give credentials by the environment "
                          f"(AWS_..., GOOGLE_..., AZURE_...), and {wanted}")
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"payloads can't be stored in {url!r}: {wanted}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"{url!r} names no folder: write file:///folder, with its whole path")
    if parts.scheme != "file" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", parts.netloc):
        raise ConfigError(f"{url!r} names no bucket: {wanted}")
    if not url.isprintable() or ".." in parts.path.split("/") or "//" in parts.path:
        raise ConfigError(f"{url!r} has an empty part, .. or an unprintable letter in its path: {wanted}")
    return url.rstrip("/")


def folder_of(place: str) -> Path | None:
    """Return the folder of a `file:` place; None for a bucket."""
    return Path(unquote(urlsplit(place).path)) if place.startswith("file:") else None


def recorded_place(url: str, *, patience: float) -> str:
    """Return the place that the log at `url` records; "" for the default place, or if the log does not exist.

    `patience`: seconds of retries while its database can't be reached. Raises LogError.
    """
    path = file_of(url)
    if path is not None and not path.is_file():
        return ""
    with closing(Database(url, read_only=True, patience=patience)) as database:
        return database.read(read_place)


def read_place(connection: Connection) -> str:
    """Return the place that this log records; "" for the default place."""
    if not inspect(connection).has_table(schema.payload_place.name):
        return ""
    return connection.execute(select(schema.payload_place.c.url)).scalar_one_or_none() or ""


def original_of(database: Database, connection: Connection) -> str:
    """If this log is a copy and its recorded payloads belong to the original, return the original's host and path.

    Otherwise return "". A SQLite file whose recorded original is gone was moved, and is no copy.
    """
    if not read_place(connection):
        return ""
    stored = connection.execute(select(schema.payload_place.c.store)).scalar_one()
    recorded = StoreIdentity.from_dict(orjson.loads(stored))
    path = Path(recorded.place.partition(" ")[2])
    if recorded.is_same(identity_of(database, connection)) or (database.file is not None and not path.is_file()):
        return ""
    return recorded.place


def place_below(connection: Connection, url: str) -> str:
    """Return the log's own place below a URL. Logs that use the same URL must not delete each other's payloads."""
    generation = connection.execute(select(schema.heads.c.generation)).scalar_one()
    return f"{url}/{generation[:12]}"


def write_place(database: Database, connection: Connection, place: str) -> None:
    """Record the place of the log's payloads; "" for the default. The first release can't open logs with others."""
    schema.payload_place.create(connection, checkfirst=True)
    connection.execute(delete(schema.payload_place))
    if place:
        connection.execute(insert(schema.payload_place).values(
            id=0, url=place, store=orjson.dumps(identity_of(database, connection).to_dict())))
    connection.execute(update(schema.heads).values(schema_rev=schema.SCHEMA_REV if place else schema.FIRST_REV))
