"""The base of all commands, and how one travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar

from trinity_es.actors.requests import Parcel
from trinity_es.events.errors import DataError

__all__ = ["Command", "CommandRequest", "encode"]

A = TypeVar("A")
C_co = TypeVar("C_co", bound="Command[Any]", covariant=True)


class Command(Generic[A]):
    """Base of all commands: a frozen dataclass whose fields are kinds of `fields.py`."""

    __slots__ = ()
    name: ClassVar[str]
    """How it is called in messages and errors."""
    writes: ClassVar[bool]
    """True if what it asks for is recorded."""
    waits: ClassVar[bool] = False
    """True if it is answered when runners, or other clients, have got something done. While the log can't be written,
    and that may pass, its client goes on waiting; who asks for another one that writes is told so at once."""


@dataclass(frozen=True, slots=True)
class CommandRequest(Generic[C_co]):
    """A command as a handler gets it, with the id of its request: sent again, it has the same one."""

    id: str
    command: C_co


def encode(command: Command[Any]) -> dict[str, Any]:
    """Return a command's fields as plain values. Raises DataError for what only this process knows the class of."""
    try:
        return dict(_plain(command, command.name))
    except RecursionError:
        raise DataError(f"{command.name}: its arguments are nested too deeply") from None


def _plain(value: Any, name: str) -> Any:
    """Return what a coordinator can read, without the user's classes: an enum's member is its text or number there."""
    if isinstance(value, bool | bytes | Parcel) or value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(item, f"{name}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{name}: {f.name}") for f in fields(value)}
    raise DataError(f"{name} is {type(value).__name__}: a text, a number, or a list or mapping of these is expected")
