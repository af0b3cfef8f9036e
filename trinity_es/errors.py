"""Every error that a user may catch; all are `TrinityError`s, and `trinity_es.events.errors` has their tree."""

from __future__ import annotations

from trinity_es.events.errors import *  # noqa: F403  # all of them, and tests/values/test_errors.py holds the list

__all__ = [  # noqa: F405
    "AlreadyRunning", "AnswerDelivered", "AnswerNotFound", "BatchAlreadyActive", "BatchNotFound",
    "BatchTypeMismatch", "CommitMismatch", "ConcurrencyError", "ConfigError", "CorruptPayload", "DataError",
    "EngineError", "EnvironmentFailed", "Fenced", "FinalizeTimeout", "GraderError", "HostNotFound", "InvalidEvent",
    "LogCorrupt", "LogError", "LogNotFound", "LogReplaced", "LogRewound", "LogTooNew", "LogUnavailable", "NotALog",
    "NotFinite", "NotRunning", "PayloadNotFound", "PipelineError", "RequestRefused", "RunnerNotFound",
    "StartupError", "SyncError", "TakeTimeout", "TaskNotSerializable", "TasksetError", "TooFewGroups",
    "TrinityError",
    "UnknownWorkflow", "VersionMismatch", "WaitTimeout", "WeightNotFound", "WorkflowError", "WrongKey",
]
