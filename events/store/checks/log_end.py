"""Checks that a log still has its acknowledged events, by marks that processes keep.

A `Mark` is a position of a log and the hash there, which covers all events up to it. Every answer about the log carries
a mark. Clients, runners, guardian and keeper keep the newest mark, and the host keeps it in a file (`MemoryFile`). If
the log lacks the event of a mark, it was rewound or replaced (LogRewound, `EventLog.require`). When a person accepts a
loss (`RewindAccepted`), the log gets a new generation, and marks of earlier generations no longer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from trinity_es.events.errors import LogRewound
from trinity_es.events.store.checks.host_memory import (
    HERE,
    Claim,
    Mark,
    MemoryFile,
    claim_to_dict,
    claims_of,
    lost_between,
)
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.statements import LockedHead
from trinity_es.events.store.records.event_queries import rare_page
from trinity_es.events.store.records.log_values import Head, from_row
from trinity_es.events.vocabulary import KnownEnd, RewindAccepted

__all__ = [
    "HERE", "Claim", "Mark", "MemoryFile", "acceptance", "claim_to_dict", "claims_of", "find_lost", "lost_between",
    "require_known", "rewound_error",
]


def find_lost(connection: Connection, claims: Sequence[Claim]) -> tuple[Head, list[Claim]]:
    """Return the end of the log, and the claims that are false: the log lacks the event of their mark."""
    row = connection.execute(select(schema.heads)).one()
    head = Head(position=row.last_position, generation=row.generation, hash=bytes(row.last_hash))
    has_other_generations = any(claim.mark.generation != head.generation for claim in claims)
    given_up = _given_up_generations(connection) if has_other_generations else set[str]()

    def is_lost(mark: Mark) -> bool:
        if mark.generation == head.generation:
            return _hash_at(connection, head, mark.position) != mark.hash
        return mark.generation not in given_up

    return head, [claim for claim in claims if is_lost(claim.mark)]


def require_known(connection: Connection, head: Row[Any] | LockedHead, url: str, mark: Mark | None) -> None:
    """Raise LogRewound if the log lacks the event at `mark`, the newest that this process has seen.

    `head`: the log's row of `es_log_head`.
    """
    if mark is not None:
        end = Head(position=head.last_position, generation=head.generation, hash=bytes(head.last_hash))
        if _hash_at(connection, end, mark.position) != mark.hash:
            raise rewound_error(url, end, [Claim(mark, "this process")])


def _hash_at(connection: Connection, head: Head, position: int) -> bytes | None:
    """Return the hash at a position of the log, which ends at `head`; None without such an event."""
    if position == 0:
        return schema.GENESIS
    if position == head.position:
        return head.hash
    query = select(schema.events.c.hash).where(schema.events.c.position == position)
    value = connection.execute(query).scalar_one_or_none() if position < head.position else None
    return None if value is None else bytes(value)


def _given_up_generations(connection: Connection) -> set[str]:
    """Return the generations that earlier `RewindAccepted` events gave up for the log's current generation."""
    rows = rare_page(connection, ["RewindAccepted"])
    events = [event for row in rows if isinstance(event := from_row(row).event, RewindAccepted)]
    return {generation for e in events for generation in (e.generation_before, *(k.generation for k in e.lost))}


def rewound_error(url: str, head: Head | None, lost: Sequence[Claim]) -> LogRewound:
    """Return an error that names the acknowledged end, the log's end, and what to do. `head`: None without a log."""
    claim = max(lost, key=lambda c: c.mark.position)
    mark, other_holders = claim.mark, sorted({c.by for c in lost} - {claim.by})
    knows = f"{claim.by} knows it up to position {mark.position} (hash {mark.hash.hex()[:12]})"
    knows += f" ({', '.join(other_holders)} too)" if other_holders else ""
    if head is None:
        problem = f"lost what was acknowledged: {knows}, and there is no log any more"
    elif mark.generation != head.generation:
        problem = (f"is another log than the one that was acknowledged: {knows}, and the log that is there, up to "
                   f"position {head.position}, is of another generation ({head.generation[:8]}, not "
                   f"{mark.generation[:8]})")
    elif mark.position > head.position:
        problem = (f"was at position {mark.position} and is at {head.position}: {knows}, and positions "
                   f"{head.position + 1} to {mark.position} are lost")
    else:
        problem = f"lost what was acknowledged: {knows}, and another event is there now, in a log up to {head.position}"
    return LogRewound(
        f"{url} {problem}: it was restored from an older copy, or its server lost commits. Nothing more is "
        "acknowledged: bring the better copy back, accept the loss with `trinity-es accept-rewind`, or begin a new run "
        "under another `name` (or store.url, if that is set)",
        position=mark.position, found=0 if head is None else head.position, lost=[claim_to_dict(c) for c in lost],
    )


def acceptance(head: Head, lost: Sequence[Claim], generation: str, by: str, reason: str) -> RewindAccepted:
    """Return the event that accepts the loss of these claims. The log ends at `head` and gets a new `generation`."""
    positions = [c.mark.position for c in lost if c.mark.generation == head.generation]
    foreign_positions = [c.mark.position for c in lost if c.mark.generation != head.generation]
    return RewindAccepted(
        lost=[KnownEnd(generation=c.mark.generation, position=c.mark.position, hash=c.mark.hash.hex(), by=c.by)
              for c in lost],
        first=1 if foreign_positions else min(min(p, head.position + 1) for p in positions),
        last=max([*positions, *foreign_positions]),
        kept=head.position, generation_before=head.generation, generation=generation, by=by, reason=reason,
    )
