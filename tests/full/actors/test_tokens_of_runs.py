"""Each run is charged what it read and made, and a task what was asked for it, whoever played its runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.cli.render.task import print_task
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.workflow import Workflow


class AllAtOnce(Workflow):
    """All runs are one request; with `extra` it asks for more than it returns, with `failing` one run is no good."""

    can_repeat = True

    def run(self) -> list[Experience]:
        answers: list[Experience] = self.model.chat([{"role": "user", "content": "hello"}], n=self.repeat_times)
        if self.task.workflow_args.get("extra"):
            self.model.generate("thinking", max_tokens=5)
        for i, answer in enumerate(answers):
            answer.reward, answer.eid.run = 1.0, self.run_id_base + i
        if self.task.workflow_args.get("failing"):
            answers[1].metrics = {"reward": float("nan")}
        return answers


class OneByOne(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        found = []
        for i in range(self.repeat_times):
            [answer] = await self.model.generate_async("x" * (i + 1), max_tokens=i + 1)
            answer.reward, answer.eid.run = 1.0, self.run_id_base + i
            found.append(answer)
        return found


class MadeUp(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        found = [Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0) for _ in range(self.repeat_times)]
        for i, experience in enumerate(found):
            experience.eid.run = self.run_id_base + i
        return found


PROMPT = len("hello\n")


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(("workflow", "how", "charged", "beside"), [
    (AllAtOnce, {}, [(PROMPT, 8)] * 3, (-2 * PROMPT, 0)),  # three runs had one prompt, which was read once
    (AllAtOnce, {"extra": True}, [(PROMPT, 8)] * 3, (len("thinking") - 2 * PROMPT, 5)),  # in no experience
    (AllAtOnce, {"failing": True}, [(PROMPT, 8)] * 2, (-PROMPT, 8)),  # of the run that failed
    (OneByOne, {}, [(1, 1), (2, 2), (3, 3)], (0, 0)),
    (MadeUp, {}, [(0, 0)] * 3, (0, 0)),  # experiences that no model made cost nothing
])
async def test_each_run_is_charged_its_own_tokens_and_others_are_named_beside_them(
    workflow: type[Workflow], how: dict[str, bool], charged: list[tuple[int, int]], beside: tuple[int, int],
    in_worker: bool, pool: WorkerPool,
) -> None:
    engine = ScriptedEngine(EngineConfig(model_path=""))
    runner = WorkflowRunner(engine, workers=pool if in_worker else None, defaults={"max_tokens": 8})
    done = await runner.execute(Task(workflow=workflow, workflow_args=how), 1, range(3))
    assert ([(r.prompt_tokens, r.response_tokens) for r in done.results], done.other_tokens) == (charged, beside)
    assert [f[0] for f in done.failures] == ([1] if "failing" in how else [])


def test_a_task_shows_what_it_cost_beside_its_runs() -> None:
    from trinity_es.projections.history.attempts import RunRow
    from trinity_es.projections.history.task_history import TaskHistory

    made = {run: RunRow(batch_id=1, task=0, run=run, outcome="finished", run_id_base=0, runner="runner-0",
                        incarnation=1, attempt=1, model_version=0, model_version_end=0, reward=1.0, prompt_tokens=6,
                        response_tokens=8, seconds=1.0, finished_at=0.0, finish_position=9)
            for run in range(2)}
    course = TaskHistory(batch_id=1, batch_type="train", task=0, runs=2, made=made)
    for others, said in [((-6, 0), "6 prompt tokens were not read again"), ((3, 5), "3 prompt tokens and 5 tokens are "
                         "in no run's"), ((0, 0), ""), ((0, -2), "2 tokens of its experiences were not generated")]:
        course.other_prompt_tokens, course.other_response_tokens = others
        out = io.StringIO()
        print_task(Console(file=out, width=200), course, None, [])
        assert said in out.getvalue()
        assert ("other       " in out.getvalue()) == bool(said)
