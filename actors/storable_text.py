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
    values = {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]  # it is a dataclass
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    changes = {name: clean for name, text in texts.items() if (clean := clean_text(text)) != text}
    return replace(message, **changes) if changes else message  # type: ignore[type-var]  # a dataclass
