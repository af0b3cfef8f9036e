"""Commands about the hosts that take part besides the head's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import Text

__all__ = ["DrainHost", "DrainingHost"]


# --- hosts ------------------------------------------------------------------------------------------------------------
class DrainingHost(TypedDict):
    """A host that is to leave; `units`: what its runners have now."""

    host: str
    epoch: int
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHost(Command[DrainingHost]):
    """Have a host leave: its runners get no more units, end those that they have, and its system ends.

    Answered when that is recorded. Raises HostNotFound.
    """

    name = "drain_host"
    writes = True
    host: Text
    reason: Text
