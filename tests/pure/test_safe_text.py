"""Errors as a line that a person reads: what was raised, and where."""

from __future__ import annotations

import traceback

from trinity_es.actors.engines.vllm.weights import short
from trinity_es.safe_text import error_line, plain


def told(message: str) -> str:
    try:
        raise ValueError(message)
    except ValueError as e:
        return f"ValueError: {e}\n{''.join(traceback.format_exception(e))}"


def test_an_error_is_shown_with_its_last_frame_however_long_it_is() -> None:
    line = error_line(told("no reward for that"), 200)
    assert line.startswith("ValueError: no reward for that (test_safe_text.py:")
    assert line.endswith(" in told)")
    long = error_line(told("x" * 500), 80)
    assert long.startswith("ValueError: xxx")
    assert long.endswith(" in told)")
    assert len(long) == 80


def test_a_text_without_frames_is_shown_as_it_is() -> None:
    assert error_line("two\nlines", 80) == plain("two\nlines", 80) == "two⏎lines"


def test_an_engine_tells_what_pydantic_refused_and_not_where_to_read_on() -> None:
    error = ValueError("1 validation error for ModelConfig\n  Value error, max_model_len (512) is greater than 256\n"
                       "    For further information visit https://errors.pydantic.dev/2.14/v/value_error")
    assert short(error) == "ValueError: Value error, max_model_len (512) is greater than 256"
