"""Workflows as users of the known system (0.6) write them, on the real actor system, sync and async: rows 39 to 49."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.parity_rows import NewId, one
from tests.helpers.systems import StartSystem
from trinity_es import MultiTurnWorkflow, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.client.scheduler import Scheduler
from trinity_es.events.experience import Experience
from trinity_es.events.values import Status, Task
from trinity_es.testing import wait_until

TALK = [
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
]


@pytest.fixture
def client(system_for: StartSystem) -> RolloutClient:
    return system_for(
        explorer={
            "rollout_model": {"max_model_len": 64, "max_response_tokens": 8}, "max_retry_times": 0,
            "auxiliary_models": [{"name": "judge", "engine_type": "scripted", "script": {"response": "0.5"}}],
            "over_rollout": {"return_partial_tasks": True}, "max_repeat_times_per_runner": 2,
        },
    )


def played(client: RolloutClient, batch: int, tasks: list[Task], **how: Any) -> tuple[list[Status], list[Experience]]:
    async def main() -> tuple[list[Status], list[Experience]]:
        async with Scheduler(client.config) as scheduler:
            scheduler.schedule(tasks, batch_id=batch)
            return await scheduler.get_results(batch_id=batch, **{"timeout": 60, **how})

    return asyncio.run(main())


def both(sync: type[Workflow], on_loop: type[Workflow], **fields: Any) -> list[Task]:
    return [Task(workflow=sync, **fields), Task(workflow=on_loop, **fields)]


def fine(found: tuple[list[Status], list[Experience]]) -> list[Experience]:
    statuses, experiences = found
    assert all(s.ok for s in statuses), [s.message for s in statuses]
    return experiences


# --- M0 -------------------------------------------------------------------------------------------------------------
class Converts(Workflow):
    def run(self) -> list[Experience]:
        models = [self.model, self.auxiliary["judge"]]
        made = [model.convert_messages_to_experience(TALK) for model in models]
        warm = self.model.convert_messages_to_experience(TALK, None, 0.5)
        for i, experience in enumerate([*made, warm]):
            experience.reward, experience.eid.step = 1.0, i
        return [*made, warm]


class ConvertsOnLoop(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        models = [self.model, self.auxiliary["judge"]]
        made = [await model.convert_messages_to_experience_async(TALK) for model in models]
        made.append(await self.model.convert_messages_to_experience_async(TALK, temperature=0.5))
        for i, experience in enumerate(made):
            experience.reward, experience.eid.step = 1.0, i
        return made


def test_p39_p47_a_sync_workflow_converts_messages_by_each_of_its_models(client: RolloutClient, new_id: NewId) -> None:
    found = fine(played(client, new_id(), both(Converts, ConvertsOnLoop)))
    assert len(found) == 6
    for sync, on_loop in zip(found[:3], found[3:], strict=True):
        assert sync.tokens.tolist() == on_loop.tokens.tolist() == list(b"one\ntwo\nthree\nfour\n")
        assert sync.logprobs.tolist() == on_loop.logprobs.tolist()
        assert sync.experience_type == "multi_turn"
    assert found[2].logprobs.tolist() == pytest.approx([2 * p for p in found[0].logprobs.tolist()])  # type: ignore[union-attr]


# --- M1 -------------------------------------------------------------------------------------------------------------
class AsksJudges(Workflow):
    can_reset = True

    def reset(self, task: Task) -> None:
        self.task = task

    def run(self) -> list[Experience]:
        [judge], [wrapper] = self.auxiliary_models, self.auxiliary_model_wrappers
        asked = [{"role": "user", "content": "how good?"}]
        said = judge.chat.completions.create(model=judge.model_path, messages=asked)
        [same] = wrapper.chat(asked)
        return [one(reward=float(said.choices[0].message.content), info={
            "client": type(judge).__name__, "wrapper": wrapper.name, "same": same.response_text,
        })]


class AsksJudgesOnLoop(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [judge], [wrapper] = self.auxiliary_models, self.auxiliary_model_wrappers
        said = await judge.chat.completions.create(
            model=judge.model_path, messages=[{"role": "user", "content": "how good?"}]
        )
        return [one(reward=float(said.choices[0].message.content), info={
            "client": type(judge).__name__, "wrapper": wrapper.name,
        })]


def test_p40_auxiliary_models_are_openai_clients_beside_their_wrappers(client: RolloutClient, new_id: NewId) -> None:
    found = fine(played(client, new_id(), [*both(AsksJudges, AsksJudgesOnLoop), Task(workflow=AsksJudges)]))
    assert [e.reward for e in found] == [0.5] * 3
    assert [e.info["client"] for e in found] == ["OpenAI", "AsyncOpenAI", "OpenAI"]
    assert {e.info["wrapper"] for e in found} == {"judge"}
    assert found[0].info["same"] == "0.5"


# --- M3, M4 ---------------------------------------------------------------------------------------------------------
class SetsNoRun(Workflow):
    """As the dummy of the known system's tests: does all runs itself, and numbers none."""

    can_repeat = True

    def run(self) -> list[Experience]:
        steps = self.task.workflow_args.get("steps", 1)
        found = []
        for step in range(steps):
            for i in range(self.repeat_times):
                experience = one(metrics={"run_metrics": float(self.run_id_base + i)}, info={
                    "n": self.task.rollout_args.n, "i": i, "base": self.run_id_base,
                })
                experience.eid.step = step
                found.append(experience)
        return found


class SeesN(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [answer] = await self.model.chat_async([{"role": "user", "content": "x"}], n=self.task.rollout_args.n)
        answer.reward, answer.metrics = 1.0, {"run_metrics": float(self.model.sampling.seed)}
        answer.info["n"] = self.task.rollout_args.n
        return [answer]


def test_p42_a_scheduled_tasks_metrics_are_those_of_the_task(client: RolloutClient, new_id: NewId) -> None:
    tasks = [Task(workflow=SeesN, repeat_times=4, rollout_args={"seed": 0}), Task(workflow=SetsNoRun, repeat_times=4)]
    statuses, _ = played(client, new_id(), tasks)
    for status in statuses:
        assert len(status.metrics) == 1
        assert status.metrics[0]["run_metrics"] == 1.5
        assert status.metrics[0]["time/task_execution"] >= status.metrics[0]["time/run_execution"] >= 0
        assert [r["run_metrics"] for r in status.per_run] == [0.0, 1.0, 2.0, 3.0]
        assert status.metric == status.per_run[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_p43_a_workflow_that_numbers_no_runs_completes_all(client: RolloutClient, new_id: NewId, steps: int) -> None:
    statuses, found = played(
        client, new_id(), [Task(workflow=SetsNoRun, repeat_times=4, workflow_args={"steps": steps})]
    )
    assert [(s.completed_runs, s.total_runs) for s in statuses] == [(4, 4)]
    assert [(e.eid.run, e.eid.step) for e in found] == [(r, s) for r in range(4) for s in range(steps)]
    assert all(e.eid.run == e.info["base"] + e.info["i"] for e in found)
    assert {e.info["n"] for e in found} == {2}, "two runs a unit here, and the runner says how many"


def test_p43_the_n_of_a_single_run_is_1(client: RolloutClient, new_id: NewId) -> None:
    found = fine(played(client, new_id(), [Task(workflow=SeesN, repeat_times=3, rollout_args={"seed": 0})]))
    assert [(e.eid.run, e.info["n"]) for e in found] == [(0, 1), (1, 1), (2, 1)]


# --- M5 -------------------------------------------------------------------------------------------------------------
class TellsItsState(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await self.model.set_workflow_state({"agent_id": "a7", "step": 3})
        while not await asyncio.to_thread(__import__("os").path.exists, self.task.workflow_args["gate"]):
            await asyncio.sleep(0.01)
        return [one()]


class TellsItsStateInAWorker(Workflow):
    def run(self) -> list[Experience]:
        import os
        import time

        asyncio.run(self.model.set_workflow_state({"agent_id": "a8"}))
        while not os.path.exists(self.task.workflow_args["gate"]):
            time.sleep(0.01)
        return [one()]


@pytest.mark.parametrize(("workflow", "agent"), [(TellsItsState, "a7"), (TellsItsStateInAWorker, "a8")])
def test_p44_what_a_workflow_tells_of_itself_is_in_its_runners_state(
    client: RolloutClient, new_id: NewId, tmp_path: Any, workflow: type[Workflow], agent: str
) -> None:
    batch, gate = new_id(), tmp_path / "gate"
    client.submit_batch(
        batch_id=batch, tasks=[Task(workflow=workflow, workflow_args={"gate": str(gate)})], batch_type="train"
    )
    state = wait_until(
        lambda: (s := client.get_runner_state("runner-0"))["workflow_state"].get("agent_id") == agent and s,
        "the state that the workflow told",
    )
    assert state["workflow_id"] == f"{batch}/0/0"
    assert state["terminate_time"] is None
    gate.touch()
    client.finalize_train_batch(batch, timeout=30)
    ended = wait_until(lambda: (s := client.get_runner_state("runner-0"))["terminate_time"] and s, "the run to end")
    assert ended["terminate_time"] == ended["end_time"] >= ended["begin_time"]


# --- M6 -------------------------------------------------------------------------------------------------------------
class GivesFloats(Workflow):
    def run(self) -> list[Experience]:
        import torch

        return [
            Experience(tokens=torch.zeros(5), prompt_length=2, prompt_text="success", reward=0.5),
            Experience(tokens=torch.tensor([1, 2, 3, 4]), logprobs=torch.tensor([0.1, 0.2, 0.3, 0.4]), reward=2.0,
                       action_mask=torch.tensor([1, 0, 1, 0], dtype=torch.bool)),
        ]


def test_p45_tensors_as_the_known_system_takes_them(client: RolloutClient, new_id: NewId) -> None:
    first, second = fine(played(client, new_id(), [Task(workflow=GivesFloats)]))
    assert (first.tokens.tolist(), first.prompt_length) == ([0] * 5, 2)
    assert (second.prompt_length, second.action_mask.tolist()) == (1, [False, True, False])  # type: ignore[union-attr]


# --- M7 -------------------------------------------------------------------------------------------------------------
class ByHistory(Workflow):
    def run(self) -> list[Experience]:
        self.model.chat([{"role": "user", "content": "first"}])
        asked = self.model.get_openai_client()
        asked.chat.completions.create(model=asked.model_path, messages=[{"role": "user", "content": "second"}])
        self.model.generate(["third"])
        return rewarded(self.model.extract_experience_from_history())


class ByHistoryOnLoop(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await self.model.chat_async([{"role": "user", "content": "first"}])
        asked = self.model.get_openai_async_client()
        await asked.chat.completions.create(model=asked.model_path, messages=[{"role": "user", "content": "second"}])
        await self.model.generate_async(["third"])
        return rewarded(self.model.extract_experience_from_history())


def rewarded(experiences: list[Experience]) -> list[Experience]:
    for experience in experiences:
        experience.reward = 1.0
    return experiences


def test_p46_the_history_has_what_chat_generate_and_clients_answered(client: RolloutClient, new_id: NewId) -> None:
    found = fine(played(client, new_id(), both(ByHistory, ByHistoryOnLoop)))
    assert [(e.eid.step, e.prompt_text) for e in found] == 2 * [(0, "first\n"), (1, "second\n"), (2, "third")]
    assert all(e.logprobs is not None and len(e.logprobs) == 8 for e in found)


# --- M8 -------------------------------------------------------------------------------------------------------------
class KnownNames(Workflow):
    def run(self) -> list[Experience]:
        tokens = [1, 2, 3]
        length = asyncio.run(self.model.get_message_token_len([{"role": "user", "content": "hello"}]))
        again = self.task.to_workflow(self.model, self.auxiliary_model_wrappers)
        return [one(logprobs=self.model.logprobs(tokens=tokens, temperature=0.5), info={
            "length": length, "again": type(again).__name__, "wrappers": len(again.auxiliary_model_wrappers or []),
        })]


def test_p47_names_and_keywords_of_the_known_model(client: RolloutClient, new_id: NewId) -> None:
    [found] = fine(played(client, new_id(), [Task(workflow=KnownNames)]))
    assert (found.info["length"], found.info["again"], found.info["wrappers"]) == (6, "KnownNames", 1)


# --- M9 -------------------------------------------------------------------------------------------------------------
class TooLong(MultiTurnWorkflow):
    def run(self) -> list[Experience]:
        talk = [*TALK, {"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 100}]
        whole = self.process_messages_to_experience(TALK, 1.0)
        cut = self.process_messages_to_experience(talk, 1.0)
        cut.eid.step = 1
        return [whole, cut]


class TooLongOnLoop(TooLong):
    is_async = True

    async def run_async(self) -> list[Experience]:
        talk = [*TALK, {"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 100}]
        whole = await self.process_messages_to_experience_async(TALK, 1.0)
        cut = await self.process_messages_to_experience_async(talk, 1.0)
        cut.eid.step = 1
        return [whole, cut]


def test_p48_a_conversation_beyond_the_context_is_cut_and_says_so(client: RolloutClient, new_id: NewId) -> None:
    found = fine(played(client, new_id(), both(TooLong, TooLongOnLoop)))
    assert [(e.truncate_status, e.reward) for e in found] == 2 * [(None, 1.0), ("response_truncated", 0.0)]
    assert [len(e.tokens) for e in found] == 2 * [len("one\ntwo\nthree\nfour\n"), 63]


# --- M10 ------------------------------------------------------------------------------------------------------------
class Mixed(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        if self.model.sampling.seed == 1:
            raise RuntimeError("run 1 is broken")
        if self.model.sampling.seed == 2:
            await asyncio.Event().wait()
        return [one()]


def test_p49_a_task_given_up_half_done_names_the_run_s_error_and_why(client: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    [status], [experience] = played(
        client, batch, [Task(workflow=Mixed, repeat_times=3, rollout_args={"seed": 0})], timeout=3
    )
    assert (status.completed_runs, status.total_runs, experience.eid.run) == (1, 3, 0)
    assert status.message.startswith("1/3 runs completed. First error: workflow: RuntimeError: run 1 is broken")
    assert "1 given up: 0 tasks were ready when get_results timed out" in status.message
