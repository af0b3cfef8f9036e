"""The reward of the letter task: a plain function, named in the taskset as "examples.grpo.reward:letter_share"."""

from __future__ import annotations

__all__ = ["letter_share"]

LENGTH = 8


def letter_share(response: str, truth: str, prompt: str | None = None, length: int = LENGTH) -> float:
    """Return the share of the first `length` characters of the response that are the right letter, from 0 to 1.

    Missing characters of a shorter response count as wrong.
    """
    return response[:length].count(truth) / length
