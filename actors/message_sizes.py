"""Functions that keep messages small: they group items, cut texts, and put large results into payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import orjson

from trinity_es.actors.messages import UnitOutcome
from trinity_es.actors.requests import LIMIT
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import RunResult

__all__ = ["LARGEST_RESULTS", "outcome_size", "pack_results", "shorten_error", "split_by_size", "unpack_results"]

LARGEST_RESULTS = 256 * 2**20
"""Maximum size in bytes of one unit's results as JSON. They become one event, and a database row holds up to 1 GB."""

ERROR_LENGTH = 4000
"""Maximum characters of an error's text in the log."""

_T = TypeVar("_T")


def split_by_size(items: Iterable[_T], size: Callable[[_T], int]) -> list[list[_T]]:
    """Split items into groups that each fit in a message. Without items, there is one empty group. `size` returns the
    bytes of an item as JSON."""
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


def shorten_error(message: str) -> str:
    """Return an error's text cut to `ERROR_LENGTH` and as valid UTF-8, since a file name in it may not be UTF-8."""
    return message[:ERROR_LENGTH].encode(errors="replace").decode()


def outcome_size(outcome: UnitOutcome) -> int:
    """Return the size of an outcome as JSON, in bytes. Raises TypeError if it has a value that JSON can't hold."""
    return len(orjson.dumps([outcome.results, outcome.failures])) + 200


def pack_results(outcome: UnitOutcome, payloads: PayloadStore) -> UnitOutcome:
    """Return the outcome in a form that fits in a message: results that are too large go to the payload store.

    The payload belongs to this attempt alone, so it can be deleted once the results are in the log. Raises what
    `PayloadStore.put` raises.
    """
    if outcome_size(outcome) <= LIMIT:
        return outcome
    attempt = [outcome.batch_id, outcome.submission, outcome.unit]
    digest = payloads.put(orjson.dumps([attempt, outcome.results, outcome.failures]))
    return replace(outcome, results=[], failures=[], results_digest=digest)


def unpack_results(outcome: UnitOutcome, payloads: PayloadStore) -> UnitOutcome:
    """Undo `pack_results`: return the outcome with its results. Raises what `PayloadStore.get` raises."""
    if not outcome.results_digest:
        return outcome
    _, results, failures = orjson.loads(payloads.get(outcome.results_digest))
    return replace(
        outcome, results=[RunResult(**r) for r in results], failures=[tuple(f) for f in failures], results_digest="",
    )
