"""A verifiers environment: two turns of a model, rewarded by its letters "e". A task may fail in the way it names."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["LettersEnv", "LettersTaskset", "Talk"]

RAISED = {e.__name__: e for e in (
    vf.ProviderError, vf.SandboxError, vf.TunnelError, vf.InterceptionError, vf.HarnessError)}


class LettersData(vf.TaskData):
    fails: str = ""
    """The type of the error to end with, or what else goes wrong."""
    note: str = ""
    """A file that a line is appended to when an episode begins."""


class LettersConfig(vf.TasksetConfig):
    rows: int = 4
    """0: there is no end."""
    shuffled: bool = False
    """Each time another order."""


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float | dict[str, float]:
        if self.data.fails == "TaskError":
            raise ValueError("the rubric is broken")
        if self.data.fails in ("no reward", "nan reward"):
            return {} if self.data.fails == "no reward" else math.nan
        said = [n.message.content or "" for n in trace.nodes if n.sampled]
        return sum(text.count("e") for text in said) / max(sum(map(len, said)), 1)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return math.nan if self.data.fails == "nan metric" else float(trace.num_turns)

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return []


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    @property
    def INFINITE(self) -> bool:  # type: ignore[override]
        return self.config.rows == 0

    def load(self) -> Iterator[LettersTask]:
        numbers: Any = itertools.islice(itertools.count(), self.config.rows or None)
        for number in random.sample(list(numbers), self.config.rows) if self.config.shuffled else numbers:
            yield LettersTask(LettersData(prompt=f"{number}: write an e"), self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any,
        **more: Any,
    ) -> vf.ProgramResult:
        noted(data, "begun")
        try:
            await self.talk(data, ctx.model, endpoint, secret)
        finally:
            noted(data, "over")
        return vf.ProgramResult(exit_code=1 if data.fails == "exit" else 0, stdout="", stderr="")

    async def talk(self, data: Any, model: str, endpoint: str, secret: str) -> None:
        how = data.fails
        said: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(2 if how in ("", "fork", "judged", "gives up", "asks again") else 1):
                try:
                    answer = await client.chat.completions.create(model=model, messages=said)
                except openai.APIError:
                    if how == "gives up":  # and ends as if all were well
                        return
                    if how != "asks again":
                        raise
                    answer = await client.chat.completions.create(model=model, messages=said)
                text = answer.choices[0].message.content
                # A history that is changed is another branch.
                said += [{"role": "assistant", "content": f"{text}, said he" if how == "fork" else text},
                         {"role": "user", "content": f"and on, {turn}"}]
        if how in ("timeout", "sleep"):
            await asyncio.sleep(600)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        if how == "orphan":  # the shell ends before what it started
            subprocess.run(["sh", "-c", f"sleep 0.5 & echo $! >> {data.note}"], check=True)
        if how == "surrogate":
            raise RuntimeError("half a pair: \ud83d")
        if how in RAISED:
            raise RAISED[how](f"injected {how}")
        if how == "plain":
            raise RuntimeError("a harness that breaks")


def noted(data: Any, what: str) -> None:
    if data.note:
        with Path(data.note).open("a") as f:
            f.write(f"{data.idx} {os.getpid()} {what}\n")


class LettersEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class LettersEnv(vf.Env[LettersEnvConfig]):
    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)
        if task.data.fails == "EnvError":
            raise RuntimeError("the game is over before it is over")
        if task.data.fails == "judged":
            await agents.judge.run(task)
