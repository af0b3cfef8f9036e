"""Steps of workflows over deaths (promise 12, trap 5), in real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.lost_runs import SECTIONS, SHORT, TwoCalls, kill_everything, kill_runner, sections_of
from tests.helpers.systems import StartSystem, finalize_in_thread
from trinity_es import Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.projections.event_texts import kept_text
from trinity_es.testing import wait_until


def deliver(what: str) -> int:
    """Count an effect in a file, and take a while the first two times that it is `slow`."""
    with open(os.environ["EFFECTS"], "a") as file:
        file.write(f"{what}\n")
    lines = Path(os.environ["EFFECTS"]).read_text().splitlines()
    if what == "slow" and lines.count("slow") < 3:
        time.sleep(60)
    return len(lines)


class Steps(Workflow):
    """A step, an answer, and a step that does not end in the first two attempts."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        again = self.task.workflow_args["idempotent"]
        first = await self.step_async("pay", deliver, "pay")
        [answer] = await self.model.generate_async([65, self.random.randrange(66, 90)], max_tokens=SHORT)
        slow = await self.step_async("post it", deliver, "slow", idempotent=again)
        answer.reward, answer.metrics = 1.0, {"first": first, "slow": slow, "now": await self.now_async()}
        return [answer]


class StepsInAProcess(Steps):
    is_async = False

    def run(self) -> list[Experience]:
        first = self.step("pay", deliver, "pay")
        [answer] = self.model.generate([65, self.random.randrange(66, 90)], max_tokens=SHORT)
        slow = self.step("post it", deliver, "slow", idempotent=self.task.workflow_args["idempotent"])
        answer.reward, answer.metrics = 1.0, {"first": first, "slow": slow, "now": self.now()}
        return [answer]


def deliver_and_exit() -> None:
    deliver("exit")
    sys.exit()


class FailsOnce(Workflow):
    """The first attempt fails in a step, and later ones go another way."""

    def run(self) -> list[Experience]:
        if not Path(os.environ["EFFECTS"]).exists():
            self.step("exit", deliver_and_exit)
        self.step("pay", deliver, "pay")
        self.step("post it", deliver, "slow", idempotent=True)
        [answer] = self.model.generate([65], max_tokens=SHORT)
        answer.reward = 1.0
        return [answer]


def slow_steps(effects: Path, number: int) -> bool:
    return effects.exists() and effects.read_text().count("slow") == number


@pytest.mark.parametrize(("kill", "workflow", "store"), [
    (kill_runner, Steps, "sqlite"),
    (kill_everything, StepsInAProcess, "sqlite"),
    pytest.param(kill_runner, StepsInAProcess, "postgresql", marks=pytest.mark.postgres),
])
@pytest.mark.parametrize("idempotent", [True, False])
def test_trap_5_a_known_step_is_never_repeated_and_a_possibly_delivered_one_is_named(
    kill: Callable[[RolloutClient, StartSystem], RolloutClient], workflow: type[Workflow], idempotent: bool,
    store: str, start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    effects, requests = tmp_path / "effects", tmp_path / "requests"
    monkeypatch.setenv("EFFECTS", str(effects))
    monkeypatch.setenv("REQUESTS", str(requests))
    client = start_system(**sections_of(store, request))
    task = Task(workflow=workflow, workflow_args={"idempotent": idempotent})
    client.submit_batch(batch_id=1, tasks=[task], batch_type="train")
    for kills in (1, 2):
        wait_until(partial(slow_steps, effects, kills), f"slow step {kills}")
        client = kill(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 1
    [experience] = client.experiences(1)
    kept = [r.event for r in client.log.events() if isinstance(r.event, ev.AttemptKept)]
    if idempotent:
        assert effects.read_text().split() == ["pay", "slow", "slow", "slow"]
        assert [(e.calls, e.steps, e.possibly_delivered) for e in kept] == [(1, 1, [])] * 2
        assert len(requests.read_text().splitlines()) == 1
        assert "possibly_delivered" not in experience.info
    else:
        assert effects.read_text().split() == ["pay", "slow"] * 3
        assert [(e.calls, e.steps, e.possibly_delivered) for e in kept] == [(0, 0, ["post it"])] * 2
        assert len(requests.read_text().splitlines()) == 3
        assert experience.info["possibly_delivered"] == ["post it", "post it"]
        assert "may have had its effect" in kept_text(kept[0])
    assert [experience.metrics[name] for name in ("first", "slow")] == ([1, 4] if idempotent else [5, 6])
    assert client.log.verify() == []


def test_a_lost_attempt_goes_on_from_its_own_steps_and_not_from_those_of_one_that_failed(
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects = tmp_path / "effects"
    monkeypatch.setenv("EFFECTS", str(effects))
    monkeypatch.setenv("REQUESTS", str(tmp_path / "requests"))
    client = start_system(explorer={**SECTIONS["explorer"], "max_retry_times": 5})
    client.submit_batch(batch_id=1, tasks=[Task(workflow=FailsOnce), Task(workflow=TwoCalls)], batch_type="train")
    for kills in (1, 2):
        wait_until(partial(slow_steps, effects, kills), f"slow step {kills}")
        kill_runner(client, start_system)
    assert finalize_in_thread(client, 1).result(60)["finished_task_count"] == 2
    assert effects.read_text().split() == ["exit", "pay", "slow", "slow", "slow"]
