"""Payloads that events refer to, and batches whose payloads `store.retention` freed.

Equal payloads have the same digest, so several batches may share one. It is deleted when all of them are freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.store.payloads.payload_store import is_inline
from trinity_es.events.values import batch_stream

__all__ = ["EXPERIENCES", "experience_digests", "freed_positions"]

EXPERIENCES = "experiences"
"""Stream of events about experiences of several batches, or outside of batches."""


def freed_positions(recorded: Iterable[Recorded]) -> dict[str, int]:
    """Return {batch stream: last position at which the batch's payloads were freed}.

    Payloads of a submission after that position are not freed.
    """
    return {batch_stream(batch_id): item.position for item in recorded
            if isinstance(event := item.event, ev.PayloadsFreed) for batch_id in event.batches}


def experience_digests(recorded: Iterable[Recorded]) -> set[str]:
    """Return the digests of the payloads of runs, of deliveries and of lost attempts that these events name."""
    digests: set[str] = set()
    for item in recorded:
        match item.event:
            case ev.RunsFinished() as event:  # or its subclass TaskFinished
                if event.payload is not None:
                    digests.add(event.payload.digest)
            case ev.BatchFinalized() | ev.ExperiencesProcessed() as event:
                digests |= {ref.digest for ref in event.experiences if not is_inline(ref.digest)}
            case ev.AttemptKept() as event:
                digests.add(event.payload)
    return digests
