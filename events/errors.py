"""The error tree, once, for every room; users find it in `trinity_es.errors`.

```
TrinityError
├── ConfigError, TasksetError, TaskNotSerializable, UnknownWorkflow, DataError (NotFinite)   bad input (ValueError)
├── BatchNotFound, RunnerNotFound, HostNotFound, WeightNotFound, AnswerNotFound  there is no such thing (KeyError)
├── BatchAlreadyActive, BatchTypeMismatch, AnswerDelivered                       not in this state (ValueError)
├── FinalizeTimeout, TakeTimeout, WaitTimeout                                nothing is lost, ask again (TimeoutError)
├── PipelineError, WorkflowError, GraderError, EngineError, EnvironmentFailed, SyncError  what ran failed
├── NotRunning, AlreadyRunning, StartupError, WrongKey, VersionMismatch, RequestRefused    the system
└── LogError
    ├── LogUnavailable (LogReplaced), LogRewound                               the log can't be written, or trusted
    ├── LogNotFound, NotALog, LogTooNew, LogCorrupt, InvalidEvent               it can't be read
    ├── PayloadNotFound, CorruptPayload                                          nor what it points to
    └── ConcurrencyError, CommitMismatch, Fenced                                     two wrote
```

Every error that this software raises on purpose is a `TrinityError`; many are also the built-in error that says the
same. An error crosses processes: it is its class name, its message and a dict of plain details, so it pickles, encodes
to JSON and is raised again on the other side as the same class.

A message names the thing, the value and the way out.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "AlreadyRunning", "AnswerDelivered", "AnswerNotFound", "BatchAlreadyActive", "BatchNotFound",
    "BatchTypeMismatch", "CommitMismatch", "ConcurrencyError", "ConfigError", "CorruptPayload", "DataError",
    "EngineError", "EnvironmentFailed", "Fenced", "FinalizeTimeout", "GraderError", "HostNotFound", "InvalidEvent",
    "LogCorrupt", "LogError", "LogNotFound", "LogReplaced", "LogRewound", "LogTooNew", "LogUnavailable", "NotALog",
    "NotFinite", "NotRunning", "PayloadNotFound", "PipelineError", "RequestRefused", "RunnerNotFound",
    "StartupError", "SyncError", "TakeTimeout", "TaskNotSerializable", "TasksetError", "TrinityError",
    "UnknownWorkflow", "VersionMismatch", "WaitTimeout", "WeightNotFound", "WorkflowError", "WrongKey",
    "error_from_dict", "error_to_dict", "said_and_where",
]


class TrinityError(Exception):
    """Base of all. `message` is what a person reads; `details` are plain JSON values for a program."""

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:  # KeyError's own __str__ would show the repr
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(cls: type[TrinityError], message: str, details: dict[str, Any]) -> TrinityError:
    return cls(message, **details)


# --- what the user gave us ------------------------------------------------------------------------------------------
class ConfigError(TrinityError, ValueError):
    """A config that can't be used: unknown key, wrong type, a path that isn't there."""


class TasksetError(TrinityError, ValueError):
    """A taskset that can't be read; names the file and the line."""


class TaskNotSerializable(TrinityError, ValueError):
    """A task holds something that can't travel to a runner; names the task and the field."""


class UnknownWorkflow(TrinityError, ValueError):
    """A workflow name that is neither registered nor importable."""


class DataError(TrinityError, ValueError):
    """A value that can't be recorded: NaN or infinite, or of the wrong shape."""


class NotFinite(DataError):
    """NaN, an infinity or a reward beyond all measure in what a trainer would learn from."""


# --- batches --------------------------------------------------------------------------------------------------------
class BatchAlreadyActive(TrinityError, ValueError):
    """submit_batch with the id of a batch that has not ended."""


class BatchNotFound(TrinityError, KeyError):
    """No batch with that id in the log."""


class RunnerNotFound(TrinityError, KeyError):
    """No runner has this name."""


class HostNotFound(TrinityError, KeyError):
    """No host of this name takes part."""


class BatchTypeMismatch(TrinityError, ValueError):
    """finalize_train_batch of an eval batch, or the other way round."""


class FinalizeTimeout(TrinityError, TimeoutError):
    """The batch was not complete within the timeout. Nothing is lost: ask again."""


class TakeTimeout(TrinityError, TimeoutError):
    """There were not enough experiences in the queue within the timeout. None was taken: ask again, or for fewer."""


class WaitTimeout(TrinityError, TimeoutError):
    """No task finished within the timeout of Scheduler.wait_all."""


class PipelineError(TrinityError):
    """An operator of the experience pipeline failed, and the batch is RUNNING again; or a priority function did."""


# --- answers of the proxy -------------------------------------------------------------------------------------------
class AnswerNotFound(TrinityError, KeyError):
    """A reward for a message id that the proxy never gave."""


class AnswerDelivered(TrinityError, ValueError):
    """A reward for an answer that went to the pipeline already."""


# --- the log --------------------------------------------------------------------------------------------------------
class LogError(TrinityError):
    """Base of what goes wrong with the log."""


class ConcurrencyError(LogError):
    """The stream is not at the version that the writer expected."""


class CommitMismatch(LogError):
    """The same commit id was used before with other content."""


class Fenced(LogError):
    """The writer's lease was taken by another: it can write nothing any more."""


class InvalidEvent(LogError, ValueError):
    """An event that can't be encoded, or stored data that is no known event."""


class LogNotFound(LogError, FileNotFoundError):
    """There is no log at that place."""


class NotALog(LogError):
    """There is a database or file, but no log in it."""


class LogTooNew(LogError):
    """The log was written by a newer version of this software."""


class LogCorrupt(LogError):
    """A gap, a broken hash or data that does not decode; names the position."""


class LogRewound(LogError):
    """The log lost what was acknowledged, or is another one: it was restored from an older copy, say.

    Nothing is acknowledged on it until the better copy is back, or a person accepts it (`trinity-es accept-rewind`).
    `details`: `position` that was known, `found`: that the log ends at.
    """


class LogUnavailable(LogError):
    """The database can't be written or reached: disk full, locked, connection lost. Nothing was acknowledged.

    `details["passing"]`: it may pass by itself (see events/store/database/retry.py).
    """


class LogReplaced(LogUnavailable):
    """The path of a SQLite log names another file than the one in use, or none. Nothing was acknowledged.

    `details["missing"]`: it names none. When the file is put back under its name, all goes on.
    """


class PayloadNotFound(LogError, KeyError):
    """No payload with that digest."""


class CorruptPayload(LogError):
    """A payload whose bytes do not match its digest, or can't be decoded."""


# --- the running system ---------------------------------------------------------------------------------------------
class NotRunning(TrinityError):
    """No actor system is running on this store."""


class WrongKey(TrinityError):
    """The key to the actor system is missing, does not fit, or others could read it; says where it was looked for."""


class VersionMismatch(TrinityError):
    """The running actor system is of a version of trinity_es that this process can't talk to."""


class AlreadyRunning(TrinityError):
    """An actor system runs on this store already."""


class RequestRefused(TrinityError):
    """A request that coordinators ended of, or may have: it is not tried again until the system is started anew."""


class StartupError(TrinityError):
    """The actor system, or a runner in it, did not come up."""


class EngineError(TrinityError):
    """An inference engine refused or failed."""


class EnvironmentFailed(TrinityError):
    """An environment ended a task without a result. No reward comes of it: the run is attempted again.

    `details["kind"]` is the kind of this failure: `infra` (also where it is not there), `timeout` or `workflow`.
    """


class SyncError(TrinityError):
    """Weights could not be loaded; the engines go on with the version they had."""


class WeightNotFound(TrinityError, KeyError):
    """No tensor with that name in the weights that are served."""


class WorkflowError(TrinityError):
    """A workflow broke its contract: no experience, a NaN reward, a wrong return type."""


class GraderError(TrinityError):
    """What was to judge an answer did not end in time, ended its process, took too much memory or raised.

    Nothing is known of the answer then: its run has failed, and is no zero.
    """


def _tree(cls: type[TrinityError]) -> dict[str, type[TrinityError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


_BUILTIN: dict[str, type[Exception]] = {c.__name__: c for c in (KeyError, ValueError, TimeoutError, TypeError)}


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON: `{"type", "message", "details"}`."""
    if isinstance(error, TrinityError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"type": type(error).__name__, "message": message, "details": {}}


def error_from_dict(data: dict[str, Any]) -> Exception:
    """Return the error that `error_to_dict` wrote.

    A class that this process doesn't know comes back as TrinityError.
    """
    name, message, details = data["type"], data["message"], data.get("details") or {}
    cls = _tree(TrinityError).get(name)
    if cls is not None:
        return cls(message, **details)
    if name in _BUILTIN:
        return _BUILTIN[name](message)
    return TrinityError(f"{name}: {message}", **details)


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame of a traceback, as Python writes it."""


def said_and_where(error: str) -> tuple[str, str]:
    """Return what was raised, and of an error's text with a traceback its last frame, as `(code.py:12 in run)`.

    Of a text without one: all of it, and "".
    """
    said, _, frames = error.partition("\n")
    places = _FRAME.findall(frames)
    if not places:
        return error, ""
    file, line, function = places[-1]
    return said, f"({file.rpartition('/')[2]}:{line} in {function})"
