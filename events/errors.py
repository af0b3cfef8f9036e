"""All errors of this software, for every room; users import them from `trinity_es.errors`.

```
TrinityError
├── ConfigError, TasksetError, TaskNotSerializable, UnknownWorkflow, DataError (NotFinite)   bad input (ValueError)
├── BatchNotFound, RunnerNotFound, HostNotFound, WeightNotFound, AnswerNotFound  no such thing (KeyError)
├── BatchAlreadyActive, BatchTypeMismatch, AnswerDelivered                       wrong state (ValueError)
├── FinalizeTimeout, TakeTimeout, WaitTimeout                                nothing is lost, ask again (TimeoutError)
├── TooFewGroups                                                             nothing is lost, add tasks
├── PipelineError, WorkflowError, GraderError, EngineError, EnvironmentFailed, SyncError  a part failed
├── NotRunning, AlreadyRunning, StartupError, WrongKey, VersionMismatch, RequestRefused    the system
└── LogError
    ├── LogUnavailable (LogReplaced), LogRewound                               the log can't be written, or trusted
    ├── LogNotFound, NotALog, LogTooNew, LogCorrupt, InvalidEvent               the log can't be read
    ├── PayloadNotFound, CorruptPayload                                          a payload can't be read
    └── ConcurrencyError, CommitMismatch, Fenced                                     two writers
```

Every error that this software raises on purpose is a `TrinityError`; many are also the built-in error with the same
meaning. An error crosses processes as its class name, its message and a dict of plain details, and is raised on the
other side as the same class. A message names the thing, the value and the way out.
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
    """A config that can't be used: unknown key, wrong type, a path that isn't there."""


class TasksetError(TrinityError, ValueError):
    """A taskset that can't be read; names the file and the line."""


class TaskNotSerializable(TrinityError, ValueError):
    """A task holds a value that can't be sent to a runner; names the task and the field."""


class UnknownWorkflow(TrinityError, ValueError):
    """A workflow name that is neither registered nor importable."""


class DataError(TrinityError, ValueError):
    """A value that can't be recorded: NaN or infinite, or of the wrong shape."""


class NotFinite(DataError):
    """NaN, an infinity or an absurdly large reward in data that a trainer would learn from."""


# --- batches --------------------------------------------------------------------------------------------------------
class BatchAlreadyActive(TrinityError, ValueError):
    """A submission with the id of a batch that is still open."""


class BatchNotFound(TrinityError, KeyError):
    """No batch has this id in the log."""


class RunnerNotFound(TrinityError, KeyError):
    """No runner has this name."""


class HostNotFound(TrinityError, KeyError):
    """No host of this name takes part."""


class BatchTypeMismatch(TrinityError, ValueError):
    """finalize_train_batch of an eval batch, or the other way round."""


class FinalizeTimeout(TrinityError, TimeoutError):
    """The batch was not complete within the timeout. Nothing is lost: ask again."""


class TooFewGroups(TrinityError):
    """A batch has fewer usable tasks than its finalize asked for. Nothing is lost: add tasks, or ask for fewer.

    `details` has `missing`, `usable` and `lost`, the numbers of tasks as in the event GroupsMissing.
    """


class TakeTimeout(TrinityError, TimeoutError):
    """The queue did not have enough experiences within the timeout. None was taken: ask again, or for fewer."""


class WaitTimeout(TrinityError, TimeoutError):
    """No task finished within the timeout of Scheduler.wait_all."""


class PipelineError(TrinityError):
    """An operator of the experience pipeline failed, and the batch is RUNNING again; or a priority function failed."""


# --- answers of the proxy -------------------------------------------------------------------------------------------
class AnswerNotFound(TrinityError, KeyError):
    """A reward for a message id that the proxy never sent."""


class AnswerDelivered(TrinityError, ValueError):
    """A reward for an answer that already went to the pipeline."""


# --- the log --------------------------------------------------------------------------------------------------------
class LogError(TrinityError):
    """Base of errors of the log."""


class ConcurrencyError(LogError):
    """The stream is not at the version that the writer expected."""


class CommitMismatch(LogError):
    """The same commit id was used before with other content."""


class Fenced(LogError):
    """Another writer took the lease; this one can't write any more."""


class InvalidEvent(LogError, ValueError):
    """An event that can't be encoded, or stored data that is no known event."""


class LogNotFound(LogError, FileNotFoundError):
    """No log exists at this place."""


class NotALog(LogError):
    """A database or file that holds no log."""


class LogTooNew(LogError):
    """The log was written by a newer version of this software."""


class LogCorrupt(LogError):
    """A gap, a broken hash or data that does not decode; names the position."""


class LogRewound(LogError):
    """The log lost acknowledged events, or is another log, for example restored from an older copy.

    Nothing is acknowledged on it until the better copy is back, or a person accepts it (`trinity-es accept-rewind`).
    `details`: `position` is the acknowledged one, `found` the last one of the log.
    """


class LogUnavailable(LogError):
    """The database can't be written or reached: disk full, locked, connection lost. Nothing was acknowledged.

    `details["passing"]`: true if it may pass by itself (events/store/database/retry.py).
    """


class LogReplaced(LogUnavailable):
    """The path of a SQLite log leads to another file than the one in use, or to none. Nothing was acknowledged.

    `details["missing"]`: true if it leads to none. When the file is back at its path, work continues.
    """


class PayloadNotFound(LogError, KeyError):
    """No payload has this digest."""


class CorruptPayload(LogError):
    """A payload whose bytes do not match its digest, or can't be decoded."""


# --- the running system ---------------------------------------------------------------------------------------------
class NotRunning(TrinityError):
    """No actor system is running on this store."""


class WrongKey(TrinityError):
    """The key of the actor system is missing, wrong, or readable by others; says which places were searched."""


class VersionMismatch(TrinityError):
    """The running actor system has a version of trinity_es that this process can't talk to."""


class AlreadyRunning(TrinityError):
    """An actor system already runs on this store."""


class RequestRefused(TrinityError):
    """A request that may have crashed coordinators; it is not tried again until the system is restarted."""


class StartupError(TrinityError):
    """The actor system, or a runner in it, did not start."""


class EngineError(TrinityError):
    """An inference engine refused a request or failed."""


class EnvironmentFailed(TrinityError):
    """An environment ended a task without a result. The run gets no reward and is attempted again.

    `details["kind"]` is the failure kind: `infra` (also if the environment is not installed), `timeout` or `workflow`.
    """


class SyncError(TrinityError):
    """Weights could not be loaded; the engines continue with the version they had."""


class WeightNotFound(TrinityError, KeyError):
    """No tensor has this name in the weights in use."""


class WorkflowError(TrinityError):
    """A workflow broke its contract: no experience, a NaN reward, a wrong return type."""


class GraderError(TrinityError):
    """A grader did not finish in time, ended its process, used too much memory or raised.

    The answer stays ungraded: its run fails, and does not get a reward of zero.
    """


def _classes_by_name(cls: type[TrinityError]) -> dict[str, type[TrinityError]]:
    classes = {cls.__name__: cls}
    for subclass in cls.__subclasses__():
        classes |= _classes_by_name(subclass)
    return classes


_BUILTIN: dict[str, type[Exception]] = {c.__name__: c for c in (KeyError, ValueError, TimeoutError, TypeError)}


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON: `{"type", "message", "details"}`."""
    if isinstance(error, TrinityError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"type": type(error).__name__, "message": message, "details": {}}


def error_from_dict(data: dict[str, Any]) -> Exception:
    """Return the error that `error_to_dict` wrote; TrinityError if this process doesn't know the class."""
    name, message, details = data["type"], data["message"], data.get("details") or {}
    cls = _classes_by_name(TrinityError).get(name)
    if cls is not None:
        return cls(message, **details)
    if name in _BUILTIN:
        return _BUILTIN[name](message)
    return TrinityError(f"{name}: {message}", **details)


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)


def split_error(error: str) -> tuple[str, str]:
    """Return an error's first line, and the last frame of the traceback below it, as `(code.py:12 in run)`.

    Without a traceback: the whole text and "".
    """
    message, _, traceback = error.partition("\n")
    frames = _FRAME.findall(traceback)
    if not frames:
        return error, ""
    file, line, function = frames[-1]
    return message, f"({file.rpartition('/')[2]}:{line} in {function})"
