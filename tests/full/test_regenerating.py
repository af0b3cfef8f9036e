"""regenerate: a recorded rollout once more, token by token, on the ScriptedEngine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import trinity_es
from tests.helpers.adapters import make_adapter
from tests.helpers.handmade import EVIL, cli, history, write
from tests.helpers.made_rollouts import record
from trinity_es import Task
from trinity_es.actors.engines.adapter_checks import checked_adapter
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.audit.regenerate import Rollout, compare, find_rollout, regenerate
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, WeightNotFound
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.workflow import MultiTurnWorkflow, Workflow

SCRIPT: dict[str, Any] = {"tokens": 9}


class TwoTurns(MultiTurnWorkflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for turn in ("b", None):
            [answer] = await self.model.chat_async(messages)
            messages.append({"role": "assistant", "content": answer.response_text})
            if turn:
                messages.append({"role": "user", "content": turn})
        return [await self.process_messages_to_experience_async(messages, 0.5)]


def reward(**_: Any) -> float:
    return 1.0


def made(folder: Path, *, script: dict[str, Any] | None = None, weights: Path | None = None, **how: Any) -> str:
    """A log of four tasks: two runs of one request with a seed; one without; a conversation; one with more sampling."""
    recorded = SCRIPT if script is None else script
    config = trinity_es.Config.from_dict(
        {"mode": "explore", "explorer": {"rollout_model": {"engine_type": "scripted", "script": recorded}}},
        folder=folder,
    )

    async def play() -> None:
        engine = ScriptedEngine(replace(config.explorer.rollout_model.engine_config(), options=SCRIPT))
        if weights is not None:
            await engine.load_weights(4, str(weights))
        one: dict[str, Any] = {
            "workflow": "trinity_es.workflows:SingleTurnWorkflow", "reward_fn": "tests.full.test_regenerating:reward",
        }
        tasks = [
            Task(**one, repeat_times=2, rollout_args={"seed": 3}, raw_task={"prompt": "first"}),
            Task(**one, rollout_args={"temperature": 0.0, "max_tokens": 4}, raw_task={"prompt": "second"}),
            Task(workflow=TwoTurns, rollout_args={"seed": 5}, raw_task={"prompt": "third"}),
            Task(workflow=AsksInTwoWays, rollout_args={"seed": 6}, raw_task={"prompt": "fourth"}),
            Task(workflow=Further, rollout_args={"seed": 5}, raw_task={"prompt": "fifth"}),
        ]
        await record(folder / "log.sqlite", engine, config, tasks, weights=str(weights or ""), **how)

    asyncio.run(play())
    return str(folder / "log.sqlite")


def rollout_of(url: str, task: int, run: int = 0) -> Rollout:
    with trinity_es.open_log(url) as log:
        return find_rollout(log, 1, task, run)


def again(url: str, task: int, run: int = 0, **where: str) -> Any:
    return regenerate(rollout_of(url, task, run), **where)


class Further(Workflow):
    """An answer that a client asked for with more than `Sampling` has."""

    can_reset = False
    is_async = True

    async def run_async(self) -> list[Experience]:
        [answer] = await self.model.chat_async([{"role": "user", "content": "a"}])
        answer.reward, answer.info["further_sampling"] = 1.0, {"stop_token_ids": [7]}
        return [answer]


def test_the_same_engine_makes_the_same_tokens(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    url = made(tmp_path, weights=weights)
    for task, run in ((0, 0), (0, 1), (1, 0)):
        found = again(url, task, run)
        assert found.equal, found
        assert (found.rollout.version, found.weights) == (4, str(weights))
        [turn] = found.turns
        assert turn.recorded == turn.regenerated
        assert (turn.agreement, turn.logprob_tokens, turn.logprob_max) == (1.0, len(turn.recorded), 0.0)
        assert found.why == []
    assert again(url, 0, 0).turns[0].recorded != again(url, 0, 1).turns[0].recorded, "two answers of one request"
    assert again(url, 1).turns[0].sampling["max_tokens"] == 4
    told = cli("regenerate", 1, 0, 1, "--log", url)
    assert told.exit_code == 0, told.output
    assert "every token is the same" in told.stdout
    weights.rename(tmp_path / "moved")
    with pytest.raises(WeightNotFound, match="is no longer at"):
        again(url, 0)
    assert cli("regenerate", 1, 0, 0, "--log", url).exit_code == 2
    assert again(url, 0, weights=str(tmp_path / "moved")).equal


class AsksInTwoWays(TwoTurns):
    """Takes the second of three answers, and goes on in another way."""

    async def run_async(self) -> list[Experience]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        _, second, _ = await self.model.chat_async(messages, n=3, max_tokens=5)
        messages += [{"role": "assistant", "content": second.response_text}, {"role": "user", "content": "b"}]
        await self.model.chat_async(messages, max_tokens=7)
        kept = self.model.extract_experience_from_history(clear_history=False)
        for experience in kept:
            experience.reward = 0.5
        return [*kept[-1:], *kept[:-1]]


def test_each_turn_of_a_conversation_is_generated_as_it_was_asked_for(tmp_path: Path) -> None:
    url = made(tmp_path)
    talk = again(url, 2)
    assert talk.equal
    assert talk.why == []
    assert len(talk.turns) == 2, "each of the assistant's turns"
    found = again(url, 3)
    assert found.equal
    assert sorted(len(t.recorded) for t in found.turns) == [5, 5, 5, 7]
    assert {t.sampling["n"] for t in found.turns} == {1, 3}


def test_another_engine_makes_others_and_it_says_how_far_they_agree_and_why_not(tmp_path: Path) -> None:
    changed = {"tokens": 9, "rules": [{"prompt": "first", "response": EVIL}]}
    url = made(tmp_path, script=changed)
    found = again(url, 0)
    assert not found.equal
    assert found.turns[0].first_difference == 0
    assert any(why.startswith("another engine") for why in found.why)
    told = cli("regenerate", 1, 0, 0, "--log", url)
    assert told.exit_code == 1
    assert "THE TOKENS DIFFER" in told.stdout
    assert "\x1b" not in told.stdout
    data = orjson.loads(cli("regenerate", 1, 0, 0, "--log", url, "--json").stdout)
    assert (data["equal"], data["turns"][0]["first_difference"]) == (False, 0)
    assert data["why"] == found.why
    assert again(url, 1).equal, "the rule is for the first task"


def test_what_the_log_does_not_say_is_named(tmp_path: Path) -> None:
    url = made(tmp_path, strip=("sampling",), engine_version="")
    found = again(url, 1)
    assert found.turns[0].sampling["temperature"] == 0.0, "the task said so"
    told = "; ".join(found.why)
    assert "how it was sampled is not recorded" in told
    assert "which version of the engine" in told
    talk = again(url, 2)
    assert len(talk.turns) == 2, "each of the assistant's turns"
    assert any("conversation" in why for why in talk.why)
    greedy = again(url, 0)
    assert not any("without a seed" in why for why in greedy.why)
    assert any("also set stop_token_ids" in why for why in again(url, 4).why)
    assert not any("also set" in why for why in greedy.why)


def test_without_a_seed_it_says_that_it_is_another_draw(tmp_path: Path) -> None:
    rollout = rollout_of(made(tmp_path), 0)
    [experience] = rollout.experiences
    experience.info["sampling"]["seed"] = None
    experience.info["version_spans"] = [[0, 0, 3], [1, 3, 9]]
    why = regenerate(rollout).why
    assert any("without a seed" in w for w in why)
    assert any("tokens 0 to 2 by 0, 3 to 8 by 1; here all are by 0" in w for w in why)


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    url = made(tmp_path)
    with trinity_es.open_log(url) as log:
        with pytest.raises(DataError, match="tasks 0 to 4"):
            find_rollout(log, 1, 5, 0)
        with pytest.raises(DataError, match="runs 0 to 1"):
            find_rollout(log, 1, 0, 2)
    assert cli("regenerate", 9, 0, 0, "--log", url).exit_code == 2
    other = tmp_path / "other.sqlite"
    write(other, history("0" * 64))
    with trinity_es.open_log(str(other)) as log:
        with pytest.raises(DataError, match="an eval"):
            find_rollout(log, "0/letters", 0, 0)
        with pytest.raises(DataError, match="left no tokens to compare"):
            find_rollout(log, "open", 0, 0)
    rollout = rollout_of(url, 0)
    rollout.experiences = [trinity_es.Experience(tokens=[1, 2, 3], prompt_length=1)]
    with pytest.raises(DataError, match="called no model"):
        regenerate(rollout)


def test_the_first_difference_and_the_share_that_agrees() -> None:
    logprobs = np.array([-1, -2, -3, -4], dtype=np.float32)
    e = Experience(tokens=[1, 2, 10, 11, 12, 13], prompt_length=2, logprobs=logprobs)

    def of(*tokens: int, logprobs: list[float] | None = None) -> Any:
        answer = Completion(prompt_token_ids=[1, 2], token_ids=list(tokens), logprobs=logprobs, text="",
                            finish_reason="stop")
        return compare(e, 2, 6, answer, Sampling())

    assert of(10, 11, 12, 13).first_difference is None
    other = of(10, 11, 99, 13, logprobs=[-1.0, -2.5, -9.0, -9.0])
    assert (other.first_difference, other.agreement, other.logprob_tokens) == (2, 0.75, 2)
    assert (other.logprob_max, other.logprob_mean) == (0.5, 0.25)
    assert (of(10, 11).first_difference, of(10, 11).agreement) == (2, 0.5)
    longer = of(10, 11, 12, 13, 14)
    assert (longer.first_difference, longer.agreement) == (4, 0.8)


def test_a_rollout_of_an_adapter_is_generated_again_with_its_version(tmp_path: Path) -> None:
    config = trinity_es.Config.from_dict(
        {"mode": "explore", "explorer": {"rollout_model": {"engine_type": "scripted", "lora": {}}}}, folder=tmp_path
    )
    folder = make_adapter(tmp_path / "math")

    async def play() -> None:
        engine = ScriptedEngine(config.explorer.rollout_model.engine_config())
        await engine.load_adapter("math", 3, str(folder))
        task = Task(
            workflow="trinity_es.workflows:SingleTurnWorkflow", reward_fn="tests.full.test_regenerating:reward",
            raw_task={"prompt": "a"}, rollout_args={"seed": 3, "adapter": "math", "max_tokens": 9},
        )
        await record(tmp_path / "log.sqlite", engine, config, [task])

    asyncio.run(play())
    event = ev.AdapterPublished(adapter="math", version=3, path=str(folder), rank=8, size=12_345,
                                digest=checked_adapter(folder).digest)
    write(tmp_path / "log.sqlite", [(event.own_stream(), [event])])
    rollout = rollout_of(str(tmp_path / "log.sqlite"), 0)
    assert rollout.experiences[0].info["adapter_spans"] == [["math", 3, 0, 9]]
    found = regenerate(rollout)
    assert found.equal, found
    assert found.turns[0].sampling["adapter"] == "math"
    make_adapter(folder, seed=1)
    with pytest.raises(WeightNotFound, match=r"version 3 of adapter 'math' can't be loaded: the files at .* changed"):
        regenerate(rollout)
