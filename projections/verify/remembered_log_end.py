"""Check of a log against the claims about its end in this host's memory files (`MemoryFile`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trinity_es.events import errors
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks.log_end import Claim, MemoryFile, rewound_error
from trinity_es.events.store.database.urls import file_of
from trinity_es.events.store.log import EventLog
from trinity_es.projections.verify.tables import UNREADABLE

__all__ = ["loss_text", "read_claims"]


def read_claims(log: EventLog, url: str, folder: str) -> list[Claim]:
    """Return this host's claims about the log. Memory files may be beside the system's key, in its log folder or
    beside the log's file."""
    folders = [folder] if folder else []
    with suppress(*UNREADABLE, errors.LogError):
        last_start = log.last("system", "SystemConfigured")
        event = None if last_start is None else last_start.event
        system = event.config.get("system", {}) if isinstance(event, ev.SystemConfigured) else {}
        if system.get("key_file"):
            folders.append(str(Path(system["key_file"]).parent))
        if system.get("log_dir"):
            folders.append(system["log_dir"])
    if (file := file_of(url)) is not None:
        folders.append(str(file.absolute().parent / "logs"))
    remembered: list[Claim] = []
    with suppress(*UNREADABLE, errors.LogError):
        for path in dict.fromkeys(folders):
            remembered += log.remembered_claims(MemoryFile.of(url, path))
    return remembered


def loss_text(log: EventLog, remembered: Sequence[Claim]) -> str | None:
    """Describe the loss if the log lacks remembered events; None if it has all of them."""
    with suppress(*UNREADABLE, errors.LogCorrupt):  # an unreadable head or event is already reported
        head, missing_claims = log.lost_claims(remembered)
        return rewound_error(log.url, head, missing_claims).message if missing_claims else None
    return None
