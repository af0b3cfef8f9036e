"""Dataclasses that travel in great numbers, pickled at a quarter of what Python's own way costs.

A frozen dataclass with slots looks its fields up for every object that is pickled, and again for every one that is
unpickled: a tenth of what the coordinator did for a task (docs/PROFILES.md).
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["quickly_pickled"]

T = TypeVar("T")


def quickly_pickled(cls: type[T]) -> type[T]:
    """Have a frozen dataclass with slots and two fields or more pickled by the values of its fields, in their order."""
    made: Any = cls
    names = [f.name for f in fields(made)]
    setters = [vars(made)[name].__set__ for name in names]
    values = attrgetter(*names)

    def set_state(self: T, values: tuple[Any, ...]) -> None:
        for setter, value in zip(setters, values, strict=True):
            setter(self, value)

    made.__getstate__, made.__setstate__ = lambda self: values(self), set_state
    return cls
