"""Outcomes of a runner, on their way into the log. Pure, with the time as an argument.

Outcomes go out in numbered groups. A group is kept and sent again until the coordinator confirms its number, when the
log has it. The units of confirmed groups are remembered for long, because a unit may arrive twice.
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
"""How long outcomes may stay unconfirmed before they are sent again."""
REMEMBERED_UNITS = 20_000
"""Maximum number of remembered units whose outcome is in the log and which are not run again."""

Key = tuple[BatchId, str, int, int]
"""Identity of a unit: batch, submission, task, first run."""


def key_of(outcome: UnitOutcome) -> Key:
    """Return the identity of an outcome's unit."""
    return (outcome.batch_id, outcome.submission, outcome.unit.task, outcome.unit.run_id_base)


_G = TypeVar("_G")


class NumberedGroups(Generic[_G]):
    """Reports of one life of a runner, in groups that are kept until their number is confirmed."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.number = 0
        """Number of the newest group."""
        self.unconfirmed: dict[int, _G] = {}
        self._sent_at: dict[int, float] = {}

    def keep(self, group: _G, now: float) -> _G:
        """Keep a group under the newest number; the caller sends it now."""
        self.unconfirmed[self.number] = group
        self._sent_at[self.number] = now
        return group

    def due(self, now: float, *, resend_all: bool = False) -> list[_G]:
        """Return the groups to send now, and note them as sent.

        These are the groups unconfirmed for too long, or with `resend_all`, for a new coordinator, all of them.
        """
        numbers = [n for n in self.unconfirmed if resend_all or now - self._sent_at[n] > RESEND_SECONDS]
        self._sent_at.update(dict.fromkeys(numbers, now))
        return [self.unconfirmed[n] for n in numbers]

    def drop(self, number: int) -> _G | None:
        """Forget a group; return it, or None if it is forgotten already."""
        self._sent_at.pop(number, None)
        return self.unconfirmed.pop(number, None)


class Outbox(NumberedGroups[OutcomeReport]):
    """Groups of outcomes, and the units whose outcomes are in the log."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self._settled: OrderedDict[tuple[Key, int], None] = OrderedDict()

    def put(self, outcomes: list[UnitOutcome], known: Mark | None, now: float) -> OutcomeReport:
        """Make a group of these outcomes, to send now."""
        self.number += 1
        return self.keep(OutcomeReport(self.name, self.incarnation, self.number, outcomes, known), now)

    def acknowledge(self, numbers: Iterable[int]) -> list[UnitOutcome]:
        """Forget these groups, which are in the log; return their outcomes. A second confirmation is fine."""
        outcomes: list[UnitOutcome] = []
        for number in numbers:
            group = self.drop(number)
            if group is not None:
                outcomes += group.outcomes
        for outcome in outcomes:
            self._settled[key_of(outcome), outcome.unit.attempt] = None
        while len(self._settled) > REMEMBERED_UNITS:
            self._settled.popitem(last=False)
        return outcomes

    def has_settled(self, key: Key, attempt: int) -> bool:
        """Return True if the outcome of this attempt is in the log and is still remembered."""
        return (key, attempt) in self._settled
