"""All commands that clients can send to the coordinator. docs/COMMANDS.md is printed from these files.

The answer to a `Command[A]` is an A, which is plain JSON. A command travels as its name and plain values (`encode`),
and the receiver builds and checks it again (`decode`): an unknown command or a wrong field is refused there. A new
command needs a class here and a handler in `coordinator/handlers/`.
"""

from __future__ import annotations

from typing import Any

from trinity_es.actors.commands import batches, serve, servers_and_hosts, trainer
from trinity_es.actors.commands.base import Command, CommandRequest, encode
from trinity_es.actors.commands.batches import *
from trinity_es.actors.commands.fields import read_fields, shown
from trinity_es.actors.commands.serve import *
from trinity_es.actors.commands.servers_and_hosts import *
from trinity_es.actors.commands.trainer import *
from trinity_es.events.errors import TrinityError

__all__ = ["COMMANDS", "Command", "CommandRequest", "decode", "encode"]
__all__ += [*batches.__all__, *trainer.__all__, *serve.__all__, *servers_and_hosts.__all__]

COMMANDS: dict[str, type[Command[Any]]] = {cls.name: cls for cls in Command.__subclasses__()}
"""All commands, by their names in messages."""


def decode(name: Any, args: Any) -> Command[Any]:
    """Return the command that a client sent. Raises DataError for a wrong field, TrinityError for an unknown one."""
    cls = COMMANDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise TrinityError(f"unknown command {shown(name)}: install the same trinity-es for client and system")
    command: Command[Any] = read_fields(cls, f"request {name!r}", args)
    return command
