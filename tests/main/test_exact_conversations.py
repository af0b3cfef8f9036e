"""Conversations over the chat templates of real models: every token of theirs was sampled or rendered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.helpers.chat_templates import STYLES
from tests.helpers.random_conversations import Talk, talks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("style", STYLES)
@given(talks)
async def test_i2_every_token_was_sampled_or_rendered(style: str, talk: Any) -> None:
    tools, system, steps, cleared = talk
    await Talk(style, tools, system).play(steps, cleared)
