"""PARITY P1 to P12 row by row on the real actor system, as a trainer and a workflow's author see them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.parity_rows import NewId, one, recorded, train
from tests.helpers.systems import StartSystem
from trinity_es import BatchLifecycleState, Status, Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import EID, Experience
from trinity_es.events.vocabulary import RunsFinished
from trinity_es.testing import SleepWorkflow, wait_until

HERE = "tests.full.system.test_parity_rows"


# --- P1 to P7: values -----------------------------------------------------------------------------------------------
class Echoes(Workflow):
    """What the runner made of the task."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        task = self.task
        [answer] = await self.model.chat_async([{"role": "user", "content": task.task_desc or ""}])
        found = {name: getattr(task, name) for name in (
            "repeat_times", "format_args", "rollout_args", "workflow_args", "reward_fn", "reward_fn_args", "is_eval",
            "raw_task", "index", "batch_id", "task_id", "task_desc", "truth",
        )}
        return [one(reward=self.reward(answer.response_text)["reward"], info={
            "task": found, "answer": answer.tokens.size - answer.prompt_length, "logprobs": answer.logprobs is not None,
        })]


def scaled(response: str, truth: str, prompt: str, scale: float) -> float:
    return scale * len(response) * (truth == "yes")


def test_p2_p8_a_task_reaches_its_workflow_with_all_its_fields(shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    task = Task(
        workflow=f"{HERE}:Echoes", repeat_times=1, format_args={"prompt_key": "q", "response_key": "a"},
        rollout_args={"max_tokens": 3, "temperature": 0.5, "logprobs": False, "top_p": 0.9, "top_k": 5, "seed": 1,
                      "n": 1},
        workflow_args={"depth": [1, {"x": None}]}, reward_fn=f"{HERE}:scaled", reward_fn_args={"scale": 0.5},
        raw_task={"q": "really?", "a": "yes", "level": 3}, index={"taskset": "t", "index": 41},
    )
    [other, found] = train(shared, batch, [Task(workflow=SleepWorkflow), task])
    assert other.eid.task == 0
    assert found.reward == 1.5, "three tokens, each a letter, times the scale"
    assert (found.info["answer"], found.info["logprobs"]) == (3, False)
    given = {name: getattr(task, name) for name in found.info["task"]}
    assert found.info["task"] == given | {"batch_id": batch, "task_id": 1}
    assert (given["task_desc"], given["truth"]) == ("really?", "yes")


class Waits(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        while self.run_id_base >= args.get("from_run", 0) and not Path(args["gate"]).exists():
            await asyncio.sleep(0.01)
        runs = range(self.run_id_base, self.run_id_base + self.repeat_times)
        return [one(reward=float(run), eid=EID(run=run), info={"unit": [runs.start, len(runs)]}) for run in runs]


class EveryOther(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        return [
            one(reward=float(r), eid=EID(run=r), metrics={"steps": 2.0 * r})
            for r in range(self.run_id_base, self.run_id_base + self.repeat_times) if r % 2 == 0
        ]


def test_p4_p7_a_status_and_a_batch_state_say_what_came_of_it(shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    tasks = [Task(workflow=EveryOther, repeat_times=3), Task(workflow=SleepWorkflow, repeat_times=2)]
    shared.submit_batch(batch_id=batch, tasks=tasks, batch_type="train", min_wait_num=2)
    result = shared.finalize_train_batch(batch, timeout=30)
    state = shared.batch(batch)
    assert (state.batch_id, state.batch_type, state.expected_task_count, state.min_wait_num) == (batch, "train", 2, 2)
    assert (state.completed_task_count, state.state, state.final_result) == (2, BatchLifecycleState.FINALIZED, result)
    assert sorted(state.statuses) == [0, 1]
    half, whole = state.statuses[0], state.statuses[1]
    assert isinstance(half, Status)
    assert (half.completed_runs, half.total_runs, half.ok) == (2, 3, False)
    assert [m["steps"] for m in half.metrics] == [0.0, 4.0]
    assert half.metric == half.metrics[0]
    assert "2/3 runs completed" in (half.message or "")
    assert "no experience for run 1" in (half.message or "")
    assert (whole.completed_runs, whole.total_runs, whole.ok, whole.message) == (2, 2, True, None)
    state.statuses.clear()  # a projection: what a reader does to his copy is nobody else's
    assert sorted(shared.log.replay(batch).statuses) == [0, 1]
    assert shared.batch(batch) == shared.log.replay(batch)


class SlowOperator:
    def __init__(self, gate: str) -> None:
        self.gate = gate

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        while not os.path.exists(self.gate):
            time.sleep(0.01)
        return experiences, {}


def test_p6_a_batch_goes_through_its_states(start_system: StartSystem, tmp_path: Path) -> None:
    gate, done = tmp_path / "gate", tmp_path / "done"
    operator = {"name": f"{HERE}:SlowOperator", "args": {"gate": str(done)}}
    client = start_system(buffer={"pipeline": {"operators": [operator]}})
    client.submit_batch(batch_id=1, tasks=[], batch_type="train")
    client.submit_batch(batch_id=2, tasks=[Task(workflow=Waits, workflow_args={"gate": str(gate)})], batch_type="train")
    client.submit_batch(batch_id=3, tasks=[Task(workflow=Waits, workflow_args={"gate": str(gate)})], batch_type="train")
    assert [client.batch(b).state.value for b in (1, 2)] == ["pending", "running"]
    client.abort_batch(3, reason="test")
    gate.touch()
    waiter = threading.Thread(target=lambda: client.finalize_train_batch(2, timeout=30))
    waiter.start()
    wait_until(lambda: client.batch(2).state is BatchLifecycleState.FINALIZING, "the pipeline to begin")
    done.touch()
    waiter.join(timeout=30)
    assert [client.batch(b).state.value for b in (2, 3)] == ["finalized", "aborted"]


EVERYTHING: dict[str, Any] = {
    "tokens": [5, 6, 7, 8, 9], "prompt_length": 2, "logprobs": [-0.5, -1.25, -2.0], "reward": 0.75,
    "token_level_reward": [0.0, 0.25, 0.5], "advantages": [1.0, -1.0, 0.5], "returns": [3.0, 2.0, 1.0],
    "action_mask": [True, False, True], "truncate_status": "response_truncated", "info": {"a": [1, {"b": None}]},
    "metrics": {"m": 0.1}, "prompt_text": "ä\n", "response_text": "", "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function"}], "chosen": [1, 2], "rejected": [3], "chosen_messages": [{"role": "a"}],
    "rejected_messages": [], "multi_modal_inputs": {"pixels": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "teacher_logprobs": [-0.1, -0.2, -0.3], "routed_experts": np.arange(8, dtype=np.int16).reshape(4, 1, 2),
}  # fmt: skip
_PAIR = {"chosen", "rejected", "chosen_messages", "rejected_messages"}


def rollout() -> Experience:
    return Experience(**{k: v for k, v in EVERYTHING.items() if k not in _PAIR})


def pair() -> Experience:
    return Experience(tokens=[1, 2], reward=0.0, **{k: v for k, v in EVERYTHING.items() if k in _PAIR})


class ReturnsEverything(Workflow):
    def run(self) -> list[Experience]:  # sync: it goes through a worker's pipe as well
        found = [rollout(), pair()]
        for step, experience in enumerate(found):
            experience.eid = EID(step=step, suffix=f"s{step}")
        return found


@pytest.fixture
def plain(system_for: StartSystem) -> RolloutClient:
    return system_for(buffer={"pipeline": {"operators": []}}, monitor={"detailed_stats": True})


def test_p5_every_field_of_an_experience_comes_back_through_the_store(plain: RolloutClient) -> None:
    found = train(plain, 12, [Task(workflow=ReturnsEverything)])
    for step, (got, given) in enumerate(zip(found, (rollout(), pair()), strict=True)):
        stamps = {name: got.info.pop(name) for name in
                  ("model_version", "model_version_drift", "task_index", "use_count")}
        assert stamps == {"model_version": 0, "model_version_drift": 0, "task_index": {}, "use_count": 0}
        assert (got.eid.uid, got.eid.sid, got.eid.rid, got.eid.tid) == (
            f"12/0/0/{step}/s{step}", f"12/0/{step}", "12/0/0", "12/0"
        )
        given.eid = got.eid
        assert got == given
    assert Experience.serialize_many(found) == Experience.serialize_many(
        Experience.deserialize_many(Experience.serialize_many(found))
    )


# --- P8: what a runner says of a run --------------------------------------------------------------------------------
class Scores(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        while "gate" in args and not Path(args["gate"]).exists():
            await asyncio.sleep(0.01)
        return [one(reward=r, eid=EID(step=s), metrics={"score": 10 * r, "turns:sum": 1}) for s, r in enumerate((0, 1))]


def test_p8_p30_runs_are_stamped_and_measured(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    for version in (1, 2):
        (tmp_path / f"w{version}").mkdir()
    client.sync_weights(1, tmp_path / "w1")
    gate = tmp_path / "gate"
    tasks = [
        Task(workflow=Scores, repeat_times=2, index={"taskset": "t", "index": i}, workflow_args=args)
        for i, args in enumerate(({}, {"gate": str(gate)}))
    ]
    client.submit_batch(batch_id=4, tasks=tasks, batch_type="train")
    wait_until(lambda: client.batch(4).statuses, "the first task")
    client.sync_weights(2, tmp_path / "w2")
    gate.touch()
    result = client.finalize_train_batch(4, timeout=30)
    found = list(client.experiences(4))
    assert [(e.eid.batch, e.eid.task, e.eid.run, e.eid.step) for e in found] == [
        (4, t, r, s) for t in (0, 1) for r in (0, 1) for s in (0, 1)
    ]
    for e in found:
        assert (e.info["model_version"], e.info["model_version_drift"]) == (1, e.eid.task)
        assert e.info["task_index"] == {"taskset": "t", "index": e.eid.task}
        assert e.info["use_count"] == 0
    for status in client.batch(4).statuses.values():
        for run in status.metrics:
            assert set(run) == {"score", "turns:sum", "reward", "time/run_execution"}
            assert (run["score"], run["turns:sum"], run["reward"]) == (5.0, 2.0, 0.5)
            assert run["time/run_execution"] >= 0
    metrics = result["metrics"]
    assert metrics["rollout/turns/sum"] == 8.0
    for name in ("time/run_execution", "time/task_execution"):
        assert metrics[f"rollout/{name}/max"] >= metrics[f"rollout/{name}/mean"] >= metrics[f"rollout/{name}/min"] >= 0
    assert metrics["rollout/time/task_execution/max"] >= metrics["rollout/time/run_execution/max"]


def test_p8_p31_evals_give_no_experiences_and_details_where_they_are_wanted(plain: RolloutClient) -> None:
    tasks = [Task(workflow=SleepWorkflow, repeat_times=2, workflow_args={"reward": r}, is_eval=True) for r in (0, 1)]
    plain.submit_batch(batch_id="3/x", tasks=tasks, batch_type="eval")
    metrics = plain.finalize_eval_batch("3/x", timeout=30)["metrics"]
    assert {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("eval/x/reward/mean@2/")} == {
        "mean": 0.5, "max": 1.0, "min": 0.0, "std": 0.5
    }
    assert plain.batch("3/x").experiences == []
    assert all(e.payload is None for e in recorded(plain, "3/x", RunsFinished))
