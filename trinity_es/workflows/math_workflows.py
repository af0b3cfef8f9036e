"""Workflows for mathematics, under the names in Trinity-RFT, with its prompts.

Each workflow asks once and rewards the answer. Rows have the form of GSM8K (`question`, an `answer` that ends with
`#### 18`) or of MATH (`problem`, a `solution` with \\boxed{}); `format: {prompt_key: problem, response_key: solution}`
names the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trinity_es.events.errors import DataError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Args, Task, class_path
from trinity_es.workflows.row_prompts import chat_of, plain_text, with_question
from trinity_es.workflows.simple import AsyncSimpleWorkflow, SimpleWorkflow
from trinity_es.workflows.workflow import KNOWN

__all__ = [
    "AsyncMathBoxedWorkflow", "AsyncMathEvalWorkflow", "AsyncMathRMWorkflow", "AsyncMathWorkflow", "MathBoxedWorkflow",
    "MathEvalWorkflow", "MathRMWorkflow", "MathWorkflow",
]

_THINK_ANSWER = """\
A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first \
thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and \
answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,
<think> reasoning process here </think>
<answer> answer here </answer>.
"""

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

_BOXED_THINK = """\
You are a helpful assistant that solves MATH problems. You should first thinks about the reasoning process in mind and \
then provides the user with the answer. You should present your reasoning process using the format: <think>
 ...your reasoning process here... </think>
 first. You should always include your final answer in \\boxed{} as closed-form results."""


class MathWorkflow(SimpleWorkflow):
    """Workflow with reasoning in <think> and the answer in <answer> tags, as DeepSeek-R1; reward: `math_reward`."""

    default_reward = "math_reward"

    def reset(self, task: Task) -> None:
        """Take another task. If its reward is `math_reward` and it has no system prompt, set the fitting prompt."""
        reward = class_path(task.reward_fn or self.default_reward)
        if reward in _MATH_REWARD_NAMES and task.format_args.get("system_prompt") is None:
            task = replace(task, format_args=Args({**task.format_args, "system_prompt": _THINK_ANSWER}))
        super().reset(task)


_MATH_REWARD_NAMES = ("math_reward", "trinity_es.workflows.math_rewards:MathRewardFn")


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """Async variant of MathWorkflow, which plays each run on the runner's event loop."""


class MathBoxedWorkflow(SimpleWorkflow):
    """Workflow that asks for the answer in \\boxed{}; reward: `math_boxed_reward`.

    `workflow_args`: `with_think` (false; true asks for reasoning between <think> tags), `format_score_coef` (0.1:
    penalty for leaving them out), `use_base` (false; true makes the prompt plain text, for a base model).
    """

    default_reward = "math_boxed_reward"
    ARGS = frozenset({"with_think", "format_score_coef", "use_base"})
    KNOWN_TO_REWARDS = KNOWN | {"with_think", "format_score_coef", "response_token"}

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.workflow_args = task.workflow_args
        self.use_base = self.workflow_args.get("use_base", False)
        self.with_think = self.workflow_args.get("with_think", False)
        self.format_score_coef = self.workflow_args.get("format_score_coef", 0.1)
        if self.system_prompt is None:
            self.system_prompt = _BOXED_THINK if self.with_think else _BOXED

    def format_prompt(self) -> str:
        self.require_prompt()
        return plain_text(chat_of(self.task_desc, self.system_prompt)) + (self.reply_prefix or "")

    def _ask(self, chat: Callable[..., Any], generate: Callable[..., Any]) -> Any:
        """Return the model's answers, or an awaitable of them. With `use_base` the prompt is sent as plain text."""
        if self.use_base:
            return generate([self.format_prompt()], **self.rollout_args)
        return super()._ask(chat, generate)

    def _reward_arguments(self, answer: Experience) -> dict[str, Any]:
        arguments = super()._reward_arguments(answer)
        return {**arguments, "with_think": self.with_think, "format_score_coef": self.format_score_coef,
                "response_token": arguments["completion_ids"]}

    def _with_rewards(self, answers: list[Experience], rewards: Sequence[Any]) -> list[Experience]:
        """Set the answers' rewards. Mask each response that was cut off, so that it is not trained on."""
        rewarded_answers = super()._with_rewards(answers, rewards)
        for answer in rewarded_answers:
            if answer.truncate_status == "response_truncated":
                answer.action_mask = np.zeros(len(answer.tokens) - answer.prompt_length, dtype=np.bool_)
        return rewarded_answers


class AsyncMathBoxedWorkflow(AsyncSimpleWorkflow, MathBoxedWorkflow):
    """Async variant of MathBoxedWorkflow, which plays each run on the runner's event loop."""


class MathEvalWorkflow(SimpleWorkflow):
    """Workflow with Qwen2.5-Math's prompt and sampling (temperature 0.6, top_p 0.8); reward: `math_eval_reward`.

    The prompt is always the row's `question`, whatever `prompt_key` is.
    """

    default_reward = "math_eval_reward"

    @property
    def rollout_args(self) -> dict[str, Any]:
        return {"temperature": 0.6, "top_p": 0.8, "n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        question = (self.raw_task or {}).get("question")
        if question is None:
            raise DataError("the row has no 'question', which math_eval_workflow asks: rename the row's key to it")
        messages = chat_of(question, self.system_prompt or "You are a helpful assistant.", self.reply_prefix)
        return with_question(messages, lambda text: f"{text}\n{_BOXED}")


class AsyncMathEvalWorkflow(AsyncSimpleWorkflow, MathEvalWorkflow):
    """Async variant of MathEvalWorkflow, which plays each run on the runner's event loop."""


class MathRMWorkflow(SimpleWorkflow):
    """Workflow for reward models: rewards that take `answer` (its Experience), `messages` and `ground_truth`."""

    KNOWN_TO_REWARDS = KNOWN | {"answer", "messages", "ground_truth"}

    def _reward_arguments(self, answer: Experience) -> dict[str, Any]:
        return {**super()._reward_arguments(answer), "answer": answer, "messages": self.format_messages(),
                "ground_truth": self.truth}


class AsyncMathRMWorkflow(AsyncSimpleWorkflow, MathRMWorkflow):
    """Async variant of MathRMWorkflow, which plays each run on the runner's event loop."""
