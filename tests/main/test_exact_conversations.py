"""Conversations over the chat templates of real models: every token of theirs was sampled or rendered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.helpers.chat_templates import STYLES
from tests.helpers.random_conversations import Sampler, Talk, talks
from trinity_es.actors.rollout.model import Model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15)
@given(talks)
async def test_i2_p48_every_token_was_sampled_or_rendered(style: str, talk: Any) -> None:
    tools, system, steps, cleared = talk
    await Talk(style, tools, system).play(steps, cleared)


@pytest.mark.parametrize("style", sorted({*STYLES} - {"qwen3", "deepseekv3"}))  # which write a <think> or drop theirs
async def test_an_answer_that_was_cut_is_gone_on_with(style: str) -> None:
    engine = Sampler(style)
    model = Model(engine)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    texts = ["the answer", " is forty", "-two"]
    said, before = "", list[int]()
    for text in texts:
        engine.next = [engine.tokenizer.encode(text, add_special_tokens=False)]
        given = [{"role": "assistant", "content": said}] if said else []
        await model.chat_async([*asked, *given])
        assert not said or engine.asked == before, "nothing stands between the parts"
        before, said = [*engine.asked, *engine.next[0]], said + text
    [whole] = model.extract_experience_from_history()
    assert whole.action_mask.all()
    assert whole.response_text == said
