"""Ready-made workflows, run by name as in a runner, on an engine with prepared answers."""

from __future__ import annotations

from typing import Any

from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.registry import WORKFLOWS


class Answers(ScriptedEngine):
    """Engine that returns these answers in turn, and keeps its requests."""

    def __init__(self, *answers: str) -> None:
        super().__init__(EngineConfig(model_path=""))
        self.answers, self.turn = answers, 0
        self.prompts: list[str] = []
        self.sampling: list[Sampling] = []

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        self.prompts.append(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))
        self.sampling.append(sampling)
        return await super().generate(prompt, sampling)

    def _completion(self, prompt: Any, rule: Any, sampling: Any, chance: Any) -> Any:
        text = self.answers[self.turn % len(self.answers)]
        self.turn += 1
        return super()._completion(prompt, {**rule, "response": text}, sampling, chance)


async def played(pool: WorkerPool, workflow: str, engine: ScriptedEngine, runs: int = 1, **fields: Any) -> UnitResult:
    """Run a task of a registered workflow as a runner does. An answer may have 4,000 tokens (bytes)."""
    fields = {"rollout_args": {"max_tokens": 4000}, **fields}
    task = Task(workflow=WORKFLOWS.path(workflow), task_id=0, **fields)
    return await WorkflowRunner(engine, workers=pool).execute(task, 1, range(runs), timeout=300)


async def rewards(pool: WorkerPool, workflow: str, answers: list[str], **fields: Any) -> list[float]:
    """Return the reward of each answer. Fails if an answer has none."""
    found = []
    for answer in answers:
        done = await played(pool, workflow, Answers(answer), **fields)
        assert not done.failures, done.failures
        [experience] = done.experiences
        found.append(experience.reward)
    return found
