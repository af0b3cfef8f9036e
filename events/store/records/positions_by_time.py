"""Positions of a log by the time at which events were recorded."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from trinity_es.events.errors import LogCorrupt
from trinity_es.events.store.database import schema
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.vocabulary import ClockStepped

__all__ = ["clock_note", "position_at"]

_E = schema.events.c


def position_at(connection: Connection, url: str, time: float, steps: Sequence[Recorded]) -> int:
    """Return the position of the last event recorded at or before this moment (unix seconds); 0 if there is none.

    With `steps` (`ClockStepped`): in the last stretch between two of them that had begun by then. Raises LogCorrupt.
    """
    begin = max((s.position for s in steps if s.recorded_at <= time), default=0)
    end = min((s.position for s in steps if s.position > begin), default=None)
    head = connection.execute(select(schema.heads.c.last_position)).scalar_one()
    low, high = begin, head if end is None else end - 1
    while low < high:  # recorded_at never falls within a stretch, so this needs no index
        middle = (low + high + 1) // 2
        at = connection.execute(select(_E.recorded_at).where(_E.position == middle)).scalar_one_or_none()
        if at is None:
            raise LogCorrupt(f"{url}: position {middle} is missing; run verify", position=middle)
        low, high = (middle, high) if at <= time else (low, middle - 1)
    return int(low)


def clock_note(time: float, steps: Sequence[Recorded]) -> str:
    """Return a note if the clock was set around this moment, by the log's `ClockStepped`; empty if not."""
    for step in steps:
        assert isinstance(step.event, ClockStepped)
        first, last = sorted((step.recorded_at, step.recorded_at - step.event.seconds))
        if first <= time <= last:
            return (f"the clock of this log was set by {step.event.seconds:+.0f} s at position {step.position}: this "
                    "moment may have been twice, or not at all; a position is exact")
    return ""
