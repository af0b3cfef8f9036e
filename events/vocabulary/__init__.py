"""What can happen: every event of the log.

Events are facts in the past tense, frozen, plain JSON, and never change; a new shape is a new `schema_version` with an
upcaster in `codec.py`. The docstring of a class is its line in docs/EVENTS.md, made from these files, and the string
under a field is that field's. Each class names its stream: `system`, `clock`, `weights`, `pace`, `runner/<name>`,
`taskset/<name>`, `batch/<id>`, `experiences`, `queue`, `output/<name>`, `answers`.
"""

from __future__ import annotations

from trinity_es.events.vocabulary.base import Answer, Event, KnownEnd, PayloadRef, RunResult, TakenItem, Unit
from trinity_es.events.vocabulary.batch import (
    AttemptFailed,
    BatchAborted,
    BatchFinalized,
    BatchFinalizing,
    BatchPaused,
    BatchResumed,
    BatchSubmitted,
    BatchTrained,
    FinalizeFailed,
    RecoveryDecided,
    ResultsTaken,
    RunsFinished,
    StallDetected,
    TaskDropped,
    TaskFinished,
    TaskReopened,
    TasksAdded,
    TasksDispatched,
)
from trinity_es.events.vocabulary.delivery import (
    AnswersDelivered,
    AnswersRecorded,
    AnswersRewarded,
    ExperiencesProcessed,
    ExperiencesRedelivered,
    ExperiencesReturned,
    ExperiencesTaken,
    OutputFailed,
    OutputWritten,
    PayloadsFreed,
)
from trinity_es.events.vocabulary.system import (
    ClockStepped,
    CoordinatorStarted,
    PaceMeasured,
    RewindAccepted,
    RunnerFailed,
    RunnerLost,
    RunnerQuarantined,
    RunnerReady,
    RunnerRetired,
    RunnerStarted,
    SystemConfigured,
    TasksetAdvanced,
    WeightsFailed,
    WeightsLoaded,
    WeightsPublished,
    WritingResumed,
)

__all__ = [
    "EVENTS",
    "RUNNER_LIFE",
    "Answer",
    "AnswersDelivered",
    "AnswersRecorded",
    "AnswersRewarded",
    "AttemptFailed",
    "BatchAborted",
    "BatchFinalized",
    "BatchFinalizing",
    "BatchPaused",
    "BatchResumed",
    "BatchSubmitted",
    "BatchTrained",
    "ClockStepped",
    "CoordinatorStarted",
    "Event",
    "ExperiencesProcessed",
    "ExperiencesRedelivered",
    "ExperiencesReturned",
    "ExperiencesTaken",
    "FinalizeFailed",
    "KnownEnd",
    "OutputFailed",
    "OutputWritten",
    "PaceMeasured",
    "PayloadRef",
    "PayloadsFreed",
    "RecoveryDecided",
    "ResultsTaken",
    "RewindAccepted",
    "RunResult",
    "RunnerFailed",
    "RunnerLost",
    "RunnerQuarantined",
    "RunnerReady",
    "RunnerRetired",
    "RunnerStarted",
    "RunsFinished",
    "StallDetected",
    "SystemConfigured",
    "TakenItem",
    "TaskDropped",
    "TaskFinished",
    "TaskReopened",
    "TasksAdded",
    "TasksDispatched",
    "TasksetAdvanced",
    "Unit",
    "WeightsFailed",
    "WeightsLoaded",
    "WeightsPublished",
    "WritingResumed",
]

EVENTS: dict[str, type[Event]] = {
    name: cls
    for name, cls in list(globals().items())
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""Every event by its name in the log."""

RUNNER_LIFE = ("RunnerStarted", "RunnerReady", "RunnerFailed", "RunnerLost", "RunnerQuarantined", "RunnerRetired")
"""The events that begin and end a runner's lives."""
