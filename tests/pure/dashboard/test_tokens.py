"""A rollout token by token, as plain values; texts and errors that are safe to show."""

from __future__ import annotations

import math
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.actors.engines.vllm.weights import short_error
from trinity_es.dashboard.tokens import LEVELS, byte_decode, decoder, level, overlay, token_texts
from trinity_es.events.experience import Experience
from trinity_es.safe_text import cut, error_line, plain, shown


def one(**fields: object) -> Experience:
    return Experience(**({"tokens": [1, 2, 3, 4], "prompt_length": 2, "logprobs": [-0.5, -3.0]} | fields))


@settings(max_examples=50)
@given(st.text(max_size=60), st.binary(max_size=60))
def test_the_pieces_of_tokens_are_the_whole_text_and_bytes_that_are_no_text_have_some(text: str, data: bytes) -> None:
    assert "".join(token_texts(list(text.encode()), byte_decode)) == text
    assert len(token_texts(list(data), byte_decode)) == len(data)


def test_mask_logprob_version_and_advantage_stand_at_their_tokens() -> None:
    e = one(tokens=[9, 8, 7, 6, 5], prompt_length=2, logprobs=[-0.001, -9.0, 0.0], action_mask=[True, False, True],
            advantages=[1.0, 2.0, 3.0], info={"version_spans": [[4, 0, 2], [5, 2, 3]]})
    e.logprobs[2] = math.nan  # as in a payload of an older release
    o = overlay(e)
    assert [t.prompt for t in o.tokens] == [True, True, False, False, False]
    assert [t.trained for t in o.tokens] == [False, False, True, False, True]
    assert [t.level for t in o.tokens] == [None, None, 0, LEVELS - 1, None]
    assert o.tokens[3].logprob == -9.0
    assert o.tokens[4].logprob is None  # not a number
    assert [t.version for t in o.tokens] == [None, None, 4, 4, 5]
    assert [t.advantage for t in o.tokens][2:] == [1.0, 2.0, 3.0]
    assert o.versions == [4, 5]
    assert [t.text for t in o.tokens] == ["[9]", "[8]", "[7]", "[6]", "[5]"]  # no tokenizer: ids


def test_the_scale_goes_from_sure_to_unlikely() -> None:
    levels = [level(math.log(p)) for p in (0.999, 0.95, 0.8, 0.6, 0.3, 0.15, 0.05, 0.001)]
    assert levels == list(range(LEVELS))


def test_a_million_tokens_are_cut_and_counted() -> None:
    long = overlay(one(tokens=np.zeros(1_000_000, np.int32), prompt_length=10, logprobs=None), max_tokens=100)
    assert (len(long.tokens), long.left_out, long.skipped) == (100, 999_900, 0)
    prompt = overlay(one(tokens=np.zeros(1000, np.int32), prompt_length=990, logprobs=None), max_tokens=100)
    assert (len(prompt.tokens), prompt.left_out, prompt.skipped) == (100, 900, 900)
    assert prompt.tokens[-1].index == 999  # the response is there to its end


@pytest.mark.parametrize("spans", ["x", [1], [[1, 2]], [["1", 0, 2]], {"a": 1}, [[None, None, None]]])
def test_what_a_workflow_writes_into_info_breaks_nothing(spans: object) -> None:
    assert [t.version for t in overlay(one(info={"version_spans": spans})).tokens] == [None] * 4


def test_texts_come_from_the_scripted_engines_bytes_or_from_the_models_folder(tmp_path: object) -> None:
    decode, source = decoder({"explorer": {"rollout_model": {"engine_type": "scripted"}}})
    assert source == "bytes"
    assert decode is not None
    assert [t.text for t in overlay(one(tokens=list(b"abcd")), decode, source).tokens] == list("abcd")
    assert decoder({"model": {"model_path": f"{tmp_path}/none"}}) == (None, "")
    assert decoder({}) == (None, "")


def test_a_tokenizer_of_the_models_folder_is_used(tmp_path: object) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"low": 0, "high": 1, "?": 2}, unk_token="?"))
    made.save(f"{tmp_path}/tokenizer.json")
    decode, source = decoder({"model": {"model_path": str(tmp_path)}})
    assert source == "tokenizer"
    assert decode is not None
    assert [t.text.strip() for t in overlay(one(tokens=[0, 1, 1, 0]), decode, source).tokens] == [
        "low", "high", "high", "low"]


def test_characters_that_act_are_written_out_and_letters_stay() -> None:
    assert shown("\x1b[31m\x00\x7f\x9b\u202e\u2066\r") == r"\x1b[31m\x00\x7f\x9b\u202e\u2066\r"
    kept = "naïve\n\tすし　می‌خواهم 👩‍🔬 e\u0301"
    assert shown(kept) == kept
    assert cut("abc\x1bdef", 4) == ("abc\\x1b", 3)


@given(st.text())
def test_no_text_keeps_a_control_character(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t\u00a0\u3000" or ord(c) > 0xA0 for c in shown(text))


def told(message: str) -> str:
    try:
        raise ValueError(message)
    except ValueError as e:
        return f"ValueError: {e}\n{''.join(traceback.format_exception(e))}"


def test_an_error_is_shown_with_its_last_frame_however_long_it_is() -> None:
    line = error_line(told("no reward for that"), 200)
    assert line.startswith("ValueError: no reward for that (test_tokens.py:")
    assert line.endswith(" in told)")
    long = error_line(told("x" * 500), 80)
    assert long.startswith("ValueError: xxx")
    assert long.endswith(" in told)")
    assert len(long) == 80
    assert error_line("two\nlines", 80) == plain("two\nlines", 80) == "two⏎lines", "without frames"


def test_an_engine_tells_what_pydantic_refused_and_not_where_to_read_on() -> None:
    error = ValueError("1 validation error for ModelConfig\n  Value error, max_model_len (512) is greater than 256\n"
                       "    For further information visit https://errors.pydantic.dev/2.14/v/value_error")
    assert short_error(error) == "ValueError: Value error, max_model_len (512) is greater than 256"
