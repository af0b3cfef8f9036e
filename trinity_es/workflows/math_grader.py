"""Calls of math-verify (the extra `math`), made only in graders, which can be killed.

math-verify's own timeouts are off, since they need signals. Its errors are raised here instead of counting as wrong
answers, so the run fails and does not get a zero.
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

__all__ = ["equal", "parsed", "parsed_latex"]

math_verify.grader.TIMEOUT_WARNING_SHOWN = math_verify.parser.TIMEOUT_WARNING_SHOWN = True

_ANSWER = LatexExtractionConfig(
    normalization_config=NormalizationConfig(basic_latex=True, units=True, boxed="all"),
    boxed_match_priority=0, try_extract_without_anchor=False,
)
"""Extraction as in open-r1: boxed text first, and only formulas that the text calls its answer."""


def parsed(text: str) -> list[Any]:
    """Return the answer in a text as math-verify's expressions and their text; [] if there is none."""
    expressions: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions


def parsed_latex(text: str, *, answer: bool) -> list[Any]:
    """Return the first LaTeX expression of a text. For an `answer`, as open-r1 extracts it."""
    config = [_ANSWER if answer else LatexExtractionConfig()]
    expressions: list[Any] = parse(text, config, extraction_mode="first_match", parsing_timeout=None,
                                   raise_on_error=True)
    return expressions


def equal(gold: Any, target: Any) -> bool:
    """Return True if the two are mathematically equal, as far as sympy can tell."""
    return bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))


equal(parsed("$\\frac{1}{2}$"), parsed("the answer is 0.5"))  # builds tables before graders are forked
parsed_latex("\\boxed{1}", answer=True)
