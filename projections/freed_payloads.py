"""Which payloads batches refer to, and which batches had theirs freed (`store.retention`).

A payload is named by its content, so one may belong to several batches: it can go when all of them were freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import batch_stream

__all__ = ["EXPERIENCES", "experience_digests", "freed_at"]

EXPERIENCES = "experiences"
"""The stream of what concerns experiences of no batch, or of many."""


def freed_at(recorded: Iterable[Recorded]) -> dict[str, int]:
    """Return, by batch stream, the position at which its payloads were freed last. From the stream `experiences`.

    A batch that was submitted later than that, under the same id, has its own.
    """
    freed: dict[str, int] = {}
    for item in recorded:
        if isinstance(item.event, ev.PayloadsFreed):
            freed.update({batch_stream(batch_id): item.position for batch_id in item.event.batches})
    return freed


def experience_digests(recorded: Iterable[Recorded]) -> set[str]:
    """Return the payloads with experiences that these events name, as runs brought them in and as delivered."""
    digests: set[str] = set()
    for item in recorded:
        match item.event:
            case ev.RunsFinished() as event:  # TaskFinished is one
                digests |= {event.payload.digest} if event.payload is not None else set()
            case ev.BatchFinalized() | ev.ExperiencesProcessed() as event:
                digests |= {ref.digest for ref in event.experiences}
    return digests
