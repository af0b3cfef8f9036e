"""Every workflow takes rewards of every form, in place and in a process of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.helpers.ready_made import Answers, played
from tests.helpers.reward_forms import FORMS, ROW
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.workflows.registry import WORKFLOWS

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN = {"verifiers", "openenv"}
"""What these environments give is the reward."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    await pool.close()


@pytest.mark.parametrize("graded", [False, True], ids=["in place", "graded"])
@pytest.mark.parametrize("workflow", sorted(set(WORKFLOWS.names()) - OWN))
async def test_every_workflow_takes_rewards_of_every_form(pool: WorkerPool, workflow: str, graded: bool) -> None:
    found: dict[str, Any] = {}
    for reward, arguments in FORMS.items():
        arguments = {**arguments, "grader_timeout": 30.0} if graded else arguments
        done = await played(pool, workflow, Answers("aab"), raw_task=ROW, reward_fn=reward, reward_fn_args=arguments)
        found[reward.__name__] = done.failures or [result.metrics["reward"] for result in done.results]
    assert found == {reward.__name__: [3.0] for reward in FORMS}


def of_the_answer(answer: Any, messages: list[Any], ground_truth: str) -> float:
    return float(len(answer.tokens) - answer.prompt_length)


async def test_what_is_no_json_is_refused_to_a_reward_that_has_a_process(pool: WorkerPool) -> None:
    done = await played(pool, "async_math_rm_workflow", Answers("aab"), raw_task=ROW, reward_fn=of_the_answer,
                        reward_fn_args={"grader_timeout": 5.0})
    [(_, kind, message)] = done.failures
    assert kind == "workflow"
    assert "of_the_answer takes answer, an Experience" in message
    done = await played(pool, "async_math_rm_workflow", Answers("aab"), raw_task=ROW, reward_fn=of_the_answer)
    assert [result.metrics["reward"] for result in done.results] == [3.0]
