"""Workflows that ask by OpenAI clients, on an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import openai
import pytest

from tests.helpers.endpoint import HELLO, Fails, Recorder, serving, until
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.workflow import Workflow


class Talks(Workflow):
    """Two requests by a client; returns what was kept of them."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        ask = self.model.get_openai_async_client()
        assert self.model.get_openai_async_client() is ask
        said = [*HELLO]
        for _ in range(2):
            answer = await ask.chat.completions.create(model=self.model.model_name, messages=said)
            said += [answer.choices[0].message, {"role": "user", "content": "on"}]
        return [self.rewarded(e) for e in self.model.extract_experience_from_history()]

    def rewarded(self, experience: Experience) -> Experience:
        experience.reward = 1.0
        return experience


class Judged(Talks):
    """Fails by an OpenAI client of another model, after its own model's error was dealt with."""

    async def run_async(self) -> list[Experience]:
        ask = self.model.get_openai_async_client()
        with contextlib.suppress(openai.APIError):
            await ask.completions.create(model="tiny", prompt="x")
        await ask.models.list()
        await ask.completions.create(model="judge", prompt="x")
        return []


class TalksInAThread(Talks):
    is_async = False

    def run(self) -> list[Experience]:
        ask = self.model.get_openai_client()
        said = [*HELLO]
        for _ in range(2):
            answer = ask.chat.completions.create(model=ask.model_path, messages=said)
            said += [answer.choices[0].message, {"role": "user", "content": "on"}]
        return [self.rewarded(e) for e in self.model.extract_experience_from_history()]


class KeepsItself(Talks):
    """Makes its experience of what an answer has beyond OpenAI's fields."""

    is_async = False

    def run(self) -> list[Experience]:
        ask = self.model.get_openai_client()
        answer = ask.chat.completions.create(model=ask.model_path, messages=HELLO, logprobs=True)
        (choice,) = answer.choices
        return [Experience(
            tokens=[*answer.prompt_token_ids, *choice.token_ids], prompt_length=len(answer.prompt_token_ids),
            logprobs=[lp.logprob for lp in choice.logprobs.content], reward=0.5,
        )]


class BlocksTheLoop(Talks):
    async def run_async(self) -> list[Experience]:
        self.model.get_openai_client().chat.completions.create(model="tiny", messages=HELLO)
        return []


class Leaves(Talks):
    """Its request goes on when it is over."""

    async def run_async(self) -> list[Experience]:
        ask = self.model.get_openai_async_client()
        self.left = asyncio.create_task(ask.completions.create(model="tiny", prompt="hang"))
        await asyncio.sleep(0.3)
        return [Experience(tokens=[1, 2], prompt_length=1, reward=0.0)]


def runner_on(server: EngineServer | None, engine: Any, **more: Any) -> WorkflowRunner:
    return WorkflowRunner(engine, server=server, defaults={"max_tokens": 4}, timeout=60, **more)


async def played(runner: WorkflowRunner, workflow: type[Workflow]) -> UnitResult:
    return await runner.execute(Task(workflow=workflow, task_id=1), 7, range(2))


async def served(engine: Any, workflow: type[Workflow], **more: Any) -> UnitResult:
    """Play two runs on an engine with an endpoint, which has no session afterwards."""
    async with serving(engine) as server:
        done = await played(runner_on(server, engine, **more), workflow)
        assert server.sessions == {}
    return done


def sound(done: UnitResult) -> None:
    assert done.failures == []
    assert [(e.eid.run, e.eid.step) for e in done.experiences] == [(0, 1), (1, 1)]
    for e in done.experiences:  # both answers, and what was said between them
        assert e.action_mask.tolist() == [True] * 4 + [False] * len("\non\n") + [True] * 4
        assert len(e.tokens) - e.prompt_length == len(e.logprobs)
        assert (e.logprobs[4:8] == 0).all()
        assert bytes(e.tokens.tolist()).decode() == e.prompt_text + e.response_text
        first, on, second = e.messages[-3:]
        assert (on["content"], e.response_text) == ("on", f"{first['content']}\non\n{second['content']}")
    assert [r.response_tokens for r in done.results] == [8, 8]


@pytest.mark.parametrize(("workflow", "in_worker"), [(Talks, False), (TalksInAThread, False), (TalksInAThread, True)])
async def test_p15_a_workflow_asks_by_an_openai_client_and_returns_its_history(
    workflow: type[Workflow], in_worker: bool, pool: WorkerPool
) -> None:
    sound(await served(Recorder(), workflow, workers=pool if in_worker else None))


async def test_an_answer_has_all_that_an_experience_needs(pool: WorkerPool) -> None:
    engine = Recorder()
    done = await served(engine, KeepsItself, workers=pool)
    (own,) = await engine.generate(list(b"hello\n"), Sampling(max_tokens=4))
    assert [e.tokens.tolist() for e in done.experiences] == [[*own.prompt_token_ids, *own.token_ids]] * 2
    assert done.experiences[0].logprobs.tolist() == pytest.approx(own.logprobs)
    assert [(r.prompt_tokens, r.response_tokens) for r in done.results] == [(6, 4), (6, 4)]


async def test_a_run_that_is_over_is_forgotten_with_its_requests() -> None:
    engine = Recorder(rules=[{"prompt": "hang", "hang": True}])
    async with serving(engine) as server:
        assert (await played(runner_on(server, engine), Leaves)).failures == []
        assert server.sessions == {}
        await until(lambda: engine.aborted == 2, "the end of what they left behind")


async def test_a_blocking_client_on_the_engines_loop_is_refused() -> None:
    done = await served(Recorder(), BlocksTheLoop)
    assert [f[1] for f in done.failures] == ["workflow", "workflow"]
    assert "get_openai_async_client" in done.failures[0][2]


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(("details", "kind"), [({}, "infra"), ({"dead": True}, "infra"), ({"refused": True}, "data")])
async def test_an_engines_error_has_its_kind_by_a_client_too(
    details: dict[str, Any], kind: str, in_worker: bool, pool: WorkerPool
) -> None:
    engine = Fails(**details)
    async with serving(engine) as server:
        runner = runner_on(server, engine, workers=pool)
        done = await played(runner, TalksInAThread if in_worker else Talks)
    assert [f[1] for f in done.failures] == [kind, kind]
    assert "it burns" in done.failures[0][2]
    assert runner.engine_dead == ("it burns" if details.get("dead") else None)


async def test_an_error_that_is_not_the_engines_is_the_workflows() -> None:
    done = await served(Fails(), Judged)
    assert [(f[1], "judge" in f[2]) for f in done.failures] == [("workflow", True)] * 2


async def test_where_there_is_no_server_the_error_says_what_to_do() -> None:
    done = await played(runner_on(None, Recorder()), Talks)
    assert [f[1] for f in done.failures] == ["workflow", "workflow"]
    assert "server" in done.failures[0][2]


async def test_without_openai_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    done = await served(Recorder(), Talks)
    assert 'pip install "trinity-es[openai]"' in done.failures[0][2]
