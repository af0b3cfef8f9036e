"""Workflows: what a task does with a model, and what it returns for training.

A workflow is built by a runner with `task`, `model` and `auxiliary_models` (in the order of the config; they become its
`auxiliary_model_wrappers`), and `run` (or `run_async`) returns a list of Experience. Yours: subclass `Workflow`, and
name it in a task or a taskset as "module:Class", or register it under a short name with
`@WORKFLOWS.register_module("name")`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import UnknownWorkflow, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task, class_path
from trinity_es.workflows.rewards import TRLReward, as_parts, reward_of

__all__ = ["WORKFLOWS", "MultiTurnWorkflow", "SingleTurnWorkflow", "Workflow", "WorkflowRegistry"]


class WorkflowRegistry:
    """Short names for workflow classes. A name that has a colon is "module:Class" and needs no registration."""

    def __init__(self, paths: Mapping[str, str] | None = None) -> None:
        self._paths: dict[str, str] = dict(paths or {})

    def register_module(self, name: str) -> Callable[[type[Any]], type[Any]]:
        """Register a class, as its decorator. Raises UnknownWorkflow when another class has the name already."""

        def add(cls: type[Any]) -> type[Any]:
            path = class_path(cls)
            if self._paths.get(name, path) != path:
                raise UnknownWorkflow(f"workflow name {name!r} is taken by {self._paths[name]}: choose another")
            self._paths[name] = path
            return cls

        return add

    def path(self, workflow: type[Any] | str) -> str:
        """Return the "module:Class" of a class, a registered name or a path.

        Raises UnknownWorkflow if it can't be found.
        """
        name = class_path(workflow)
        path = self._paths.get(name, name)
        resolve(path, self._paths, "workflow")
        return path

    def get(self, name: str) -> type[Any]:
        """Return the class of a registered name or "module:Class". Raises UnknownWorkflow."""
        return resolve(name, self._paths, "workflow")

    def names(self) -> list[str]:
        return sorted(self._paths)


WORKFLOWS = WorkflowRegistry({
    "simple_workflow": "trinity_es.workflows.simple:SimpleWorkflow",
    "async_simple_workflow": "trinity_es.workflows.simple:AsyncSimpleWorkflow",
    "verifiers": "trinity_es.environments.verifiers_workflow:VerifiersWorkflow",
    "openenv": "trinity_es.environments.openenv:OpenEnvWorkflow",
})
"""The registry that tasks and tasksets look names up in."""


class Workflow:
    """Base of all workflows.

    Class attributes say how a runner may use it: `can_reset` (one instance is reused through `reset(task)`),
    `can_repeat` (it does all n runs itself; `set_repeat_times(n, run_id_base)` is called before, and each experience's
    `eid.run` is set by it), `is_async` (`run_async` is awaited; otherwise `run` is called in a worker process).
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        self.repeat_times = 1
        self.run_id_base = 0
        self.logger = logging.getLogger(type(self).__name__)
        """Writes, from INFO on, to the runner's log, `runner-<n>.log` in `system.log_dir`. What is printed goes to
        `launch-<store>.log` there, with what all processes of the system print."""
        if self.logger.level == logging.NOTSET:
            self.logger.setLevel(logging.INFO)

    @property
    def auxiliary_model_wrappers(self) -> list[Any] | None:
        """The auxiliary models as `self.model` is one, in the order of the config; None where there are none."""
        return self._wrappers

    @auxiliary_model_wrappers.setter
    def auxiliary_model_wrappers(self, models: Sequence[Any] | None) -> None:
        self._wrappers = list(models) if models else None
        self._clients: list[Any] | None = None

    @property
    def auxiliary_models(self) -> list[Any] | None:
        """An OpenAI client of each auxiliary model (`openai.AsyncOpenAI` where `is_async`), None where there are none.

        `client.model_path` is the name to ask it by. They are made when they are first asked for. Raises WorkflowError
        where a model has no endpoint, and without the package openai.
        """
        if self._clients is None and self._wrappers is not None:
            make = "get_openai_async_client" if type(self).is_async else "get_openai_client"
            self._clients = [getattr(model, make)() for model in self._wrappers]
        return self._clients

    @auxiliary_models.setter
    def auxiliary_models(self, clients: list[Any] | None) -> None:
        self._clients = clients

    @property
    def auxiliary(self) -> dict[str, Any]:
        """`auxiliary_model_wrappers` by their names in the config."""
        return {model.name: model for model in self._wrappers or ()}

    def reset(self, task: Task) -> None:
        """Take on another task; `self.model` (and the auxiliary ones) are its own already. Needed where `can_reset`."""
        raise NotImplementedError(f"{type(self).__name__} says can_reset and has no reset(task)")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> list[Experience]:
        """Play the task once (or `repeat_times` times where `can_repeat`)."""
        raise NotImplementedError(f"{type(self).__name__} has no run(): define it, or set is_async and run_async()")

    async def run_async(self) -> list[Experience]:
        raise NotImplementedError(f"{type(self).__name__} says is_async and has no run_async()")

    # --- for subclasses ---------------------------------------------------------------------------------------------
    def prompt_messages(self) -> list[dict[str, Any]]:
        """Return the task's prompt as chat messages, with its system prompt and the beginning of the answer, if any."""
        prompt = self.task.task_desc
        if prompt is None:
            key = self.task.format_args.get("prompt_key", "prompt")
            raise WorkflowError(f"the task has no {key!r}: set format.prompt_key to the key of its prompt")
        if isinstance(prompt, list):  # messages already, as data sets for TRL have them
            return list(prompt)
        system = self.task.format_args.get("system_prompt")
        head = [{"role": "system", "content": system}] if system else []
        prefix = self.task.format_args.get("reply_prefix")
        tail = [{"role": "assistant", "content": prefix}] if prefix else []
        return [*head, {"role": "user", "content": prompt}, *tail]

    def reward(self, response: str, completion_ids: Sequence[int] | None = None) -> dict[str, float]:
        """Return what `task.reward_fn` says of a response.

        That is a class, built with `reward_fn_args`, or a function, given them. It is called with `response, prompt,
        truth` by keyword and returns a number, or a dict of parts that are added; one with a parameter `completions`
        is called as TRL does. `completion_ids`: the response's tokens, for those that ask for them. Raises
        WorkflowError for an async one, whose workflow awaits `reward_async`.
        """
        said = self._said(response, completion_ids)
        if inspect.isawaitable(said):
            getattr(said, "close", lambda: None)()
            raise WorkflowError(f"the reward {self.task.reward_fn} is async: await self.reward_async(...)")
        return as_parts(said)

    async def reward_async(self, response: str, completion_ids: Sequence[int] | None = None) -> dict[str, float]:
        """Return what `reward` does, of an async reward, too."""
        said = self._said(response, completion_ids)
        return as_parts(await said if inspect.isawaitable(said) else said)

    def _said(self, response: str, completion_ids: Sequence[int] | None) -> Any:
        fn = reward_of(self.task)
        more = {"completion_ids": completion_ids} if isinstance(fn, TRLReward) else {}
        return fn(response=response, prompt=self.task.task_desc, truth=self.task.truth, **more)


@WORKFLOWS.register_module("single_turn")
class SingleTurnWorkflow(Workflow):
    """One prompt, one answer, one reward. All runs of the task go to the engine as one request."""

    can_reset = True
    can_repeat = True
    is_async = True

    def reset(self, task: Task) -> None:
        self.task = task

    async def run_async(self) -> list[Experience]:
        experiences: list[Experience] = await self.model.chat_async(self.prompt_messages(), n=self.repeat_times)
        for i, experience in enumerate(experiences):
            experience.eid.run = self.run_id_base + i
            ids = experience.tokens[experience.prompt_length :].tolist()
            parts = await self.reward_async(experience.response_text or "", ids)
            experience.reward = sum(parts.values())
            experience.metrics = {**parts, "reward": experience.reward}
        return experiences


class MultiTurnWorkflow(Workflow):
    """Base for conversations: collect messages, then make one experience with an action mask of them."""

    def process_messages_to_experience(
        self, messages: list[dict[str, Any]], reward: float, info: dict[str, Any] | None = None,
        truncate_status: str | None = None, as_text: bool = False,
    ) -> Experience:
        """Return one experience of a whole conversation: tokens of all turns, `action_mask` true on the assistant's.

        What `self.model.chat` answered is there as it was sampled, token by token, with its logprobs (0 on what it only
        read). What others wrote or changed is not learned from: `info["untrained_turns"]`. A conversation in which
        nothing was asked of this model, or any `as_text`, is tokenized as it stands, with the model's own logprobs. It
        blocks: for sync workflows. The numbers in `info` are metrics, with the reward. A conversation that is longer
        than the model's context is cut: `truncate_status` says so, and the reward is 0 where a part of it is gone.
        """
        experience: Experience = self.model.experience_from_messages(messages, as_text=as_text)
        return self._finished(experience, reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self, messages: list[dict[str, Any]], reward: float, info: dict[str, Any] | None = None,
        truncate_status: str | None = None, as_text: bool = False,
    ) -> Experience:
        """Return the same, for async workflows."""
        experience: Experience = await self.model.experience_from_messages_async(messages, as_text=as_text)
        return self._finished(experience, reward, info, truncate_status)

    def _finished(
        self, experience: Experience, reward: float, info: dict[str, Any] | None, truncate_status: str | None
    ) -> Experience:
        if experience.truncate_status == "response_truncated":  # what it was for was not all of what is learned
            reward = 0.0
        experience.reward = reward
        experience.info = {**(experience.info or {}), **(info or {})}
        experience.truncate_status = experience.truncate_status or truncate_status
        numbers = {name: float(value) for name, value in (info or {}).items() if isinstance(value, int | float)}
        experience.metrics = {**numbers, "reward": reward}
        return experience

