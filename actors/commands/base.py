"""The base of all commands, and how one travels."""

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
    """Base of all commands: a frozen dataclass whose fields are kinds of `fields.py`.

    `name`: how it is called in messages and errors. `writes`: what it asks for is recorded. `waits`: it is answered
    when runners, or other clients, have got something done; while the log can't be written, and that may pass, its
    client goes on waiting, and who asks for another one that writes is told so at once.
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
    """A command as a handler gets it, with the id of its request: sent again, it has the same one."""

    id: str
    command: C_co


def encode(command: Command[Any]) -> dict[str, Any]:
    """Return a command's fields as plain values. Raises DataError for what can't be."""
    return dict(_plain(read_fields(type(command), command.name, _fields(command))))


_PLAIN = frozenset({str, int, float, bool, type(None), Parcel, dict})
"""Types of what a checked command holds and travels as it is."""


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [item if type(item) in _PLAIN else _plain(item) for item in value]
    return {name: item if type(item) in _PLAIN else _plain(item) for name, item in _fields(value).items()}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
