"""What runners and the guardian report, with its texts made ones that every database can hold.

They hold what engines and users' code said: that is no reason to refuse a report.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from trinity_es.actors.commands.fields import TEXT_LENGTH, is_storable

__all__ = ["clean_report", "clean_text"]

_T = TypeVar("_T")


def clean_text(text: str) -> str:
    """Return the text as every database can hold it: cut, and without what can't be stored."""
    cut = text if len(text) <= TEXT_LENGTH else text[:TEXT_LENGTH] + "..."
    return cut if is_storable(cut) else cut.encode(errors="replace").decode().replace("\0", "\ufffd")


def clean_report(message: _T) -> _T:
    changed = {
        f.name: clean_text(value)
        for f in fields(message)  # type: ignore[arg-type]  # every message is a dataclass
        if isinstance(value := getattr(message, f.name), str) and (len(value) > TEXT_LENGTH or not is_storable(value))
    }
    return replace(message, **changed) if changed else message  # type: ignore[type-var]  # as above
