"""What this host remembers of a store's log, against the log: asked before a system is started on it, and by `verify`.

The file lies beside the key (`store.known.Memory`). `accept` is the way on where a person says that the loss is meant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trinity_es.config.config import Config
from trinity_es.events.errors import LogNotFound, LogRewound, NotALog
from trinity_es.events.store.checks.log_end import Claim, Memory, rewound
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog

__all__ = ["folder", "look", "memory", "require"]


def folder(config: Config) -> str:
    """Return the folder of the memory: that of the key, or of the text logs where that one can't be written to."""
    logs = config.system.log_dir
    beside = str(Path(config.system.key_file).parent) if config.system.key_file else logs
    return beside if os.access(beside, os.W_OK) else logs


def memory(config: Config) -> Memory:
    return Memory.of(config.store.url, folder(config))


def require(config: Config, known: Sequence[Claim] = ()) -> None:
    """Raise LogRewound where the log lacks what this host remembers, or what is `known` besides; LogUnavailable."""
    kept = memory(config)
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            log.require([*log.remembered(kept), *known])
    except (LogNotFound, NotALog):
        claims = [c for c in (*kept.claims(), *known) if c.mark.position]
        if claims:
            raise rewound(masked(config.store.url), None, claims) from None


def look(config: Config) -> str | None:
    """Tell what `require` would raise, in words; None where the log has all that this host remembers."""
    try:
        require(config)
    except LogRewound as e:
        return e.message
    return None




