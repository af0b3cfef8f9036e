"""An engine that records its requests, and a tokenizer with turn marks, for tests of a workflow's model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.testing import ByteTokenizer, ScriptedEngine


class Recorder(ScriptedEngine):
    """Scripted engine that records requests, answers and aborts."""

    def __init__(self, **script: Any) -> None:
        super().__init__(EngineConfig(model_path="", options=script))
        self.asked: list[tuple[str | list[int], Sampling]] = []
        self.gave: list[Completion] = []
        self.aborted = 0

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt, sampling))
        try:
            found = await super().generate(prompt, sampling)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        self.gave += found
        return found

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        self.asked.append((prompt, sampling))
        try:
            async for part in super().stream(prompt, sampling):
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise


HELLO = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"},
]


class Marked(ByteTokenizer):
    """Tokenizer with a template like `U:q1|A:a1$\\n`: a turn ends with `$`, and the template adds a newline."""

    eos_token_id = ord("$")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = "".join(
            f"U:{m['content']}|" if m["role"] == "user" else f"A:{m['content']}$\n" for m in messages
        ) + ("A:" if kwargs.get("add_generation_prompt") else "")
        return self.encode(text) if kwargs.get("tokenize", True) else text
