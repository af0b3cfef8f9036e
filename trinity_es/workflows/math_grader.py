"""Calls of math-verify (the extra `math`), only for grader processes, which can be killed.

math-verify's own timeouts are off, since they need signals. Its errors are raised, so the run fails and does not get
a zero.
"""

from __future__ import annotations

from typing import Any

try:
    import math_verify.grader
    import math_verify.parser
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as e:
    raise ImportError(f"{e}: math rewards need math-verify: pip install 'trinity-es[math]'") from e

__all__ = ["is_equal", "parse_answer", "parse_latex"]

math_verify.grader.TIMEOUT_WARNING_SHOWN = math_verify.parser.TIMEOUT_WARNING_SHOWN = True

_ANSWER = LatexExtractionConfig(
    normalization_config=NormalizationConfig(basic_latex=True, units=True, boxed="all"),
    boxed_match_priority=0, try_extract_without_anchor=False,
)
"""Extraction as in open-r1: boxed text first, then only formulas that the text marks as its answer."""


def parse_answer(text: str) -> list[Any]:
    """Return the answer in a text as math-verify's expressions and their text; [] if it has no answer."""
    expressions: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions


def parse_latex(text: str, *, is_answer: bool) -> list[Any]:
    """Return the first LaTeX expression of a text, or with `is_answer` the one that open-r1 would extract.

    The list has math-verify's expression and its text; [] if there is none.
    """
    targets = [_ANSWER if is_answer else LatexExtractionConfig()]
    expressions: list[Any] = parse(text, targets, extraction_mode="first_match", parsing_timeout=None,
                                   raise_on_error=True)
    return expressions


def is_equal(gold: Any, target: Any) -> bool:
    return bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))


is_equal(parse_answer("$\\frac{1}{2}$"), parse_answer("the answer is 0.5"))  # builds tables before graders are forked
parse_latex("\\boxed{1}", is_answer=True)
