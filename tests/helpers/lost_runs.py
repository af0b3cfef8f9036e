"""Systems whose runners die during an answer: an engine that records requests, workflows, kills, journals."""

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
    """Engine that records each request: tokens of its prompt, and its max_tokens."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        with open(os.environ["REQUESTS"], "a") as file:
            file.write(f"{len(prompt)} {sampling.max_tokens}\n")
        return await super().generate(prompt, sampling)


class TwoCalls(Workflow):
    """Workflow with two calls: a short answer, and a long one."""

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
    """Change a sandbox. Each call counts."""
    with open(f"{folder}.filled", "a") as file:
        file.write(f"{box}\n")


class InASandbox(TwoCalls):
    """Workflow that fills a sandbox and then makes the calls. The task's `workflow_args` are the provider's."""

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
    """Return the total size of all journals in bytes."""
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
