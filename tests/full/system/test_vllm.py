"""A real vLLM engine with adapters and a judge: what fails leaves it serving, and what dies comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import trinity_es
from tests.helpers.adapters import ByHand, adapter_for
from tests.helpers.engines import largest_difference
from tests.helpers.judged import JudgedWithATool
from tests.helpers.of_the_day import of_the_day
from tests.helpers.real_engine import TOLERANCE, letters, run, vllm_system
from tests.helpers.systems import everything, finalize_in_thread, kill_all, pid_of
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.values import Task
from trinity_es.events.vocabulary import TasksDispatched
from trinity_es.system import running_system
from trinity_es.testing import wait_until
from trinity_es.workflows.workflow import Workflow

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny: Path, other: Path) -> Iterator[RolloutClient]:
    judge = {
        "name": "judge", "engine_type": "vllm", "model_path": str(other), "max_model_len": 128,
        "max_response_tokens": 8, "gpu_memory_utilization": 0.3,
    }
    rollout = {"max_model_len": 128, "lora": {"max_adapters": 2, "max_rank": 8}}
    with vllm_system(tmp_path_factory.mktemp("system"), tiny, auxiliary_models=[judge], **rollout) as made:
        yield made


def serve_first_weights(client: RolloutClient, tiny: Path) -> None:
    """Publish the weights that the model began with, if another test has published others."""
    if version := client.status()["weights_version"]:
        client.sync_weights(version + 1, tiny)


def test_a_failed_sync_leaves_the_engine_serving(client: RolloutClient, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny / "config.json").read_text())
    version = client.status()["weights_version"] + 1
    with pytest.raises(trinity_es.TrinityError, match=r"was not published: .*holds no weights"):
        client.sync_weights(version, broken)
    assert len(run(client, 10)) == 64


def test_p12_a_request_that_takes_too_long_for_its_finalize_loses_nothing(client: RolloutClient) -> None:
    client.submit_batch(batch_id=20, tasks=letters(64), batch_type="train")
    with pytest.raises(TimeoutError):
        client.finalize_train_batch(20, timeout=0.01)
    assert client.finalize_train_batch(20, timeout=120)["finished_task_count"] == 64


class AsksVLLM(Workflow):
    """Its own answer, the judge's answer to it, and what the judge thinks of a text, token by token."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        [mine] = await self.model.chat_async([{"role": "user", "content": str(self.task.task_desc)}])
        judge = self.auxiliary["judge"]
        [said] = await judge.chat_async([{"role": "user", "content": "b="}], n=1)
        ids = said.tokens.tolist()
        again = await judge.logprobs_async(ids, temperature=1.0)
        rendered = judge.tokenizer.apply_chat_template([{"role": "user", "content": "b="}], add_generation_prompt=True)
        ours = rendered["input_ids"] if hasattr(rendered, "keys") else rendered
        same = list(ours) == ids[: said.prompt_length]
        said.eid.step, mine.reward, said.reward = 1, 1.0, float(same)
        said.info = {"again": again[said.prompt_length - 1 :].tolist()}
        return [mine, said]


def test_c6_p15_a_real_judge_s_tokens_and_logprobs_are_its_own(client: RolloutClient, tiny: Path, other: Path) -> None:
    from examples.grpo.trainer import GRPOTrainer

    serve_first_weights(client, tiny)
    model, judge = GRPOTrainer(str(tiny)), GRPOTrainer(str(other))
    given = [Task(workflow=AsksVLLM, raw_task={"prompt": f"{letter}="}, repeat_times=2) for letter in "abcd"]
    client.submit_batch(batch_id=21, tasks=given, batch_type="train")
    client.finalize_train_batch(21, timeout=300)
    assert all(s.ok for s in client.batch(21).statuses.values()), client.batch(21).statuses
    found = list(client.experiences(21))
    mine, said = [e for e in found if e.eid.step == 0], [e for e in found if e.eid.step == 1]
    assert (len(mine), len(said)) == (8, 8)
    assert {e.reward for e in said} == {1.0}, "the judge's prompt was not rendered with its own tokenizer"
    assert all(np.allclose(e.info["again"], e.logprobs, atol=TOLERANCE) for e in said)
    assert largest_difference(model, mine) < TOLERANCE
    assert largest_difference(judge, said) < TOLERANCE
    assert largest_difference(model, said) > 10 * TOLERANCE  # it is another model's

    # C6: a conversation with a tool and the judge, 64 tasks of 8 runs.
    given = [Task(workflow=JudgedWithATool, raw_task={"prompt": f"{'abcdefgh'[i % 8]}="}, repeat_times=8)
             for i in range(64)]
    client.submit_batch(batch_id=22, tasks=given, batch_type="train")
    assert client.finalize_train_batch(22, timeout=400)["finished_task_count"] == 64
    assert all(s.ok and s.completed_runs == 8 for s in client.batch(22).statuses.values())
    found = list(client.experiences(22))
    whole, last = [e for e in found if e.eid.step == 0], [e for e in found if e.eid.step == 1]
    assert len({e.eid.uid for e in found}) == len(found) == 64 * 8 * 2
    for e in found:
        response = len(e.tokens) - e.prompt_length
        assert len(e.logprobs) == len(e.action_mask) == response > 0
    assert all(e.action_mask is not None and 0 < e.action_mask.sum() < len(e.action_mask) for e in whole)  # the tool's
    assert all(isinstance(e.info["judge"], str) for e in whole)
    assert largest_difference(model, whole) < TOLERANCE
    assert largest_difference(model, last) < TOLERANCE


def runner(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(pid_of(client, "runner-0"))]


def engine_core(client: RolloutClient) -> list[psutil.Process]:
    found = [p for p in runner(client)[0].children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert found
    return found


def runner_and_coordinator(client: RolloutClient) -> list[psutil.Process]:
    return [*runner(client), psutil.Process(pid_of(client, "coordinator"))]


def of_adapter(client: RolloutClient, batch: int, adapter: str) -> list[Experience]:
    """Return the answers to a batch that asks for an adapter."""
    client.submit_batch(batch_id=batch, tasks=letters(4, rollout_args={"adapter": adapter}), batch_type="train")
    client.finalize_train_batch(batch, timeout=600)
    found = list(client.experiences(batch))
    assert len(found) == 16
    return found


@pytest.mark.chaos
@pytest.mark.parametrize(
    "victims", of_the_day([engine_core, runner_and_coordinator, everything]), ids=lambda victims: victims.__name__
)
def test_b2_i4_what_is_killed_while_it_generates_comes_back_with_weights_and_adapters_and_loses_nothing(
    client: RolloutClient, tiny: Path, tmp_path: Path, victims: Callable[[RolloutClient], list[psutil.Process]],
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    serve_first_weights(client, tiny)
    version = client.status()["weights_version"] + 1
    batch = 100 * version
    trainer = GRPOTrainer(str(tiny))
    trainer.step(ExperienceColumns.of(run(client, batch)))
    trainer.save(str(tmp_path / "weights"))
    client.sync_weights(version, tmp_path / "weights")
    adapters = {"math": adapter_for(tiny, tmp_path / "math", 0), "code": adapter_for(tiny, tmp_path / "code", 1)}
    for name, folder in adapters.items():
        client.sync_adapter(name, version, folder)
    before = runner(client)
    family = before[0].children(recursive=True)
    assert family
    client.submit_batch(batch_id=batch + 1, tasks=letters(256), batch_type="train")
    answer = finalize_in_thread(client, batch + 1, timeout=600)
    wait_until(lambda: client.batch(batch + 1).completed_task_count > 8, "some tasks to finish")
    finished = set(client.batch(batch + 1).statuses)
    kill_all(victims(client))
    wait_until(lambda: not running_system.wait_gone(before, 0), "the runner to end")
    # Beside others on two cores a process of vLLM that was killed takes seconds to give its memory back.
    assert not running_system.wait_gone(family, 10.0), "an engine process outlived its runner by 10 s"
    assert answer.result(600)["finished_task_count"] == 256
    state = client.batch(batch + 1)
    assert all(s.ok for s in state.statuses.values())
    later = [r.event for r in client.log.events(batch + 1) if isinstance(r.event, TasksDispatched)][1:]
    assert not {u.task for event in later for u in event.units if u.attempt > 1} & finished
    experiences = list(client.experiences(batch + 1))
    assert {e.info["model_version"] for e in experiences} == {version}
    assert largest_difference(trainer, experiences) < TOLERANCE
    for number, (name, folder) in enumerate(adapters.items()):
        found = of_adapter(client, batch + 2 + number, name)
        assert {tuple(span[:2]) for e in found for span in e.info["adapter_spans"]} == {(name, version)}
        reference = ByHand(tmp_path / "weights", folder)
        assert max(
            float(np.abs(reference.logprobs(e.tokens.tolist())[e.prompt_length - 1 :] - e.logprobs).max())
            for e in found
        ) < TOLERANCE
    assert client.log.verify() == []
