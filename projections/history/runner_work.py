"""What one runner did of some batches: units that it got, and what came of them.

Pure. From the stored JSON of a batch's events, as `projections.reading.overview.distributions`: it is asked of many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from trinity_es.events.store.records.recorded import Recorded

__all__ = ["WORK", "RunnerWork", "work_of"]

WORK = ("TasksDispatched", "RunsFinished", "TaskFinished", "AttemptFailed")
"""The types of events that `work_of` needs."""


@dataclass(slots=True, kw_only=True)
class RunnerWork:
    """One runner's part of one batch; of all its lives, or of one."""

    units: int = 0
    runs: int = 0
    response_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts by kind."""
    seconds: float = 0.0
    """Of all attempts together, as the runner measured them; of several at a time it is more than the clock's."""
    versions: set[int] = field(default_factory=set)
    """Of the weights that it had when it got a unit."""
    first_at: float | None = None
    last_at: float | None = None


def work_of(recorded: Iterable[Recorded], runner: str, incarnation: int | None = None) -> RunnerWork:
    """Return the fold of these events, of which others than its own don't count."""
    found, counted = RunnerWork(), set[tuple[int, ...]]()
    for item in recorded:
        if item.type not in WORK:
            continue
        event = orjson.loads(item.data)
        if event["runner"] != runner or incarnation not in (None, event["incarnation"]):
            continue
        if item.type == "TasksDispatched":
            found.units += len(event["units"])
            found.versions.add(event["model_version"])
            found.first_at = item.recorded_at if found.first_at is None else found.first_at
        else:
            # What an attempt finished and what of it failed are events of their own, with the same seconds.
            attempt = event["incarnation"], event["task"], event["run_id_base"], event["attempt"]
            found.seconds += 0.0 if attempt in counted else event.get("seconds", 0.0)
            counted.add(attempt)
            if item.type == "AttemptFailed":
                found.failures[event["kind"]] += 1
            else:
                found.runs += len(event["runs"])
                found.response_tokens += sum(r.get("response_tokens", 0) for r in event["runs"])
                found.response_tokens += event.get("other_response_tokens", 0)
        found.last_at = item.recorded_at
    return found
