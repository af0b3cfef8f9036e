"""Check, before a start and by `verify`, that a store's log still has the last event that this host remembers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trinity_es.config.config import Config
from trinity_es.events.errors import LogNotFound, LogRewound, NotALog
from trinity_es.events.store.checks.log_end import Claim, MemoryFile, rewound_error
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog

__all__ = ["folder", "memory", "require_remembered", "rewind_message"]


def folder(config: Config) -> str:
    """Return the folder of the memory file: the key file's folder, or the text logs' if that can't be written to."""
    log_dir = config.system.log_dir
    key_folder = str(Path(config.system.key_file).parent) if config.system.key_file else log_dir
    return key_folder if os.access(key_folder, os.W_OK) else log_dir


def memory(config: Config) -> MemoryFile:
    """Return this host's memory of the log: a file with the last known event, to detect a log that was set back."""
    return MemoryFile.of(config.store.url, folder(config))


def require_remembered(config: Config, others: Sequence[Claim] = ()) -> None:
    """Raise LogRewound if the log lacks an event that this host remembers or `others` claim. Raises LogUnavailable."""
    own_memory = memory(config)
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            log.require([*log.remembered_claims(own_memory), *others])
    except (LogNotFound, NotALog):
        # Without a log, any claim that it had an event means that it was lost.
        claims = [claim for claim in (*own_memory.claims(), *others) if claim.mark.position]
        if claims:
            raise rewound_error(masked(config.store.url), None, claims) from None


def rewind_message(config: Config) -> str | None:
    """Return an error text if the log lacks an event that this host remembers, else None."""
    try:
        require_remembered(config)
    except LogRewound as e:
        return e.message
    return None
