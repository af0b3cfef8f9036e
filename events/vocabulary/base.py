"""The base of all events, and the values inside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trinity_es.events.quick_pickle import quickly_pickled
from trinity_es.events.values import BatchId

__all__ = ["Answer", "Event", "KnownEnd", "PayloadRef", "RunResult", "TakenItem", "TasksetSource", "Unit"]


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is dispatched: some consecutive runs of one task, and which attempt at them this is."""

    task: int
    run_id_base: int
    runs: int
    attempt: int
    """1 for the first; counted per task and first run."""


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Where experiences lie: `count` of them from `first` on in the payload with this digest."""

    digest: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenItem:
    """Experiences that were taken from the queue: `count` in a row, from `first` on, of what a batch delivered."""

    batch_id: BatchId
    version: int
    """Of the batch's stream at its BatchFinalized: the id may be used again."""
    first: int
    count: int
    use_count: int
    """How often each of them was taken, with this time."""


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One completed run: its metrics (aggregated from its experiences), and what it cost."""

    run: int
    metrics: dict[str, float]
    experiences: int = 0
    prompt_tokens: int = 0
    """Read by the model for this run; of a workflow that does all runs itself (`can_repeat`), as those tell."""
    response_tokens: int = 0
    """Made by it, in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the proxy of mode `serve` answered to one request, and where its experiences lie."""

    message: str
    """The message id, as the client got it: `chatcmpl-...` or `cmpl-...`."""
    runner: str
    incarnation: int
    model_version: int
    """The oldest version that made any of the tokens."""
    model_version_end: int
    """The newest."""
    payload: PayloadRef | None
    """One experience for each of its choices; None where not one token was generated."""
    prompt_tokens: int = 0
    response_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    stream: ClassVar[str]
    """Where it is recorded; `<runner>`, `<taskset>` and `<output>` stand for the field of that name, `<id>` for the
    batch."""
    schema_version: ClassVar[int] = 1

    def __init_subclass__(cls, stream: str = "") -> None:
        if stream:  # `dataclass` makes a class with slots again, without its arguments
            cls.stream = stream

    @classmethod
    def stream_of(cls, name: str) -> str:
        """Return the stream of this event about the runner, taskset or output of this name."""
        return f"{cls.stream.partition('<')[0]}{name}"

    def own_stream(self) -> str:
        """Return the stream where this event belongs. An event of a batch does not say which: see `batch_stream`."""
        head, _, field = self.stream.partition("<")
        return f"{head}{getattr(self, field[:-1])}" if field else head


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEnd:
    """What somebody knew of a log: a position, and the hash of the event there."""

    generation: str
    """Of the log that they knew."""
    position: int
    hash: str
    """In hexadecimal."""
    by: str
    """Who knew it: this host's memory, a client, a runner, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetSource:
    """What a taskset is read from, found when a run began, the same for all of it."""

    taskset: str
    is_eval: bool
    path: str
    """As in the config: `hub:owner/name`, `reasoning_gym:family`, `verifiers:environment` or a file."""
    subset: str | None
    """Of the hub's dataset; where the config names none, the name of the default one."""
    split: str | None
    asked: str | None
    """Branch, tag or commit that the config asked for; None: the main branch."""
    revision: str
    """What that was: the commit of the hub's repository; of reasoning-gym the version of the package; of an environment
    its version, and the SHA-256 of the tasks that it wrote; of a file its SHA-256."""
    args: str
    """Config of the family of reasoning-gym, as JSON; "" for others."""
    rows: int
    order: str | None = None
    """How rows are chosen to train on: `shuffle`, `seed` and `data_selector`, as JSON; "" for the file's own order;
    None in logs of before 2026-11."""
