"""Input of a simulation: the settings to simulate, and the recorded history of batches, runners and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState

__all__ = ["Addition", "Anchor", "Duration", "History", "Life", "PastBatch", "Settings", "WeightsUpdate"]

LATE_SECONDS = 0.05
"""If finalizing began later than this after a batch had enough results, the batch had to wait for its caller."""

Anchor = tuple[str, Any]
"""Event to which delays refer: ("begin", None), ("submit" | "end" | "trained", batch id), ("weights", version)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings to simulate. None means the recorded value."""

    timeout: float | None = None
    """`explorer.max_timeout` in seconds."""
    over_rollout_ratio: float | None = None
    """`explorer.over_rollout.ratio`, of train batches."""
    runners: int | None = None
    """Number of engines of the rollout model. Additional ones have the concurrency of the largest, and never die."""
    max_concurrency: int | None = None
    """`explorer.max_concurrency`, of each runner."""
    max_retry: int | None = None
    """`explorer.max_retry_times`."""
    runs_per_unit: int | None = None
    """`explorer.max_repeat_times_per_runner`."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Duration and outcome of one run in one attempt."""

    seconds: float
    kind: str = ""
    """FailureKind; empty if the run completed."""
    limit: float = 0.0
    """Time limit in seconds."""
    cut: bool = False
    """True if the run was cut off after `seconds`: its full duration and outcome are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Tasks that a client added, perhaps because the pipeline had left too few groups (`missing`)."""

    event: ev.TasksAdded
    added_at: float
    missing: ev.GroupsMissing | None = None
    pipeline_seconds: float = 0.0
    """Duration of the pipeline that left too few groups."""
    pause: float = 0.0
    """Seconds from the end of that pipeline until the tasks were added."""


@dataclass(kw_only=True)
class PastBatch:
    """Recorded history of one batch."""

    submitted: ev.BatchSubmitted
    submitted_at: float
    state: BatchState | None = None
    durations: dict[tuple[int, int, int], Duration] = field(default_factory=dict)
    """Durations by (task, run, attempt)."""
    overheads: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    """Two overheads of each unit, by (task, first run, attempt): its seconds on the runner minus those of its runs, and
    the seconds from then until its outcome was in the log."""
    due_at: float | None = None
    """When the batch had enough results to finalize."""
    finalizing_at: float | None = None
    """When finalizing first began."""
    pipeline_at: float | None = None
    """When the pipeline first began after the last tasks were added."""
    additions: list[Addition] = field(default_factory=list)
    ended_at: float | None = None
    trained_at: float | None = None
    attempts: int = 0
    """Number of units sent to runners."""

    @property
    def batch_id(self) -> BatchId:
        return self.submitted.batch_id

    @property
    def was_requested_late(self) -> bool:
        """True if the batch had enough results before its caller asked to finalize it."""
        begun = self.finalizing_at
        return begun is not None and self.due_at is not None and begun - self.due_at > LATE_SECONDS

    @property
    def timer_delay(self) -> float:
        """Seconds by which the timer of `wait_after_min` was late."""
        if self.was_requested_late or self.finalizing_at is None or self.due_at is None:
            return 0.0
        return max(0.0, self.finalizing_at - self.due_at)

    @property
    def pipeline_seconds(self) -> float:
        """Duration of the last pipeline, which ended the batch. Those before added tasks don't count."""
        return 0.0 if self.ended_at is None or self.pipeline_at is None else self.ended_at - self.pipeline_at

    @cached_property
    def usual_overheads(self) -> tuple[float, float]:
        """Return the medians of the two overheads of a unit, in seconds; (0, 0) without units."""
        overheads = list(self.overheads.values())
        return (median(o[0] for o in overheads), median(o[1] for o in overheads)) if overheads else (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process of a runner of the rollout model, from the time when it was ready."""

    runner: str
    incarnation: int
    places: int
    ready_at: float
    ended_at: float | None
    is_blamed: bool = True
    """True if the end of the process counts as a failed attempt of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdate:
    """Publication of new weights, with the seconds that each runner took to load them."""

    version: int
    published_at: float
    loads: dict[str, float]


@dataclass(slots=True, kw_only=True)
class History:
    """Recorded history of batches that no other batch overlaps in time, with their runners and weights."""

    config: dict[str, Any]
    batches: list[PastBatch]
    lives: list[Life]
    updates: list[WeightsUpdate]
    pace: ev.PaceMeasured | None
    """Speed of attempts before the first of these batches, from which dynamic timeouts follow."""
    unit_seconds: float | None
    """Usual duration of a unit before these batches; None if there were no earlier batches."""
    anchors: list[tuple[float, Anchor]]
    """(time, anchor) in order of time; the first anchor is ("begin", None)."""

    def last_anchor_before(self, at: float) -> tuple[Anchor, float]:
        """Return the last anchor before this time, and the seconds since then."""
        when, anchor = next((a for a in reversed(self.anchors) if a[0] < at), self.anchors[0])
        return anchor, at - when
