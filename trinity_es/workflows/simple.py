"""Workflows and rewards under the names that users of Trinity-RFT subclass.

`SimpleWorkflow` and `AsyncSimpleWorkflow` take a task apart into attributes, chat once and reward each answer;
`RewardFn` is the base of reward classes. The registry has them as `simple_workflow` and `async_simple_workflow`. Base
new workflows on `Workflow` or `single_turn` instead.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.rewards import Reward, RewardFn, answer_values, value_of
from trinity_es.workflows.row_prompts import chat_of
from trinity_es.workflows.workflow import KNOWN, Workflow

__all__ = ["AsyncSimpleWorkflow", "RewardFn", "SimpleWorkflow"]


class SimpleWorkflow(Workflow):
    """Workflow with one prompt, and one answer and one reward per run. All runs are one request to the engine.

    Attributes for subclasses: `format_args, system_prompt, reply_prefix, reward_fn, reward_fn_args, raw_task,
    task_desc, truth`. Raises WorkflowError if the task lacks a reward_fn.
    """

    can_reset = True
    can_repeat = True
    ARGS: ClassVar[frozenset[str] | None] = frozenset()
    KNOWN_TO_REWARDS: ClassVar[frozenset[str] | None] = KNOWN
    default_reward: str | None = None
    """Registered reward of tasks that name none."""

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Take another task, with `default_reward` if it names no reward. Raises WorkflowError if both are missing."""
        if task.reward_fn is None:
            task = replace(task, reward_fn=self.default_reward)
        self.task = task
        self.format_args, self.reward_fn_args, self.raw_task = task.format_args, task.reward_fn_args, task.raw_task
        self.system_prompt = task.format_args.get("system_prompt")
        self.reply_prefix = task.format_args.get("reply_prefix")
        self.task_desc, self.truth = task.task_desc, task.truth
        self.reward_fn: Any = Reward(task, self)

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The task's sampling settings, with `n` set to the number of runs that this workflow plays."""
        task_settings = {name: value for name, value in self.task.rollout_args.items() if value is not None}
        return {**task_settings, "n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        self.require_prompt()
        return chat_of(self.task_desc, self.system_prompt, self.reply_prefix)

    def run(self) -> list[Experience]:
        return self._rewarded(self._ask(self.model.chat, self.model.generate))

    def _ask(self, chat: Callable[..., Any], generate: Callable[..., Any]) -> Any:
        """Ask the model by `chat` or `generate`, and return its answers, or an awaitable of them."""
        return chat(self.format_messages(), **self.rollout_args)

    def _reward_of(self, answer: Experience) -> Any:
        """Return the reward of an answer, or an awaitable of it."""
        return self.reward_fn(**self._reward_arguments(answer))

    def _reward_arguments(self, answer: Experience) -> dict[str, Any]:
        """Return all arguments that a reward of this answer may take."""
        return {**answer_values(answer), "prompt": self.task_desc, "truth": self.truth}

    def _rewarded(self, answers: list[Experience]) -> list[Experience]:
        """Reward the answers, and return those whose reward did not fail (see `_with_rewards`)."""
        rewards: list[Any] = []
        for answer in answers:
            try:
                rewards.append(value_of(self._reward_of(answer)))
            except Exception as e:
                rewards.append(e)
        return self._with_rewards(answers, rewards)


class AsyncSimpleWorkflow(SimpleWorkflow):
    """Async variant of SimpleWorkflow, which plays each run on the runner's event loop."""

    can_reset = False
    can_repeat = False
    is_async = True

    async def run_async(self) -> list[Experience]:
        """Play one run; the reward may be async."""
        answers = await self._ask(self.model.chat_async, self.model.generate_async)
        rewards = await asyncio.gather(*(self._awaited_reward(answer) for answer in answers), return_exceptions=True)
        return self._with_rewards(answers, rewards)

    async def _awaited_reward(self, answer: Experience) -> Any:
        reward = self._reward_of(answer)
        return await reward if inspect.isawaitable(reward) else reward
