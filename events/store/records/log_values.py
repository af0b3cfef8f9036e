"""Values that the log takes and returns, and their rows. Import them from `events.store.log`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
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

__all__ = ["Committed", "Draft", "Head", "Lease", "Projector", "Recorded", "Write", "checked_write", "clock_offset",
           "draft", "from_row", "with_true_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Events to append to one stream if it is at `expected_version` (0: it does not exist)."""

    stream: str
    expected_version: int
    events: Sequence[Event]
    checked: Sequence[tuple[bytes, Event]] | None = field(default=None, repr=False, compare=False)
    """Results of `codec.check` for the events, if the caller has them already."""


def checked_write(stream: str, expected_version: int, events: Sequence[Event]) -> Write:
    """Return a write whose events are checked already. An append can then refuse only its version.

    Raises InvalidEvent.
    """
    _check_name("stream", stream)
    return Write(
        stream=stream, expected_version=expected_version, events=list(events), checked=[codec.check(e) for e in events]
    )


@dataclass(slots=True, kw_only=True)
class Recorded:
    """An event in the log."""

    position: int
    """Position in the whole log, from 1."""
    stream: str
    version: int
    """Position in its stream, from 1."""
    type: str
    schema_version: int
    data: bytes
    metadata: dict[str, Any]
    """Metadata of the append, with the writer's `lease` and `epoch`. Don't change it: events of an append share it."""
    recorded_at: float
    """Unix seconds, UTC; smaller than the previous event's only if the clock was set back (`ClockStepped`)."""
    commit_id: str
    hash: bytes
    """SHA-256 over this event and the previous event's hash."""
    _event: Event | None = field(default=None, repr=False, compare=False)

    @property
    def event(self) -> Event:
        """The decoded event. Raises LogTooNew or InvalidEvent, with the position, if this software can't decode it."""
        if self._event is None:
            try:
                self._event = codec.decode(self.type, self.schema_version, self.data)
            except LogError as e:
                place = f"position {self.position} ({self.stream} {self.version})"
                raise type(e)(f"the event at {place} can't be decoded: {e.message}", **e.details) from e
        return self._event


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The end of the log. `generation` changes when a log is restored from a copy."""

    position: int
    generation: str
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Right to append, which lasts until another writer takes the lease of this name with the next epoch."""

    name: str
    epoch: int
    owner: dict[str, Any]
    copied_from: str = ""
    """Host and path or address of the original store, if the last holder took the lease there and this is a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Result of an append. `duplicate` is true if an earlier append with this commit id wrote the events."""

    first_position: int
    last_position: int
    recorded: list[Recorded]
    duplicate: bool


class Projector(Protocol):
    """Read model that is updated in the transaction of each append. An error of it undoes the append."""

    name: str
    version: int
    """Version of the tables and their meaning. After it rises, the tables are rebuilt from the log."""

    def create(self, connection: Connection) -> None:
        """Create the tables that are missing."""

    def apply(self, connection: Connection, recorded: Sequence[Recorded]) -> None:
        """Update the tables by the next events. Each event comes once, in order of position."""

    def reset(self, connection: Connection) -> None:
        """Empty the tables, or drop and create them."""


@dataclass(slots=True)
class Draft:
    """Events of one commit, prepared before the log is locked."""

    recorded: list[Recorded]
    """The events. `place` sets their positions, times and hashes."""
    bodies: list[bytes]
    metadata: bytes

    def place(self, position: int, previous: bytes, times: Iterable[float]) -> tuple[int, bytes]:
        """Give the events positions, times and chained hashes, as successors of the event at `position`.

        `previous`: hash of that event. Return the last event's position and hash.
        """
        for item, body, recorded_at in zip(self.recorded, self.bodies, times, strict=False):
            position += 1
            previous = schema.chain_hash(previous, position, recorded_at, body)
            item.position, item.recorded_at, item.hash = position, recorded_at, previous
        return position, previous

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the events as rows of `schema.events`."""
        return [
            (r.position, r.stream, r.version, r.type, r.schema_version, r.data, self.metadata, r.recorded_at,
             r.commit_id, index, r.hash)
            for index, r in enumerate(self.recorded)
        ]


def draft(writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None) -> Draft:
    """Check and encode the events of these writes, and return them as one commit. Raises InvalidEvent."""
    _check_name("commit id", commit_id)
    metadata_fields: dict[str, Any] = {"mono": round(clock.monotonic(), 3), "boot": clock.boot(), **(metadata or {})}
    if lease is not None:
        metadata_fields |= {"lease": lease.name, "epoch": lease.epoch}
    try:
        metadata_json = orjson.dumps(metadata_fields, option=orjson.OPT_SORT_KEYS)
    except TypeError as e:
        raise InvalidEvent(f"the metadata of commit {commit_id} can't be recorded: {e}") from e
    read_metadata = orjson.loads(metadata_json)  # as a reader of the log gets it
    prepared = Draft([], [], metadata_json)
    for write in writes:
        _check_name("stream", write.stream)
        checked = [codec.check(event) for event in write.events] if write.checked is None else write.checked
        events_and_data = zip(write.events, checked, strict=True)
        for version, (event, (data, read_back)) in enumerate(events_and_data, write.expected_version + 1):
            kind, schema_version = type(event).__name__, event.schema_version
            prepared.bodies.append(schema.body_hash(
                stream=write.stream, version=version, type=kind, schema_version=schema_version, data=data,
                metadata=metadata_json, commit_id=commit_id, commit_index=len(prepared.bodies),
            ))
            prepared.recorded.append(Recorded(  # `Draft.place` sets position, time and hash
                position=0, stream=write.stream, version=version, type=kind, schema_version=schema_version, data=data,
                metadata=read_metadata, recorded_at=0.0, commit_id=commit_id, hash=b"", _event=read_back,
            ))
    if not prepared.recorded:
        raise InvalidEvent(f"commit {commit_id} holds no event: an append needs at least one")
    return prepared


def _check_name(subject: str, name: str) -> None:
    """Raise InvalidEvent if this can't be the name of a stream or commit. `subject` says which, for the message."""
    if not isinstance(name, str) or not name or len(name) > 500 or not name.isprintable():
        raise InvalidEvent(f"{subject} {str(name)[:80]!r} must be 1 to 500 printable characters")


_metadata = lru_cache(64)(orjson.loads)
"""Cached decoder of metadata, since all events of an append have the same."""


def from_row(row: Sequence[Any]) -> Recorded:
    """Return the event of a row with all columns of `schema.events`, not decoded yet. Raises LogCorrupt."""
    # Access by column name took three times as long, a third of the time to read a log.
    position, stream, version, kind, schema_version, data, metadata, recorded_at, commit_id, _, event_hash = row
    try:
        return Recorded(
            position=position, stream=stream, version=version, type=kind, schema_version=schema_version,
            data=bytes(data), metadata=_metadata(bytes(metadata)), recorded_at=recorded_at, commit_id=commit_id,
            hash=bytes(event_hash),
        )
    except (ValueError, TypeError) as e:
        raise LogCorrupt(f"position {position} ({stream} {version}) can't be read ({e}): `trinity-es verify` lists all "
                         "problems of this log") from e


_offsets: list[float] = []
"""Last offset between wall clock and monotonic clock, reused until the wall clock is set."""


def clock_offset() -> float:
    """Return the wall clock minus the monotonic clock, in seconds.

    Calls return the same value until the wall clock is set, so that several reads of an event give the same time.
    """
    offset = time.time() - clock.monotonic()
    if not _offsets or abs(_offsets[-1] - offset) > clock.STEP_SECONDS:
        _offsets[:] = [offset]
    return _offsets[-1]


def with_true_time(recorded: Recorded, offset: float) -> Recorded:
    """Return an event of this boot with a corrected time if the wall clock was set by more than FIRST_SECONDS since.

    Other events are returned unchanged. `offset`: the present `clock_offset()`.
    """
    monotonic_time = recorded.metadata.get("mono")
    is_of_this_boot = clock.boot() != "" and recorded.metadata.get("boot") == clock.boot()
    if not isinstance(monotonic_time, int | float) or not is_of_this_boot:
        return recorded
    was_set = abs(offset + monotonic_time - recorded.recorded_at) > clock.FIRST_SECONDS
    return replace(recorded, recorded_at=offset + monotonic_time) if was_set else recorded
