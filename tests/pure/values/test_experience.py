"""events.experience: what an experience accepts, and its bytes."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trinity_es.events import payload_format
from trinity_es.events.errors import CorruptPayload, DataError
from trinity_es.events.experience import EID, CustomField, Experience, group_by
from trinity_es.events.payload_items import columns_of, item_of

FIELDS = {
    "eid", "tokens", "prompt_length", "logprobs", "reward", "token_level_reward", "advantages", "returns",
    "action_mask", "truncate_status", "info", "metrics", "prompt_text", "response_text", "messages", "tools", "chosen",
    "rejected", "chosen_messages", "rejected_messages", "multi_modal_inputs", "teacher_logprobs", "routed_experts",
    "custom_fields", "experience_type",
}  # fmt: skip
DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_dicts = st.dictionaries(texts, json_values, max_size=3)
message_lists = st.none() | st.lists(json_dicts, max_size=2)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)  # -0.0 too: an array keeps it
any_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False, "allow_infinity": False} if "float" in dtype else None,
    )
)
eids = st.builds(
    EID,
    batch=st.integers(0, 2**62) | texts, task=st.integers(0, 99) | texts, run=st.integers(0, 99),
    step=st.integers(0, 99), suffix=texts,
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    tokens = draw(hnp.arrays(np.int32, st.integers(2, 8)))
    kind = draw(st.sampled_from(["single", "multi", "dpo"]))
    prompt = draw(st.integers(1, len(tokens) - 1))
    more: dict[str, Any] = {}
    response = len(tokens) - prompt
    vector = st.none() | hnp.arrays(np.float32, response, elements=floats)
    if kind == "multi":
        more["action_mask"] = draw(hnp.arrays(np.bool_, response))
    if kind == "dpo":
        more |= {name: draw(hnp.arrays(np.int32, st.integers(0, 4))) for name in ("chosen", "rejected")}
    return Experience(
        eid=draw(eids), tokens=tokens, prompt_length=prompt,
        logprobs=draw(vector), token_level_reward=draw(vector), advantages=draw(vector), returns=draw(vector),
        teacher_logprobs=draw(vector), routed_experts=draw(st.none() | any_arrays),
        multi_modal_inputs=draw(st.none() | st.dictionaries(texts, any_arrays, max_size=2)),
        reward=draw(st.none() | st.floats(-1e30, 1e30)),
        truncate_status=draw(st.sampled_from([None, "prompt_truncated", "response_truncated"])),
        info=draw(json_dicts), metrics=draw(json_dicts), prompt_text=draw(st.none() | texts),
        response_text=draw(st.none() | texts), messages=draw(message_lists), tools=draw(message_lists),
        chosen_messages=draw(message_lists), rejected_messages=draw(message_lists),
        custom_fields=draw(st.lists(st.builds(CustomField, texts, texts, st.just("float32")), max_size=2)), **more,
    )  # fmt: skip


def small(**more: Any) -> Experience:
    return Experience(eid=EID(1, 2, 3, 4, "s"), tokens=[1, 2, 3, 4], prompt_length=2, **more)


PAYLOAD = Experience.serialize_many(
    [small(logprobs=[-0.5, -1.5], reward=1.0, info={"é": [1, None]}), small(multi_modal_inputs={"p": np.ones((2, 2))})]
)
WRITTEN = Experience.deserialize_many(PAYLOAD)


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


def test_p5_a_dict_that_is_no_eid_is_refused() -> None:
    with pytest.raises(DataError, match="project"):
        EID.from_dict({"batch": 1, "project": "x"})


# --- construction ---------------------------------------------------------------------------------------------------
def test_p5_an_experience_has_every_field_of_the_row() -> None:
    assert small().__dict__.keys() == FIELDS


def test_p5_lists_become_arrays_of_the_documented_types() -> None:
    e = small(logprobs=[-1, -2.5], action_mask=[1, 0], advantages=[1, 2], routed_experts=[[1, 2]], chosen=[])
    assert (e.tokens.dtype, e.logprobs.dtype, e.action_mask.dtype) == (np.int32, np.float32, np.bool_)
    assert (e.advantages.dtype, e.chosen.dtype, e.routed_experts.shape) == (np.float32, np.int32, (1, 2))
    assert e.action_mask.tolist() == [True, False]


def test_p5_a_single_turn_experience_has_an_action_mask_of_ones() -> None:
    e = small()
    assert (e.experience_type, e.action_mask.tolist()) == ("single_turn", [True, True])


def test_p5_a_truncated_prompt_has_an_action_mask_of_zeros() -> None:
    e = small(truncate_status="prompt_truncated", logprobs=[0, 0])
    assert e.action_mask.tolist() == [False, False]


def test_p5_the_prompt_length_is_inferred_from_the_mask_then_the_logprobs_and_is_1_otherwise() -> None:
    assert Experience(tokens=[1, 2, 3, 4], action_mask=[1, 0, 1]).prompt_length == 1
    assert Experience(tokens=[1, 2, 3, 4], logprobs=[0.0]).prompt_length == 3
    assert Experience(tokens=[1, 2, 3, 4]).prompt_length == 1


def test_p45_an_experience_of_the_known_system_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    caplog.set_level(logging.WARNING, "trinity_es.events.experience")
    for _ in range(2):
        e = Experience(tokens=torch.zeros(5), prompt_length=2)
        assert (e.tokens.dtype, e.tokens.tolist(), e.action_mask.tolist()) == (np.int32, [0] * 5, [True] * 3)
    assert [r.message for r in caplog.records].count(
        "Experience: tokens given as float32: whole numbers are taken as int32, give them as integers") <= 1
    with pytest.raises(DataError, match="float32"):
        Experience(tokens=torch.tensor([0.0, 1.5]), prompt_length=1)
    with pytest.raises(DataError, match="fit int32"):
        Experience(tokens=torch.tensor([0.0, 1e12]), prompt_length=1)
    with pytest.raises(DataError, match="tokens has dtype"):
        Experience(tokens=torch.tensor([0.0, math.nan]), prompt_length=1)


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


def test_p5_the_prompt_of_a_preference_pair_is_its_tokens() -> None:
    e = small(chosen=[5, 6], rejected=[7])
    assert (e.experience_type, e.prompt_length, e.action_mask) == ("dpo", 4, None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": [0.0]}, ["logprobs", "(1,)", "2 tokens", "(4,)", "prompt_length 2"]),
        ({"action_mask": [1, 1, 1]}, ["action_mask", "(3,)", "2 tokens"]),
        ({"advantages": [0.0] * 3}, ["advantages", "(3,)", "2 tokens"]),
        ({"returns": [0.0] * 4}, ["returns", "(4,)"]),
        ({"token_level_reward": []}, ["token_level_reward", "(0,)"]),
        ({"teacher_logprobs": [0.0]}, ["teacher_logprobs", "(1,)"]),
        ({"prompt_length": 0}, ["prompt_length", "0", "1 to 3", "(4,)"]),
        ({"prompt_length": 4}, ["prompt_length", "4", "1 to 3"]),
        ({"prompt_length": 5, "action_mask": []}, ["prompt_length", "5", "0 to 4"]),
        ({"prompt_length": 1.5}, ["prompt_length", "1.5"]),
        ({"tokens": None}, ["tokens", "missing"]),
        ({"tokens": [[1, 2]]}, ["tokens", "(1, 2)"]),
        ({"tokens": [0.5, 1.5]}, ["tokens", "float64", "int32"]),
        ({"tokens": [1, 2**31]}, ["tokens", "fit int32"]),
        ({"tokens": ["a"]}, ["tokens", "<U1"]),
        ({"logprobs": [None, 0.0]}, ["logprobs", "object"]),
        ({"logprobs": [1e300, 0.0]}, ["logprobs", "fit float32"]),
        ({"logprobs": [[1], [1, 2]]}, ["logprobs", "array"]),
        ({"reward": math.nan}, ["reward", "nan"]),
        ({"reward": math.inf}, ["reward", "inf"]),
        ({"reward": "1.0"}, ["reward", "'1.0'"]),
        ({"reward": {"a": 1}}, ["reward"]),
        ({"info": {"a": {"b": [1, math.nan]}}}, ["info.a.b[1]", "nan"]),
        ({"info": {"a": np.float32("inf")}}, ["info.a", "inf"]),
        ({"info": {"a": object()}}, ["info.a", "object"]),
        ({"info": {1: 2}}, ["info", "key 1", "int"]),
        ({"info": {"a": 2**64}}, ["info.a", "64 bits"]),
        ({"info": {"a": "\ud800"}}, ["info.a", "unicode"]),
        ({"info": [1]}, ["info", "list", "dict"]),
        ({"metrics": {"score": np.float64("nan")}}, ["metrics.score", "nan"]),
        ({"messages": [{"content": b"x"}]}, ["messages[0].content", "bytes"]),
        ({"messages": "hello"}, ["messages", "str"]),
        ({"prompt_text": 5}, ["prompt_text", "int"]),
        ({"response_text": "\udfff"}, ["response_text", "unicode"]),
        ({"multi_modal_inputs": {"p": ["a"]}}, ["multi_modal_inputs.p", "<U1"]),
        ({"multi_modal_inputs": {3: [1]}}, ["multi_modal_inputs", "key 3"]),
        ({"routed_experts": np.ones(2, np.complex128)}, ["routed_experts", "complex128"]),
        ({"chosen": [1.5], "rejected": [1]}, ["chosen", "float64"]),
        ({"custom_fields": ["a"]}, ["custom_fields", "CustomField"]),
        ({"eid": 5}, ["eid", "int"]),
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


def test_p5_torch_tensors_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    e = small(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True), reward=torch.tensor(0.5),
        action_mask=torch.ones(2, dtype=torch.bool), routed_experts=torch.ones(2, 3, dtype=torch.bfloat16),
        info={"x": torch.tensor(2)}, custom_fields=[CustomField("x", "y", torch.float32)],
    )
    assert (e.logprobs.tolist(), e.reward, e.info) == ([-1.0, -2.0], 0.5, {"x": 2})
    assert (e.routed_experts.dtype, e.custom_fields[0].data_type) == (np.float32, "float32")
    assert Experience.deserialize(e.serialize()) == e


def test_p5_experiences_are_grouped_by_task_run_and_step_in_order_of_appearance() -> None:
    made = [Experience(eid=EID(1, t, r, s), tokens=[1, 2]) for t, r, s in [(1, 0, 0), (0, 0, 0), (1, 1, 0), (1, 0, 1)]]
    assert {k: [made.index(e) for e in v] for k, v in group_by(made, "task").items()} == {"1/1": [0, 2, 3], "1/0": [1]}
    assert list(group_by(made, "run")) == ["1/1/0", "1/0/0", "1/1/1"]
    assert list(group_by(made, "step")) == ["1/1/0", "1/0/0", "1/1/1"]
    with pytest.raises(DataError, match="colour"):
        group_by(made, "colour")  # type: ignore[arg-type]


# --- bytes ----------------------------------------------------------------------------------------------------------
@given(st.lists(experiences(), max_size=4))
def test_p5_experiences_come_back_from_their_bytes_to_the_last_bit(made: list[Experience]) -> None:
    data = Experience.serialize_many(made)
    back = Experience.deserialize_many(data)
    assert back == made
    assert Experience.serialize_many(back) == data
    for e in back:
        e.validate()


@given(st.lists(experiences(), max_size=4), st.data())
def test_p5_a_part_of_a_payload_can_be_read(made: list[Experience], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(made)))
    count = data.draw(st.none() | st.integers(0, len(made) - first))
    last = len(made) if count is None else first + count
    assert Experience.deserialize_many(Experience.serialize_many(made), first, count) == made[first:last]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eid", EID(1, 2, 3, 4, "t")), ("tokens", np.array([1, 2, 3, 5], np.int32)), ("reward", 1.0), ("reward", 0),
        ("tokens", np.array([1, 2, 3, 4], np.int64)), ("logprobs", np.zeros(2, np.float32)), ("info", {"a": 1}),
        ("multi_modal_inputs", {}), ("messages", []), ("prompt_length", 3),
        ("custom_fields", [CustomField("a", "b", "")]),
        ("action_mask", np.array([True, False])), ("routed_experts", np.zeros((1, 4))), ("experience_type", "dpo"),
    ],
)  # fmt: skip
def test_p5_experiences_are_equal_when_every_field_is(name: str, value: Any) -> None:
    one, other = small(reward=0.0), small(reward=0.0)
    assert one == other
    setattr(other, name, value)
    assert one != other
    assert one != name


def test_p5_minus_zero_in_an_array_is_kept() -> None:
    e = small(logprobs=[-1.0, -0.0])
    back = Experience.deserialize(e.serialize())
    assert back == e
    assert math.copysign(1, back.logprobs[1]) == -1
    assert back != small(logprobs=[-1.0, 0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"])
def test_a_number_that_is_none_is_refused_in_every_vector_with_its_place(name: str, value: float) -> None:
    with pytest.raises(DataError, match=rf"1/2/3/4/s: {name}\[1\] is -?(nan|inf): only finite"):
        small(**{name: [0.5, value]})
    e = small(**{name: [0.5, 0.5]})
    getattr(e, name)[0] = value
    with pytest.raises(DataError, match=rf"{name}\[0\]") as found:
        e.serialize()
    assert found.value.details == {"eid": "1/2/3/4/s", "field": name}


def test_a_number_that_is_none_is_refused_in_arrays_of_any_shape() -> None:
    with pytest.raises(DataError, match=r"multi_modal_inputs\.pixels\[0, 1\] is inf"):
        small(multi_modal_inputs={"pixels": np.array([[0.0, np.inf]], np.float16)})
    with pytest.raises(DataError, match=r"routed_experts\[2\] is nan"):
        small(routed_experts=[1.0, 2.0, math.nan])


@pytest.mark.parametrize("reward", [1.7e308, -1.7e308, 3.5e38, np.float64(1.1e30)])
def test_a_reward_beyond_what_trainers_compute_in_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match=r"reward is .*float32, 1e30 is the most"):
        small(reward=reward)
    assert small(reward=1e30).reward == 1e30


def test_what_is_read_from_a_payload_of_an_older_release_may_hold_nan() -> None:
    e = small(logprobs=[0.5, 0.5], reward=1.0)
    data = e.serialize()
    old = payload_format.encode(*_with_nan(e))
    assert len(old) == len(data)
    [back] = Experience.deserialize_many(old)
    assert math.isnan(back.logprobs[1])
    with pytest.raises(DataError, match=r"logprobs\[1\] is nan"):
        back.require_finite()


def _with_nan(e: Experience) -> tuple[Any, Any]:
    assert e.logprobs is not None
    e.logprobs[1] = math.nan
    eid = [e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix]
    return [item_of(e.__dict__, eid)], columns_of([e.__dict__])


def test_p5_what_is_read_can_be_changed_without_changing_its_neighbour() -> None:
    for back in (Experience.deserialize_many(PAYLOAD), Experience.deserialize_many(PAYLOAD, 1)):
        back[-1].tokens[:] = 9
    assert back[0].tokens.tolist() == [9] * 4
    first, second = Experience.deserialize_many(PAYLOAD)
    second.tokens[:] = 9
    assert first.tokens.tolist() == [1, 2, 3, 4]


def test_p5_big_endian_and_strided_arrays_come_back_the_same() -> None:
    pixels = np.arange(12, dtype=">f4").reshape(3, 4).T[::2]
    e = small(multi_modal_inputs={"pixels": pixels}, logprobs=np.array([0.0, 1.0, 2.0, 3.0])[::2])
    back = Experience.deserialize(e.serialize())
    assert back.multi_modal_inputs["pixels"].tolist() == pixels.tolist()
    assert back.logprobs.tolist() == [0.0, 2.0]


def test_p5_a_part_that_is_read_does_not_keep_the_whole_payload_in_memory() -> None:
    part = Experience.deserialize_many(Experience.serialize_many([small()] * 1000), 500, 1)[0]
    held = part.tokens
    while isinstance(held.base, np.ndarray):
        held = held.base
    assert held.base is None
    assert held.nbytes == part.tokens.nbytes


def test_p5_one_experience_is_read_only_from_a_payload_of_one() -> None:
    assert Experience.deserialize(small().serialize()) == small()
    for made in ([], [small(), small()]):
        with pytest.raises(DataError, match=f"holds {len(made)}"):
            Experience.deserialize(Experience.serialize_many(made))


@pytest.mark.parametrize(("first", "count"), [(3, None), (0, 3), (2, 1), (1, 2)])
def test_p5_reading_more_than_there_is_says_that_the_payload_is_not_the_one_expected(first: int, count: Any) -> None:
    with pytest.raises(CorruptPayload, match="holds 2 experiences"):
        Experience.deserialize_many(PAYLOAD, first, count)
    with pytest.raises(DataError, match="negative"):
        Experience.deserialize_many(PAYLOAD, -1, count)


def test_p5_a_thousand_experiences_are_a_handful_of_tensors() -> None:
    data = Experience.serialize_many([small(logprobs=[0, 1], reward=1.0)] * 1000)
    header = orjson.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert set(header) == {"__metadata__", "header", "0", "1", "2"}


# --- corruption -----------------------------------------------------------------------------------------------------
@given(st.binary(max_size=200))
def test_p5_random_bytes_are_a_corrupt_payload(data: bytes) -> None:
    with pytest.raises(CorruptPayload):
        Experience.deserialize_many(data)


@given(st.binary(max_size=60), st.sampled_from([b"{}", b'{"__metadata__":{"trinity_es":"{}"}}', b"[]", b"null"]))
def test_p5_a_file_that_begins_like_ours_is_a_corrupt_payload(tail: bytes, header: bytes) -> None:
    with pytest.raises(CorruptPayload):
        Experience.deserialize_many(struct.pack("<Q", len(header)) + header + tail)


def test_p5_another_programs_safetensors_file_is_a_corrupt_payload() -> None:
    from safetensors.numpy import save

    for metadata in (None, {"format": "pt"}, {"trinity_es": "5"}, {"trinity_es": '{"version":1,"crc32":0}'}):
        with pytest.raises(CorruptPayload):
            Experience.deserialize_many(save({"a": np.ones(3)}, metadata=metadata))


def test_p5_every_truncation_is_a_corrupt_payload() -> None:
    for length in range(len(PAYLOAD)):
        with pytest.raises(CorruptPayload):
            Experience.deserialize_many(PAYLOAD[:length])
    with pytest.raises(CorruptPayload):
        Experience.deserialize_many(PAYLOAD + b"\0")


def test_p5_every_flipped_bit_is_a_corrupt_payload_or_changes_nothing() -> None:
    unnoticed = 0
    for place in range(len(PAYLOAD) * 8):
        flipped = bytearray(PAYLOAD)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert Experience.deserialize_many(bytes(flipped)) == WRITTEN
            unnoticed += 1
        except CorruptPayload:
            pass
    assert unnoticed < 100  # white space around the header


@settings(max_examples=300)
@given(st.integers(0, len(PAYLOAD)), st.integers(0, 40), st.binary(max_size=40))
@example(0, 8, struct.pack("<Q", 2**63))
def test_p5_overwritten_bytes_are_a_corrupt_payload_or_change_nothing(place: int, length: int, put: bytes) -> None:
    with contextlib.suppress(CorruptPayload):
        assert Experience.deserialize_many(PAYLOAD[:place] + put + PAYLOAD[place + length :]) == WRITTEN


def test_p5_a_newer_format_is_named() -> None:
    with pytest.raises(CorruptPayload, match=r"version 2.*newer"):
        Experience.deserialize_many(PAYLOAD.replace(b'\\"version\\":1', b'\\"version\\":2'))


def test_p5_experiences_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trinity_es.events.experience import Experience\n"
        "assert len(Experience.deserialize_many(sys.stdin.buffer.read())) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], input=PAYLOAD, check=True, timeout=60)
