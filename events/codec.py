"""Encoding of events as JSON bytes, and decoding. The log stores an event's name and schema version in own columns.

`check` decodes an event before it is written, because an unreadable event would stop every later replay.
`UPCASTERS` convert older schemas when an event is read. Stored bytes are never rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

import orjson

from trinity_es.events.errors import DataError, InvalidEvent, LogTooNew
from trinity_es.events.values import require_finite
from trinity_es.events.vocabulary import EVENTS, Event

__all__ = ["UPCASTERS", "check", "decode"]

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(event type, schema version) -> function that converts fields of this version to the next version."""


def check(event: Event) -> tuple[bytes, Event]:
    """Encode an event: return its fields as JSON bytes, and the event decoded from these bytes.

    Equal events have the same bytes. Live state is folded from the decoded event, so it can't differ from replayed
    state. Raises InvalidEvent, naming the field, for NaN, infinities, objects, keys other than strings, integers beyond
    64 bits, and text that is not UTF-8.
    """
    cls = type(event)
    if EVENTS.get(cls.__name__) is not cls:
        raise InvalidEvent(f"event {cls.__module__}.{cls.__name__} is not in events/vocabulary/: define it there")
    names, values = _fields_and_getter(cls)  # type: ignore[arg-type]  # mypy takes an event's __hash__ for its class's
    try:
        data = orjson.dumps(dict(zip(names, values(event), strict=True)), option=orjson.OPT_SORT_KEYS)
    except TypeError as e:  # orjson.JSONEncodeError is a TypeError
        raise InvalidEvent(f"{_unencodable_field(event)} can't be recorded: {e}", event=cls.__name__) from e
    try:
        read_back = _make_event(cls, orjson.loads(data))
    except InvalidEvent:
        _require_finite(event)  # if this is the reason, its message says more
        raise
    if b"null" in data and read_back != event:  # an event that reads back equal held no NaN
        _require_finite(event)
    return data, read_back


def _require_finite(event: Event) -> None:
    """Raise InvalidEvent if an event holds NaN or an infinity, which orjson writes as null."""
    name = type(event).__name__
    try:
        require_finite(event, name)
    except DataError as e:
        raise InvalidEvent(e.message, event=name) from e


def decode(type_name: str, schema_version: int, data: bytes) -> Event:
    """Decode the JSON of an event of this type and schema version, and convert it to the current schema.

    Raises LogTooNew for a type or schema version that only newer software knows, InvalidEvent for invalid data.
    """
    cls = EVENTS.get(type_name)
    if cls is None:
        raise LogTooNew(
            f"event type {type_name} is unknown to this version of trinity-es: a newer one wrote it; upgrade",
            type=type_name, schema_version=schema_version,
        )
    if schema_version > cls.schema_version:
        raise LogTooNew(
            f"{type_name} has schema version {schema_version}, this version of trinity-es knows up to "
            f"{cls.schema_version}: a newer one wrote it; upgrade",
            type=type_name, schema_version=schema_version,
        )
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise InvalidEvent(f"the data of a {type_name} is not JSON: {e}", type=type_name) from e
    if not isinstance(raw, dict):
        raise InvalidEvent(f"the data of a {type_name} is a {type(raw).__name__}, not an object", type=type_name)
    for version in range(schema_version, cls.schema_version):
        upcast = UPCASTERS.get((type_name, version))
        if upcast is None:
            raise InvalidEvent(
                f"no upcaster from schema version {version} of {type_name}: add one to events/codec.py", type=type_name
            )
        raw = upcast(raw)
    names = _fields_and_getter(cls)[0].keys()  # type: ignore[arg-type]  # mypy takes an event's __hash__ for its class's
    if not raw.keys() <= names:
        raise InvalidEvent(f"{type_name} has no field {', '.join(sorted(raw.keys() - names))}", type=type_name)
    return _make_event(cls, raw)


def _make_event(cls: type[Event], raw: dict[str, Any]) -> Event:
    """Make an event of this class from a dict of its fields. Raises InvalidEvent, naming the field."""
    try:
        return _event_maker(cls)(raw)  # type: ignore[arg-type]  # mypy takes an event's own __hash__ for its class's
    except ValueError as e:  # pydantic.ValidationError is one
        problem = e.errors(include_url=False)[0]  # type: ignore[attr-defined]  # of a ValidationError
        path = ".".join(map(str, problem["loc"]))
        raise InvalidEvent(f"{cls.__name__}.{path}: {problem['msg']}", type=cls.__name__, field=path) from e


@cache
def _fields_and_getter(cls: type[Event]) -> tuple[dict[str, None], Callable[[Event], tuple[Any, ...]]]:
    """Return the field names of an event class as keys of a dict, and a function that returns an event's values."""
    names = [f.name for f in fields(cls)]
    # attrgetter returns a tuple only for several names.
    values = attrgetter(*names) if len(names) > 1 else lambda event: tuple(getattr(event, n) for n in names)
    return dict.fromkeys(names), values


@cache
def _event_maker(cls: type[Event]) -> Callable[[dict[str, Any]], Event]:
    """Return the function that makes an event of this class from a dict of its fields, and checks their types."""
    from pydantic import TypeAdapter  # here, since it takes a third of this package's import time

    return TypeAdapter(cls).validator.validate_python  # a sixth faster than through the wrapper


def _unencodable_field(event: Event) -> str:
    """Return the name of the first field of an event that orjson can't encode, as `Event.field`."""
    for f in fields(event):
        try:
            orjson.dumps(getattr(event, f.name))
        except TypeError:
            return f"{type(event).__name__}.{f.name}"
    return type(event).__name__
