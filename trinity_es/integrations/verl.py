"""Agent loop for verl 0.9.1: plays verl's prompts on the engines of a running system, and returns exact experiences.

    # agent_loops.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: trinity_es
      _target_: trinity_es.integrations.verl.RolloutLoop
      _convert_: all
      config: /shared/config.yaml        # of the system that `trinity-es up` started
      reward_fn: rewards:letters

and `actor_rollout_ref.rollout.agent.default_agent_loop: trinity_es`. verl makes a loop for each rollout, in its
workers, and awaits `run`. Each rollout is an eval batch of one task, so no trainer of trinity_es gets it. verl does not
control which weights the engines serve (docs/integrations/VERL.md).
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import numpy as np

from trinity_es.client.rollout_client import RolloutClient, connect
from trinity_es.config.config import load_config
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.experience import Experience
from trinity_es.events.json_values import NotPlain, plain
from trinity_es.events.values import Task
from trinity_es.integrations.answers import ANSWERS, PROMPTS, require_no_format
from trinity_es.integrations.step_batches import play_batch

__all__ = ["RolloutLoop", "output_fields"]

SAMPLING = "temperature", "top_p", "top_k", "repetition_penalty", "logprobs"
"""Sampling parameters from verl's worker that are passed on."""
ROLLOUTS = 256
"""Maximum number of rollouts that a verl worker waits for at a time."""
_connecting = threading.Lock()
_threads = ThreadPoolExecutor(ROLLOUTS, thread_name_prefix="verl-rollouts")


class RolloutLoop:
    """Agent loop with the interface of verl's `AgentLoopBase`, for verl's `AgentLoopWorker`.

    - `config`: path to the config of the running system
    - `workflow`, `reward_fn`, `workflow_args`, `reward_fn_args`, `format_args`, `rollout_args`: as in a `Task`; by
      default one answer, rewarded by `reward_fn`, or by verl if there is no `reward_fn`
    - `trainer_config`: only its lengths of prompts and responses are used; `data_config`: only its chat template's
      variables; `others`: verl's further arguments, which are ignored

    Raises ConfigError for chat template variables and `format_args` that the workflow would ignore.
    """

    def __init__(
        self, config: str, *, trainer_config: Any, data_config: Any = None, workflow: str | None = None,
        reward_fn: str | None = None, workflow_args: Mapping[str, Any] | None = None,
        reward_fn_args: Mapping[str, Any] | None = None, format_args: Mapping[str, Any] | None = None,
        rollout_args: Mapping[str, Any] | None = None, **others: Any,
    ) -> None:
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self._prompt_length, self._response_length = int(rollout.prompt_length), int(rollout.response_length)
        self._config, self._rollout_args = str(config), dict(rollout_args or {})
        template = dict((data_config.config.get("apply_chat_template_kwargs") if data_config else None) or {})
        if template and workflow:
            raise ConfigError(f"data.apply_chat_template_kwargs does not reach the workflow {workflow}: leave it out")
        template_args = {"chat_template_kwargs": template} if template else {}
        self._task: dict[str, Any] = {
            "workflow": workflow or (PROMPTS if reward_fn else ANSWERS), "reward_fn": reward_fn,
            "workflow_args": {**template_args, **(workflow_args or {})}, "reward_fn_args": dict(reward_fn_args or {}),
            "format_args": dict(format_args or {}),
        }
        require_no_format(self._task["workflow"], self._task["format_args"])

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Play `kwargs["raw_prompt"]` once, and return verl's `AgentLoopOutput`.

        The other fields of the row become the task's; `reward_model.ground_truth` is its `answer` if it has none.
        Raises WorkflowError if the run failed for good, DataError if the prompt is longer than verl allows.
        """
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        started_at = time.monotonic()
        task = self._task_of(sampling_params, kwargs)
        experience = await asyncio.get_running_loop().run_in_executor(_threads, self._play, task)
        fields = output_fields(experience, self._prompt_length, self._response_length)
        metrics = AgentLoopMetrics(generate_sequences=time.monotonic() - started_at)
        return AgentLoopOutput(metrics=metrics, **fields)

    def _task_of(self, sampling: Mapping[str, Any], row: Mapping[str, Any]) -> Task:
        """Return a task of one run for a row of verl's data, with verl's sampling unless `rollout_args` override it."""
        sampling_args = {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
        raw_task = {key: _plain(key, value) for key, value in row.items() if key != "raw_prompt"}
        reward_model = raw_task.get("reward_model")  # verl's data sets have the answer in it
        if isinstance(reward_model, dict) and "ground_truth" in reward_model:
            raw_task.setdefault("answer", reward_model["ground_truth"])
        return Task(
            **self._task, repeat_times=1, raw_task={**raw_task, "prompt": _plain("raw_prompt", row["raw_prompt"])},
            rollout_args={"max_tokens": self._response_length, **sampling_args, **self._rollout_args},
        )

    def _play(self, task: Task) -> Experience:
        """Play the task as an eval batch of its own, and return its last experience. Blocks."""
        with _connecting:
            client = _client(self._config)
        return play_batch(client, f"verl/{uuid4().hex}", [task], "eval")[-1]


def output_fields(experience: Experience, prompt_length: int, response_length: int) -> dict[str, Any]:
    """Return the fields of verl's `AgentLoopOutput` without metrics. Response lists are cut at `response_length`.

    Raises DataError for a prompt of more than `prompt_length` tokens, which verl would cut.
    """
    if experience.prompt_length > prompt_length:
        raise DataError(
            f"a prompt has {experience.prompt_length} tokens, but rollout.prompt_length is {prompt_length}: raise it, "
            "or set data.filter_overlong_prompts"
        )
    tokens = [int(token) for token in experience.tokens]
    ids = tokens[experience.prompt_length :]
    mask = np.ones(len(ids), int) if experience.action_mask is None else np.asarray(experience.action_mask, int)
    logprobs = None if experience.logprobs is None else np.where(mask, experience.logprobs, 0.0)[:response_length]
    versions = [int(span[0]) for span in experience.info.get("version_spans", ())]
    if not versions and (version := experience.info.get("model_version")) is not None:
        versions = [int(version)]
    messages = experience.messages or [{}, {}]  # one prompt and its answer
    return {
        "prompt_ids": tokens[: experience.prompt_length], "response_ids": ids[:response_length],
        "response_mask": [int(bit) for bit in mask[:response_length]],
        "response_logprobs": None if logprobs is None else [float(value) for value in logprobs],
        "reward_score": experience.reward, "num_turns": sum(message.get("role") != "system" for message in messages),
        "extra_fields": {
            "turn_scores": [], "tool_rewards": [], "experience_id": experience.eid.uid,
            "min_global_steps": min(versions, default=None), "max_global_steps": max(versions, default=None),
        },
    }


def _plain(name: str, value: Any) -> Any:
    """Return a field of verl's row, perhaps a numpy value, as plain JSON."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    try:
        return plain(list(value) if name == "raw_prompt" and not isinstance(value, str) else value)
    except NotPlain as e:
        raise DataError(f"{name} of verl's row is no JSON ({e}): leave it out of the data set") from e


@functools.cache
def _client(config: str) -> RolloutClient:
    """Return this process's client for the system of a config. Raises NotRunning."""
    return connect(load_config(config))
