"""Experiences as bytes: they come back to the last bit, and damage is named (P5)."""

from __future__ import annotations

import contextlib
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

from tests.helpers.any_experience import PAYLOAD, WRITTEN, experiences, small
from tests.helpers.paths import ROOT
from trinity_es.events import payload_format
from trinity_es.events.errors import CorruptPayload, DataError
from trinity_es.events.experience import EID, CustomField, Experience
from trinity_es.events.experience_encoding import columns_of, item_of
from trinity_es.events.flat_columns import Rows
from trinity_es.events.payload_format import Column, Payload


@given(st.lists(experiences(), max_size=4), st.data())
def test_p5_experiences_come_back_from_their_bytes_to_the_last_bit(made: list[Experience], data: st.DataObject) -> None:
    written = Experience.serialize_many(made)
    back = Experience.deserialize_many(written)
    assert back == made
    assert Experience.serialize_many(back) == written
    for e in back:
        e.validate()
    first = data.draw(st.integers(0, len(made)))  # a part of them can be read
    count = data.draw(st.none() | st.integers(0, len(made) - first))
    last = len(made) if count is None else first + count
    assert Experience.deserialize_many(written, first, count) == made[first:last]


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
    with pytest.raises(DataError, match=r"reward is .*at most 1e30, since trainers compute in float32"):
        small(reward=reward)
    assert small(reward=1e30).reward == 1e30


def test_what_is_read_from_a_payload_of_an_older_release_may_hold_nan() -> None:
    e = small(logprobs=[0.5, 0.5], reward=1.0)
    e.logprobs[1] = math.nan
    eid = [e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix]
    old = payload_format.encode([item_of(e.__dict__, eid)], columns_of([e.__dict__]))
    [back] = Experience.deserialize_many(old)
    assert math.isnan(back.logprobs[1])
    with pytest.raises(DataError, match=r"logprobs\[1\] is nan"):
        back.require_finite()


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
    with pytest.raises(DataError, match="both numbers must be 0 or more"):
        Experience.deserialize_many(PAYLOAD, -1, count)


def test_p5_a_thousand_experiences_are_a_handful_of_tensors() -> None:
    data = Experience.serialize_many([small(logprobs=[0, 1], reward=1.0)] * 1000)
    header = orjson.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert set(header) == {"__metadata__", "header", "0", "1", "2", "2.lengths"}


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
    with pytest.raises(CorruptPayload, match=r"version 3, and this software reads up to 2: upgrade"):
        Experience.deserialize_many(PAYLOAD.replace(b'\\"version\\":2', b'\\"version\\":3'))


def test_p5_a_payload_of_version_1_is_read() -> None:
    old = (ROOT / "tests/golden/payload-1.safetensors").read_bytes()
    assert b'\\"version\\":1' in old
    assert Experience.deserialize_many(old) == WRITTEN
    assert Experience.deserialize_many(old, 1) == WRITTEN[1:]
    with pytest.raises(CorruptPayload, match="checksum"):
        Experience.deserialize_many(old.replace(b'"reward":1.0', b'"reward":2.0'))


def test_p5_another_program_can_read_the_tensors() -> None:
    from safetensors.numpy import load

    found = load(PAYLOAD)
    assert found["0"].tolist() == [1, 2, 3, 4] * 2
    assert found["1"].tolist() == [-0.5, -1.5]


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32", "float64"])
@given(data=st.data())
def test_p5_an_array_of_few_values_takes_little_room_and_comes_back_exactly(dtype: str, data: st.DataObject) -> None:
    special = [0, 1] if dtype in ("bool", "int32") else [0.0, -0.0, math.nan, math.inf, -1.5]
    runs = data.draw(st.lists(st.tuples(st.sampled_from(special), st.integers(1, 3000)), min_size=1, max_size=4))
    whole = np.repeat(np.array([v for v, _ in runs], dtype), [n for _, n in runs])
    if dtype == "float32":
        whole[:1].view(np.uint32)[0] = 0x7FC00001  # a NaN that says something
    cut = data.draw(st.integers(0, len(whole)))
    arrays: list[Any] = [whole[:cut], None, whole[cut:].reshape(1, -1)]
    written = payload_format.encode([{}] * 3, [Column("a", None, arrays)])
    assert len(written) < 500 + 12 * (len(runs) + 1)
    for numbers in ([0, 1, 2], [2]):
        [column] = Payload(bytearray(written)).columns.values()
        part = Rows([3], np.array(numbers)).gather([column])
        for n, back in zip(numbers, part.arrays() if part else [None], strict=True):
            if back is None:
                assert arrays[n] is None
                continue
            assert (back.dtype, back.shape, back.tobytes()) == (whole.dtype, arrays[n].shape, arrays[n].tobytes())
            assert back.flags.writeable


def test_p5_runs_that_are_not_as_long_as_their_array_are_a_corrupt_payload() -> None:
    data = payload_format.encode([{}], [Column("a", None, [np.zeros(1000, np.int32)])])
    assert data.count(struct.pack("<I", 1000)) == 1
    wrong = data.replace(struct.pack("<I", 1000), struct.pack("<I", 999))
    with pytest.raises(CorruptPayload, match="checksum"):
        Payload(wrong)
    with pytest.raises(CorruptPayload, match="run lengths"):
        Payload(wrong, checked=True)


def test_p5_experiences_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trinity_es.events.experience import Experience\n"
        "assert len(Experience.deserialize_many(sys.stdin.buffer.read())) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], input=PAYLOAD, check=True, timeout=60)
