"""Ways to keep messages small: groups, shortened texts, and payloads for large results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import orjson

from trinity_es.actors.messages import UnitOutcome
from trinity_es.actors.requests import LIMIT
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import RunResult

__all__ = ["LARGEST_RESULTS", "grouped", "outcome_size", "pack_results", "shortened", "unpack_results"]

LARGEST_RESULTS = 256 * 2**20
"""Maximum JSON of the results of one unit, in bytes: they become one event, and a database takes 1 GB in a row."""

ERROR_LENGTH = 4000
"""Maximum characters of an error's text in the log."""

_T = TypeVar("_T")


def grouped(items: Iterable[_T], size: Callable[[_T], int]) -> list[list[_T]]:
    """Return items in groups below the size limit of a message; without items, one empty group.

    `size` returns the bytes of an item as JSON.
    """
    groups: list[list[_T]] = [[]]
    group_size = 0
    for item in items:
        item_size = size(item)
        if group_size + item_size > LIMIT and groups[-1]:
            groups.append([])
            group_size = 0
        group_size += item_size
        groups[-1].append(item)
    return groups


def shortened(message: str) -> str:
    """Return an error's text as the log can hold it: not too long, and UTF-8, which a file name in it may not be."""
    return message[:ERROR_LENGTH].encode(errors="replace").decode()


def outcome_size(outcome: UnitOutcome) -> int:
    """Return how many bytes an outcome takes as JSON in a message. Raises TypeError for what JSON can't hold."""
    return len(orjson.dumps([outcome.results, outcome.failures])) + 200


def pack_results(outcome: UnitOutcome, payloads: PayloadStore) -> UnitOutcome:
    """Return an outcome that fits in a message. If its results are too large, they go to the payload store.

    The payload belongs to this attempt alone, so it can be deleted once the results are in the log. Raises what
    `PayloadStore.put` raises.
    """
    if outcome_size(outcome) <= LIMIT:
        return outcome
    attempt = [outcome.batch_id, outcome.submission, outcome.unit]
    digest = payloads.put(orjson.dumps([attempt, outcome.results, outcome.failures]))
    return replace(outcome, results=[], failures=[], results_digest=digest)


def unpack_results(outcome: UnitOutcome, payloads: PayloadStore) -> UnitOutcome:
    """Return the outcome that `pack_results` got. Raises what `PayloadStore.get` raises."""
    if not outcome.results_digest:
        return outcome
    _, results, failures = orjson.loads(payloads.get(outcome.results_digest))
    return replace(
        outcome, results=[RunResult(**r) for r in results], failures=[tuple(f) for f in failures], results_digest="",
    )
