"""Reward of the countdown game: an equation of given numbers, each used once, that yields a target."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from trinity_es.events.errors import DataError
from trinity_es.workflows.rewards import RewardFn

__all__ = ["CountDownRewardFn"]

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.UAdd: operator.pos, ast.USub: operator.neg,
}
_MAX_CHARACTERS = 1000


class CountDownRewardFn(RewardFn):
    """`score`: 1 for an equation with the target's value, 0.1 for another text between <answer> tags, 0 without them.

    The truth is `{"target": 24, "numbers": [2, 3, 4]}`, or JSON of it; numbers may be texts. The answer is the last one
    on the response's last line. Raises DataError for another truth.
    """

    def __init__(self, **kwargs: Any) -> None:
        pass

    def __call__(self, response: str, truth: Any = None, **kwargs: Any) -> dict[str, float]:
        target, numbers = _target_and_numbers(truth)
        answers = re.findall(r"<answer>(.*?)</answer>", response.split("\n")[-1])
        if not answers:
            return {"score": 0.0}
        equation = answers[-1].strip()
        uses_each_once = sorted(re.findall(r"\d+", equation)) == sorted(numbers)
        value = _value(equation) if uses_each_once else None
        is_right = value is not None and abs(value - target) < 1e-5
        return {"score": 1.0 if is_right else 0.1}


def _target_and_numbers(truth: Any) -> tuple[float, list[str]]:
    """Return the target, and the numbers as texts, from a row's answer. Raises DataError."""
    try:
        row_answer = json.loads(truth) if isinstance(truth, str) else truth
        numbers = [int(n) for n in row_answer["numbers"]]
        if not numbers or numbers != [float(n) for n in row_answer["numbers"]]:
            raise ValueError
        return float(row_answer["target"]), [str(n) for n in numbers]
    except (KeyError, TypeError, ValueError):
        raise DataError(f"the row's answer is {truth!r:.100}: a target and a list of whole numbers are expected, as in "
                        '{"target": 24, "numbers": [2, 3, 4]} (format.response_key)') from None


def _value(equation: str) -> float | None:
    """Return the value of an equation of numbers, + - * / and brackets; None for other texts."""
    if len(equation) > _MAX_CHARACTERS:
        return None
    try:
        return _node_value(ast.parse(equation, mode="eval").body)
    except (ArithmeticError, KeyError, RecursionError, SyntaxError, ValueError):
        return None


def _node_value(node: ast.AST) -> float:
    """Return the value of a part of an equation. Raises KeyError or ValueError for anything but arithmetic."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_node_value(node.left), _node_value(node.right))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_node_value(node.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    raise ValueError
