"""Batch ids, tasks and their status. This module uses no clock, database, actor or numpy.

`task_to_dict` is the only encoding of a `Task`. Messages, log and runner share it, so the task in the log is the task
that ran.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any, ClassVar, Literal

import orjson

from trinity_es.events.errors import DataError, TaskNotSerializable, UnknownWorkflow

__all__ = [
    "MOST_METRICS", "NAME_LENGTH", "Args", "BatchId", "BatchLifecycleState", "BatchType", "FailureKind", "Status",
    "Task", "TaskWrapper", "batch_stream", "check_metric_names", "class_path", "local_time", "require_batch_id",
    "require_finite", "shown", "sort_batch_id", "task_from_dict", "task_to_dict", "with_offset",
]

NAME_LENGTH = 200
"""Maximum length of any name, metrics included, in characters. Some tables have columns of 255."""
MOST_METRICS = 10_000
"""Maximum number of metrics of one run, and of one step of a trainer."""
_SHOWN = 80
"""Maximum number of characters of a value in an error message."""

BatchId = int | str
BatchType = Literal["train", "eval", "collect"]
"""Kind of a batch. A client finalizes `train` and `eval`; a Scheduler takes the results of `collect` task by task."""

FailureKind = Literal["data", "workflow", "timeout", "grader", "runner_lost", "infra"]
"""Cause of a failed attempt: the task's data, workflow code, the time limit, a grader, the runner's death, or the
engine and other parts of the system."""


class BatchLifecycleState(StrEnum):
    """Stage of a batch. FINALIZED and ABORTED are the last ones."""

    PENDING = "pending"
    RUNNING = "running"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        return self in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)


_LEADING_INT = re.compile(r"\d+")
_BATCH_ID_LENGTH = 200
_AMBIGUOUS_TEXT_ID = re.compile(r"-?\d+\Z|'")
"""Pattern of text ids that begin like a number or with a quote. Their stream's name needs quotes."""


def local_time(seconds: float, timespec: str = "seconds", sep: str = "T") -> str:
    """Return unix seconds as local time in ISO format, with the offset from UTC."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(sep, timespec).replace("+00:00", "Z")


def with_offset(at: datetime) -> datetime:
    """Return a time with its offset from UTC; a naive datetime is taken as local time.

    Raises DataError for a local time that occurred twice or never, because of daylight saving time.
    """
    if at.tzinfo is not None:
        return at.astimezone()
    first, last = sorted(at.replace(fold=fold).astimezone() for fold in (0, 1))
    if first == last:
        return first
    if first.replace(tzinfo=None) == at:
        raise DataError(f"{at.isoformat()} came twice, as clocks went back: give {first.isoformat()} or "
                        f"{last.isoformat()}")
    raise DataError(f"{at.isoformat()} never came, as clocks went forward: give a time with its offset, as in "
                    f"{last.isoformat()}")


def sort_batch_id(batch_id: BatchId) -> tuple[float, int, str]:
    """Return the sort key of a batch id; batches with smaller keys run first.

    Ids sort by their leading number. At equal numbers an int (a training step) precedes a string (an eval at that
    step). Strings without a leading number come last.

    >>> sorted(["nightly", "3/gsm8k", 12, 3], key=sort_batch_id)
    [3, '3/gsm8k', 12, 'nightly']
    """
    if isinstance(batch_id, int):
        return (float(batch_id), 0, "")
    match = _LEADING_INT.match(batch_id)
    return (float(match.group()) if match else math.inf, 1, batch_id)


def shown(value: Any) -> str:
    """Return a value as ASCII text for an error message, cut to 80 characters."""
    try:
        text = ascii(value)
    except Exception:  # for example an int with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def check_metric_names(names: Collection[str]) -> None:
    """Raise DataError if there are too many names of metrics, or one is too long."""
    if len(names) > MOST_METRICS:
        raise DataError(f"a run gave {len(names):,} metrics: at most {MOST_METRICS:,} are expected")
    for name in names:
        if len(name) > NAME_LENGTH:
            raise DataError(f"a metric has a name of {len(name):,} characters, {shown(name)}: at most {NAME_LENGTH} "
                            "are expected")


def require_batch_id(value: Any) -> BatchId:
    """Return the value if it can name a batch. Raises DataError."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return value
    if isinstance(value, str) and 0 < len(value) <= _BATCH_ID_LENGTH and value.isprintable():
        return value
    raise DataError(
        f"batch_id is {shown(value)}: expected an int (a step, below 2**53), or a string of at most "
        f"{_BATCH_ID_LENGTH} printable characters such as \"12/gsm8k\""
    )


def batch_stream(batch_id: BatchId) -> str:
    """Return the name of a batch's stream: `batch/12` for `12`, `batch/'12'` for `"12"`. Raises DataError."""
    if not isinstance(batch_id, str):
        return f"batch/{require_batch_id(batch_id)}"
    return f"batch/'{batch_id}'" if _AMBIGUOUS_TEXT_ID.match(batch_id) else f"batch/{batch_id}"


class Args(dict[str, Any]):
    """Arguments of a task, whose keys are also attributes. Known keys have defaults; None stands for the config's.

    >>> args = Args({"prompt_key": "question"})
    >>> args.prompt_key, args.response_key, args.system_prompt
    ('question', 'answer', None)
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "prompt_key": "prompt", "response_key": "answer", "n": 1,
        **dict.fromkeys((
            "system_prompt", "reply_prefix", "temperature", "top_p", "top_k", "max_tokens", "logprobs", "seed",
        )),
    }

    def __getattr__(self, name: str) -> Any:
        if name in self or name in self._DEFAULTS:
            return self.get(name, self._DEFAULTS.get(name))
        raise AttributeError(f"there is no {name!r} among these arguments: {', '.join(self) or 'there are none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass
class Task:
    """A data sample, the workflow that plays it, and the number of runs. Positional arguments are those of Trinity-RFT.

    Submission sets `batch_id` and `task_id` (the position in the batch). All fields but `workflow` and `reward_fn` are
    plain JSON.
    """

    workflow: type[Any] | str | None = None
    """Class, registered name, or "module:Class"."""
    repeat_times: int | None = None
    """Number of runs of this task (the size of its GRPO group); None means 1."""
    format_args: dict[str, Any] = field(default_factory=Args)
    """`prompt_key` and `response_key` (keys of raw_task), `system_prompt` and `reply_prefix` (texts)."""
    rollout_args: dict[str, Any] = field(default_factory=Args)
    """Sampling parameters `temperature, top_p, top_k, max_tokens, logprobs, seed, n`."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: type[Any] | str | None = None
    raw_task: dict[str, Any] | None = None
    """The data sample of the taskset, unchanged."""
    batch_id: BatchId = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)
    """Origin of the sample: `{"taskset": name, "index": row}`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("format_args", "rollout_args") and type(value) is dict:
            value = Args(value)
        object.__setattr__(self, name, value)

    def to_workflow(self, model: Any, auxiliary_models: Sequence[Any] | None = None) -> Any:
        """Make the task's workflow with these models, as a runner does. Raises UnknownWorkflow."""
        cls = self.workflow
        if isinstance(cls, str):
            module, _, attribute = cls.partition(":")
            if not attribute:
                raise UnknownWorkflow(
                    f"workflow {cls!r} is a registered name: give \"module:Class\", or WORKFLOWS.get({cls!r})"
                )
            cls = attrgetter(attribute)(importlib.import_module(module))
        if cls is None:
            raise UnknownWorkflow("the task names no workflow: set Task.workflow")
        return cls(task=self, model=model, auxiliary_models=auxiliary_models)

    def to_dict(self) -> dict[str, Any] | None:
        """Return `raw_task`. Trinity-RFT has this method too."""
        return self.raw_task

    @property
    def task_desc(self) -> str | list[dict[str, Any]] | None:
        """The prompt, a text or chat messages: `raw_task[format_args["prompt_key"]]`, key "prompt" by default."""
        return (self.raw_task or {}).get(self.format_args.get("prompt_key", "prompt"))

    @property
    def truth(self) -> str | None:
        """The reference answer: `raw_task[format_args["response_key"]]`, key "answer" by default."""
        return (self.raw_task or {}).get(self.format_args.get("response_key", "answer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWrapper:
    """Unit of work: runs `run_id_base .. run_id_base + repeat_times - 1` of one task of one batch."""

    task: Task
    batch_id: BatchId
    run_id_base: int = 0
    repeat_times: int = 1


@dataclass(slots=True)
class Status:
    """Outcome of a task. `metrics` has a dict for each run; from a Scheduler, one dict for the whole task."""

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    message: str | None = None
    per_run: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each run, if `metrics` has one dict for the whole task."""

    @property
    def ok(self) -> bool:
        return self.completed_runs == self.total_runs

    @property
    def metric(self) -> dict[str, float]:
        """Metrics of the first run."""
        run_metrics = self.per_run or self.metrics
        return run_metrics[0] if run_metrics else {}


def class_path(cls: type[Any] | str) -> str:
    """Return a class as "module:Class" for other processes; return a text unchanged.

    Raises TaskNotSerializable for a class that other processes can't import (local, or of `__main__`).
    """
    if isinstance(cls, str):
        return cls
    if not callable(cls) or not hasattr(cls, "__qualname__"):
        raise TaskNotSerializable(f"{cls!r:.60} is no class: pass a class, a registered name or \"module:Class\"")
    name, module = cls.__qualname__, cls.__module__
    if "<locals>" in name or module == "__main__":
        raise TaskNotSerializable(
            f"class {module}.{name} can't be imported by a runner: define it at the top of a module that can be "
            f"imported, and pass the class or \"module:{cls.__name__}\""
        )
    return f"{module}:{name}"


_ENCODED = (
    "repeat_times", "format_args", "rollout_args", "workflow_args", "reward_fn_args", "is_eval", "raw_task", "index",
)
_MAPPINGS = {"format_args", "rollout_args", "workflow_args", "reward_fn_args", "raw_task", "index"}


def task_to_dict(task: Task) -> dict[str, Any]:
    """Return a task as plain JSON, without its ids. Raises TaskNotSerializable, naming the field and the type."""
    data: dict[str, Any] = {"workflow": None if task.workflow is None else class_path(task.workflow)}
    if task.reward_fn is not None:
        data["reward_fn"] = class_path(task.reward_fn)
    for name in _ENCODED:
        value = getattr(task, name)
        if value is None or value is False or (value == {} and name != "raw_task"):
            continue
        if name in _MAPPINGS and not isinstance(value, dict):
            raise TaskNotSerializable(f"task field {name} is a {type(value).__name__}: a mapping is expected")
        try:
            culprit = _first_part_not_json(value, name)
        except RecursionError:
            culprit = f"{name}, which is nested too deeply or holds itself,"
        if culprit is None:
            try:
                orjson.dumps(value)  # an integer beyond 64 bits, text that is no UTF-8
            except TypeError as e:
                culprit = f"{name}: {e}"
        if culprit is not None:
            raise TaskNotSerializable(
                f"task field {culprit} can't be written as JSON; put plain values there "
                "(numbers, text, lists, dicts) and load heavy objects inside the workflow"
            )
        data[name] = value
    return data


def task_from_dict(data: dict[str, Any], *, batch_id: BatchId = "", task_id: int | str = "") -> Task:
    return Task(**data, batch_id=batch_id, task_id=task_id)


def _first_part_not_json(value: Any, path: str) -> str | None:
    """Return path and type of the first part that is not plain JSON; None if all are. orjson would convert some."""
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{path} is {value}, which"
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                return f"{path}[{key!r}] (key of type {type(key).__name__})"
            culprit = _first_part_not_json(inner, f"{path}.{key}")
            if culprit is not None:
                return culprit
        return None
    if isinstance(value, list | tuple):
        culprits = (_first_part_not_json(inner, f"{path}[{i}]") for i, inner in enumerate(value))
        return next((culprit for culprit in culprits if culprit is not None), None)
    return f"{path} (a {type(value).__name__})"


def require_finite(value: Any, path: str = "value") -> None:
    """Raise DataError, naming the path, if a JSON-like value holds NaN or an infinity. orjson writes these as null."""
    if type(value) is float:
        if not math.isfinite(value):
            raise DataError(f"{path} is {value}: only finite numbers can be recorded", path=path)
    elif isinstance(value, dict):
        for key, inner in value.items():
            require_finite(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            require_finite(inner, f"{path}[{i}]")
    elif is_dataclass(value):
        for field_ in fields(value):
            require_finite(getattr(value, field_.name), f"{path}.{field_.name}")

