"""This host's memory of a store's log (`log_end.Memory`), compared with the log before a start and by `verify`."""

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
    """Return the folder of the memory: the key's, or the text logs' if that one can't be written."""
    logs = config.system.log_dir
    beside = str(Path(config.system.key_file).parent) if config.system.key_file else logs
    return beside if os.access(beside, os.W_OK) else logs


def memory(config: Config) -> Memory:
    return Memory.of(config.store.url, folder(config))


def require(config: Config, others: Sequence[Claim] = ()) -> None:
    """Raise LogRewound if the log lacks a claim of this host or of `others`; LogUnavailable."""
    own = memory(config)
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            log.require([*log.remembered(own), *others])
    except (LogNotFound, NotALog):
        claims = [c for c in (*own.claims(), *others) if c.mark.position]
        if claims:
            raise rewound(masked(config.store.url), None, claims) from None


def look(config: Config) -> str | None:
    """Return the message of `require`'s error; None if the log has all that this host remembers."""
    try:
        require(config)
    except LogRewound as e:
        return e.message
    return None
