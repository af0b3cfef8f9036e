"""What clients can ask of the coordinator: every command.

Commands are imperative and frozen. A class says what it asks for and what is answered (docs/COMMANDS.md is made from
these files); `Command[A]` is one that is answered with an A, which is plain JSON. A command travels as its name and
plain values (`encode`), and is made and checked anew where it arrives (`decode`): what is no command, or has a field
that it can't have, comes no further. A new command is a class here, and a handler in `coordinator/handlers/`.
"""

from __future__ import annotations

from typing import Any

from trinity_es.actors.commands import batches, serve, servers, trainer
from trinity_es.actors.commands.base import Command, CommandRequest, encode
from trinity_es.actors.commands.batches import *
from trinity_es.actors.commands.fields import read_fields, shown
from trinity_es.actors.commands.serve import *
from trinity_es.actors.commands.servers import *
from trinity_es.actors.commands.trainer import *
from trinity_es.events.errors import TrinityError

__all__ = ["COMMANDS", "Command", "CommandRequest", "decode", "encode"]
__all__ += [*batches.__all__, *trainer.__all__, *serve.__all__, *servers.__all__]

COMMANDS: dict[str, type[Command[Any]]] = {cls.name: cls for cls in Command.__subclasses__()}
"""Every command by its name in messages."""


def decode(name: Any, args: Any) -> Command[Any]:
    """Return the command that a client sent. Raises DataError where a field is not what it must be, TrinityError for an
    unknown command.
    """
    cls = COMMANDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise TrinityError(f"unknown command {shown(name)}: client and system are of different versions")
    command: Command[Any] = read_fields(cls, f"request {name!r}", args)
    return command
