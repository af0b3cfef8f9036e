"""The base class of all events, and the values inside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trinity_es.events.quick_pickle import quickly_pickled
from trinity_es.events.values import BatchId

__all__ = [
    "Answer", "ContinuedTask", "Event", "KnownEnd", "PayloadRef", "RunResult", "TakenItem", "TasksetSource", "Unit",
]


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Unit of work: consecutive runs of one task that a runner gets together, for one attempt."""

    task: int
    run_id_base: int
    runs: int
    attempt: int
    """Number of the attempt at these runs, from 1. Counted separately for each task and first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedTask:
    """Task that continues a task of an earlier batch, which that batch cut (stopped unfinished)."""

    task: int
    batch_id: BatchId
    """The earlier batch."""
    cut_task: int
    """Number of the task in the earlier batch."""
    cuts: int
    """Number of times that the task was cut so far."""


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Range of experiences in a payload: `count` of them from `first` on."""

    digest: str
    """SHA-256 of the payload's bytes. For a small payload of a pipeline, `data:` and the bytes themselves in base64."""
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenItem:
    """Consecutive experiences of one batch that a trainer took from the queue: `count` of them from `first` on."""

    batch_id: BatchId
    version: int
    """Version of the batch's stream at its BatchFinalized. It tells batches with the same id apart."""
    first: int
    count: int
    use_count: int
    """Number of times that each of them was taken, including this time."""


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Metrics of one completed run, aggregated from its experiences, and its token counts."""

    run: int
    metrics: dict[str, float]
    experiences: int = 0
    prompt_tokens: int = 0
    """Tokens that the model read for this run. For workflows with `can_repeat`, counted from its experiences."""
    response_tokens: int = 0
    """Tokens that the model generated for this run. Counted in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the proxy (mode `serve`) to one request, with a reference to its experiences."""

    message: str
    """Message id that the client got: `chatcmpl-...` or `cmpl-...`."""
    runner: str
    incarnation: int
    model_version: int
    """Oldest version that made any of the tokens."""
    model_version_end: int
    """Newest version that made any of the tokens."""
    payload: PayloadRef | None
    """Experiences, one per choice; None if no token was generated."""
    prompt_tokens: int = 0
    response_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    stream: ClassVar[str]
    """Stream of this event. `<runner>`, `<taskset>`, `<output>` are fields of the event, `<id>` is the batch's id."""
    schema_version: ClassVar[int] = 1

    def __init_subclass__(cls, stream: str = "") -> None:
        if stream:  # `dataclass` makes a class with slots a second time, without this argument
            cls.stream = stream

    @classmethod
    def stream_of(cls, name: str) -> str:
        """Return the stream of this event class for the runner, taskset or output of this name."""
        return f"{cls.stream.partition('<')[0]}{name}"

    def own_stream(self) -> str:
        """Return the stream of this event. Not for events of a batch, which don't hold its id (use `batch_stream`)."""
        head, _, field = self.stream.partition("<")
        return f"{head}{getattr(self, field[:-1])}" if field else head


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEnd:
    """End of a log as an observer saw it: a position, and the hash of the event there."""

    generation: str
    """Generation of the log."""
    position: int
    hash: str
    """Hash in hexadecimal."""
    by: str
    """The observer: this host's memory file, a client, a runner, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetSource:
    """Source of a taskset, resolved when a run began and fixed for the whole run."""

    taskset: str
    is_eval: bool
    path: str
    """The path in the config: `hub:owner/name`, `reasoning_gym:family`, `verifiers:environment` or a file."""
    subset: str | None
    """Subset of the hub's dataset; the name of the default one if the config has none."""
    split: str | None
    asked: str | None
    """Branch, tag or commit in the config; None: the main branch."""
    revision: str
    """The resolved revision. Hub: the commit of the repository; reasoning-gym: the version of the package; environment:
    its version and the SHA-256 of the tasks that it wrote; file: its SHA-256."""
    args: str
    """Config of the reasoning-gym family, as JSON; "" for others."""
    rows: int
    order: str | None = None
    """Settings that order the training rows, as JSON: `shuffle`, `seed`, `data_selector`. "" for the order of the file;
    None in logs written before 2026-11."""
