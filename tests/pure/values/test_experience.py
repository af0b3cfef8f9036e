"""events.experience: what an experience accepts, and its bytes."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from tests.helpers.any_experience import eids, small
from trinity_es.events.errors import DataError
from trinity_es.events.experience import EID, CustomField, Experience, group_by

FIELDS = {
    "eid", "tokens", "prompt_length", "logprobs", "reward", "token_level_reward", "advantages", "returns",
    "action_mask", "truncate_status", "info", "metrics", "prompt_text", "response_text", "messages", "tools", "chosen",
    "rejected", "chosen_messages", "rejected_messages", "multi_modal_inputs", "teacher_logprobs", "routed_experts",
    "custom_fields", "experience_type",
}  # fmt: skip


# --- EID ------------------------------------------------------------------------------------------------------------
def test_p5_an_eid_names_an_experience_its_step_its_run_and_its_task() -> None:
    eid = EID("12/gsm8k", 7, 3, 1, "ab12cd")
    assert (eid.uid, eid.sid) == ("12/gsm8k/7/3/1/ab12cd", "12/gsm8k/7/1")
    assert (eid.rid, eid.tid) == ("12/gsm8k/7/3", "12/gsm8k/7")
    assert str(eid) == eid.uid


def test_p5_a_suffix_is_six_random_hex_digits_unless_one_is_given() -> None:
    assert len({EID().suffix for _ in range(100)}) > 90
    assert len(EID().suffix) == 6
    assert int(EID().suffix, 16) >= 0
    assert EID(suffix="mine").suffix == "mine"


@given(eids)
def test_p5_an_eid_comes_back_from_its_dict(eid: EID) -> None:
    assert EID.from_dict(orjson.loads(orjson.dumps(eid.to_dict()))) == eid
    with pytest.raises(DataError, match="project"):
        EID.from_dict({**eid.to_dict(), "project": "x"})


# --- construction ---------------------------------------------------------------------------------------------------
def test_p5_an_experience_has_every_field_of_the_row() -> None:
    assert small().__dict__.keys() == FIELDS


def test_p5_lists_become_arrays_of_the_documented_types() -> None:
    e = small(logprobs=[-1, -2.5], action_mask=[1, 0], advantages=[1, 2], routed_experts=[[1, 2]], chosen=[])
    assert (e.tokens.dtype, e.logprobs.dtype, e.action_mask.dtype) == (np.int32, np.float32, np.bool_)
    assert (e.advantages.dtype, e.chosen.dtype, e.routed_experts.shape) == (np.float32, np.int32, (1, 2))
    assert e.action_mask.tolist() == [True, False]


@pytest.mark.parametrize(("fields", "kind", "prompt", "mask"), [
    ({}, "single_turn", 2, [True, True]),
    ({"truncate_status": "prompt_truncated", "logprobs": [0, 0]}, "single_turn", 2, [False, False]),
    ({"chosen": [5, 6], "rejected": [7]}, "dpo", 4, None),
], ids=["single turn", "truncated prompt", "preference pair, whose prompt is its tokens"])
def test_p5_an_experience_has_the_action_mask_of_its_kind(
    fields: dict[str, Any], kind: str, prompt: int, mask: list[bool] | None
) -> None:
    e = small(**fields)
    assert (e.experience_type, e.prompt_length) == (kind, prompt)
    assert (None if e.action_mask is None else e.action_mask.tolist()) == mask


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.bool_])
def test_p45_a_mask_of_whole_numbers_is_taken_whatever_their_type_and_no_other(kind: Any) -> None:
    assert small(action_mask=np.ones(2, dtype=kind)).action_mask.tolist() == [True, True]
    assert small(action_mask=np.array([0, 1], dtype=kind)).action_mask.tolist() == [False, True]
    for other in (0.5, math.nan):
        with pytest.raises(DataError, match="action_mask has dtype float64, expected bool"):
            small(action_mask=[1.0, other])


def test_p5_the_prompt_length_is_inferred_from_the_mask_then_the_logprobs_and_is_1_otherwise() -> None:
    assert Experience(tokens=[1, 2, 3, 4], action_mask=[1, 0, 1]).prompt_length == 1
    assert Experience(tokens=[1, 2, 3, 4], logprobs=[0.0]).prompt_length == 3
    assert Experience(tokens=[1, 2, 3, 4]).prompt_length == 1


def test_p45_logprobs_of_all_tokens_are_cut_to_the_response() -> None:
    assert small(logprobs=[0, 1, 2, 3]).logprobs.tolist() == [2, 3]
    assert small(logprobs=[1, 2, 3]).logprobs.tolist() == [2, 3], "those of tokens[1:], as model.logprobs gives them"
    e = Experience(tokens=[1, 2, 3], logprobs=[0.1, 0.2, 0.3], prompt_length=1)
    assert e.logprobs.tolist() == pytest.approx([0.2, 0.3])


def test_p45_the_default_prompt_length_with_a_mask_of_all_tokens_is_1() -> None:
    e = Experience(tokens=[1, 2, 3, 4], logprobs=[0, 1, 2, 3], action_mask=[1, 0, 1, 0])
    assert (e.experience_type, e.prompt_length) == ("multi_turn", 1)
    assert (e.action_mask.tolist(), e.logprobs.tolist()) == ([False, True, False], [1, 2, 3])
    assert Experience(tokens=[1, 2, 3], logprobs=[0, 1, 2]).prompt_length == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": [0.0]}, ["logprobs", "(1,)", "2 tokens", "(4,)", "prompt_length 2"]),
        ({"action_mask": [1, 1, 1]}, ["action_mask", "(3,)", "2 tokens"]),
        ({"advantages": [0.0] * 3}, ["advantages", "(3,)", "2 tokens"]),
        ({"returns": [0.0] * 4}, ["returns", "(4,)"]), ({"token_level_reward": []}, ["token_level_reward", "(0,)"]),
        ({"teacher_logprobs": [0.0]}, ["teacher_logprobs", "(1,)"]),
        ({"prompt_length": 0}, ["prompt_length", "0", "1 to 3", "(4,)"]),
        ({"prompt_length": 4}, ["prompt_length", "4", "1 to 3"]),
        ({"prompt_length": 5, "action_mask": []}, ["prompt_length", "5", "0 to 4"]),
        ({"prompt_length": 1.5}, ["prompt_length", "1.5"]), ({"tokens": None}, ["tokens", "missing"]),
        ({"tokens": [[1, 2]]}, ["tokens", "(1, 2)"]), ({"tokens": [0.5, 1.5]}, ["tokens", "float64", "int32"]),
        ({"tokens": [1, 2**31]}, ["tokens", "fit int32"]),
        ({"tokens": [-5, 1, 2, -3]}, ["tokens[0] is -5", "must be 0 or more"]), ({"tokens": ["a"]}, ["tokens", "<U1"]),
        ({"logprobs": [None, 0.0]}, ["logprobs", "object"]),
        ({"logprobs": [1e300, 0.0]}, ["logprobs", "fit float32"]),
        ({"logprobs": [[1], [1, 2]]}, ["logprobs", "array"]), ({"reward": math.nan}, ["reward", "nan"]),
        ({"reward": math.inf}, ["reward", "inf"]), ({"reward": "1.0"}, ["reward", "'1.0'"]),
        ({"reward": {"a": 1}}, ["reward"]), ({"info": {"a": {"b": [1, math.nan]}}}, ["info.a.b[1]", "nan"]),
        ({"info": {"a": np.float32("inf")}}, ["info.a", "inf"]), ({"info": {"a": object()}}, ["info.a", "object"]),
        ({"info": {1: 2}}, ["info", "key 1", "int"]), ({"info": {"a": 2**64}}, ["info.a", "64 bits"]),
        ({"info": {"a": "\ud800"}}, ["info.a", "Unicode"]), ({"info": [1]}, ["info", "list", "dict"]),
        ({"metrics": {"score": np.float64("nan")}}, ["metrics.score", "nan"]),
        ({"messages": [{"content": b"x"}]}, ["messages[0].content", "bytes"]),
        ({"messages": "hello"}, ["messages", "str"]), ({"prompt_text": 5}, ["prompt_text", "int"]),
        ({"response_text": "\udfff"}, ["response_text", "Unicode"]),
        ({"multi_modal_inputs": {"p": ["a"]}}, ["multi_modal_inputs.p", "<U1"]),
        ({"multi_modal_inputs": {3: [1]}}, ["multi_modal_inputs", "key 3"]),
        ({"routed_experts": np.ones(2, np.complex128)}, ["routed_experts", "complex128"]),
        ({"chosen": [1.5], "rejected": [1]}, ["chosen", "float64"]),
        ({"rejected": [1, -2], "chosen": [1]}, ["rejected[1] is -2"]),
        ({"custom_fields": ["a"]}, ["custom_fields", "CustomField"]), ({"eid": 5}, ["eid", "int"]),
    ],
)
def test_p5_what_does_not_fit_is_refused_with_its_name(fields: dict[str, Any], says: list[str]) -> None:
    given_fields = {"eid": EID(1, 2, 3, 4, "s"), "tokens": [1, 2, 3, 4], "prompt_length": 2} | fields
    with pytest.raises(DataError) as e:
        Experience(**given_fields)
    for part in says if "eid" in fields else ["1/2/3/4/s", *says]:
        assert part in str(e.value)
    assert e.value.details["field"].startswith(next(iter(fields)))


def test_p5_json_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(DataError, match="nested too deeply"):
        small(info=loop)


def test_p5_numpy_scalars_become_python_numbers() -> None:
    class Level(enum.IntEnum):
        HARD = 3

    e = small(
        reward=np.float32(0.5), info={"a": np.int64(3), "b": (np.bool_(True), np.arange(2)), "c": Level.HARD},
        metrics={"x": np.float64(0.25)},
    )
    assert (e.reward, e.info, e.metrics) == (0.5, {"a": 3, "b": [True, [0, 1]], "c": 3}, {"x": 0.25})
    kinds = [type(v) for v in (e.reward, e.info["a"], e.info["b"][0], e.info["c"], e.metrics["x"])]
    assert kinds == [float, int, bool, int, float]


def test_p5_an_experience_has_an_info_of_its_own() -> None:
    shared: dict[str, Any] = {"a": {"b": 1}}
    first, second = small(info=shared), small(info=shared)
    first.info["a"]["b"] = 2
    assert (second.info, shared) == ({"a": {"b": 1}}, {"a": {"b": 1}})


def test_p5_what_is_assigned_later_is_checked_when_it_is_written() -> None:
    e = small()
    e.metrics["score"] = math.nan
    with pytest.raises(DataError, match=r"1/2/3/4/s: metrics\.score is nan"):
        e.serialize()
    e = small()
    e.logprobs = [0.0]  # type: ignore[assignment]
    with pytest.raises(DataError, match="logprobs has shape"):
        e.serialize()
    e = small()
    e.advantages = [0.5, 1]  # type: ignore[assignment]
    assert Experience.deserialize(e.serialize()).advantages.dtype == np.float32


def test_p5_a_dict_of_an_experience_is_plain_json_without_what_is_none() -> None:
    e = small(reward=1.0, prompt_text="é", info={"a": 1}, messages=[{"role": "user"}])
    assert orjson.loads(orjson.dumps(e.to_dict())) == {
        "eid": e.eid.to_dict(), "type": "single_turn", "prompt_length": 2, "response_length": 2, "info": {"a": 1},
        "metrics": {}, "prompt_text": "é", "messages": [{"role": "user"}], "reward": 1.0,
    }  # fmt: skip


def test_p5_custom_fields_keep_the_name_of_a_dtype() -> None:
    assert CustomField("a", "b", np.float32).data_type == "float32"  # type: ignore[arg-type]
    assert CustomField("a", "b", "torch.int64").data_type == "int64"


def test_p5_experiences_are_grouped_by_task_run_and_step_in_order_of_appearance() -> None:
    made = [Experience(eid=EID(1, t, r, s), tokens=[1, 2]) for t, r, s in [(1, 0, 0), (0, 0, 0), (1, 1, 0), (1, 0, 1)]]
    assert {k: [made.index(e) for e in v] for k, v in group_by(made, "task").items()} == {"1/1": [0, 2, 3], "1/0": [1]}
    assert list(group_by(made, "run")) == ["1/1/0", "1/0/0", "1/1/1"]
    assert list(group_by(made, "step")) == ["1/1/0", "1/0/0", "1/1/1"]
    with pytest.raises(DataError, match="colour"):
        group_by(made, "colour")  # type: ignore[arg-type]
