"""Rewards for mathematics, under the names in Trinity-RFT. The grader is math-verify (extra `math`).

Each answer is judged in its own process, which is killed after `grader_timeout` seconds (`reward_fn_args`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from trinity_es.actors.rollout.workers.graders import GRADER_SECONDS
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.workflows.rewards import RewardFn

__all__ = [
    "AccuracyReward", "FormatReward", "GSM8KReward", "MathBoxedRewardFn", "MathDAPORewardFn", "MathEvalRewardFn",
    "MathRewardFn", "boxed_answer",
]

_GRADER = f"{__package__}.math_grader"


def _grader() -> Any:
    """Return the module that calls math-verify. Its import takes a second, but graders have imported it already."""
    return importlib.import_module(_GRADER)


class _Math(RewardFn):
    """Base of rewards that call math-verify, always in a grader process."""

    grader_timeout = GRADER_SECONDS
    grader_imports = _GRADER
    needs: tuple[str, str] | None = ("math_verify", "math")

    def __init__(self, **kwargs: Any) -> None:
        pass


class AccuracyReward(_Math):
    """`accuracy`: 1 if the answer equals the truth; both are parsed as in open-r1, or by `answer_parser`."""

    def __init__(self, answer_parser: Callable[[str], Any] | None = None) -> None:
        self.answer_parser = answer_parser

    def __call__(self, response: str, prompt: Any = None, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        grader, truth = _grader(), _required_text(truth)
        if self.answer_parser is not None:
            answer, gold = self.answer_parser(response), self.answer_parser(truth)
        else:
            answer = grader.parse_latex(response, is_answer=True)
            gold = grader.parse_latex(truth, is_answer=False) or grader.parse_answer(_after_hashes(truth)) or truth
        return {"accuracy": float(grader.is_equal(gold, answer))}


class FormatReward(_Math):
    """`format_score`: 0.1 if the whole response matches `pattern`, a regular expression, otherwise -0.1.

    By default the reasoning is between <think> and </think>, the answer between <answer> and </answer>, on lines of
    their own.
    """

    grader_imports = ""
    needs = None

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = pattern or r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"

    def __call__(self, response: str, **kwargs: Any) -> dict[str, float]:
        match = re.match(self.pattern, response, re.DOTALL | re.MULTILINE)
        return {"format_score": 0.1 if match else -0.1}


class MathRewardFn(_Math):
    """`accuracy` of the text between <answer> tags (without tags, of the whole response), and `format_score`.

    The format is <think>...</think> <answer>...</answer>, after any text. If the truth has GSM8K's form, only the text
    after its `####` counts.
    """

    def __init__(self, pattern: str = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$") -> None:
        self.accuracy_reward = AccuracyReward(_parsed_tag_answer)
        self.format_reward = FormatReward(pattern)

    def __call__(self, response: str, prompt: Any = None, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        return {**self.accuracy_reward(response, prompt, _after_hashes(truth)), **self.format_reward(response)}


class MathBoxedRewardFn(_Math):
    """`accuracy`: 1 if the last \\boxed{} of the response equals the truth, or the truth's own last \\boxed{}.

    `format_score`: with `with_think`, minus `format_score_coef` unless exactly one <think> precedes one </think>;
    otherwise 0.
    """

    def __call__(
        self, response: str, truth: Any = None, with_think: bool = False, format_score_coef: float | None = 0.1,
        **kwargs: Any,
    ) -> dict[str, float]:
        has_think_form = (response.count("<think>") == response.count("</think>") == 1
                          and response.find("<think>") < response.find("</think>"))
        return {"accuracy": float(_is_equal(boxed_answer(response), _boxed_or_answer(truth))),
                "format_score": -(format_score_coef or 0.1) if with_think and not has_think_form else 0.0}


class MathEvalRewardFn(_Math):
    """`accuracy`: 1 if the response's answer equals the truth, or the truth's own last \\boxed{}.

    The answer is the last \\boxed{}, else the text after "the answer is" on its line, else the last number, as in
    Qwen2.5-Math's evaluation.
    """

    def __call__(self, response: str, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        return {"accuracy": float(_is_equal(_last_answer(response), _boxed_or_answer(truth)))}


class GSM8KReward(_Math):
    """`accuracy`: 1 if the response's answer equals the text after the truth's `####`.

    The answer is the text after the response's last `####`, else its last \\boxed{}, else the answer that math-verify
    finds.
    """

    def __call__(self, response: str, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        answer = response.rpartition("####")[2] if "####" in response else boxed_answer(response)
        parsed_answer = _grader().parse_answer(response if answer is None else answer)
        return {"accuracy": float(_grader().is_equal(_grader().parse_answer(_after_hashes(truth)), parsed_answer))}


class MathDAPORewardFn(_Math):
    """`accuracy`: 1 or -1, of the last \\boxed{} after the reasoning; `format_score`: lower for overlong responses.

    With `enable_overlong_penalty`, `format_score` falls from 0 at `max_response_length - cache_length` tokens to
    `-penalty_factor` at `max_response_length`. Raises ConfigError if a length or the response's tokens are missing.
    """

    def __init__(
        self, enable_overlong_penalty: bool | None = None, penalty_factor: float | None = None,
        max_response_length: int | None = None, cache_length: int | None = None,
    ) -> None:
        self.limits: tuple[float, int, int] | None = None
        if enable_overlong_penalty:
            max_length, cache = max_response_length or 0, cache_length or 0
            if penalty_factor is None or not 0 < cache < max_length:
                raise ConfigError("enable_overlong_penalty needs penalty_factor and 0 < cache_length < "
                                  f"max_response_length, but these are {penalty_factor}, {cache} and {max_length}: "
                                  "set them in reward_fn_args")
            self.limits = penalty_factor, max_length, cache

    def __call__(
        self, response: str, truth: Any = None, response_token: Sequence[int] | None = None,
        completion_ids: Sequence[int] | None = None, **kwargs: Any,
    ) -> dict[str, float]:
        is_right = _is_equal(boxed_answer(response.rpartition("</think>")[2]), _required_text(truth))
        ids = completion_ids if response_token is None else response_token
        return {"accuracy": 1.0 if is_right else -1.0, "format_score": self._overlong_penalty(ids)}

    def _overlong_penalty(self, ids: Sequence[int] | None) -> float:
        """Return the penalty (0 or less) for a response of these tokens. Raises ConfigError if they are missing."""
        if self.limits is None:
            return 0.0
        if ids is None:
            raise ConfigError("enable_overlong_penalty needs the response's tokens: have the workflow call "
                              "self.reward(response, completion_ids)")
        penalty, max_length, cache = self.limits
        excess = max(len(ids) - (max_length - cache), 0)
        return -penalty * min(excess / cache, 1.0)


def boxed_answer(text: str) -> str | None:
    """Return the content of the last \\boxed or \\fbox of a text; None if there is none or it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    argument = text[start:].partition("box")[2].removeprefix("ed")
    if not argument.startswith("{"):  # "\boxed 5$" without braces
        return argument.partition("$")[0].strip() or None
    depth = 0
    for i, character in enumerate(argument):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return argument[1:i]
    return None


def _last_answer(text: str) -> str | None:
    """Return the last \\boxed{} of a text, else the text after "the answer is", else the last number, else None."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    if sentence := re.search(r"(?:(?:final|the)\s+answer\s+is|答案是)\s*:?\s*(.+)", text, re.IGNORECASE):
        return sentence.group(1).strip().strip("$*").rstrip(".。")
    numbers = re.findall(r"[-+]?\d*\.?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None


def _is_equal(answer: str | None, truth: str) -> bool:
    """Return whether an answer equals the truth. Both are contents of a \\boxed{}."""
    if answer is None:
        return False
    if answer.strip() == truth.strip():
        return True
    grader = _grader()
    gold, parsed_answer = (grader.parse_answer(f"\\boxed{{{text}}}") for text in (truth, answer))
    return bool(grader.is_equal(gold, parsed_answer))


def _parsed_tag_answer(text: str) -> Any:
    answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return _grader().parse_answer(answer.group(1) if answer else text)


def _after_hashes(truth: Any) -> str:
    return _required_text(truth).rpartition("####")[2].strip()


def _boxed_or_answer(truth: Any) -> str:
    answer = _after_hashes(truth)
    boxed = boxed_answer(answer)
    return answer if boxed is None else boxed


def _required_text(truth: Any) -> str:
    if truth is None:
        raise DataError("the row has no answer to compare with: set format.response_key to its key")
    return str(truth)
