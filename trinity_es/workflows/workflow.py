"""Base classes of workflows, which play a task with a model and return experiences for training.

A runner builds a workflow with `task`, `model` and `auxiliary_models` (in the order of the config; they become its
`auxiliary_model_wrappers`), and `run` (or `run_async`) returns a list of Experience. To write a workflow, subclass
`Workflow`. Name the class in a task or a taskset as "module:Class", or register it under a short name with
`@WORKFLOWS.register_module("name")`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from trinity_es.actors.rollout.leases import Lease
from trinity_es.actors.rollout.recorded_steps import RunSteps
from trinity_es.actors.rollout.workers.graders import GRADER_BYTES, GRADER_SECONDS
from trinity_es.events.errors import WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.workflows.registry import WORKFLOWS, WorkflowRegistry
from trinity_es.workflows.rewards import Reward, answer_values, as_parts, call_of, value_of
from trinity_es.workflows.row_prompts import chat_of

__all__ = ["KNOWN", "WORKFLOWS", "MultiTurnWorkflow", "SingleTurnWorkflow", "Workflow", "WorkflowRegistry"]


KNOWN = frozenset({"response", "completion_ids", "prompt", "truth"})
"""Arguments that every ready-made workflow passes to a reward."""


class Workflow:
    """Base of all workflows.

    Class attributes tell a runner how to use a workflow. `can_reset`: one instance is reused through `reset(task)`.
    `can_repeat`: one call plays all n runs, after `set_repeat_times(n, run_id_base)`, and sets the `eid.run` of each
    experience. `is_async`: `run_async` is awaited; otherwise `run` is called in a worker process.
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False
    ARGS: ClassVar[frozenset[str] | None] = None
    """Accepted `workflow_args`, checked before a run starts; None: any. A user's subclass that does not set `ARGS`
    accepts any."""
    FUNCTION_ARGS: ClassVar[frozenset[str]] = frozenset()
    """Names in `ARGS` whose values are a "module:name", or a list of them, imported before a run starts."""

    KNOWN_TO_REWARDS: ClassVar[frozenset[str] | None] = None
    """Arguments that a ready-made workflow passes to a task's reward; None if it calls no reward."""

    @classmethod
    def taken_args(cls) -> frozenset[str] | None:
        """Return the accepted `workflow_args`; None for any. A user's subclass does not inherit `ARGS`."""
        is_ready_made = cls.__module__.partition(".")[0] == "trinity_es"
        return cls.ARGS if is_ready_made or "ARGS" in vars(cls) else None

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        self.repeat_times = 1
        self.run_id_base = 0
        self.failed_runs: dict[int, Exception] = {}
        """{`eid.run`: error} of failed runs, if `can_repeat`; the other runs are kept."""
        self.logger = logging.getLogger(type(self).__name__)
        """Logger of `runner-<n>.log` in `system.log_dir`, from INFO on. Printed text goes to `launch-<store>.log`
        there, with the output of all processes."""
        if self.logger.level == logging.NOTSET:
            self.logger.setLevel(logging.INFO)

    @property
    def auxiliary_model_wrappers(self) -> list[Any] | None:
        """The auxiliary models, each like `self.model`, in the order of the config; None without any."""
        return self._wrappers

    @auxiliary_model_wrappers.setter
    def auxiliary_model_wrappers(self, models: Sequence[Any] | None) -> None:
        self._wrappers = list(models) if models else None
        self._clients: list[Any] | None = None

    @property
    def auxiliary_models(self) -> list[Any] | None:
        """An OpenAI client for each auxiliary model (`openai.AsyncOpenAI` if `is_async`); None without any.

        `client.model_path` is the model's name in requests. Raises WorkflowError for a model without an endpoint, or if
        the package openai is missing.
        """
        if self._clients is None and self._wrappers is not None:
            method = "get_openai_async_client" if type(self).is_async else "get_openai_client"
            self._clients = [getattr(model, method)() for model in self._wrappers]
        return self._clients

    @auxiliary_models.setter
    def auxiliary_models(self, clients: list[Any] | None) -> None:
        self._clients = clients

    @property
    def auxiliary(self) -> dict[str, Any]:
        """`auxiliary_model_wrappers` by their names in the config."""
        return {model.name: model for model in self._wrappers or ()}

    def reset(self, task: Task) -> None:
        """Take another task. `self.model` and the auxiliary models are set for it before. Needed with `can_reset`."""
        raise NotImplementedError(f"{type(self).__name__} says can_reset and has no reset(task)")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of runs to play and the number of the first run. A runner calls this before `run`."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> list[Experience]:
        """Play the task once (or `repeat_times` times with `can_repeat`)."""
        raise NotImplementedError(f"{type(self).__name__} has no run(): define it, or set is_async and run_async()")

    async def run_async(self) -> list[Experience]:
        """Play the task as `run` does, on the runner's event loop."""
        raise NotImplementedError(f"{type(self).__name__} says is_async and has no run_async()")

    # --- for subclasses ---------------------------------------------------------------------------------------------
    def lease(
        self, provider: str, args: Mapping[str, Any] | None = None, *, ttl: float = 3600.0,
        creation_timeout: float = 60.0,
    ) -> Lease:
        """Return a lease on an outside resource such as a sandbox, for `async with`, or `with` in a sync workflow
        (docs/integrations/LEASES.md).

        `provider` is a "module:Class" built with `args`, which are recorded. The resource lives at most `ttl` seconds
        without a renewal, and making it takes at most `creation_timeout`. It is released however the run ends. Raises
        WorkflowError for arguments that can't be recorded.
        """
        return Lease(self.model.leases, provider, args, ttl=ttl, creation_timeout=creation_timeout)

    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, idempotent: bool = False) -> Any:
        """Return `fn(*args)`, called only once even if the run is lost and played again. For sync workflows.

        Use it for calls with outside effects, and for results that a second call would change. The arguments and the
        value are plain JSON. The next attempt finds a step by its name and arguments, and returns its value, or raises
        its error (TrinityError if the class is neither built in nor of this software), without a call.

        If an attempt is lost while `fn` runs, the effect may have happened or not. With `idempotent` the next attempt
        calls `fn` again. Otherwise the run starts over, without its earlier answers and steps. A warning,
        `AttemptKept.possibly_delivered` and `info["possibly_delivered"]` of its experiences then name the step.

        Raises WorkflowError if the arguments or the value are not plain JSON.
        """
        return self._steps.step(name, fn, args, idempotent)

    async def step_async(self, name: str, fn: Callable[..., Any], /, *args: Any, idempotent: bool = False) -> Any:
        """Return what `step` returns, for async workflows. `fn` may be async; a sync `fn` is called in a thread."""
        return await self._steps.step_async(name, fn, args, idempotent)

    def now(self) -> float:
        """Return the unix time in seconds. A run that is played again gets the same times. For sync workflows."""
        return self._steps.now()

    async def now_async(self) -> float:
        """Return what `now` returns, for async workflows."""
        return await self._steps.now_async()

    @property
    def random(self) -> Random:
        """Random generator with a seed per run, so a run that is played again gets the same numbers."""
        return self._steps.random

    @property
    def _steps(self) -> RunSteps:
        """Recorder of this run's steps. Outside a runner, as in a test, it records nothing."""
        steps = getattr(self.model, "steps", None)
        if isinstance(steps, RunSteps):
            return steps
        own_steps: RunSteps = self.__dict__.setdefault("_own_steps", RunSteps())
        return own_steps

    def require_prompt(self) -> Any:
        """Return the task's prompt. Raises WorkflowError if it is missing or null."""
        prompt = self.task.task_desc
        if prompt is None:
            key = self.task.format_args.get("prompt_key", "prompt")
            raise WorkflowError(f"the task has no {key!r}: set format.prompt_key to the key of its prompt")
        return prompt

    def prompt_messages(self) -> list[dict[str, Any]]:
        """Return the prompt as chat messages, with the system prompt and the beginning of the answer, if any."""
        format_args = self.task.format_args
        return chat_of(self.require_prompt(), format_args.get("system_prompt"), format_args.get("reply_prefix"))

    def reward(self, response: str, completion_ids: Sequence[int] | None = None) -> dict[str, float]:
        """Return the result of `task.reward_fn` for a response.

        The reward is a class built with `reward_fn_args`, or a function called with them. It gets those of `response,
        prompt, truth, completion_ids` that it has parameters for, and returns a number or a dict of parts to add up. A
        reward of TRL's form is called as TRL does (`workflows/rewards.py`). `completion_ids`: the response's tokens.
        Raises WorkflowError for an async reward in an async workflow, which must await `reward_async`.
        """
        result = self._reward_result(response, completion_ids)
        if inspect.isawaitable(result) and type(self).is_async:
            getattr(result, "close", lambda: None)()
            raise WorkflowError(f"the reward {self.task.reward_fn} is async: await self.reward_async(...)")
        return as_parts(value_of(result), self.task.reward_fn)

    async def reward_async(self, response: str, completion_ids: Sequence[int] | None = None) -> dict[str, float]:
        """Return what `reward` returns, for async workflows. The reward may be async."""
        result = self._reward_result(response, completion_ids)
        return as_parts(await result if inspect.isawaitable(result) else result, self.task.reward_fn)

    def _reward_result(self, response: str, completion_ids: Sequence[int] | None) -> Any:
        """Call the task's reward, and return its result or an awaitable of it."""
        ids = {} if completion_ids is None else {"completion_ids": completion_ids}
        return Reward(self.task, self)(response=response, prompt=self.task.task_desc, truth=self.task.truth, **ids)

    def grade(
        self, function: Callable[..., Any], *args: Any, timeout: float = GRADER_SECONDS, memory: int = GRADER_BYTES,
        imports: str = "", **kwargs: Any,
    ) -> Any:
        """Call a function in a grader process and return its result. For sync workflows.

        Use it for functions that may hang, crash or take too much memory over an answer. `function` belongs to a module
        that can be imported; `args`, `kwargs` and the result are plain JSON. `timeout` is in seconds, `memory` in
        bytes; `imports` is a module that the process imports beforehand, by default the function's own.

        Raises GraderError if the call fails. If the workflow does not catch it, the run fails with kind `grader` and
        does not get a zero.
        """
        return self.model.grade(*call_of(function, args, kwargs), timeout=timeout, memory=memory, imports=imports)

    async def grade_async(
        self, function: Callable[..., Any], *args: Any, timeout: float = GRADER_SECONDS, memory: int = GRADER_BYTES,
        imports: str = "", **kwargs: Any,
    ) -> Any:
        """Return what `grade` returns, for async workflows."""
        call = call_of(function, args, kwargs)
        return await self.model.grade_async(*call, timeout=timeout, memory=memory, imports=imports)

    def _with_rewards(self, answers: list[Experience], rewards: Sequence[Any]) -> list[Experience]:
        """Set run number and reward of each answer, and return the answers whose reward did not fail.

        A reward that is an exception is noted in `failed_runs`; without `can_repeat` it is raised.
        """
        rewarded_answers = []
        for run, (answer, parts) in enumerate(zip(answers, rewards, strict=True), self.run_id_base):
            try:
                if isinstance(parts, BaseException):
                    raise parts
                parts = as_parts(parts, self.task.reward_fn or self)
            except Exception as e:
                if not type(self).can_repeat:
                    raise
                self.failed_runs[run] = e
                continue
            answer.metrics = {**answer.metrics, **parts}
            answer.reward = float(sum(parts.values()))
            answer.eid.run = run
            rewarded_answers.append(answer)
        return rewarded_answers


class SingleTurnWorkflow(Workflow):
    """One prompt, one answer, one reward. All runs of the task go to the engine as one request."""

    can_reset = True
    can_repeat = True
    is_async = True
    ARGS: ClassVar[frozenset[str] | None] = frozenset()
    KNOWN_TO_REWARDS: ClassVar[frozenset[str] | None] = KNOWN

    def reset(self, task: Task) -> None:
        self.task = task

    async def run_async(self) -> list[Experience]:
        """Ask the model once for all runs, and reward each answer. The metric `reward` is the sum of the parts."""
        answers = await self._answers()
        calls = [self.reward_async(**answer_values(answer)) for answer in answers]
        rewarded_answers = self._with_rewards(answers, await asyncio.gather(*calls, return_exceptions=True))
        for answer in rewarded_answers:
            answer.metrics["reward"] = answer.reward or 0.0
        return rewarded_answers

    async def _answers(self) -> list[Experience]:
        answers: list[Experience] = await self.model.chat_async(self.prompt_messages(), n=self.repeat_times)
        return answers


class MultiTurnWorkflow(Workflow):
    """Base of workflows that collect the messages of a conversation and turn them into one experience."""

    def process_messages_to_experience(
        self, messages: list[dict[str, Any]], reward: float, info: dict[str, Any] | None = None,
        truncate_status: str | None = None, as_text: bool = False,
    ) -> Experience:
        """Return one experience of a whole conversation: tokens of all turns, `action_mask` true on the assistant's.

        Answers of `self.model.chat` keep their sampled tokens and logprobs (0 on tokens that the model only read).
        Assistant turns that this model did not sample, or that were changed, are not trained on;
        `info["untrained_turns"]` counts them. A conversation without an answer of this model, or any with `as_text`, is
        tokenized from its text, with the model's own logprobs. The numbers in `info` become metrics, with the reward.
        A conversation longer than the model's context is cut: `truncate_status` says so, and the reward is 0 if an
        answer is cut. For sync workflows, since it blocks.
        """
        experience: Experience = self.model.experience_from_messages(messages, as_text=as_text)
        return self._with_reward(experience, reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self, messages: list[dict[str, Any]], reward: float, info: dict[str, Any] | None = None,
        truncate_status: str | None = None, as_text: bool = False,
    ) -> Experience:
        """Return what `process_messages_to_experience` returns, for async workflows."""
        experience: Experience = await self.model.experience_from_messages_async(messages, as_text=as_text)
        return self._with_reward(experience, reward, info, truncate_status)

    def _with_reward(
        self, experience: Experience, reward: float, info: dict[str, Any] | None, truncate_status: str | None
    ) -> Experience:
        """Set reward, info and metrics of a conversation's experience. The reward is 0 if an answer was cut."""
        if experience.truncate_status == "response_truncated":  # the reward was for the whole response
            reward = 0.0
        experience.reward = reward
        experience.info = {**(experience.info or {}), **(info or {})}
        experience.truncate_status = experience.truncate_status or truncate_status
        numbers = {name: float(value) for name, value in (info or {}).items() if isinstance(value, int | float)}
        experience.metrics = {**numbers, "reward": reward}
        return experience

