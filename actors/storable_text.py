"""Cleaning of the texts in reports from runners and the guardian, so that every database can store them.

The texts come from engines and users' code, and a bad character is no reason to refuse a report.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from trinity_es.actors.commands.fields import TEXT_LENGTH, is_storable

__all__ = ["clean_report", "clean_text"]

_T = TypeVar("_T")


def clean_text(text: str) -> str:
    """Return the text cut to `TEXT_LENGTH`, with characters that a database can't store replaced."""
    cut = text if len(text) <= TEXT_LENGTH else text[:TEXT_LENGTH] + "..."
    return cut if is_storable(cut) else cut.encode(errors="replace").decode().replace("\0", "\ufffd")


def clean_report(message: _T) -> _T:
    """Return the message with `clean_text` applied to each of its text fields."""
    changes: dict[str, str] = {}
    for field in fields(message):  # type: ignore[arg-type]  # every message is a dataclass
        value = getattr(message, field.name)
        if isinstance(value, str) and (len(value) > TEXT_LENGTH or not is_storable(value)):
            changes[field.name] = clean_text(value)
    return replace(message, **changes) if changes else message  # type: ignore[type-var]  # a dataclass
