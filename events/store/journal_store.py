"""Store of journals (`events/journal.py`) beside the log, one journal for each incarnation of a runner.

A journal holds the model answers and step results of unfinished attempts. Training data comes from the log, so a
missing journal is no damage. Beside a SQLite log a journal is a folder of files. In PostgreSQL it is rows of a table,
so that every host reaches it. A journal has segments, each deleted when the units in it are settled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from sqlalchemy import Connection, delete, insert, select, text

from trinity_es.events.errors import LogUnavailable
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database, Durability
from trinity_es.events.store.database.disk_errors import write_error_text
from trinity_es.events.store.database.urls import file_of

__all__ = ["Journals", "Life", "open_journals"]

Life = tuple[str, int]
"""A runner's name and incarnation, which identify one life of its process."""


class Journals(Protocol):
    """Store of journals. Each method raises LogUnavailable if the store can't be reached or written."""

    quick: bool
    """True if `append` without `durable` only copies the bytes to the kernel, so that an event loop may call it. A
    thread then appends b"" with `durable`."""

    def append(self, life: Life, segment: int, data: bytes, *, durable: bool) -> None:
        """Append bytes to a segment. They survive a crash of this process.

        With `durable`, these and all earlier bytes survive a crash of the machine too.
        """

    def read(self, life: Life) -> list[bytes]:
        """Return the segments of a runner's journal in order; [] without a journal. A segment may have a torn end."""

    def drop(self, life: Life, segment: int | None = None) -> None:
        """Delete a segment of a runner's journal, or the whole journal, if it exists."""

    def lives(self) -> list[Life]:
        """Return the runners and incarnations that have a journal."""

    def close(self) -> None: ...


def open_journals(url: str, *, durability: Durability = "power", patience: float = 2.0) -> Journals:
    """Open the journals beside the log at `url`. In PostgreSQL, create their table if it is missing."""
    if (file := file_of(url)) is not None:
        return _Files(Path(f"{os.path.realpath(file)}.journals"), durability == "power")
    database = Database(url, durability=durability, patience=patience)
    try:
        database.write(lambda c: schema.create_table(c, schema.journals))
    except BaseException:
        database.close()
        raise
    return _Rows(database)


class _Files:
    quick = True

    def __init__(self, root: Path, power: bool) -> None:
        self._root, self._survives_power_loss = root, power
        self._open: dict[tuple[Life, int], int] = {}
        """File descriptors of the newest segment, and of earlier segments until they are synced."""

    def append(self, life: Life, segment: int, data: bytes, *, durable: bool) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._segment_handle(life, segment), view) :]
            if durable:
                self._sync()
        except OSError as e:
            raise LogUnavailable(
                f"{len(data)} bytes of a journal can't be written in {self._root} ({e.strerror}): "
                f"{write_error_text(self._root, len(data), e)}"
            ) from e

    def _segment_handle(self, life: Life, segment: int) -> int:
        handle = self._open.get((life, segment))
        if handle is None:
            folder = self._folder(life)
            make_private_folder(folder)
            handle = os.open(folder / f"{segment:08}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._open[life, segment] = handle
        return handle

    def _sync(self) -> None:
        """Sync all open segments to the disk, and close all but the newest."""
        newest = max(self._open, default=None)
        for key, handle in list(self._open.items()):
            if self._survives_power_loss:
                os.fdatasync(handle)
            if newest is not None and key < newest:
                os.close(self._open.pop(key))

    def read(self, life: Life) -> list[bytes]:
        try:
            return [path.read_bytes() for path in sorted(self._folder(life).iterdir())]
        except FileNotFoundError:
            return []
        except OSError as e:
            raise LogUnavailable(f"the journals in {self._root} can't be read: {e.strerror}") from e

    def drop(self, life: Life, segment: int | None = None) -> None:
        if segment is None:
            shutil.rmtree(self._folder(life), ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                (self._folder(life) / f"{segment:08}").unlink()

    def lives(self) -> list[Life]:
        names = [path.name.rpartition(".") for path in sorted(self._root.glob("*"))]
        return [(unquote(name), int(life)) for name, _, life in names if life.isdigit()]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _folder(self, life: Life) -> Path:
        return self._root / f"{quote(life[0], safe='')}.{life[1]}"


class _Rows:
    """One row per append, in the database of the log."""

    quick = False

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, life: Life, segment: int, data: bytes, *, durable: bool) -> None:
        runner, incarnation = life
        row = insert(schema.journals).values(runner=runner, incarnation=incarnation, segment=segment, data=data)

        def work(connection: Connection) -> None:
            if not durable:  # the server answers before the row is on its disk
                connection.execute(text("SET LOCAL synchronous_commit = off"))
            connection.execute(row)

        self._database.write(work)

    def read(self, life: Life) -> list[bytes]:
        t = schema.journals.c
        query = select(t.data).where(t.runner == life[0], t.incarnation == life[1]).order_by(t.number)
        return self._database.read(lambda c: [bytes(data) for data in c.execute(query).scalars()])

    def drop(self, life: Life, segment: int | None = None) -> None:
        t = schema.journals.c
        rows = delete(schema.journals).where(t.runner == life[0], t.incarnation == life[1])
        rows = rows if segment is None else rows.where(t.segment == segment)
        self._database.write(lambda c: c.execute(rows) and None)

    def lives(self) -> list[Life]:
        t = schema.journals.c
        query = select(t.runner, t.incarnation).distinct().order_by(t.runner, t.incarnation)
        return self._database.read(lambda c: [(runner, life) for runner, life in c.execute(query)])

    def close(self) -> None:
        self._database.close()
