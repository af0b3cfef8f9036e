"""Versions of the weights that made the tokens of an experience, read from its `info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["listed", "model_versions", "version_spans"]


def listed(info: Any, name: str) -> list[Any]:
    """Return the list under this name in `info`; [] if it is no list, since a user may write anything there."""
    value = info.get(name) if isinstance(info, Mapping) else None
    return value if isinstance(value, list) else []


def version_spans(info: Any) -> list[tuple[int, int, int]]:
    """Return the spans (version, start, end) of the response that each version of the weights made; [] if unknown."""
    return [(span[0], span[1], span[2]) for span in listed(info, "version_spans")
            if isinstance(span, list) and [type(n) for n in span] == [int, int, int]]


def model_versions(info: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the oldest and the newest version of the weights that made any of the tokens; None if unknown."""
    if "version_spans" in info and (versions := [version for version, _, _ in version_spans(info)]):
        return min(versions), max(versions)
    oldest, drift = info.get("model_version"), info.get("model_version_drift")
    return oldest, oldest + drift if isinstance(oldest, int) and isinstance(drift, int) else oldest
