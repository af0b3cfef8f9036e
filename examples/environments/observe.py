"""User message for observations of examples/environments/openenv_server.py; openenv.yaml names this function."""

from __future__ import annotations

from typing import Any

__all__ = ["question"]


def question(observation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return only the observation's question, since a tiny model can't read JSON."""
    return str(observation["question"])
