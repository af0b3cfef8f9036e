"""Outcomes that a runner keeps until they are in the log. Pure, with the time as an argument.

Outcomes are sent in numbered groups. A group is kept and sent again until the coordinator confirms that the log has it.
The units of confirmed groups are remembered, because a unit may arrive twice.
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
"""Time after which an unconfirmed group is sent again."""
REMEMBERED_UNITS = 20_000
"""Maximum number of units that are remembered as recorded in the log, so that they do not run again."""

Key = tuple[BatchId, str, int, int]
"""Identity of a unit (runs of one task): batch, submission, task, first run."""


def key_of(outcome: UnitOutcome) -> Key:
    return (outcome.batch_id, outcome.submission, outcome.unit.task, outcome.unit.run_id_base)


_G = TypeVar("_G")


class NumberedGroups(Generic[_G]):
    """Reports of one incarnation of a runner. Each group is kept until the coordinator confirms its number."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.number = 0
        """Number of the newest group."""
        self.unconfirmed: dict[int, _G] = {}
        self._sent_at: dict[int, float] = {}

    def keep(self, group: _G, now: float) -> _G:
        """Keep a group under the newest number, and return it; the caller sends it now."""
        self.unconfirmed[self.number] = group
        self._sent_at[self.number] = now
        return group

    def due(self, now: float, *, resend_all: bool = False) -> list[_G]:
        """Return the groups sent more than RESEND_SECONDS ago, or all with `resend_all`, and note them as sent now."""
        numbers = [n for n in self.unconfirmed if resend_all or now - self._sent_at[n] > RESEND_SECONDS]
        self._sent_at.update(dict.fromkeys(numbers, now))
        return [self.unconfirmed[n] for n in numbers]

    def drop(self, number: int) -> _G | None:
        """Remove and return a group; None if it was removed already."""
        self._sent_at.pop(number, None)
        return self.unconfirmed.pop(number, None)


class Outbox(NumberedGroups[OutcomeReport]):
    """Unconfirmed groups of outcomes, and the units whose outcomes are in the log."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self._settled: OrderedDict[tuple[Key, int], None] = OrderedDict()

    def put(self, outcomes: list[UnitOutcome], known: Mark | None, now: float) -> OutcomeReport:
        """Keep and return a group of these outcomes, to send now. `known`: last position of the log known here."""
        self.number += 1
        return self.keep(OutcomeReport(self.name, self.incarnation, self.number, outcomes, known), now)

    def acknowledge(self, numbers: Iterable[int]) -> list[UnitOutcome]:
        """Remove groups that are in the log, and return their outcomes. Groups removed before are ignored."""
        groups = [group for number in numbers if (group := self.drop(number)) is not None]
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        for outcome in outcomes:
            self._settled[key_of(outcome), outcome.unit.attempt] = None
        while len(self._settled) > REMEMBERED_UNITS:
            self._settled.popitem(last=False)
        return outcomes

    def has_settled(self, key: Key, attempt: int) -> bool:
        return (key, attempt) in self._settled
