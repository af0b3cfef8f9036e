"""Check of a log against what this host remembers of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trinity_es.events import errors
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks.log_end import Claim, Memory, rewound
from trinity_es.events.store.database.urls import file_of
from trinity_es.events.store.log import EventLog
from trinity_es.projections.verify.tables import UNREADABLE

__all__ = ["claims", "lost"]


def claims(log: EventLog, url: str, folder: str) -> list[Claim]:
    """Return what this host remembers of the log, from beside the key of its last system and beside the log's file."""
    folders = [folder] if folder else []
    with suppress(*UNREADABLE, errors.LogError):
        configured = log.last("system", "SystemConfigured")
        event = None if configured is None else configured.event
        system = event.config.get("system", {}) if isinstance(event, ev.SystemConfigured) else {}
        folders += [str(Path(system["key_file"]).parent)] if system.get("key_file") else []
        folders += [system["log_dir"]] if system.get("log_dir") else []
    if (file := file_of(url)) is not None:
        folders.append(str(file.absolute().parent / "logs"))
    remembered: list[Claim] = []
    with suppress(*UNREADABLE, errors.LogError):
        for path in dict.fromkeys(folders):
            remembered += log.remembered(Memory.of(url, path))
    return remembered


def lost(log: EventLog, remembered: Sequence[Claim]) -> str | None:
    """Return a text on remembered events that the log lacks; None if it has all of them."""
    with suppress(*UNREADABLE, errors.LogCorrupt):  # an unreadable head or event is already reported
        head, missing_claims = log.lost(remembered)
        return rewound(log.url, head, missing_claims).message if missing_claims else None
    return None
