"""Decorator that makes dataclasses pickle at a quarter of the usual cost, for those that are sent often.

When Python pickles a frozen dataclass with slots, it looks up the fields for every object. This was a tenth of the
coordinator's work for a task (docs/PROFILES.md).
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["quickly_pickled"]

T = TypeVar("T")


def quickly_pickled(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots and at least two fields pickle as the tuple of its values."""
    patched: Any = cls  # the same class, for mypy
    names = [f.name for f in fields(patched)]
    setters = [vars(patched)[name].__set__ for name in names]
    get_values = attrgetter(*names)

    def set_state(self: T, values: tuple[Any, ...]) -> None:
        for setter, value in zip(setters, values, strict=True):
            setter(self, value)

    patched.__getstate__, patched.__setstate__ = lambda self: get_values(self), set_state
    return cls
