"""Promise 12: what a lost attempt got from its engine is not generated again."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import lost_runs
from tests.helpers.lost_runs import LONG, SECTIONS, SHORT, TwoCalls, journaled, kill_everything, kill_runner
from tests.helpers.systems import StartSystem, finalize_in_thread, kill_system
from trinity_es import Task, Workflow
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import EngineError
from trinity_es.projections.verify.log import verify_log
from trinity_es.testing import wait_until


@pytest.mark.parametrize(("kill", "workflow", "store"), [
    (kill_runner, TwoCalls, "sqlite"),
    (kill_everything, lost_runs.TwoCallsInAProcess, "sqlite"),
    pytest.param(kill_runner, lost_runs.TwoCallsInAProcess, "postgresql", marks=pytest.mark.postgres),
    pytest.param(kill_everything, TwoCalls, "postgresql", marks=pytest.mark.postgres),
])
def test_promise_12_a_lost_attempt_goes_on_where_it_was(
    kill: Callable[[RolloutClient, StartSystem], RolloutClient], workflow: type[Workflow], store: str,
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))
    client = start_system(**lost_runs.sections_of(store, request))
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
def test_without_a_journal_a_lost_attempt_begins_at_its_prompt_and_the_log_is_sound(
    seconds: float, start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is written, or somebody deletes that of a dead system."""
    requests = tmp_path / "requests"
    monkeypatch.setenv("REQUESTS", str(requests))
    explorer = {**SECTIONS["explorer"], "progress": {"seconds": seconds}}
    client = start_system(explorer=explorer)
    client.submit_batch(batch_id=1, tasks=[Task(workflow=TwoCalls)], batch_type="train")
    wait_until(lambda: requests.exists() and len(requests.read_text().splitlines()) == 2, "the second call")
    if seconds:
        wait_until(lambda: journaled(client) > 0, "a record")
        kill_system(client)
        url = client.config.store.url
        assert verify_log(url).problems == []
        shutil.rmtree(f"{url.removeprefix('sqlite:///')}.journals")
        assert verify_log(url).problems == [], "the journal is no part of the log"
        client = start_system(explorer=explorer, store={"url": url})
    else:
        kill_runner(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    assert [line.split()[0] for line in requests.read_text().splitlines()] == ["2", "22", "2", "22"]
    wait_until(lambda: journaled(client) == 0, "the journal to be freed")
    assert client.log.verify() == []
    assert not any(isinstance(r.event, ev.AttemptKept) for r in client.log.events())


class EngineFailsOnce(lost_runs.Counting):
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


@pytest.mark.parametrize(("kill", "workflow", "how"), [
    (kill_everything, lost_runs.InASandboxInAProcess, ""),
    (kill_runner, lost_runs.InASandbox, "can't attach"),
])
def test_a_sandbox_that_lives_is_taken_over_if_its_provider_can_and_else_a_new_one_is_filled(
    kill: Callable[[RolloutClient, StartSystem], RolloutClient], workflow: type[Workflow], how: str,
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REQUESTS", str(tmp_path / "requests"))
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    client = start_system(**SECTIONS)
    task = Task(workflow=workflow, workflow_args={"folder": str(boxes), "how": how})
    client.submit_batch(batch_id=1, tasks=[task], batch_type="train")
    wait_until(lambda: journaled(client) > 2_000, "a part of the long answer to be in the journal")
    [box] = boxes.iterdir()
    client = kill(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    wait_until(lambda: client.log.leases() == [], "all leases to be released")
    taken = [r.event for r in client.log.read(stream="leases") if isinstance(r.event, ev.LeaseTaken)]
    by = [r.event.by for r in client.log.read(stream="leases") if isinstance(r.event, ev.LeaseReleased)]
    filled = Path(f"{boxes}.filled").read_text().split()
    [experience] = client.experiences(1)
    assert experience.info["splices"]
    assert [t.attaches for t in taken][:2] == ["", taken[0].lease]
    assert sorted(p.suffix for p in boxes.iterdir()) == [".released"] * len({*filled})
    if how:
        assert filled == [box.name, experience.info["box"]], "the step is done again in the new sandbox"
        assert sorted(by) == ["coordinator", "coordinator", "owner"]
    else:
        assert filled == [box.name] == [experience.info["box"]]
        assert by == ["successor", "owner"]
    assert experience.info["attached"] is (how == "")
    assert client.log.verify() == []
