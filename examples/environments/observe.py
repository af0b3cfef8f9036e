"""The user's turn of what examples/environments/openenv_server.py shows, named in openenv.yaml."""

from __future__ import annotations

from typing import Any

__all__ = ["question"]


def question(observation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the question alone: a tiny model reads no JSON."""
    return str(observation["question"])
