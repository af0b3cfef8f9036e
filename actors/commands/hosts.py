"""Commands about the hosts that take part besides the head's own."""

from __future__ import annotations

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


class DrainHost(Command[DrainingHost], name="drain_host", writes=True):
    """Have a host leave: its runners get no more units, end those that they have, and its system ends.

    Answered when that is recorded. Raises HostNotFound.
    """

    host: Text
    reason: Text
