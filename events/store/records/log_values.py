"""Values of the log's interface and their rows; import them from `events.store.log`."""

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

__all__ = ["ClockCorrection", "Committed", "Draft", "Head", "Lease", "Projector", "Recorded", "Write", "checked_write",
           "draft", "from_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Events for one stream, decided when the stream was at `expected_version` (0: it did not exist)."""

    stream: str
    expected_version: int
    events: Sequence[Event]
    checked: Sequence[tuple[bytes, Event]] | None = field(default=None, repr=False, compare=False)
    """Result of `codec.check` for each event, if it was called before."""


def checked_write(stream: str, expected_version: int, events: Sequence[Event]) -> Write:
    """Return a write whose events are checked, so that an append can refuse only its version. Raises InvalidEvent."""
    _check_name("stream", stream)
    return Write(
        stream=stream, expected_version=expected_version, events=list(events), checked=[codec.check(e) for e in events]
    )


@dataclass(slots=True, kw_only=True)
class Recorded:
    """An event in the log."""

    position: int
    """Place in the whole log, from 1."""
    stream: str
    version: int
    """Place in its stream, from 1."""
    type: str
    schema_version: int
    data: bytes
    metadata: dict[str, Any]
    """Metadata of its append, with its writer's `lease` and `epoch`. Read-only: events of one append share it."""
    recorded_at: float
    """Unix seconds, UTC; smaller than the previous event's only if the clock was set back (`ClockStepped`)."""
    commit_id: str
    hash: bytes
    """SHA-256 over this event and the hash of the one before it."""
    _event: Event | None = field(default=None, repr=False, compare=False)

    @property
    def event(self) -> Event:
        """The event itself. Raises LogTooNew or InvalidEvent, with the position, if this software can't read it."""
        if self._event is None:
            try:
                self._event = codec.decode(self.type, self.schema_version, self.data)
            except LogError as e:
                place = f"position {self.position} ({self.stream} {self.version})"
                raise type(e)(f"{place}: {e.message}", **e.details) from e
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
    """Host and place of the original, if this store is a copy of the one in which the lease was taken (for a new lease:
    in which its last holder took it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Result of an append: positions first..last. `duplicate`: an earlier append with this commit id wrote them."""

    first_position: int
    last_position: int
    recorded: list[Recorded]
    duplicate: bool


class Projector(Protocol):
    """A read model that is updated in the transaction of the append. Its errors undo the append."""

    name: str
    version: int
    """Version of the tables and their meaning. When it rises, they are rebuilt from the log."""

    def create(self, connection: Connection) -> None:
        """CREATE TABLE IF NOT EXISTS."""

    def apply(self, connection: Connection, recorded: Sequence[Recorded]) -> None:
        """Apply these events, which come in order of position, each once."""

    def reset(self, connection: Connection) -> None:
        """Empty the tables (or drop and create them)."""


@dataclass(slots=True)
class Draft:
    """Events of one commit, prepared as far as possible before the lock is taken."""

    recorded: list[Recorded]
    """The events, without position, time and hash."""
    bodies: list[bytes]
    metadata: bytes

    def place(self, position: int, previous: bytes, times: Iterable[float]) -> tuple[int, bytes]:
        """Place the events after this position and hash. Return the last one's position and hash."""
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
    """Check the events of these writes, and return them as a commit to place in the log. Raises InvalidEvent."""
    _check_name("commit id", commit_id)
    fields: dict[str, Any] = {"mono": round(clock.monotonic(), 3), "boot": clock.boot(), **(metadata or {})}
    if lease is not None:
        fields |= {"lease": lease.name, "epoch": lease.epoch}
    try:
        metadata_json = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    except TypeError as e:
        raise InvalidEvent(f"the metadata of commit {commit_id} can't be recorded: {e}") from e
    read_metadata = orjson.loads(metadata_json)
    prepared = Draft([], [], metadata_json)
    for write in writes:
        _check_name("stream", write.stream)
        checked = [codec.check(event) for event in write.events] if write.checked is None else write.checked
        pairs = zip(write.events, checked, strict=True)
        for version, (event, (data, read_back)) in enumerate(pairs, write.expected_version + 1):
            kind, schema_version = type(event).__name__, event.schema_version
            prepared.bodies.append(schema.body_hash(
                stream=write.stream, version=version, type=kind, schema_version=schema_version, data=data,
                metadata=metadata_json, commit_id=commit_id, commit_index=len(prepared.bodies),
            ))
            prepared.recorded.append(Recorded(
                position=0, stream=write.stream, version=version, type=kind, schema_version=schema_version, data=data,
                metadata=read_metadata, recorded_at=0.0, commit_id=commit_id, hash=b"", _event=read_back,
            ))
    if not prepared.recorded:
        raise InvalidEvent(f"commit {commit_id} holds no event: an append needs at least one")
    return prepared


def _check_name(subject: str, name: str) -> None:
    """Raise InvalidEvent if this can't be the name of a stream or commit. `subject`: what it names."""
    if not isinstance(name, str) or not name or len(name) > 500 or not name.isprintable():
        raise InvalidEvent(f"{subject} {str(name)[:80]!r} must be 1 to 500 printable characters")


_metadata = lru_cache(64)(orjson.loads)
"""Decoder of metadata, which decodes once for all events of an append, since these follow each other."""


def from_row(row: Sequence[Any]) -> Recorded:
    """Return the event of a stored row, with all columns in order; it is decoded on first use. Raises LogCorrupt."""
    # By index: by name it took three times as long, and a third of reading a log.
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
"""Last offset of the wall clock from the monotonic one, reused until the wall clock is set."""


@dataclass(slots=True)
class ClockCorrection:
    """Correction of this boot's event times by the monotonic clock, as seen from the current wall clock."""

    _wall: Callable[[], float] = time.time
    _monotonic: Callable[[], float] = clock.monotonic
    offset: float = field(init=False)

    def __post_init__(self) -> None:
        # With the last offset, if the clock was not set since, equal events get equal times.
        offset = self._wall() - self._monotonic()
        if not _offsets or abs(_offsets[-1] - offset) > clock.STEP_SECONDS:
            _offsets[:] = [offset]
        self.offset = _offsets[-1]

    def __call__(self, recorded: Recorded) -> Recorded:
        """Return the event. If the current clock gives it another time, the result has that time."""
        monotonic_time = recorded.metadata.get("mono")
        is_of_this_boot = clock.boot() != "" and recorded.metadata.get("boot") == clock.boot()
        if not isinstance(monotonic_time, int | float) or not is_of_this_boot:
            return recorded
        corrected_at = self.offset + monotonic_time
        was_set = abs(corrected_at - recorded.recorded_at) > clock.FIRST_SECONDS
        return replace(recorded, recorded_at=corrected_at) if was_set else recorded
