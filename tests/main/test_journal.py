"""Promise 12: what a lost attempt got from its engine is not generated again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.systems import StartSystem, finalize_in_thread, kill_system, pid_of
from trinity_es import Task, Workflow
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import EngineError
from trinity_es.events.experience import Experience
from trinity_es.events.store.journals import open_journals
from trinity_es.testing import ScriptedEngine, wait_until

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
    "rollout_model": {"engine_type": "tests.main.test_journal:Counting", "engine_args": {"token_seconds": 0.02}},
}}


def sections_of(store: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if store == "sqlite":
        return SECTIONS
    server = request.getfixturevalue("own_server")
    url = server.url(server.new_database()).replace("postgresql:", "postgresql+psycopg:")
    return {**SECTIONS, "store": {"url": url}}


@pytest.mark.parametrize(("kill", "workflow", "store"), [
    (kill_runner, TwoCalls, "sqlite"),
    (kill_everything, TwoCallsInAProcess, "sqlite"),
    pytest.param(kill_runner, TwoCallsInAProcess, "postgresql", marks=pytest.mark.postgres),
    pytest.param(kill_everything, TwoCalls, "postgresql", marks=pytest.mark.postgres),
])
def test_promise_12_a_lost_attempt_goes_on_where_it_was(
    kill: Callable[[RolloutClient, StartSystem], RolloutClient], workflow: type[Workflow], store: str,
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))
    client = start_system(**sections_of(store, request))
    client.submit_batch(batch_id=1, tasks=[Task(workflow=workflow)], batch_type="train")
    wait_until(lambda: journaled(client) > 2_000, "a part of the long answer to be in the journal")
    client = kill(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    [kept] = [r.event for r in client.log.events() if isinstance(r.event, ev.AttemptKept)]
    assert (kept.calls, kept.open_calls) == (1, 1)
    part = kept.tokens - SHORT
    assert 0 < part < LONG
    asked = [tuple(map(int, line.split())) for line in requests.read_text().splitlines()]
    assert asked == [(2, SHORT), (2 + SHORT, LONG), (2 + SHORT + part, LONG - part)]
    [experience] = client.experiences(1)
    assert experience.info["splices"] == [part]
    assert len(experience.tokens) == 2 + SHORT + LONG
    assert experience.version_spans == [(0, 0, LONG)]
    wait_until(lambda: journaled(client) == 0, "the journal to be freed")
    assert client.log.verify() == []


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_without_a_journal_a_lost_attempt_begins_at_its_prompt(
    seconds: float, start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is written, or somebody deletes it."""
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))
    client = start_system(explorer={**SECTIONS["explorer"], "progress": {"seconds": seconds}})
    client.submit_batch(batch_id=1, tasks=[Task(workflow=TwoCalls)], batch_type="train")
    wait_until(lambda: requests.exists() and len(requests.read_text().splitlines()) == 2, "the second call")
    if seconds:
        wait_until(lambda: journaled(client) > 0, "a record")
        shutil.rmtree(f"{client.log.url.removeprefix('sqlite:///')}.journals")
    kill_runner(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    assert [line.split()[0] for line in requests.read_text().splitlines()] == ["2", "22", "2", "22"]
    wait_until(lambda: journaled(client) == 0, "the journal to be freed")
    assert client.log.verify() == []
    assert not any(isinstance(r.event, ev.AttemptKept) for r in client.log.events())


class EngineFailsOnce(Counting):
    """Its first long answer fails on the way, as when the engine's process is lost."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        failed = Path(os.environ["REQUESTS"] + ".failed")
        if sampling.max_tokens == SHORT or failed.exists():
            return await super().generate(prompt, sampling)
        answering = asyncio.ensure_future(super().generate(prompt, sampling))
        await asyncio.sleep(1.5)
        answering.cancel()
        failed.touch()
        raise EngineError("the engine's process ended")


def test_an_answer_goes_on_after_its_engine_failed_and_the_runner_did_not(
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))
    engine = {**SECTIONS["explorer"]["rollout_model"], "engine_type": "tests.main.test_journal:EngineFailsOnce"}
    client = start_system(explorer={**SECTIONS["explorer"], "rollout_model": engine})
    client.submit_batch(batch_id=1, tasks=[Task(workflow=TwoCalls)], batch_type="train")
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    [kept] = [r.event for r in client.log.events() if isinstance(r.event, ev.AttemptKept)]
    part = kept.tokens - SHORT
    assert part > LONG // 4
    asked = [tuple(map(int, line.split())) for line in requests.read_text().splitlines()]
    assert asked == [(2, SHORT), (2 + SHORT, LONG), (2 + SHORT + part, LONG - part)]
    assert not any(r.type == "RunnerLost" for r in client.log.events())
