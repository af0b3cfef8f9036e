"""What becomes of experiences beyond their batch: answers, the queue, outputs, payloads that are freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Answer, Event, PayloadRef, TakenItem

__all__ = [
    "AnswersDelivered", "AnswersRecorded", "AnswersRewarded", "ExperiencesProcessed", "ExperiencesRedelivered",
    "ExperiencesReturned", "ExperiencesTaken", "OutputFailed", "OutputWritten", "PayloadsFreed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesProcessed(Event):
    """Experiences that a client handed in, outside any batch, went through the pipeline."""

    stream: ClassVar[str] = "experiences"
    pipeline_metrics: dict[str, float]
    experiences: list[PayloadRef]
    selected: int
    dropped: int
    request: str = ""
    """The client's id for this request: a resent request is recognised by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRecorded(Event):
    """The proxy gave these answers; their clients got the end of them only after this."""

    stream: ClassVar[str] = "answers"
    answers: list[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRewarded(Event):
    """A reward was posted for these answers; one that was posted before is replaced."""

    stream: ClassVar[str] = "answers"
    messages: list[str]
    reward: float
    task: str | None = None
    """The task that they were part of, which is their group in the pipeline; None: each answer is a task of its own."""
    run: int | None = None
    """Which run of it; None: 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersDelivered(Event):
    """These answers went through the pipeline with their rewards: the ExperiencesProcessed of the same transaction."""

    stream: ClassVar[str] = "answers"
    messages: list[str]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesRedelivered(Event):
    """A trainer came back from its checkpoint of `step`: these batches, trained later than that, are its again."""

    stream: ClassVar[str] = "experiences"
    step: int
    batches: list[BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesTaken(Event):
    """A trainer took these from the queue (`take_experiences`), in this order."""

    stream: ClassVar[str] = "queue"
    items: list[TakenItem]
    at: float
    """Unix seconds, by the coordinator's clock: `buffer.queue.reuse_cooldown_time` counts from here."""
    step: int | None = None
    """The trainer's step that they are for."""
    request: str = ""
    """The client's id for this request: asked again, it gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesReturned(Event):
    """A trainer came back from its checkpoint of `step`: what was taken for later steps counts as not taken."""

    stream: ClassVar[str] = "queue"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten(Event):
    """An output of the pipeline holds what this batch (or request) delivered, whole."""

    stream: ClassVar[str] = "output/<output>"
    output: str
    key: str
    """The name under which it was written: it is the same, however often it is written."""
    position: int
    """Of the BatchFinalized or ExperiencesProcessed that it holds."""
    experiences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFailed(Event):
    """An output could not be written; the batch is finalized all the same, and its experiences are delivered."""

    stream: ClassVar[str] = "output/<output>"
    output: str
    key: str
    position: int
    error: str
    retry: bool
    """It is tried again, and nothing later is written before; false: given up, its payloads are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsFreed(Event):
    """Payloads of batches that were trained long enough ago were deleted; their events stay."""

    stream: ClassVar[str] = "experiences"
    batches: list[BatchId]
    payloads: int
    bytes: int
