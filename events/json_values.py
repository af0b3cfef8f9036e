"""Copies of JSON-like values (numpy, torch, enums) in Python's own types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trinity_es.events.values import shown

__all__ = ["NotPlain", "plain", "with_single_keys", "without_nulls"]

_DEPTH = 200  # orjson refuses JSON nested deeper than 254, counting our own levels around it


class NotPlain(Exception):
    """A value can't be written as JSON. `path` holds the keys and indexes that lead to it, innermost first."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.path: list[str] = []


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Return a copy of a JSON value in Python's own types, ready for orjson. Raises NotPlain."""
    kind = type(value)
    if kind is str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as e:
                raise NotPlain(f"is text that is not valid Unicode ({e.reason})") from None
        return value
    if kind is float:
        if not math.isfinite(value):
            raise NotPlain(f"is {value}: only finite numbers can be recorded")
        return value
    if value is None or kind is bool:
        return value
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise NotPlain(f"is {shown(value)}: whole numbers must fit into 64 bits")
        return value
    if depth == 0:
        raise NotPlain("is nested too deeply")
    if isinstance(value, dict):
        copied = {}
        for key, inner in value.items():
            if not isinstance(key, str):
                raise NotPlain(f"has the key {key!r} of type {type(key).__name__}: keys must be text")
            try:
                name = key if type(key) is str and key.isascii() else plain(str.__str__(key), depth)
                copied[name] = plain(inner, depth - 1)
            except NotPlain as e:
                e.path.append(f".{key}")
                raise
        return copied
    if isinstance(value, list | tuple):
        items = []
        for i, inner in enumerate(value):
            try:
                items.append(plain(inner, depth - 1))
            except NotPlain as e:
                e.path.append(f"[{i}]")
                raise
        return items
    if isinstance(value, str):  # a subclass: an enum, numpy's str_; str() of an enum would be its name
        return plain(str.__str__(value), depth)
    if isinstance(value, int):
        return plain(int(value), depth)
    if isinstance(value, float):  # numpy's float64 is one
        return plain(float(value), depth)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return plain(value.item(), depth)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return plain(value.tolist(), depth)
    if hasattr(value, "detach") and getattr(value, "ndim", None) == 0:  # a torch scalar
        return plain(value.item(), depth)
    raise NotPlain(f"is a {kind.__name__}, which can't be written as JSON")


def with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of these pairs, as `object_pairs_hook` of `json.loads`. Raises ValueError for a repeated key."""
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {key!r} appears twice")
        unique[key] = value
    return unique


def without_nulls(value: Any) -> Any:
    """Return a JSON value without dict keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
