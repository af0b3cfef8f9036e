"""Events of experiences outside their batch's stream: answers of the proxy, the queue, outputs, freed payloads."""

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
    """Experiences that a client sent outside any batch went through the pipeline."""

    pipeline_metrics: dict[str, float]
    experiences: list[PayloadRef]
    selected: int
    dropped: int
    request: str = ""
    """The client's id for this request. The same request, sent again, has the same id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRecorded(Event, stream="answers"):
    """The proxy generated these answers. It sends the end of each to its client only after this event."""

    answers: list[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRewarded(Event, stream="answers"):
    """A client posted a reward for these answers, which replaces any earlier reward."""

    messages: list[str]
    reward: float
    task: str | None = None
    """Task of the answers, which is their group in the pipeline. None: each answer is a task of its own."""
    run: int | None = None
    """Run of the task; None means 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersDelivered(Event, stream="answers"):
    """These answers and their rewards went through the pipeline: see ExperiencesProcessed of the same transaction."""

    messages: list[str]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesRedelivered(Event, stream="experiences"):
    """A trainer went back to its checkpoint of `step`. It gets the batches again on which it trained after that."""

    step: int
    batches: list[BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesTaken(Event, stream="queue"):
    """A trainer took these experiences from the queue (`take_experiences`), in this order."""

    items: list[TakenItem]
    at: float
    """Unix seconds of the coordinator's clock; `buffer.queue.reuse_cooldown_time` counts from here."""
    step: int | None = None
    """The trainer's step that uses them."""
    request: str = ""
    """The client's id for this request; the same request again gets the same experiences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesReturned(Event, stream="queue"):
    """A trainer went back to its checkpoint of `step`. Experiences that it took for later steps count as not taken."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten(Event, stream="output/<output>"):
    """The experiences that a batch or request delivered were written to an output of the pipeline."""

    output: str
    key: str
    """Name of the entry in the output. A repeated write has the same name."""
    position: int
    """Position of its BatchFinalized or ExperiencesProcessed."""
    experiences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFailed(Event, stream="output/<output>"):
    """An output could not be written. The batch is finalized and its experiences are delivered nevertheless."""

    output: str
    key: str
    position: int
    error: str
    retry: bool
    """True: the write is repeated, and later ones wait for it. False: it was given up, since its payloads are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsFreed(Event, stream="experiences"):
    """Payloads of batches that were trained long enough ago were deleted. The batches' events stay."""

    batches: list[BatchId]
    payloads: int
    bytes: int
