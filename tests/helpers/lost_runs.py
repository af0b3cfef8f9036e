"""Systems whose runners are lost under an answer: an engine that notes its requests, workflows, kills and journals."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.helpers.systems import StartSystem, kill_system, pid_of
from trinity_es import Workflow
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.events.store.journal_store import open_journals
from trinity_es.testing import ScriptedEngine

SHORT, LONG = 20, 150


class Counting(ScriptedEngine):
    """Notes each request: how many tokens its prompt has, and how many it may have."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        with open(os.environ["REQUESTS"], "a") as file:
            file.write(f"{len(prompt)} {sampling.max_tokens}\n")
        return await super().generate(prompt, sampling)


class TwoCalls(Workflow):
    """A short answer, and a long one to it."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        [first] = await self.model.generate_async([65, 66], max_tokens=SHORT)
        [second] = await self.model.generate_async(first.tokens.tolist(), max_tokens=LONG)
        second.reward = 1.0
        return [second]


class TwoCallsInAProcess(TwoCalls):
    is_async = False

    def run(self) -> list[Experience]:
        [first] = self.model.generate([65, 66], max_tokens=SHORT)
        [second] = self.model.generate(first.tokens.tolist(), max_tokens=LONG)
        second.reward = 1.0
        return [second]


def fill(folder: str, box: str) -> None:
    """Change a sandbox, once for each call."""
    with open(f"{folder}.filled", "a") as file:
        file.write(f"{box}\n")


class InASandbox(TwoCalls):
    """Fills a sandbox and then makes the calls in it. The task's `workflow_args` are those of its provider."""

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        async with self.lease("tests.helpers.lease_providers:HandedOver", args, creation_timeout=2.0) as held:
            await self.step_async("fill", fill, args["folder"], held.handle)
            [experience] = await super().run_async()
        experience.info |= {"box": held.handle, "attached": held.attached}
        return [experience]


class InASandboxInAProcess(TwoCallsInAProcess):
    def run(self) -> list[Experience]:
        args = self.task.workflow_args
        with self.lease("tests.helpers.lease_providers:HandedOver", args, creation_timeout=2.0) as held:
            self.step("fill", fill, args["folder"], held.handle)
            [experience] = super().run()
        experience.info |= {"box": held.handle, "attached": held.attached}
        return [experience]


def kill_runner(client: RolloutClient, start: StartSystem) -> RolloutClient:
    os.kill(pid_of(client, "runner-0"), signal.SIGKILL)
    return client


def kill_everything(client: RolloutClient, start: StartSystem) -> RolloutClient:
    kill_system(client)
    return start(**SECTIONS, store={"url": client.config.store.url})


def journaled(client: RolloutClient) -> int:
    """Bytes of all journals."""
    journals = open_journals(client.config.store.url)
    try:
        return sum(len(part) for life in journals.lives() for part in journals.read(life))
    finally:
        journals.close()


SECTIONS: dict[str, Any] = {"explorer": {
    "progress": {"seconds": 0.1, "max_bytes": 1_000_000},
    "rollout_model": {"engine_type": "tests.helpers.lost_runs:Counting", "engine_args": {"token_seconds": 0.02}},
}}


def sections_of(store: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if store == "sqlite":
        return SECTIONS
    server = request.getfixturevalue("own_server")
    url = server.url(server.new_database()).replace("postgresql:", "postgresql+psycopg:")
    return {**SECTIONS, "store": {"url": url}}
