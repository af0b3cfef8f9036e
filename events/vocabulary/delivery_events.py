"""What becomes of experiences beyond their batch: answers, the queue, outputs, payloads that are freed."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Answer, Event, PayloadRef, TakenItem

__all__ = [
    "AnswersDelivered", "AnswersRecorded", "AnswersRewarded", "ExperiencesProcessed", "ExperiencesRedelivered",
    "ExperiencesReturned", "ExperiencesTaken", "OutputFailed", "OutputWritten", "PayloadsFreed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesProcessed(Event, stream="experiences"):
    """Experiences that a client handed in, outside any batch, went through the pipeline."""

    pipeline_metrics: dict[str, float]
    experiences: list[PayloadRef]
    selected: int
    dropped: int
    request: str = ""
    """The client's id for this request: a resent request is recognised by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRecorded(Event, stream="answers"):
    """The proxy gave these answers; their clients got the end of them only after this."""

    answers: list[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRewarded(Event, stream="answers"):
    """A reward was posted for these answers; one that was posted before is replaced."""

    messages: list[str]
    reward: float
    task: str | None = None
    """The task that they were part of, which is their group in the pipeline; None: each answer is a task of its own."""
    run: int | None = None
    """Which run of it; None: 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersDelivered(Event, stream="answers"):
    """These answers went through the pipeline with their rewards: the ExperiencesProcessed of the same transaction."""

    messages: list[str]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesRedelivered(Event, stream="experiences"):
    """A trainer came back from its checkpoint of `step`: these batches, trained later than that, are its again."""

    step: int
    batches: list[BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesTaken(Event, stream="queue"):
    """A trainer took these from the queue (`take_experiences`), in this order."""

    items: list[TakenItem]
    at: float
    """Unix seconds, by the coordinator's clock: `buffer.queue.reuse_cooldown_time` counts from here."""
    step: int | None = None
    """The trainer's step that they are for."""
    request: str = ""
    """The client's id for this request: asked again, it gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesReturned(Event, stream="queue"):
    """A trainer came back from its checkpoint of `step`: what was taken for later steps counts as not taken."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten(Event, stream="output/<output>"):
    """An output of the pipeline holds what this batch (or request) delivered, whole."""

    output: str
    key: str
    """The name under which it was written: it is the same, however often it is written."""
    position: int
    """Of the BatchFinalized or ExperiencesProcessed that it holds."""
    experiences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFailed(Event, stream="output/<output>"):
    """An output could not be written; the batch is finalized all the same, and its experiences are delivered."""

    output: str
    key: str
    position: int
    error: str
    retry: bool
    """It is tried again, and nothing later is written before; false: given up, its payloads are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsFreed(Event, stream="experiences"):
    """Payloads of batches that were trained long enough ago were deleted; their events stay."""

    batches: list[BatchId]
    payloads: int
    bytes: int
