"""All errors of trinity_es; users import them from `trinity_es.errors`.

```
TrinityError
├── ConfigError, TasksetError, TaskNotSerializable, UnknownWorkflow, DataError (NotFinite)  bad input (ValueError)
├── BatchNotFound, RunnerNotFound, HostNotFound, WeightNotFound, AnswerNotFound  no such thing (KeyError)
├── BatchAlreadyActive, BatchTypeMismatch, AnswerDelivered                       wrong state (ValueError)
├── FinalizeTimeout, TakeTimeout, WaitTimeout                                nothing lost, try again (TimeoutError)
├── TooFewGroups                                                             nothing lost, add tasks
├── PipelineError, WorkflowError, GraderError, EngineError, EnvironmentFailed, SyncError  a part failed
├── NotRunning, AlreadyRunning, StartupError, WrongKey, VersionMismatch, RequestRefused    the system
└── LogError
    ├── LogUnavailable (LogReplaced), LogRewound                               the log can't be written, or trusted
    ├── LogNotFound, NotALog, LogTooNew, LogCorrupt, InvalidEvent               the log can't be read
    ├── PayloadNotFound, CorruptPayload                                          a payload can't be read
    └── ConcurrencyError, CommitMismatch, Fenced                                     two writers
```

Every error that trinity_es raises on purpose is a `TrinityError`; many are also the built-in error with the same
meaning. Between processes an error travels as its class name, message and a JSON dict of details, and the receiver
raises the same class. A message says what is wrong with which value, and what to do.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

__all__ = [
    "AlreadyRunning", "AnswerDelivered", "AnswerNotFound", "BatchAlreadyActive", "BatchNotFound", "BatchTypeMismatch",
    "CommitMismatch", "ConcurrencyError", "ConfigError", "CorruptPayload", "DataError", "EngineError",
    "EnvironmentFailed", "Fenced", "FinalizeTimeout", "GraderError", "HostNotFound", "InvalidEvent", "LogCorrupt",
    "LogError", "LogNotFound", "LogReplaced", "LogRewound", "LogTooNew", "LogUnavailable", "NotALog", "NotFinite",
    "NotRunning", "PayloadNotFound", "PipelineError", "RequestRefused", "RunnerNotFound", "StartupError", "SyncError",
    "TakeTimeout", "TaskNotSerializable", "TasksetError", "TooFewGroups", "TrinityError", "UnknownWorkflow",
    "VersionMismatch", "WaitTimeout", "WeightNotFound", "WorkflowError", "WrongKey", "error_from_dict", "error_to_dict",
    "split_error",
]


class TrinityError(Exception):
    """Base of all errors. `message` is for people; `details` are plain JSON values for programs."""

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:  # KeyError's own __str__ would show the repr
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.details), (self.message,)


# --- input of the user ----------------------------------------------------------------------------------------------
class ConfigError(TrinityError, ValueError):
    """A config is wrong: an unknown key, a wrong type or a missing path."""


class TasksetError(TrinityError, ValueError):
    """A taskset can't be read. The message names the file and the line."""


class TaskNotSerializable(TrinityError, ValueError):
    """A task holds a value that can't be sent to a runner. The message names the task and the field."""


class UnknownWorkflow(TrinityError, ValueError):
    """A workflow name is neither registered nor importable."""


class DataError(TrinityError, ValueError):
    """A value can't be recorded, because it is NaN, infinite or of the wrong shape."""


class NotFinite(DataError):
    """Training data holds NaN, an infinity or a reward beyond 1e30."""


# --- batches --------------------------------------------------------------------------------------------------------
class BatchAlreadyActive(TrinityError, ValueError):
    """A batch was submitted under the id of a batch that is still open."""


class BatchNotFound(TrinityError, KeyError):
    """No batch has this id in the log."""


class RunnerNotFound(TrinityError, KeyError):
    """No runner has this name."""


class HostNotFound(TrinityError, KeyError):
    """No host of this name has joined the run."""


class BatchTypeMismatch(TrinityError, ValueError):
    """finalize_train_batch was called for an eval batch, or the other way round."""


class FinalizeTimeout(TrinityError, TimeoutError):
    """The batch was not complete within the timeout. Nothing is lost: finalize it again."""


class TooFewGroups(TrinityError):
    """A batch has fewer usable tasks than the caller of finalize requires. Nothing is lost: add tasks or require fewer.

    `details` holds the fields `missing`, `usable` and `lost` of the event GroupsMissing.
    """


class TakeTimeout(TrinityError, TimeoutError):
    """The queue had too few experiences within the timeout. None was taken: try again, or take fewer."""


class WaitTimeout(TrinityError, TimeoutError):
    """No task finished within the timeout of Scheduler.wait_all."""


class PipelineError(TrinityError):
    """An operator of the experience pipeline failed (its batch is RUNNING again), or a priority function failed."""


# --- answers of the proxy -------------------------------------------------------------------------------------------
class AnswerNotFound(TrinityError, KeyError):
    """A reward was posted for a message id that the proxy never sent."""


class AnswerDelivered(TrinityError, ValueError):
    """A reward was posted for an answer that the pipeline already processed."""


# --- the log --------------------------------------------------------------------------------------------------------
class LogError(TrinityError):
    """Base of errors of the log."""


class ConcurrencyError(LogError):
    """The stream is not at the version that the writer expected."""


class CommitMismatch(LogError):
    """The log already holds a commit with this id and other events."""


class Fenced(LogError):
    """Another writer took the lease, so this writer can no longer append."""


class InvalidEvent(LogError, ValueError):
    """An event can't be encoded, or stored data does not decode as an event."""


class LogNotFound(LogError, FileNotFoundError):
    """No log exists at this path or URL."""


class NotALog(LogError):
    """A database or file holds no log."""


class LogTooNew(LogError):
    """The log was written by a newer version of this software."""


class LogCorrupt(LogError):
    """The log has a gap, a broken hash or data that does not decode. The message names the position."""


class LogRewound(LogError):
    """The log lacks events that were acknowledged, for example because an older copy was restored.

    Nothing more is acknowledged until the newer copy is back, or a person accepts the loss (`trinity-es
    accept-rewind`). `details`: `position` was acknowledged, and the log ends at `found`.
    """


class LogUnavailable(LogError):
    """The database can't be written or reached: disk full, locked, connection lost. Nothing was acknowledged.

    `details["passing"]` is true if a retry may succeed (events/store/database/retry.py).
    """


class LogReplaced(LogUnavailable):
    """The SQLite file in use is no longer at the log's path. Nothing was acknowledged.

    `details["missing"]` is true if no file is at that path, false if another one is. Work continues when the file is
    back.
    """


class PayloadNotFound(LogError, KeyError):
    """No payload has this digest."""


class CorruptPayload(LogError):
    """The bytes of a payload do not match its digest, or can't be decoded."""


# --- the running system ---------------------------------------------------------------------------------------------
class NotRunning(TrinityError):
    """No actor system is running on this store."""


class WrongKey(TrinityError):
    """The key of the actor system is missing, wrong, or readable by other users."""


class VersionMismatch(TrinityError):
    """The running actor system has a version of trinity_es that this process can't talk to."""


class AlreadyRunning(TrinityError):
    """An actor system already runs on this store."""


class RequestRefused(TrinityError):
    """A request may have crashed coordinators, so it is refused until the system is restarted."""


class StartupError(TrinityError):
    """The actor system, or a runner in it, did not start."""


class EngineError(TrinityError):
    """An inference engine refused a request or failed."""


class EnvironmentFailed(TrinityError):
    """An environment ended a task without a result. The run gets no reward and is attempted again.

    `details["kind"]` is the failure kind: `infra` (also if the environment is not installed), `timeout` or `workflow`.
    """


class SyncError(TrinityError):
    """Weights could not be loaded; the engines keep serving the version they had."""


class WeightNotFound(TrinityError, KeyError):
    """No tensor has this name in the weights in use."""


class WorkflowError(TrinityError):
    """A workflow broke its contract: no experience, a NaN reward, a wrong return type."""


class GraderError(TrinityError):
    """A grader did not finish in time, ended its process, used too much memory or raised.

    The answer stays ungraded, so its run fails instead of getting a reward of zero.
    """


def _subclasses_by_name(cls: type[TrinityError]) -> dict[str, type[TrinityError]]:
    classes = {cls.__name__: cls}
    for subclass in cls.__subclasses__():
        classes |= _subclasses_by_name(subclass)
    return classes


_BUILTIN: dict[str, type[Exception]] = {c.__name__: c for c in (KeyError, ValueError, TimeoutError, TypeError)}


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON: `{"type", "message", "details"}`."""
    if isinstance(error, TrinityError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"type": type(error).__name__, "message": message, "details": {}}


def error_from_dict(data: dict[str, Any]) -> Exception:
    """Return the error that `error_to_dict` wrote, as a TrinityError if this process doesn't know its class."""
    name, message, details = data["type"], data["message"], data.get("details") or {}
    cls = _subclasses_by_name(TrinityError).get(name)
    if cls is not None:
        return cls(message, **details)
    if name in _BUILTIN:
        return _BUILTIN[name](message)
    return TrinityError(f"{name}: {message}", **details)


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)


def split_error(error: str) -> tuple[str, str]:
    """Return the message of an error's text, and the traceback's last frame as `(code.py:12 in run)`.

    For a text without a traceback, return the whole text and "".
    """
    message, _, traceback = error.partition("\n")
    frames = _FRAME.findall(traceback)
    if not frames:
        return error, ""
    file, line, function = frames[-1]
    return message, f"({file.rpartition('/')[2]}:{line} in {function})"
