"""An engine that samples prepared texts, and a tokenizer that tokenizes these texts differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.helpers.recorded_engine import Marked, Recorder
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.testing import ByteTokenizer


class Merging(Marked):
    """Tokenizer that merges a doubled letter into one token (1000 + its code). Sampled texts have two."""

    def encode(self, text: str) -> list[int]:
        ids, i = list[int](), 0
        while i < len(text):
            double = text[i : i + 2] == text[i] * 2
            ids.append(1000 + ord(text[i]) if double else ord(text[i]))
            i += 2 if double else 1
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t - 1000) * 2 if t >= 1000 else chr(t) for t in token_ids)


class Sampler(Recorder):
    """Engine that samples prepared texts, one token per letter, and the end of the turn unless cut."""

    def __init__(self, texts: Sequence[str], tokenizer: ByteTokenizer, cut: bool = False, **script: Any) -> None:
        super().__init__(**script)
        self.tokenizer, self.texts, self.cut = tokenizer, list(texts), cut
        self.logprobs_asked = 0

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        assert isinstance(prompt, list)
        self.asked.append((prompt, sampling))
        text = self.texts.pop(0)
        ids = [ord(c) for c in text] + ([] if self.cut else [ord("$")])
        return [
            Completion(
                prompt_token_ids=prompt, token_ids=ids, logprobs=[-0.5 - i for i in range(len(ids))], text=text,
                finish_reason="length" if self.cut else "stop",
            )
            for _ in range(sampling.n)
        ]

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        self.logprobs_asked += 1
        return await super().logprobs(token_ids, temperature)


async def talk(model: Model, asks: Sequence[str], **sampling: Any) -> list[dict[str, Any]]:
    """Send requests one after the other, each with the whole conversation so far, and return the messages."""
    messages: list[dict[str, Any]] = []
    for ask in asks:
        messages.append({"role": "user", "content": ask})
        [answer, *_] = await model.chat_async(messages, **sampling)
        messages.append({"role": "assistant", "content": answer.response_text})
    return messages
