"""Thousands of conversations (`tests/helpers/random_conversations.py`), 700 by default: `CONVERSATIONS=10000 pytest
...`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from tests.helpers.chat_templates import STYLES
from tests.helpers.random_conversations import Talk, talks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "700"))


@pytest.mark.parametrize("style", STYLES)
def test_i2_every_token_of_thousands_of_conversations_was_sampled_or_rendered(style: str) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=-(-CONVERSATIONS // len(STYLES)))
    @given(talks)
    def every(talk: Any) -> None:
        tools, system, steps, cleared = talk
        made = Talk(style, tools, system)
        asyncio.run(made.play(steps, cleared))
        seen.update({"played": 1, **made.counts})

    every()
    assert seen["played"] >= CONVERSATIONS // len(STYLES)
    assert CONVERSATIONS < 10_000 or min(seen.values()) > 5, f"some kind of conversation was hardly played: {seen}"
    print(style, dict(seen))  # noqa: T201
