"""Prompt and weights for tests that send weights to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


def state_of(model: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(str(model)).state_dict())
