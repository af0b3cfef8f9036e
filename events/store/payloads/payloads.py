"""The payload store: data too big for an event, stored under the SHA-256 of its bytes.

An event is appended only after `put` has returned, so the store has the bytes of every digest in the log. Beside a
SQLite log the store is a directory, `<db path>.payloads/ab/abcdef...`. In PostgreSQL it is a table, so that every
machine reaches it. A log may record another place (`payload_place.py`), a folder or a bucket. All kinds are safe for
threads and processes; tests/full/events/test_payloads.py runs on each.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, delete, func, inspect, select

from trinity_es.events.atomic_file import sync, whole_file
from trinity_es.events.errors import ConfigError, CorruptPayload, LogNotFound, LogUnavailable
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database, Durability, Tell
from trinity_es.events.store.database.disk_errors import write_error_text
from trinity_es.events.store.database.retry import is_transient, without_repeats
from trinity_es.events.store.database.urls import file_of, masked
from trinity_es.events.store.payloads.object_store import Objects
from trinity_es.events.store.payloads.payload_place import (
    folder_of,
    original_of,
    place_below,
    read_place,
    recorded_place,
    write_place,
)
from trinity_es.events.store.payloads.payload_store import (
    DIGEST,
    Buffer,
    PayloadStore,
    digest_of,
    not_found,
    require_digest,
)

__all__ = [
    "Buffer", "PayloadStore", "digest_of", "open_lazily", "open_payloads", "open_place", "patient", "settle_place",
]

T = TypeVar("T")

LEAST_MAPPED = 2**18
"""Minimum size in bytes of a file that is mapped into memory. Smaller files are faster to read."""


def open_payloads(
    url: str, *, place: str | None = None, create: bool = True, durability: Durability = "power",
    patience: float = 20.0,
) -> PayloadStore:
    """Open the payload store of the log at `url`. Without `create`, raises LogNotFound if it does not exist.

    `place`: the place that the log records; None: read it from the log. `patience`: seconds for which each call retries
    if the store can't be reached. Raises ConfigError and LogUnavailable for a place that can't be used.
    """
    if place is None:
        place = recorded_place(url, patience=patience)
    create = create and not place  # a missing folder may be a share that is not mounted
    return open_place(url, place, create=create, durability=durability, patience=patience)


def open_place(
    url: str, place: str, *, create: bool, durability: Durability = "power", patience: float = 20.0
) -> PayloadStore:
    """Open the payload store at `place` for the log at `url`, even if the log records another place.

    Otherwise like `open_payloads`.
    """
    if (folder := folder_of(place)) is not None:
        if not create and not folder.is_dir():
            raise LogUnavailable(f"the payload store {folder} is missing: mount or restore it", passing=True)
        return _Files(folder, create, durability)
    if place:
        objects = Objects(place, patience)
        objects.require_bucket()
        return objects
    if (file := file_of(url)) is not None:
        return _Files(Path(f"{os.path.realpath(file)}.payloads"), create, durability)
    rows = _Rows(Database(url, durability=durability, read_only=not create, patience=patience), patience)
    rows.require_table(create)
    return rows


def settle_place(url: str, wanted: str, *, durability: Durability = "power") -> str:
    """Record `wanted`, the config's `store.payloads`, as the place of a log without payloads, or check the old place.

    Return the place. A process that gets it need not open the database of a SQLite log, which costs some 4 MB. A store
    that can't be reached at the moment is no error here, since its users wait for it. Raises ConfigError if the
    payloads are at another place or belong to another log, or if the place can't be used. Raises LogUnavailable.
    """
    with closing(Database(url, durability=durability)) as database:
        place, original = database.read(lambda c: (read_place(c), original_of(database, c)))
        if original:
            move = f"trinity-es payloads move --log {masked(url)}"
            raise ConfigError(
                f"{masked(url)} is a copy of {original}, to which the payloads in {place} belong: give the copy "
                f"payloads of its own with `{move} {wanted or place.rpartition('/')[0]}`. If no run goes on with the "
                f"original, keep them with `{move} {place}`"
            )
        if wanted and place.rpartition("/")[0] != wanted:
            if (folder := folder_of(wanted)) is not None and not folder.is_dir():
                raise ConfigError(f"store.payloads is {wanted}, which is no folder: mount or make it")
            _require_no_payloads(url, place, wanted)
            new_place = database.read(lambda c: place_below(c, wanted))
            open_place(url, new_place, create=True, durability=durability).close()
            database.write(lambda c: write_place(database, c, new_place))
            return new_place
        if place:
            try:
                open_place(url, place, create=False, patience=0.0).close()
            except LogUnavailable as e:
                if not is_transient(e):
                    raise
        return place


def _require_no_payloads(url: str, place: str, wanted: str) -> None:
    """Raise ConfigError if the log has its payloads elsewhere than at `wanted`, the place in the config: at a recorded
    place, or at `place`, its default."""
    if not place:
        try:
            with closing(open_place(url, place, create=False)) as store:
                if next(store.digests(), None) is None:
                    return
        except LogNotFound:
            return
    raise ConfigError(
        f"store.payloads is {wanted}, and the payloads of {masked(url)} are {f'in {place}' if place else 'with it'}: "
        f"move them with `trinity-es payloads move --log {masked(url)} {wanted}`, or remove store.payloads"
    )


def patient(store: PayloadStore, seconds: float) -> PayloadStore:
    """Return this store with a longer patience, for a thread that can wait: calls retry passing errors for `seconds`.

    The wait is worth it, because a lost payload has to be generated again. A store in files is returned unchanged,
    because its errors don't pass by themselves.
    """
    log = logging.getLogger("trinity_es.payloads")  # not at import: Thespian silences existing loggers

    def tell(error: Exception) -> None:
        log.warning("the payload store waits: %s", error)

    if isinstance(store, Objects):
        return store.patient(seconds, tell)
    return _Rows(store.database, seconds, tell) if isinstance(store, _Rows) else store


def open_lazily(opens: Callable[[], PayloadStore]) -> PayloadStore:
    """Return a store that calls `opens` on first use. That use raises any error of `opens`."""
    return cast(PayloadStore, _StoreOnDemand(opens))


class _StoreOnDemand:
    """Payload store that is opened on first use. A status request needs no store, so it does not wait for one."""

    def __init__(self, opens: Callable[[], PayloadStore]) -> None:
        self._opens, self._lock = opens, threading.Lock()
        self._store: PayloadStore | None = None

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._store is None:
                self._store = self._opens()
        return getattr(self._store, name)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()


class _Files(PayloadStore):
    """Store with one file per payload. A file is written under another name, synced and renamed, so it is complete."""

    def __init__(self, root: Path, create: bool, durability: Durability) -> None:
        self._root, self._survives_power_loss = root, durability == "power"
        self._durable: set[str] = set()
        """Folders whose names were synced to the disk."""
        if create:
            try:
                make_private_folder(root)
            except OSError as e:
                raise LogUnavailable(f"the payload store {root} can't be made: {e.strerror}") from e
            if self._survives_power_loss:
                sync(root.parent)
        elif not root.is_dir():
            raise LogNotFound(f"no payload store at {root}; check store.url")

    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        path = self._path(digest)
        if self._holds(path, data):
            return digest
        try:
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)  # without parents, so that a deleted store stays deleted
                self._durable.discard(path.parent.name)
            self._sync_name(path.parent)
            with whole_file(path, durable=self._survives_power_loss, prefix=".put-") as file:
                file.write(data)
        except OSError as e:
            raise LogUnavailable(
                f"a payload of {len(data)} bytes can't be stored in {self._root} ({e.strerror}): "
                f"{write_error_text(self._root, len(data), e)}"
            ) from e
        return digest

    def _sync_name(self, folder: Path) -> None:
        """Sync the name of `folder` in the root, once. The process that made it may have died before its sync."""
        if self._survives_power_loss and folder.name not in self._durable:
            sync(self._root)
            self._durable.add(folder.name)

    def _holds(self, path: Path, data: bytes) -> bool:
        """Return True if the file holds these bytes, after syncing it if this store is durable."""
        try:
            if path.stat().st_size != len(data) or path.read_bytes() != data:
                return False
            if self._survives_power_loss:  # its writer may not have synced the file
                sync(path)
                sync(path.parent)
                self._sync_name(path.parent)
        except OSError:  # missing or unreadable: it is written again
            return False
        return True

    def get(self, digest: str) -> bytes:
        try:
            data = self._path(digest).read_bytes()
        except FileNotFoundError:
            raise not_found(digest, self._root) from None
        except OSError as e:
            raise CorruptPayload(f"payload {digest} in {self._root} can't be read: {e.strerror}", digest=digest) from e
        return require_digest(digest, data, self._root)

    def view(self, digest: str) -> Buffer:
        try:
            with self._path(digest).open("rb") as file:
                if os.fstat(file.fileno()).st_size < LEAST_MAPPED:
                    return self.get(digest)
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError:  # missing, or it can't be mapped
            return self.get(digest)
        return require_digest(digest, data, self._root)

    def size(self, digest: str) -> int | None:
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as e:
            raise LogUnavailable(f"the payload store {self._root} can't be read: {e.strerror}") from e

    def delete(self, digest: str) -> None:
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as e:
            raise LogUnavailable(f"payload {digest} in {self._root} can't be deleted: {e.strerror}") from e

    def digests(self) -> Iterator[str]:
        for folder in sorted(self._root.iterdir()):
            if folder.is_dir():
                # Temporary files of puts that died begin with a dot.
                yield from sorted(f.name for f in folder.iterdir() if self._is_payload(f))

    def strays(self) -> list[str]:
        return [
            str(path.relative_to(self._root)) for folder in sorted(self._root.iterdir())
            for path in (sorted(folder.iterdir()) if folder.is_dir() else [folder]) if not self._is_payload(path)
        ]

    @staticmethod
    def _is_payload(path: Path) -> bool:
        return DIGEST.fullmatch(path.name) is not None and path.parent.name == path.name[:2]

    def _path(self, digest: str) -> Path:
        # It becomes a path, so it must be a digest and nothing else.
        if not DIGEST.fullmatch(digest):
            raise not_found(digest, self._root)
        return self._root / digest[:2] / digest


class _Rows(PayloadStore):
    """Store with one row per payload, in the database of the log."""

    def __init__(self, database: Database, patience: float, tell: Tell | None = None) -> None:
        self.database, self._patience, self._tell = database, patience, tell

    def require_table(self, create: bool) -> None:
        """Check that the table exists, or create it with `create`. Raises LogNotFound."""
        try:
            if self._read(lambda c: inspect(c).has_table(schema.payloads.name)):
                return
            if not create:
                raise LogNotFound(f"no payload store at {self.database.shown}; check store.url")
            self._write(lambda c: schema.create_table(c, schema.payloads))
        except BaseException:
            self.database.close()
            raise

    def _new_reporter(self) -> Callable[[Exception], None] | None:
        """Return a function for one call that passes its errors to `tell`, repeated ones once; None without `tell`."""
        return None if self._tell is None else without_repeats(self._tell)

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self.database.read(work, patience=self._patience, tell=self._new_reporter())

    def _write(self, work: Callable[[Connection], object]) -> None:
        self.database.write(lambda c: work(c) and None, patience=self._patience, tell=self._new_reporter())

    def put(self, data: bytes) -> str:
        from sqlalchemy.dialects.postgresql import insert  # local: users of a SQLite log need not import it

        digest, t = digest_of(data), schema.payloads.c
        # Only the server reads the stored bytes.
        has_same_bytes = select(func.sha256(t.data) == bytes.fromhex(digest)).where(t.digest == digest)
        if not self._read(lambda c: c.execute(has_same_bytes).scalar_one_or_none()):
            insertion = insert(schema.payloads).values(digest=digest, data=data)
            columns = {"data": insertion.excluded.data}
            self._write(lambda c: c.execute(insertion.on_conflict_do_update(index_elements=["digest"], set_=columns)))
        return digest

    def get(self, digest: str) -> bytes:
        t = schema.payloads.c
        data = self._read(lambda c: c.execute(select(t.data).where(t.digest == digest)).scalar_one_or_none())
        if data is None:
            raise not_found(digest, self.database.shown)
        return require_digest(digest, bytes(data), self.database.shown)

    def size(self, digest: str) -> int | None:
        query = select(func.octet_length(schema.payloads.c.data)).where(schema.payloads.c.digest == digest)
        return self._read(lambda c: c.execute(query).scalar_one_or_none())

    def delete(self, digest: str) -> None:
        self._write(lambda c: c.execute(delete(schema.payloads).where(schema.payloads.c.digest == digest)))

    def digests(self) -> Iterator[str]:
        digest_column = schema.payloads.c.digest.collate("C")  # the same order as the files
        last_digest = ""
        while True:
            query = select(digest_column).where(digest_column > last_digest).order_by(digest_column).limit(1000)
            page = self._read(lambda c, q=query: list(c.execute(q).scalars()))  # type: ignore[misc]  # mypy can't infer a lambda with defaults
            yield from page
            if len(page) < 1000:
                return
            last_digest = page[-1]

    def close(self) -> None:
        self.database.close()
