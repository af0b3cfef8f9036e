"""Multiple choice: a question, lettered answers, and a reward for the right letter. Rows like those of MMLU or GPQA."""

from __future__ import annotations

import random
import re
from string import ascii_uppercase
from typing import Any

from trinity_es.events.errors import DataError
from trinity_es.events.values import Task
from trinity_es.workflows.rewards import RewardFn
from trinity_es.workflows.row_prompts import chat_of, with_question
from trinity_es.workflows.simple import AsyncSimpleWorkflow, SimpleWorkflow

__all__ = ["AsyncMultipleChoiceWorkflow", "MultipleChoiceReward", "MultipleChoiceWorkflow"]

_PROMPT = """\
Answer the following multiple choice question. The last line of your response should be of the following format: \
'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering.

{question}

{choices}"""
"""Prompt of OpenAI's simple-evals, with which most figures for MMLU and GPQA were measured."""


class MultipleChoiceReward(RewardFn):
    """`accuracy`: 1 if the response's last `Answer: X`, else its last \\boxed{X}, has the letter of the truth.

    The truth is a letter or, as in MMLU, a number from 0.
    """

    def __init__(self, **kwargs: Any) -> None:
        pass

    def __call__(self, response: str, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        text = response.rpartition("</think>")[2]
        letters = re.findall(r"(?i)\banswer\b[*_ \t]*:[*_$( \t]*([A-Z])\b", text)
        letters = letters or re.findall(r"\\boxed\{([A-Z])\}", text)
        return {"accuracy": float(bool(letters) and letters[-1].upper() == _letter(truth))}


class MultipleChoiceWorkflow(SimpleWorkflow):
    """Workflow that asks a question with lettered choices; reward: `multiple_choice_reward`.

    A row has `choices`, its prompt and its answer (a letter, or a number from 0). Or it has GPQA's `Question`, `Correct
    Answer` and `Incorrect Answer 1` to `3`, which are shuffled by a seed made of the question.
    """

    default_reward = "multiple_choice_reward"

    def reset(self, task: Task) -> None:
        """Take another task. Raises DataError if its row has no question or no choices."""
        row = task.raw_task or {}
        self.question: Any = task.task_desc
        self.choices: Any = row.get("choices")
        answer = task.truth
        if "Correct Answer" in row:
            right_answer = row["Correct Answer"].strip()
            self.question = row["Question"]
            self.choices = [right_answer, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
            random.Random(self.question).shuffle(self.choices)
            answer = self.choices.index(right_answer)
        if self.question is None:
            raise DataError("the row has no question: set format.prompt_key to the key of its question")
        if not isinstance(self.choices, list | tuple) or not 2 <= len(self.choices) <= len(ascii_uppercase):
            raise DataError(f"the row's 'choices' are {self.choices!r:.100}: a list of 2 to 26 answers is expected")
        super().reset(task)
        self.truth = _letter(answer)

    def format_messages(self) -> list[dict[str, Any]]:
        letters = ascii_uppercase[: len(self.choices)]
        choices = "\n".join(f"{letter}) {text}" for letter, text in zip(letters, self.choices, strict=True))
        messages = chat_of(self.question, self.system_prompt, self.reply_prefix)
        return with_question(messages, lambda text: _PROMPT.format(letters=letters, question=text, choices=choices))


class AsyncMultipleChoiceWorkflow(AsyncSimpleWorkflow, MultipleChoiceWorkflow):
    """Async variant of MultipleChoiceWorkflow, which plays each run on the runner's event loop."""


def _letter(truth: Any) -> str:
    """Return a row's answer as a letter. It is a letter, perhaps in brackets, or a number from 0. Raises DataError."""
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(ascii_uppercase):
        return ascii_uppercase[truth]
    letter = truth.strip().strip("()").upper() if isinstance(truth, str) else ""
    if len(letter) == 1 and letter in ascii_uppercase:
        return letter
    raise DataError(f"the row's answer is {truth!r}: a letter or a number from 0 is expected (format.response_key)")
