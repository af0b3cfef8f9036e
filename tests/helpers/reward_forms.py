"""Rewards in each form that users write. Each returns 3 for the answer "aab" to `ROW`, and fails for others."""

from __future__ import annotations

import asyncio
from typing import Any

ROW = {"prompt": "How many?", "question": "How many?", "choices": ["none", "three"], "answer": "B", "letter": "a"}
IDS = list(b"aab")
"""Token ids of the answer "aab", which are bytes."""


def plain(response: str, prompt: str, truth: str) -> float:
    assert (prompt, truth) == (ROW["prompt"], "B")
    return float(len(response))


def whatever(response: str, truth: str, **kwargs: Any) -> dict[str, float]:
    assert (kwargs["prompt"], truth) == (ROW["prompt"], "B")
    return {"letters": float(len(response)), "ids": float(len(kwargs["completion_ids"]) - len(IDS))}


def of_ids(response: str, completion_ids: list[int], scale: float) -> float:
    assert response == "aab"
    return scale * (completion_ids == IDS)


class Built:
    """Reward class, which is constructed with `reward_fn_args`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, truth: str, response: str) -> float:
        return self.scale * (response == "aab" and truth == "B")


async def awaited(response: str, truth: str) -> float:
    await asyncio.sleep(0)
    return float(len(response))


def trl(completions: list[str], letter: list[str], **kwargs: Any) -> list[float]:
    assert kwargs["prompts"] == [ROW["prompt"]]
    assert kwargs["completion_ids"] == [IDS]
    return [float(text.count(one) + 1) for text, one in zip(completions, letter, strict=True)]


def trl_ids(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def trl_bare(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


async def trl_awaited(prompts: list[str], completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


FORMS: dict[Any, dict[str, Any]] = {
    plain: {}, whatever: {}, of_ids: {"scale": 3.0}, Built: {"scale": 3.0}, awaited: {}, trl: {}, trl_ids: {},
    trl_bare: {}, trl_awaited: {},
}
"""Form of a reward -> its `reward_fn_args`."""
