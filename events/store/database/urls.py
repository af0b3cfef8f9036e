"""URLs of stores: parsing, display without secrets, and the store's address without user and options."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from trinity_es.events.errors import ConfigError

__all__ = ["file_of", "file_url", "masked", "parse_url", "place_of", "scrubbed", "secrets_in"]

_SECRET_KEYS = re.compile(r"(?i)(password|passwd|sslpassword|secret|token)=[^&\s'\"]+")

_PLAIN_KEYS = frozenset({"host", "hostaddr", "port", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl"})
"""Keys of a URL's query whose values are no secrets. Errors may have to show these, file names for example."""


def parse_url(url: str) -> URL:
    """Parse a path, `sqlite:///path`, `postgresql://...` or a full SQLAlchemy URL into a URL.

    In `sqlite:///path` the letters %, ? and # are escaped, as by `file_url`; in a plain path they are not. Raises
    ConfigError for another database, for SQLite in memory or with options, and for other text.
    """
    if "://" not in url:
        if not url or url == ":memory:":
            raise ConfigError("a log needs a file or a PostgreSQL database: give a path, sqlite:///path or postgresql://")
        return URL.create("sqlite", database=os.path.expanduser(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as e:
        # The text itself may contain a password.
        raise ConfigError("the store's url can't be read; write sqlite:///path or postgresql://user@host/db") from e
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError("a log in memory would not survive its process: give a path, as in sqlite:///run/log.db")
        if "?" in url:
            raise ConfigError(f"the store's url {url} has options after its ?, which a file can't have: if ? belongs "
                              "to the file's name, write %3F or give the path alone")
        return URL.create("sqlite", database=os.path.expanduser(parsed.database))
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(f"a log lives in SQLite or PostgreSQL, not in {backend}: {masked(parsed)}")


def file_url(path: str | Path) -> str:
    """Return the URL of a SQLite log, with %, ? and # escaped."""
    return "sqlite:///" + re.sub("[%?#]", lambda match: f"%{ord(match[0]):02X}", str(path))


def file_of(url: str) -> Path | None:
    """Return the file of a SQLite log; None for PostgreSQL or an unreadable URL."""
    try:
        parsed = parse_url(url)
    except ConfigError:
        return None
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def place_of(url: URL | str) -> str:
    """Return a store's address: the file's path without links, or host, port and name of the database."""
    url = parse_url(url) if isinstance(url, str) else url
    if url.get_backend_name() == "sqlite":
        return os.path.realpath(url.database or "")
    return f"postgresql {url.host or ''}:{url.port or ''} {url.query.get('host', '')} {url.database}"


def masked(url: URL | str) -> str:
    """Return a URL for display, with the passwords in it and in its query masked."""
    if isinstance(url, str):
        try:
            url = parse_url(url)
        except ConfigError:
            return "(unreadable url)"
    if url.get_backend_name() == "sqlite":
        return file_url(url.database or "")
    return _SECRET_KEYS.sub(r"\1=***", url.render_as_string(hide_password=True).replace(" ", "%20"))


def secrets_in(url: URL) -> list[str]:
    """Return the password and the query values of a URL that may be secrets, for `scrubbed`."""
    in_query = [str(value) for key, value in url.query.items() if key not in _PLAIN_KEYS]
    return [secret for secret in (str(url.password or ""), *in_query) if len(secret) > 3]


def scrubbed(text: object, secrets: list[str]) -> str:
    """Return a driver's message on one line, with these secrets masked."""
    message = " ".join(str(text).split())
    for secret in secrets:
        message = message.replace(secret, "***")
    return _SECRET_KEYS.sub(r"\1=***", message)
