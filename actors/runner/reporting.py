"""What a runner reports of units that it ran: their experiences in the payload store, and an outcome for each.

Whatever is wrong with a unit's experiences or numbers is that unit's failure, not its group's.
"""

from __future__ import annotations

from trinity_es.actors.message_sizes import LARGEST_RESULTS, grouped, outcome_size, pack_results, shortened
from trinity_es.actors.messages import UnitAssignment, UnitOutcome
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.events.errors import TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import FailureKind
from trinity_es.events.vocabulary import PayloadRef, Unit

__all__ = ["failed", "in_parts", "runs_of", "written"]


def written(group: list[tuple[UnitAssignment, UnitResult]], payloads: PayloadStore) -> list[UnitOutcome]:
    """Write one payload for all experiences of the group, and one for the results of a unit that has many; return an
    outcome for each unit.
    """
    kept = [done.experiences if item.keep_experiences else [] for item, done in group]
    broken: dict[int, str] = {}
    try:
        data = Experience.serialize_many([e for part in kept for e in part])
    except TrinityError:  # one of them can't be written: find it, keep the others
        for index, part in enumerate(kept):
            try:
                Experience.serialize_many(part)
            except TrinityError as e:
                broken[index], kept[index] = str(e), []
        data = Experience.serialize_many([e for part in kept for e in part])
    digest = payloads.put(data) if any(kept) else ""
    first = 0
    outcomes = []
    for index, (item, done) in enumerate(group):
        if index in broken:
            outcomes.append(failed(item, "data", broken[index]))
            continue
        outcome = UnitOutcome(
            batch_id=item.batch_id, submission=item.submission, unit=item.unit, results=done.results,
            failures=_brief(done.failures),
            payload=PayloadRef(digest=digest, first=first, count=len(kept[index])) if kept[index] else None,
            model_version=done.model_version, model_version_end=done.model_version_end, seconds=done.seconds,
            other_tokens=done.other_tokens, lacks=done.lacks,
        )
        first += len(kept[index])
        try:
            if (size := outcome_size(outcome)) > LARGEST_RESULTS:
                outcome = failed(item, "data", f"the metrics of its runs take {size:,} bytes, and {LARGEST_RESULTS:,} "
                                 "are the most: give each run fewer, or set explorer.max_repeat_times_per_runner")
        except TypeError as e:
            outcome = failed(item, "data", f"its metrics can't be recorded: {e}")
        outcomes.append(outcome)
    return [pack_results(outcome, payloads) for outcome in outcomes]


def failed(item: UnitAssignment, kind: FailureKind, message: str) -> UnitOutcome:
    """Return the outcome of a unit of which all runs failed so."""
    failures = _brief([(run, kind, message) for run in runs_of(item.unit)])
    return UnitOutcome(batch_id=item.batch_id, submission=item.submission, unit=item.unit, failures=failures)


def runs_of(unit: Unit) -> range:
    return range(unit.run_id_base, unit.run_id_base + unit.runs)


def _brief(failures: list[tuple[int, FailureKind, str]]) -> list[tuple[int, FailureKind, str]]:
    """Return the first message of each kind, which is the one that is recorded, fit for a message and the log."""
    told: set[FailureKind] = set()
    out = []
    for run, kind, message in failures:
        out.append((run, kind, "" if kind in told else shortened(message)))
        told.add(kind)
    return out


def in_parts(outcomes: list[UnitOutcome]) -> list[list[UnitOutcome]]:
    """Split into groups that stay under the limit of a message."""
    return grouped(outcomes, outcome_size)
