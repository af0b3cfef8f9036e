"""Episodes with a real OpenEnv server, in an environment of its own."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.endpoint import until
from tests.helpers.openenv_servers import Server, ended
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.values import Args, Task
from trinity_es.testing import ScriptedEngine

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

SERVER = Path(__file__).with_name("openenv_server.py")
WORKFLOW = "trinity_es.environments.openenv:OpenEnvWorkflow"
EACH = int(os.environ.get("FAILURES", "20"))
"""How often each way to fail is played; `FAILURES=100` to be surer."""


class Noted(Server):
    """The server of these tests, which notes its episodes in a file."""

    note: Path

    def open(self) -> int:
        lines = Counter(self.note.read_text().split())
        return lines["begun"] - lines["over"]

    def start(self) -> None:
        """Start it; the episodes of one that was killed are not over in its note."""
        self.note.write_text("")
        super().start()


@contextmanager
def serving(python: str, folder: Path, sessions: int = 64, ping: float = 20.0) -> Iterator[Noted]:
    note = folder / "note"
    server = Noted([python, "-I", str(SERVER)], sessions, note, ping)
    server.note = note
    with ended(server):
        yield server


@pytest.fixture(scope="module")
def shared_server(openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noted]:
    """One for all tests: to start it takes seconds."""
    with serving(openenv_python, tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def server(shared_server: Noted) -> Noted:
    """It lives, whatever a test before did to it."""
    shared_server.note.with_name("refuse").unlink(missing_ok=True)
    if shared_server.process.poll() is not None:
        shared_server.start()
    return shared_server


@pytest.fixture(scope="module")
def narrow_server(openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noted]:
    """One with room for one session, whose client has 0.5 s to answer a ping."""
    with serving(openenv_python, tmp_path_factory.mktemp("narrow"), sessions=1, ping=0.5) as one:
        yield one


def runner_that_says(text: str, **more: Any) -> WorkflowRunner:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"response": text}))
    return WorkflowRunner(engine, defaults={"max_tokens": 40}, **{"timeout": 60, **more})


def task(server: Noted, number: int = 0, reset: dict[str, Any] | None = None, **args: Any) -> Task:
    return Task(
        workflow=WORKFLOW, task_id=number, raw_task={"prompt": "Guess.", "reset": {"seed": number, **(reset or {})}},
        workflow_args=Args({"url": server.url, **args}))


async def played(runner: WorkflowRunner, *asked: Task) -> list[UnitResult]:
    return await asyncio.gather(*(runner.execute(one, 7, range(1)) for one in asked))


async def test_an_episode_is_one_conversation_and_its_reward_the_sum_of_its_steps(server: Noted) -> None:
    runner = runner_that_says("free")
    done = await played(runner, *(task(server, i) for i in range(8)))
    assert [r.failures for r in done] == [[]] * 8
    for number, result in enumerate(done):
        [e] = result.experiences
        assert e.reward == 6.0
        assert e.metrics == {"turns": 3.0, "invalid_actions": 0.0, "reward": 6.0}
        assert [m["content"] for m in e.messages if m["role"] == "assistant"] == ["free"] * 3
        assert f'"guess {number}"' in e.messages[1]["content"]
        assert bytes(e.tokens[e.prompt_length :][e.action_mask].tolist()) == b"free" * 3
    await until(lambda: server.open() == 0, "each session to be closed")


async def test_a_server_without_room_is_waited_for(narrow_server: Noted) -> None:
    done = await played(runner_that_says("e"), *(task(narrow_server, i) for i in range(4)))
    assert [[e.reward for e in r.experiences] for r in done] == [[3.0]] * 4


async def test_a_server_that_pings_is_answered_while_the_model_writes(narrow_server: Noted) -> None:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"response": "e", "latency_seconds": 1.5}))
    [done] = await played(WorkflowRunner(engine, defaults={"max_tokens": 40}, timeout=60), task(narrow_server))
    assert done.failures == []
    assert [e.reward for e in done.experiences] == [3.0]


@pytest.mark.parametrize(("how", "kind", "said"), [
    ({"reset": {"fails": "raise"}}, "workflow", "the game broke"),
    ({"reset": {"fails": "invalid"}, "invalid_reward": -1}, "workflow", "in its own code, the action is not at fault"),
    ({"reset": {"fails": "no reward"}}, "workflow", "gave no reward"),
    ({"reset": {"fails": "hang"}, "answer_timeout": 0.5}, "timeout", "did not answer in time"),
    ({"parser": f"{__name__}:no_action"}, "workflow", "not a valid action: what is e?"),
    ({"parser": f"{__name__}:unknown_fields"}, "workflow", "VALIDATION_ERROR"),
])
async def test_what_fails_is_a_failure_of_its_kind(server: Noted, how: dict[str, Any], kind: str, said: str) -> None:
    [done] = await played(runner_that_says("e"), task(server, **how))
    assert done.experiences == []
    assert [f[1] for f in done.failures] == [kind]
    assert said in done.failures[0][2]
    await until(lambda: server.open() == 0, "the session to be closed")


def no_action(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"what is {text}?")


def unknown_fields(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"unknown": text}


def wrong_types(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"guess": 1, "at": text}


def no_object(text: str, schema: dict[str, Any]) -> Any:
    return [text]


@pytest.mark.parametrize("parser", [unknown_fields, wrong_types, no_object])
async def test_what_an_answer_that_is_no_action_gives_the_task_may_say(server: Noted, parser: Any) -> None:
    said = task(server, parser=f"{__name__}:{parser.__name__}", invalid_reward=-1)
    [done] = await played(runner_that_says("e"), said)
    assert [(e.reward, e.metrics["invalid_actions"]) for e in done.experiences] == [(-1.0, 1.0)]


async def test_a_server_killed_in_a_step_fails_its_episodes_as_infra(server: Noted) -> None:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"response": "e", "latency_seconds": 0.2}))
    runner = WorkflowRunner(engine, defaults={"max_tokens": 40}, timeout=60)
    done = await played(runner, task(server, 0), task(server, 1, {"fails": "die"}), task(server, 2))
    assert [f[1] for r in done for f in r.failures] == ["infra"] * 3
    assert [e for r in done for e in r.experiences] == []
    waits = asyncio.create_task(played(runner, task(server, 0)))
    await asyncio.to_thread(server.start)
    [again] = await waits
    assert [e.reward for e in again.experiences] == [3.0]


async def test_the_session_of_a_run_that_is_cut_off_is_closed(server: Noted) -> None:
    runner = runner_that_says("e", timeout=1.5)
    [done] = await played(runner, task(server, 0, {"fails": "hang"}))
    assert [f[1] for f in done.failures] == ["timeout"]
    await until(lambda: server.open() == 0, "the session to be closed")


async def test_each_failure_of_a_server_a_hundred_times_and_none_a_reward(server: Noted) -> None:
    broken, refused, gone = await failures(server)
    for done, kind in ((broken, "workflow"), (refused, "infra"), (gone, "infra")):
        assert [e for r in done for e in r.experiences] == []
        assert Counter(f[1] for r in done for f in r.failures) == {kind: EACH}


async def failures(server: Noted) -> list[list[UnitResult]]:
    broken = await played(
        runner_that_says("e"), *(task(server, i, {"fails": "raise"}) for i in range(EACH)))
    server.note.with_name("refuse").touch()
    refused = await played(runner_that_says("e"), *(task(server, i) for i in range(EACH)))
    server.kill()
    gone = await played(runner_that_says("e"), *(task(server, i, connect_timeout=0) for i in range(EACH)))
    return [broken, refused, gone]
