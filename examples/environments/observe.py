"""The user's turn for observations of examples/environments/openenv_server.py, named in openenv.yaml."""

from __future__ import annotations

from typing import Any

__all__ = ["question"]


def question(observation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return only the question: a tiny model reads no JSON."""
    return str(observation["question"])
