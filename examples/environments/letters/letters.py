"""A verifiers environment that a tiny model can learn: answer `c=` with the letter c, sixteen times.

    trinity-es env install examples/environments/letters

It has its own harness, which asks the model once from the environment's process, since verifiers' own harnesses start a
program for each episode, which costs seconds of CPU time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import verifiers.v1 as vf

__all__ = ["AskOnce", "LettersTaskset"]


class LettersConfig(vf.TasksetConfig):
    letters: str = "abcdefgh"
    length: int = 16


class LetterData(vf.TaskData):
    letter: str
    length: int


class LetterTask(vf.Task[LetterData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """Return the share of the first `length` characters that are the right letter, from 0 to 1."""
        [answer] = [node.message.content or "" for node in trace.nodes if node.sampled]
        return answer[: self.data.length].count(self.data.letter) / self.data.length


class LettersTaskset(vf.Taskset[LetterTask, LettersConfig]):
    def load(self) -> Iterator[LetterTask]:
        for letter in self.config.letters:
            data = LetterData(prompt=f"{letter}=", letter=letter, length=self.config.length)
            yield LetterTask(data, self.config.task)


@functools.cache
def http() -> httpx.AsyncClient:
    """Return the HTTP client that all episodes share, since a new client takes 40 ms of CPU to read certificates.

    It keeps no idle connections, since the server might close one just when it is reused. The default timeout of 5 s
    for a connection is too short on a busy machine.
    """
    return httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))


class AskOnce(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any,
        **others: Any,
    ) -> vf.ProgramResult:
        messages: Any = [{"role": "user", "content": data.prompt}]
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http())
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
