"""Errors for users that explain what is wrong with a database and what to do."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.exc import DBAPIError

from trinity_es.events.errors import LogCorrupt, LogError, LogNotFound, LogUnavailable, NotALog
from trinity_es.events.store.database.disk_errors import NO_FILE, full_disk_text, is_out_of_files
from trinity_es.events.store.database.retry import NO_ROOM, POOLED, REFUSED, TLS_TROUBLE, Trouble
from trinity_es.events.store.database.urls import scrubbed

__all__ = ["ErrorMessages"]

_NO_ROOM = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_TRUNCATE")
"""Errors with which SQLite reports a full disk, and equally a quota or a limit of file sizes."""


class ErrorMessages:
    """Error messages of one database. `shown` is its URL without secrets, `path` the file of a SQLite database."""

    def __init__(self, shown: str, path: Path | None, *, read_only: bool, secrets: list[str]) -> None:
        self.shown, self.path, self.read_only, self._secrets = shown, path, read_only, secrets

    def scrubbed(self, text: object) -> str:
        return scrubbed(text, self._secrets)

    def error(self, kind: Trouble, e: DBAPIError, size: int) -> LogError:
        """Return the error to raise for a database error of this kind. `size`: bytes that the call wanted to write."""
        problem = self.scrubbed(e.orig)
        if kind == "missing":
            return LogNotFound(f"no database at {self.shown} ({problem}); create it, or correct store.url")
        if kind == "not_a_log":
            return NotALog(f"{self.shown} holds no log ({problem}); check store.url")
        if kind == "corrupt":
            return LogCorrupt(f"{self.shown} is damaged ({problem}); stop all writers and restore the last good copy")
        if kind == "passing" and NO_ROOM.search(str(e.orig)):
            return LogUnavailable(
                f"{self.shown} takes no more connections ({problem}): raise max_connections of its server, or the "
                "CONNECTION LIMIT of this user or database", passing=True,
            )
        if kind == "passing":
            advice = ("check that its server runs, and that this is its address" if self.read_only else
                      "nothing was acknowledged, the same commit can be tried again")
            return LogUnavailable(f"{self.shown} can't be reached or locked now ({problem}); {advice}", passing=True)
        assurance = "" if self.read_only else "; nothing was acknowledged"
        return LogUnavailable(f"{self.shown} can't be used ({problem}){assurance}{self._remedy(e, size)}")

    def _remedy(self, e: DBAPIError, size: int) -> str:
        """Return advice for the user as the end of a message; empty if there is none."""
        name = getattr(e.orig, "sqlite_errorname", "") or getattr(e.orig, "sqlstate", "") or ""
        if TLS_TROUBLE.search(str(e.orig)):
            return (": sslrootcert in store.url (or PGSSLROOTCERT) has to name the CA that signed the server's "
                    "certificate, which has to be one for the host in store.url")
        if POOLED.search(str(e.orig)):
            return ": give the database's own address in store.url, or set pool_mode=session in the pooler"
        if REFUSED.search(str(e.orig)) or name.startswith("28"):  # invalid authorization
            return (": its server refused this user; correct user and password in store.url (or PGUSER, PGPASSWORD), "
                    "or let them in by its pg_hba.conf")
        if name == "42501":  # insufficient privilege
            return ": the user of store.url lacks this right; let the database's owner GRANT it"
        if name == "3F000":  # invalid schema name
            return (": no schema of its search_path exists; create one, or name one that exists where the path is set "
                    "(PGOPTIONS, options in store.url, ALTER ROLE or DATABASE)")
        if name == "53100":  # disk full
            return ": free space on its server's disk, and the run continues by itself"
        if self.path and is_out_of_files():
            return f": {NO_FILE}"
        if self.path and (name == "SQLITE_FULL" or name.startswith(_NO_ROOM)):
            return f": {full_disk_text(self.path.parent, size)}"
        if self.path and name.startswith("SQLITE_IOERR"):
            return f": the disk of {self.path.parent} fails; the machine's log (dmesg) says more"
        if name.startswith("SQLITE_READONLY") or name == "25006":  # read-only transaction
            return ": it is read-only, its rights or its disk's; make it writable, and the run continues by itself"
        if self.path and name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM")):
            return f": check that {self.path.parent} exists, that this user may write there, and that its disk has room"
        return ""
