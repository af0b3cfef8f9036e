"""How often experiences were used: the fold of what trainers took and acknowledged.

A use is a step of the trainer. Batches that it gets whole are used by being acknowledged (`BatchTrained`); out of the
queue each experience is used by being taken. What is used again because the trainer came back from an older checkpoint
is no second use: the steps in between are gone with their weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from events.log import Recorded
from events.values import BatchId, batch_stream

__all__ = ["TYPES", "Usage", "Used", "fold_usage"]

TYPES = ("BatchFinalized", "BatchTrained", "ExperiencesTaken", "ExperiencesReturned",
         "ExperiencesRedelivered")
"""The events that tell of uses."""


@dataclass(frozen=True, slots=True)
class Used:
    """Some experiences in a row that were used more than once."""

    batch_id: BatchId
    first: int
    """Among those that the batch delivered."""
    count: int
    steps: list[int | None]
    """The steps that used them; None: the trainer did not say which."""
    positions: list[int]


@dataclass(slots=True)
class _Delivery:
    batch_id: BatchId
    count: int
    whole: list[tuple[int | None, int]] = field(default_factory=list)
    """Steps in which the batch was trained as a whole, and the positions that say so."""
    taken: list[tuple[int, int, int | None, int]] = field(default_factory=list)
    """First, count, step and position of each time that some were taken."""
    queued: bool = False
    """Some were taken from the queue, whatever was given back."""


@dataclass(slots=True, kw_only=True)
class Usage:
    """Uses of what train batches delivered."""

    delivered: int = 0
    """Experiences."""
    once: int = 0
    never: int = 0
    twice: list[Used] = field(default_factory=list)
    """Used more than once."""
    redone: int = 0
    """Uses that were undone by a trainer that came back from an older checkpoint."""

    @property
    def more(self) -> int:
        return sum(used.count for used in self.twice)


def fold_usage(recorded: Iterable[Recorded]) -> Usage:
    """The uses of everything delivered, from the events of TYPES, in order."""
    deliveries: dict[tuple[str, int], _Delivery] = {}
    current: dict[str, tuple[str, int]] = {}
    out = Usage()
    for item in recorded:
        data: dict[str, Any] = orjson.loads(item.data)  # few of an event's fields are needed: not worth building it
        if item.type == "BatchFinalized":
            if data["result"].get("batch_type") == "train":
                key = current[item.stream] = item.stream, item.version
                deliveries[key] = _Delivery(data["result"]["batch_id"], data.get("selected", 0))
        elif item.type == "BatchTrained":
            if (key_of := current.get(item.stream)) is not None:
                deliveries[key_of].whole.append((data["step"], item.position))
        elif item.type == "ExperiencesTaken":
            for part in data["items"]:
                delivery = deliveries.get((batch_stream(part["batch_id"]), part["version"]))
                if delivery is not None:
                    delivery.queued = True
                    delivery.taken.append((part["first"], part["count"], data.get("step"), item.position))
        elif item.type == "ExperiencesRedelivered":
            for batch_id in data["batches"]:
                if (key_of := current.get(batch_stream(batch_id))) is not None:
                    delivery = deliveries[key_of]
                    out.redone += delivery.count * len(delivery.whole)
                    delivery.whole = []
        else:
            _returned(deliveries.values(), data["step"], out)
    for delivery in deliveries.values():
        _count(delivery, out)
    return out


def _returned(deliveries: Iterable[_Delivery], step: int, out: Usage) -> None:
    for delivery in deliveries:
        kept = [t for t in delivery.taken if t[2] is None or t[2] <= step]
        out.redone += sum(count for _, count, *_ in delivery.taken) - sum(count for _, count, *_ in kept)
        delivery.taken = kept


def _count(delivery: _Delivery, out: Usage) -> None:
    out.delivered += delivery.count
    # Who takes from the queue may acknowledge the batch too, so that its payloads can be freed: that is no use.
    uses = delivery.taken if delivery.queued else [(0, delivery.count, step, at) for step, at in delivery.whole]
    cuts = sorted({0, delivery.count, *(u[0] for u in uses), *(u[0] + u[1] for u in uses)})
    for start, end in pairwise(cuts):
        mine = [u for u in uses if u[0] <= start and u[0] + u[1] >= end]
        if not mine:
            out.never += end - start
        elif len(mine) == 1:
            out.once += end - start
        else:
            out.twice.append(Used(delivery.batch_id, start, end - start, [u[2] for u in mine], [u[3] for u in mine]))
