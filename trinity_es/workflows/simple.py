"""Workflows and rewards under the names that users of Trinity-RFT have subclassed.

`SimpleWorkflow` and `AsyncSimpleWorkflow` take a task apart into attributes, chat once and reward each answer;
`RewardFn` is the base of reward classes. The registry knows them as `simple_workflow` and `async_simple_workflow`. New
workflows had better begin at `Workflow` or `single_turn`.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.rewards import as_parts, reward_of
from trinity_es.workflows.workflow import Workflow

__all__ = ["AsyncSimpleWorkflow", "RewardFn", "SimpleWorkflow"]


class RewardFn(ABC):
    """A reward: built with `reward_fn_args`, called with `response` and `truth`, gives its parts, which are added."""

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def __call__(self, **kwargs: Any) -> dict[str, float]: ...


class SimpleWorkflow(Workflow):
    """One prompt, one answer a run, one reward; all runs are one request.

    Attributes for subclasses: `format_args, system_prompt, reply_prefix, reward_fn, reward_fn_args, raw_task,
    task_desc, truth`. Raises WorkflowError where the task has no reward_fn.
    """

    can_reset = True
    can_repeat = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        self.task = task
        self.format_args, self.reward_fn_args, self.raw_task = task.format_args, task.reward_fn_args, task.raw_task
        self.system_prompt, self.reply_prefix = (task.format_args.get(k) for k in ("system_prompt", "reply_prefix"))
        self.task_desc, self.truth = task.task_desc, task.truth
        self.reward_fn: Any = reward_of(task)

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The task's sampling, with as many answers as there are runs to do."""
        return {**{k: v for k, v in self.task.rollout_args.items() if v is not None}, "n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        """System prompt, prompt, and the start of the answer where there is one."""
        if isinstance(self.task_desc, list):
            return list(self.task_desc)
        head = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        tail = [{"role": "assistant", "content": self.reply_prefix}] if self.reply_prefix else []
        return [*head, {"role": "user", "content": self.task_desc}, *tail]

    def run(self) -> list[Experience]:
        return self._rewarded(self.model.chat(self.format_messages(), **self.rollout_args))

    def _rewarded(self, answers: list[Experience]) -> list[Experience]:
        said = self._judged(answers)
        return self._kept(answers, [asyncio.run(one) if inspect.iscoroutine(one) else one for one in said])

    def _judged(self, answers: list[Experience]) -> list[Any]:
        return [self.reward_fn(response=answer.response_text, truth=self.truth) for answer in answers]

    def _kept(self, answers: list[Experience], said: list[Any]) -> list[Experience]:
        for i, answer in enumerate(answers):
            parts = as_parts(said[i])
            answer.metrics = {**answer.metrics, **parts}
            answer.reward = float(sum(parts.values()))
            answer.eid.run = self.run_id_base + i
        return answers


class AsyncSimpleWorkflow(SimpleWorkflow):
    """The same on the engine's loop, run by run."""

    can_reset = False
    can_repeat = False
    is_async = True

    async def run_async(self) -> list[Experience]:
        answers = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        said = self._judged(answers)
        return self._kept(answers, [await one if inspect.isawaitable(one) else one for one in said])
