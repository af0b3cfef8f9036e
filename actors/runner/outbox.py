"""What a runner has done, on its way into the log: pure, with the time as an argument.

Outcomes go out in numbered groups. A group is kept, and given out again, until the coordinator acknowledges its number:
it is in the log then. Of what is there it is remembered for long which units it was, since a unit may be sent twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from trinity_es.actors.messages import OutcomeReport, UnitOutcome
from trinity_es.events.store.checks.log_end import Mark
from trinity_es.events.values import BatchId

__all__ = ["RESEND_SECONDS", "Key", "NumberedGroups", "Outbox", "key_of"]

RESEND_SECONDS = 5.0
"""How long outcomes may stay unacknowledged before they are sent again."""
REMEMBERED_UNITS = 20_000
"""Maximum number of units, whose outcome is in the log, that are not run again if they come again."""

Key = tuple[BatchId, str, int, int]
"""Which unit: batch, submission, task, first run."""


def key_of(outcome: UnitOutcome) -> Key:
    return (outcome.batch_id, outcome.submission, outcome.unit.task, outcome.unit.run_id_base)


_G = TypeVar("_G")


class NumberedGroups(Generic[_G]):
    """What one life of a runner tells in groups, each kept until its number is acknowledged."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.number = 0
        """The newest group's."""
        self.unacked: dict[int, _G] = {}
        self._sent: dict[int, float] = {}

    def keep(self, group: _G, now: float) -> _G:
        """Keep a group under the newest number, which is sent now."""
        self.unacked[self.number], self._sent[self.number] = group, now
        return group

    def due(self, now: float, *, anew: bool = False) -> list[_G]:
        """Return the groups to send now: those that stayed unacknowledged, all of them (`anew`) to a new coordinator.

        They count as sent.
        """
        numbers = [n for n in self.unacked if anew or now - self._sent[n] > RESEND_SECONDS]
        self._sent.update(dict.fromkeys(numbers, now))
        return [self.unacked[n] for n in numbers]

    def drop(self, number: int) -> _G | None:
        """Forget a group; return it, unless it is forgotten."""
        self._sent.pop(number, None)
        return self.unacked.pop(number, None)


class Outbox(NumberedGroups[OutcomeReport]):
    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self._settled: OrderedDict[tuple[Key, int], None] = OrderedDict()

    def put(self, outcomes: list[UnitOutcome], known: Mark | None, now: float) -> OutcomeReport:
        """Make a group of these outcomes, to be sent now."""
        self.number += 1
        return self.keep(OutcomeReport(self.name, self.incarnation, self.number, outcomes, known), now)

    def acknowledge(self, numbers: Iterable[int]) -> list[UnitOutcome]:
        """Forget these groups, which are in the log; return their outcomes. One that is named twice is fine."""
        found = [outcome for n in numbers if (group := self.drop(n)) for outcome in group.outcomes]
        for outcome in found:
            self._settled[key_of(outcome), outcome.unit.attempt] = None
        while len(self._settled) > REMEMBERED_UNITS:
            self._settled.popitem(last=False)
        return found

    def has_settled(self, key: Key, attempt: int) -> bool:
        """Return True if the outcome of this attempt is in the log, as far as it is remembered."""
        return (key, attempt) in self._settled
