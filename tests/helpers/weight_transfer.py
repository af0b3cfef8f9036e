"""Weights that are sent to an engine."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


def state_of(model: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(str(model)).state_dict())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
