"""What this host remembers of a store's log, against the log: asked before a system is started on it, and by `verify`.

The file lies beside the key (`store.known.Memory`). `accept` is the way on where a person says that the loss is meant.
"""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_es.config import Config
from trinity_es.events.errors import LogNotFound, LogRewound, NotALog
from trinity_es.events.store.database import masked
from trinity_es.events.store.known import Claim, Memory, accepted, rewound
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.tables.read_models import projectors

__all__ = ["accept", "folder", "look", "memory", "require"]

STREAM = "system"
"""Where acceptances are recorded."""


def folder(config: Config) -> str:
    """Return the folder of the memory: that of the key, or of the text logs where nothing can be written beside the
    key.
    """
    logs = config.system.log_dir
    beside = str(Path(config.system.key_file).parent) if config.system.key_file else logs
    return beside if os.access(beside, os.W_OK) else logs


def memory(config: Config) -> Memory:
    """Return what this host remembers of the log of this config's store."""
    return Memory.of(config.store.url, folder(config))


def require(config: Config, known: Sequence[Claim] = ()) -> None:
    """Raise LogRewound where the log lacks what this host remembers, or what is `known` besides; LogUnavailable."""
    kept = memory(config)
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            log.require([*kept.claims(log.head().generation), *known])
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


def accept(config: Config, reason: str) -> dict[str, Any] | None:
    """Record that a person accepts the loss of what is remembered and not in the log; None where nothing is lost.

    A system that runs on the store is ended first: what its processes have is of the lost part. Returns the event's
    data and its position. Raises what EventLog.open does.
    """
    from trinity_es.cleanup import end_system

    kept = memory(config)
    if _lost(config, kept) == []:
        return None
    end_system(config)
    url = config.store.url
    with EventLog.open(url, create=True, durability=config.store.durability, projectors=projectors()) as log:
        by = f"{getpass.getuser()} on {socket.gethostname()}"
        lease = log.acquire_lease("coordinator", {"pid": os.getpid(), "host": socket.gethostname()})
        head, lost = log.lost(kept.claims(log.head().generation))
        if not lost:
            return None
        generation = uuid.uuid4().hex
        event = accepted(head, lost, generation, by, reason)
        write = Write(stream=STREAM, expected_version=log.stream_version(STREAM), events=[event])
        done = log.append([write], commit_id=f"accept-rewind:{generation}", lease=lease, generation=generation)
        log.release_lease(lease)
        assert log.acknowledged is not None
        kept.settle(log.acknowledged)
    return {"position": done.first_position, "first": event.first, "last": event.last, "kept": event.kept,
            "generation_before": event.generation_before, "generation": generation, "by": by, "reason": reason,
            "lost": [{"generation": k.generation, "position": k.position, "hash": k.hash, "by": k.by}
                     for k in event.lost]}


def _lost(config: Config, kept: Memory) -> list[Claim]:
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            return log.lost(kept.claims(log.head().generation))[1]
    except (LogNotFound, NotALog):
        return [c for c in kept.claims() if c.mark.position]
