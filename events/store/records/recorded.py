"""What goes into the log and what comes out of it: the values of its interface, and their rows.

Import them from `events.store.log`; this module is there so that neither is long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection

from trinity_es.events import codec
from trinity_es.events.errors import InvalidEvent, LogCorrupt, LogError
from trinity_es.events.store.database import schema
from trinity_es.events.store.records import clock
from trinity_es.events.vocabulary import Event

__all__ = ["Committed", "Draft", "Head", "Lease", "Projector", "Recorded", "Straightener", "Write", "checked_write",
           "draft", "from_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Events for one stream, decided when the stream was at `expected_version` (0: it did not exist)."""

    stream: str
    expected_version: int
    events: Sequence[Event]
    checked: Sequence[tuple[bytes, Event]] | None = field(default=None, repr=False, compare=False)
    """What `codec.check` gave of each event, where it was asked already."""


def checked_write(stream: str, expected_version: int, events: Sequence[Event]) -> Write:
    """Return a write that an append will take, as far as it can be told without the log. Raises InvalidEvent."""
    _check_name("stream", stream)
    return Write(
        stream=stream, expected_version=expected_version, events=list(events), checked=[codec.check(e) for e in events]
    )


@dataclass(slots=True, kw_only=True)
class Recorded:
    """An event as it stands in the log."""

    position: int
    """Place in the whole log, from 1."""
    stream: str
    version: int
    """Place in its stream, from 1."""
    type: str
    schema_version: int
    data: bytes
    metadata: dict[str, Any]
    """Of its append; `lease` and `epoch` of its writer among it. Events of one append may share it: it is not to be
    changed."""
    recorded_at: float
    """Unix seconds, UTC; smaller than the event's before it only where the clock was set back (`ClockStepped`)."""
    commit_id: str
    hash: bytes
    """SHA-256 over this event and the hash of the one before it."""
    _event: Event | None = field(default=None, repr=False, compare=False)

    @property
    def event(self) -> Event:
        """The event itself. Raises LogTooNew or InvalidEvent where this software can't read it, with the position."""
        if self._event is None:
            try:
                self._event = codec.decode(self.type, self.schema_version, self.data)
            except LogError as e:
                where = f"position {self.position} ({self.stream} {self.version})"
                raise type(e)(f"{where}: {e.message}", **e.details) from e
        return self._event


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The end of the log. `generation` changes when a log is restored from a copy."""

    position: int
    generation: str
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to append under this name, while `epoch` is the newest."""

    name: str
    epoch: int
    owner: dict[str, Any]
    copied_from: str = ""
    """Host and place of the store that its holder took it for, or of one just taken its last holder, if this store is a
    copy of that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What an append wrote: positions first..last. `duplicate`: its commit id had been written before."""

    first_position: int
    last_position: int
    recorded: list[Recorded]
    duplicate: bool


class Projector(Protocol):
    """A read model that moves in the transaction of the append. What it raises undoes the append."""

    name: str
    version: int
    """Raised when the tables or their meaning change: they are then built again from the log."""

    def create(self, connection: Connection) -> None:
        """CREATE TABLE IF NOT EXISTS."""

    def apply(self, connection: Connection, recorded: Sequence[Recorded]) -> None:
        """Take these events in. They come in order of position, each once."""

    def reset(self, connection: Connection) -> None:
        """Empty the tables (or drop and create them)."""


@dataclass(slots=True)
class Draft:
    """Events of one commit: all of an append that can be done before the lock is taken and they have their place."""

    recorded: list[Recorded]
    """Without position, time and hash."""
    bodies: list[bytes]
    """What `schema.body_hash` gives of each."""
    metadata: bytes

    def place(self, position: int, previous: bytes, times: Iterable[float]) -> tuple[int, bytes]:
        """Give each event its place behind this position and this hash; returns the last one's."""
        for item, body, at in zip(self.recorded, self.bodies, times, strict=False):
            position += 1
            previous = schema.chain_hash(previous, position, at, body)
            item.position, item.recorded_at, item.hash = position, at, previous
        return position, previous

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"position": r.position, "stream": r.stream, "version": r.version, "type": r.type,
             "schema_version": r.schema_version, "data": r.data, "metadata": self.metadata,
             "recorded_at": r.recorded_at, "commit_id": r.commit_id, "commit_index": index, "hash": r.hash}
            for index, r in enumerate(self.recorded)
        ]


def draft(
    writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None
) -> Draft:
    """Return the events of these writes, checked. Raises InvalidEvent."""
    _check_name("commit id", commit_id)
    about: dict[str, Any] = {"mono": round(clock.monotonic(), 3), "boot": clock.boot(), **(metadata or {})}
    if lease is not None:
        about |= {"lease": lease.name, "epoch": lease.epoch}
    try:
        meta = orjson.dumps(about, option=orjson.OPT_SORT_KEYS)
    except TypeError as e:
        raise InvalidEvent(f"the metadata of commit {commit_id} can't be recorded: {e}") from e
    about = orjson.loads(meta)
    made = Draft([], [], meta)
    for w in writes:
        _check_name("stream", w.stream)
        checked = [codec.check(event) for event in w.events] if w.checked is None else w.checked
        pairs = zip(w.events, checked, strict=True)
        for version, (event, (data, read_back)) in enumerate(pairs, w.expected_version + 1):
            kind, schema_version = type(event).__name__, event.schema_version
            made.bodies.append(schema.body_hash(
                stream=w.stream, version=version, type=kind, schema_version=schema_version, data=data, metadata=meta,
                commit_id=commit_id, commit_index=len(made.bodies),
            ))
            made.recorded.append(Recorded(
                position=0, stream=w.stream, version=version, type=kind, schema_version=schema_version, data=data,
                metadata=about, recorded_at=0.0, commit_id=commit_id, hash=b"", _event=read_back,
            ))
    if not made.recorded:
        raise InvalidEvent(f"commit {commit_id} holds no event: an append needs at least one")
    return made


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > 500 or not name.isprintable():
        raise InvalidEvent(f"{what} {str(name)[:80]!r} must be 1 to 500 printable characters")


@lru_cache(64)
def _metadata(data: bytes) -> Any:
    """Decode it once for all events of an append, which follow each other."""
    return orjson.loads(data)


def from_row(row: Sequence[Any]) -> Recorded:
    """Return a stored row, all columns of the table in their order. The event is decoded when it is asked for.

    Raises LogCorrupt for one whose columns are not what was written.
    """
    # By place: by name it took three times as long, and a third of reading a log.
    position, stream, version, kind, schema_version, data, metadata, at, commit_id, _, mark = row
    try:
        return Recorded(
            position=position, stream=stream, version=version, type=kind, schema_version=schema_version,
            data=bytes(data), metadata=_metadata(bytes(metadata)), recorded_at=at, commit_id=commit_id,
            hash=bytes(mark),
        )
    except (ValueError, TypeError) as e:
        raise LogCorrupt(f"position {position} ({stream} {version}) can't be read ({e}): `trinity-es verify` says "
                         "what else is wrong with this log") from e


_offsets: list[float] = []
"""How far the wall clock is ahead of the monotonic one, the same for each look until it is set."""


@dataclass(slots=True)
class Straightener:
    """Puts events of this boot where they were by the monotonic clock, as seen from the wall clock of now."""

    _wall: Callable[[], float] = time.time
    _monotonic: Callable[[], float] = clock.monotonic
    offset: float = field(init=False)

    def __post_init__(self) -> None:
        found = self._wall() - self._monotonic()
        if not _offsets or abs(_offsets[-1] - found) > clock.STEP_SECONDS:
            _offsets[:] = [found]
        self.offset = _offsets[-1]

    def __call__(self, recorded: Recorded) -> Recorded:
        """Return the event, with the time that the clock of now gives its moment where that is another."""
        told = recorded.metadata.get("mono")
        if not isinstance(told, int | float) or not clock.boot() or recorded.metadata.get("boot") != clock.boot():
            return recorded
        at = self.offset + told
        return recorded if abs(at - recorded.recorded_at) <= clock.FIRST_SECONDS else replace(recorded, recorded_at=at)
