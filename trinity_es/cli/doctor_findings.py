"""The result type of the checks of `doctor`."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Literal

from trinity_es.events.errors import TrinityError
from trinity_es.events.store.payloads.object_store import Objects
from trinity_es.events.store.payloads.payload_place import folder_of

__all__ = ["Finding", "payloads_finding"]

_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; its fields are the keys of `doctor --json`."""

    what: str
    """Subject of the check, such as `database`."""
    verdict: Literal["ok", "note", "missing", "wrong"]
    """`missing` and `wrong` keep a run, or a joining host, from working."""
    told: str
    """Result in words, for the user."""
    way_out: str = ""
    """What the user can do about a problem; empty if nothing is wrong."""


def payloads_finding(place: str) -> Finding:
    """Check whether this machine can use a payload store; in a bucket it writes, reads and deletes an object."""
    if (folder := folder_of(place)) is not None:
        if not folder.is_dir():
            return Finding("payloads", "missing", f"there is no folder {folder}", "mount or create it")
        if not os.access(folder, os.W_OK):
            return Finding("payloads", "wrong", f"{folder} can't be written", "change its rights")
        return Finding("payloads", "ok", place)
    try:
        store = Objects(place, _PATIENCE_SECONDS)
        digest = store.put(secrets.token_bytes(32))
        store.get(digest)
        store.delete(digest)
    except TrinityError as e:
        return Finding("payloads", "wrong", e.message, "every process of a run needs this place (docs/DEPLOY.md)")
    return Finding("payloads", "ok", f"{place}: an object was written, read and deleted")
