"""Experiences as columns: the same values as a list of them, in rows of one length, in packs, in torch and arrow."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.any_experience import experiences, small
from trinity_es.events import experience_rows
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.experience import EID, Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.experience_encoding import VECTORS

many = st.lists(experiences(), max_size=4)
RESPONSES = [name for name, (_, per_response) in VECTORS.items() if per_response]


def made(*lengths: tuple[int, int], **more: Any) -> ExperienceColumns:
    """Return columns of experiences with these lengths of prompt and response, of tokens counted from 1."""
    out = []
    for run, (prompt, response) in enumerate(lengths):
        numbers = np.arange(1, response + 1)
        out.append(Experience(
            eid=EID(7, run // 2, run % 2, 0, "s"), tokens=np.arange(1, prompt + response + 1), prompt_length=prompt,
            logprobs=-numbers, advantages=numbers + 0.5, action_mask=numbers % 2 == 1, reward=float(run), **more))
    return ExperienceColumns.of(out)


# --- the same values ------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(many)
def test_columns_have_the_values_of_each_experience(found: list[Experience]) -> None:
    columns = ExperienceColumns.of(found)
    assert len(columns) == len(found)
    for name, (dtype, _) in VECTORS.items():
        column = columns.column(name)
        assert column.values.dtype == dtype
        assert len(column.offsets) == len(found) + 1
        for number, e in enumerate(found):
            expected, there = getattr(e, name), column[number]
            assert (there is None) == (expected is None) == (not column.present[number])
            if there is not None:
                assert there.tobytes() == expected.tobytes()
                assert there.tobytes() == column.values[column.offsets[number] : column.offsets[number + 1]].tobytes()
    for name in ("info", "metrics", "messages", "tools", "response_text", "prompt_text", "reward", "prompt_length"):
        assert columns.field(name) == [getattr(e, name) for e in found]
    assert columns.truncated.tolist() == [e.truncate_status or "" for e in found]
    assert columns.prompt_lengths.tolist() == [e.prompt_length for e in found]
    assert [None if np.isnan(r) else r for r in columns.rewards] == [e.reward for e in found]
    assert columns.batches == [e.eid.batch for e in found]
    assert columns.tasks == [e.eid.task for e in found]
    assert (columns.runs.tolist(), columns.steps.tolist()) == ([e.eid.run for e in found], [e.eid.step for e in found])
    assert columns.uids == [e.eid.uid for e in found]


@settings(max_examples=60)
@given(many, st.data())
def test_a_part_of_columns_is_the_columns_of_a_part(found: list[Experience], data: st.DataObject) -> None:
    columns, numbers = ExperienceColumns.of(found), list(range(len(found)))
    mask = data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    first, step = data.draw(st.integers(-4, 4)), data.draw(st.sampled_from([1, 2, -1]))
    rows = data.draw(st.lists(st.sampled_from(numbers), max_size=5)) if numbers else []
    for part, of in ((columns[np.array(mask, bool)], [n for n in numbers if mask[n]]), (columns[rows], rows),
                     (columns[first::step], numbers[first::step])):
        assert part.experiences() == [found[n] for n in of]
    assert columns.experiences() == found


def test_a_part_has_arrays_of_its_own_and_keeps_what_was_changed() -> None:
    columns = made((2, 3), (1, 2))
    columns.advantages.values[:] = 9.0
    part = columns[:1]
    part.advantages.values[0] = 0.0
    assert part[0].advantages.tolist() == [0.0, 9.0, 9.0]
    assert columns[0].advantages.tolist() == [9.0, 9.0, 9.0]


def test_columns_are_a_sequence_of_the_same_experiences_each_time() -> None:
    columns = made((2, 3), (1, 2), (1, 1))
    assert [e.eid.uid for e in columns] == columns.uids
    assert columns[-1] is columns.experiences()[2]
    assert columns[np.int64(1)] is columns[1]
    assert np.shares_memory(columns[1].tokens, columns.tokens.values)
    assert not columns[:0]
    with pytest.raises(IndexError):
        columns[3]


def test_objects_that_a_trainer_changed_are_those_of_every_part() -> None:
    columns = made((2, 1), (2, 1), (2, 2))
    for e in columns:
        e.reward, e.advantages = 9.0, np.full(e.tokens.size - 2, 7.0, np.float32)
    for part in (columns[:2], columns[np.array([True, False, True])], columns[[2, 0]][:1]):
        assert all(e.reward == 9.0 and e.advantages is not None and e.advantages[0] == 7.0 for e in part)
        assert all(any(e is whole for whole in columns) for e in part)


def test_a_value_that_would_not_reach_parts_can_not_be_changed() -> None:
    columns = made((2, 1), (2, 2))
    for name in ("prompt_lengths", "rewards", "versions", "groups", "runs", "steps", "truncated"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(columns, name)[0] = 1
        with pytest.raises(AttributeError, match=f"{name} of these columns can't be assigned"):
            setattr(columns, name, None)
    columns.arrays()["rewards"][0] = 5.0
    assert columns.rewards[0] == 0.0


def test_a_part_without_rows_has_the_vectors_of_the_whole() -> None:
    none = made((2, 1), (2, 2))[np.zeros(2, np.bool_)]
    whole = made((2, 1))
    assert none.padded().keys() == whole.padded().keys()
    assert none.arrays().keys() == whole.arrays().keys()
    assert (len(none), none.padded()["advantages"].shape, none.packed(9)) == (0, (0, 0), [])


def test_experiences_share_no_json_with_the_columns() -> None:
    columns = ExperienceColumns.of([small(info={"a": [1]}, messages=[{"role": "user"}])])
    columns[0].info["a"].append(2)
    columns[0].messages[0]["role"] = "tool"
    assert (columns.field("info"), columns.field("messages")) == ([{"a": [1]}], [[{"role": "user"}]])


def test_groups_are_the_runs_of_a_task_of_a_batch() -> None:
    found = [small() for _ in range(5)]
    for e, (batch, task) in zip(found, [(1, 0), (1, "0"), (1, 0), (2, 0), ("1", 0)], strict=True):
        e.eid = EID(batch, task)
    assert ExperienceColumns.of(found).groups.tolist() == [0, 1, 0, 2, 3]


def test_versions_are_the_oldest_and_the_newest() -> None:
    infos: list[dict[str, Any]] = [
        {}, {"model_version": 3}, {"model_version": 3, "model_version_drift": 2}, {"model_version": "x"},
        {"version_spans": [[5, 0, 1], [4, 1, 2]]}, {"version_spans": "none", "model_version": 7},
    ]
    columns = ExperienceColumns.of([small(info=info) for info in infos])
    assert columns.versions.tolist() == [[-1, -1], [3, 3], [3, 5], [-1, -1], [4, 5], [7, 7]]
    assert columns[:0].versions.shape == (0, 2)


def test_a_key_of_info_is_added_to_copies() -> None:
    columns = ExperienceColumns.of([small(info={"a": 1}), small()])
    assert columns.with_info("uses", [3, 4]).field("info") == [{"a": 1, "uses": 3}, {"uses": 4}]
    assert columns.field("info") == [{"a": 1}, {}]
    with pytest.raises(ValueError, match="zip"):
        columns.with_info("uses", [3])


@pytest.mark.parametrize(("rows", "text"), [
    (np.array([True]), "the mask has 1 bools for 2 experiences"), (np.array([0.5]), "use a slice"),
    ("ab", "use a slice, a mask of 2 bools, or integers"), (True, "use a slice"), ([[0]], "use a slice"),
])
def test_other_rows_are_refused(rows: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        made((1, 1), (1, 1))[rows]


def test_other_names_are_refused() -> None:
    columns = made((1, 1))
    with pytest.raises(DataError, match=r"'info' is not a vector of an experience: use tokens, logprobs, "):
        columns.column("info")
    with pytest.raises(DataError, match=r"'tokens' is not a field that `field` returns: use prompt_length, reward, "):
        columns.field("tokens")


# --- for a model ----------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(many, st.sampled_from(["left", "right"]), st.integers(1, 5), st.integers(0, 9))
def test_each_value_of_a_row_stands_at_its_token(found: list[Experience], side: Any, multiple: int, pad: int) -> None:
    rows = ExperienceColumns.of(found).padded(side=side, multiple_of=multiple, pad_id=pad)
    longest = max((len(e.tokens) for e in found), default=0)
    width = rows["tokens"].shape[1]
    assert width % multiple == 0
    assert longest <= width < longest + multiple
    names = {name for name in RESPONSES for e in found if getattr(e, name) is not None}
    assert set(rows) == {"tokens", "attention_mask"} | names
    for number, e in enumerate(found):
        size = len(e.tokens)
        begin = width - size if side == "left" else 0
        assert rows["attention_mask"][number].nonzero()[0].tolist() == list(range(begin, begin + size))
        expected = np.full(width, pad)
        expected[begin : begin + size] = e.tokens
        assert rows["tokens"][number].tolist() == expected.tolist()
        for name in names:
            values = np.zeros(width, VECTORS[name][0])
            vector = getattr(e, name)
            if vector is not None and e.experience_type != "dpo":
                values[begin + e.prompt_length : begin + size] = vector
            assert rows[name][number].tobytes() == values.tobytes()


@settings(max_examples=60)
@given(many, st.integers(8, 20))
def test_packs_hold_each_experience_whole_and_once(found: list[Experience], most: int) -> None:
    packs = ExperienceColumns.of(found).packed(most)
    assert sorted(row for pack in packs for row in pack["rows"].tolist()) == list(range(len(found)))
    for pack in packs:
        assert len(pack["tokens"]) == pack["offsets"][-1] <= most
        for row, begin, end in zip(pack["rows"], pack["offsets"], pack["offsets"][1:], strict=False):
            e = found[row]
            assert pack["tokens"][begin:end].tolist() == e.tokens.tolist()
            assert pack["position_ids"][begin:end].tolist() == list(range(len(e.tokens)))
            if e.logprobs is not None and e.experience_type != "dpo":
                values = np.concatenate([np.zeros(e.prompt_length, np.float32), e.logprobs])
                assert pack["logprobs"][begin:end].tobytes() == values.tobytes()


def test_packs_are_filled_with_the_longest_first() -> None:
    packs = made((1, 2), (4, 4), (1, 4), (1, 1)).packed(10)
    assert [pack["rows"].tolist() for pack in packs] == [[1, 3], [2, 0]]
    assert packs[1]["advantages"].tolist() == [0.0, 1.5, 2.5, 3.5, 4.5, 0.0, 1.5, 2.5]
    assert [pack["tokens"].dtype for pack in packs] == [np.int32, np.int32]


def test_what_can_t_be_padded_or_packed_is_named() -> None:
    columns = made((1, 2), (2, 3))
    with pytest.raises(DataError, match=r"experience 7/0/1/0/s has 5 tokens, more than max_tokens=4"):
        columns.packed(4)
    for wrong in (0, -1, 1.5, True, "8"):
        with pytest.raises(DataError, match=r"max_tokens is .*: give a whole number from 1"):
            columns.packed(wrong)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"multiple_of is .*: give a whole number from 1"):
            columns.padded(multiple_of=wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match='side is \'up\': use "left" or "right"'):
        columns.padded(side="up")  # type: ignore[arg-type]
    for pad_id in (None, 1.5, "5", 2**40):
        with pytest.raises(DataError, match="pad_id is"):
            made((1, 1)).padded(pad_id=pad_id)  # type: ignore[arg-type]


def test_torch_gets_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    columns = made((2, 3), (1, 2))
    tensors = columns.to_torch()
    assert tensors["tokens"].data_ptr() == columns.tokens.values.ctypes.data
    assert tensors["tokens_offsets"].tolist() == [0, 5, 8]
    assert (tensors["action_mask"].dtype, tensors["logprobs"].dtype) == (torch.bool, torch.float32)
    assert "returns" not in tensors
    assert {name: tensor.tolist() for name, tensor in tensors.items()
            if name in ("prompt_lengths", "rewards", "groups", "runs", "steps", "versions")} == {
        "prompt_lengths": [2, 1], "rewards": [0.0, 1.0], "groups": [0, 0], "runs": [0, 1], "steps": [0, 0],
        "versions": [[-1, -1], [-1, -1]]}
    assert columns.to_torch("meta")["tokens"].device.type == "meta"
    assert columns.padded().to_torch()["tokens"].shape == (2, 5)


# --- as a table -----------------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(many)
def test_a_table_of_arrow_has_a_row_for_each_experience(found: list[Experience]) -> None:
    table = ExperienceColumns.of(found).to_arrow()
    assert table.column_names == list(experience_rows.COLUMNS)
    for row, e in zip(table.to_pylist(), found, strict=True):
        assert (row["eid"], row["batch"], row["task"]) == (e.eid.uid, str(e.eid.batch), str(e.eid.task))
        assert (row["reward"], row["prompt"], row["type"]) == (e.reward, e.prompt_text, e.experience_type)
        for name in ("tokens", "action_mask", "logprobs", "advantages", "returns"):
            vector = getattr(e, name)
            assert row[name] == (None if vector is None else vector.tolist())


def test_arrow_s_limits_and_absence_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = made((2, 3), (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(experience_rows, "LARGEST_COLUMN", 7)
        with pytest.raises(DataError, match="tokens have 8 values, and a column of arrow holds 7: take slices"):
            columns.to_arrow()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install 'trinity-es"):
        columns.to_arrow()
