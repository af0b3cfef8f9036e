"""What of the math rewards needs math-verify (the extra `math`): called in graders alone, which can be killed.

Its own timeouts are off, for they need signals, and what it makes of its errors by itself is a wrong answer: here they
are raised, so the run fails and is no zero.
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
"""How open-r1 reads an answer: what is boxed first, and no formula that nobody calls the answer."""


def parsed(text: str) -> list[Any]:
    """Return what is taken for the answer in a text: LaTeX or plain expressions, and its text; [] where there is none.
    """
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def parsed_latex(text: str, *, answer: bool) -> list[Any]:
    """Return the first LaTeX expression of a text; of an `answer` by its own rules."""
    config = [_ANSWER if answer else LatexExtractionConfig()]
    found: list[Any] = parse(text, config, extraction_mode="first_match", parsing_timeout=None, raise_on_error=True)
    return found


def equal(gold: Any, target: Any) -> bool:
    """Return True if the two are the same in mathematics, as far as sympy can tell."""
    return bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))


equal(parsed("$\\frac{1}{2}$"), parsed("the answer is 0.5"))  # builds its tables once, in what graders are forked from
parsed_latex("\\boxed{1}", answer=True)
