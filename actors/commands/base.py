"""Base class of all commands, the request that carries a command, and its encoding for messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform

from trinity_es.actors.commands.fields import FIELDS, read_fields
from trinity_es.actors.requests import Parcel

__all__ = ["Command", "CommandRequest", "encode"]

A = TypeVar("A")
C_co = TypeVar("C_co", bound="Command[Any]", covariant=True)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Command(Generic[A]):
    """Base of all commands: a frozen dataclass whose fields have types of `fields.py`.

    `name` is the command's name in messages and errors. `writes` is True if it is recorded in the log, `waits` if it is
    answered only after runners or other clients have acted. While the log can't be written for a reason that may pass,
    clients of a command that waits go on waiting; other commands that write fail at once.
    """

    __pydantic_config__ = FIELDS
    name: ClassVar[str]
    writes: ClassVar[bool]
    waits: ClassVar[bool]

    def __init_subclass__(cls, *, name: str, writes: bool, waits: bool = False) -> None:
        cls.name, cls.writes, cls.waits = name, writes, waits
        dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, slots=True)
class CommandRequest(Generic[C_co]):
    """A command with the id of its request, as a handler gets it. A request that is sent again has the same id."""

    id: str
    command: C_co


def encode(command: Command[Any]) -> dict[str, Any]:
    """Return a command's fields as plain values for a message. Raises DataError for a wrong field."""
    return dict(_to_plain(read_fields(type(command), command.name, _field_values(command))))


_PLAIN = frozenset({str, int, float, bool, type(None), Parcel, dict})
"""Types of values that are sent as they are."""


def _to_plain(value: Any) -> Any:
    """Return a list or the fields of a dataclass as plain JSON. Parcels in it stay as they are."""
    if isinstance(value, list):
        return [item if type(item) in _PLAIN else _to_plain(item) for item in value]
    return {name: item if type(item) in _PLAIN else _to_plain(item) for name, item in _field_values(value).items()}


def _field_values(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict, without the deep copy of `dataclasses.asdict`."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
