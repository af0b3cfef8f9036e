"""Fold of one runner's units and their outcomes. Pure.

It covers many batches, so it reads the stored JSON without making event objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from trinity_es.events.store.records.log_values import Recorded

__all__ = ["WORK", "RunnerWork", "work_of"]

WORK = ("TasksDispatched", "RunsFinished", "TaskFinished", "AttemptFailed")


@dataclass(slots=True, kw_only=True)
class RunnerWork:
    """Work of one runner, in all its incarnations or in one."""

    units: int = 0
    runs: int = 0
    response_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Total duration of the attempts, as measured by the runner. Concurrent attempts each count in full."""
    versions: set[int] = field(default_factory=set)
    """Weights versions that the runner had when it got its units."""
    first_at: float | None = None
    last_at: float | None = None


def work_of(recorded: Iterable[Recorded], runner: str, incarnation: int | None = None) -> RunnerWork:
    """Fold these events into the work of one runner. Events of other runners are skipped."""
    work = RunnerWork()
    counted_attempts: set[tuple[int, ...]] = set()
    for item in recorded:
        if item.type not in WORK:
            continue
        event = orjson.loads(item.data)
        if event["runner"] != runner or incarnation not in (None, event["incarnation"]):
            continue
        if item.type == "TasksDispatched":
            work.units += len(event["units"])
            work.versions.add(event["model_version"])
            work.first_at = item.recorded_at if work.first_at is None else work.first_at
        else:
            # The finished and the failed runs of one attempt are separate events with the same seconds.
            attempt = event["incarnation"], event["task"], event["run_id_base"], event["attempt"]
            if attempt not in counted_attempts:
                work.seconds += event.get("seconds", 0.0)
                counted_attempts.add(attempt)
            if item.type == "AttemptFailed":
                work.failures[event["kind"]] += 1
            else:
                work.runs += len(event["runs"])
                work.response_tokens += sum(r.get("response_tokens", 0) for r in event["runs"])
                work.response_tokens += event.get("other_response_tokens", 0)
        work.last_at = item.recorded_at
    return work
