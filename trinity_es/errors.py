"""Every error that a user may catch, each a `TrinityError`; many are also the built-in error that says the same.

```
TrinityError
├── ConfigError, TasksetError, TaskNotSerializable, UnknownWorkflow, DataError (NotFinite)   bad input (ValueError)
├── BatchNotFound, RunnerNotFound, WeightNotFound, AnswerNotFound             there is no such thing (KeyError)
├── BatchAlreadyActive, BatchTypeMismatch, AnswerDelivered                       not in this state (ValueError)
├── FinalizeTimeout, TakeTimeout, WaitTimeout                                nothing is lost, ask again (TimeoutError)
├── PipelineError, WorkflowError, EngineError, SyncError                                  what ran failed
├── NotRunning, AlreadyRunning, StartupError, WrongKey, VersionMismatch, RequestRefused    the system
└── LogError
    ├── LogUnavailable (LogReplaced), LogRewound                               the log can't be written, or trusted
    ├── LogNotFound, NotALog, LogTooNew, LogCorrupt, InvalidEvent               it can't be read
    ├── PayloadNotFound, CorruptPayload                                          nor what it points to
    └── ConcurrencyError, CommitMismatch, Fenced                                     two wrote
```
"""

from __future__ import annotations

from trinity_es.events.errors import (
    AlreadyRunning,
    AnswerDelivered,
    AnswerNotFound,
    BatchAlreadyActive,
    BatchNotFound,
    BatchTypeMismatch,
    CommitMismatch,
    ConcurrencyError,
    ConfigError,
    CorruptPayload,
    DataError,
    EngineError,
    Fenced,
    FinalizeTimeout,
    InvalidEvent,
    LogCorrupt,
    LogError,
    LogNotFound,
    LogReplaced,
    LogRewound,
    LogTooNew,
    LogUnavailable,
    NotALog,
    NotFinite,
    NotRunning,
    PayloadNotFound,
    PipelineError,
    RequestRefused,
    RunnerNotFound,
    StartupError,
    SyncError,
    TakeTimeout,
    TaskNotSerializable,
    TasksetError,
    TrinityError,
    UnknownWorkflow,
    VersionMismatch,
    WaitTimeout,
    WeightNotFound,
    WorkflowError,
    WrongKey,
)

__all__ = [
    "AlreadyRunning",
    "AnswerDelivered",
    "AnswerNotFound",
    "BatchAlreadyActive",
    "BatchNotFound",
    "BatchTypeMismatch",
    "CommitMismatch",
    "ConcurrencyError",
    "ConfigError",
    "CorruptPayload",
    "DataError",
    "EngineError",
    "Fenced",
    "FinalizeTimeout",
    "InvalidEvent",
    "LogCorrupt",
    "LogError",
    "LogNotFound",
    "LogReplaced",
    "LogRewound",
    "LogTooNew",
    "LogUnavailable",
    "NotALog",
    "NotFinite",
    "NotRunning",
    "PayloadNotFound",
    "PipelineError",
    "RequestRefused",
    "RunnerNotFound",
    "StartupError",
    "SyncError",
    "TakeTimeout",
    "TaskNotSerializable",
    "TasksetError",
    "TrinityError",
    "UnknownWorkflow",
    "VersionMismatch",
    "WaitTimeout",
    "WeightNotFound",
    "WorkflowError",
    "WrongKey",
]
