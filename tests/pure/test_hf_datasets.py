"""trinity_es.hf_datasets: experiences as a dataset of Hugging Face, and back (PARITY P54)."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import trinity_es
from trinity_es import EID, Experience
from trinity_es.events.errors import DataError
from trinity_es.events.experience import CustomField


class Dataset:
    """What of `datasets.Dataset` is used: a table of Arrow, made of rows and read as rows."""

    def __init__(self, table: Any) -> None:
        self.table = table

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Dataset:
        arrow = pytest.importorskip("pyarrow")
        return cls(arrow.Table.from_pylist(rows))

    def to_list(self) -> list[dict[str, Any]]:
        return self.table.to_pylist()


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, or where it is not installed, what of it is used."""
    try:
        import datasets as _  # noqa: F401
    except ImportError:
        package = types.ModuleType("datasets")
        package.Dataset = Dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", package)


def experiences() -> list[Experience]:
    single = Experience(
        eid=EID(3, 0, 1, 0, "a"), tokens=[1, 2, 3, 4], prompt_length=2, logprobs=[-0.1, -2.5], reward=0.5,
        info={"model_version": 2, "task_index": {"taskset": "t", "index": 7}}, metrics={"right": 1.0},
        prompt_text="q", response_text="a", advantages=[0.1, 0.1], returns=[0.1, 0.1],
        custom_fields=[CustomField("a", "b", "float32")],
    )
    masked = Experience(
        eid=EID(3, 1, 0, 2, "b"), tokens=[1, 2, 3, 4, 5], action_mask=[True, False, True], reward=None,
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], info={"other": "x"},
        truncate_status="response_truncated",
    )
    pair = Experience(
        eid=EID(3, 2, 0, 0, "c"), tokens=[1, 2], chosen=[3], rejected=[4, 5],
        chosen_messages=[{"role": "assistant", "content": "y"}],
    )
    return [single, masked, pair]


def test_p54_experiences_are_the_same_after_a_dataset_of_hugging_face(datasets: None) -> None:
    given = experiences()
    dataset = trinity_es.to_hf_datasets(given)
    rows = dataset.to_list()
    assert rows[0]["tokens"] == [1, 2, 3, 4]
    assert rows[0]["eid"] == {"batch": 3, "task": 0, "run": 1, "step": 0, "suffix": "a"}
    assert rows[0]["reward"] == 0.5
    assert rows[1]["messages"][1]["content"] == "a"
    assert trinity_es.from_hf_datasets(dataset) == given
    assert trinity_es.from_hf_datasets(trinity_es.to_hf_datasets([])) == []


def test_p54_arrays_that_may_have_any_type_keep_their_values(datasets: None) -> None:
    made = Experience(
        tokens=[1, 2, 3], prompt_length=1, routed_experts=np.arange(8, dtype=np.uint8).reshape(2, 2, 2),
        multi_modal_inputs={"pixels": np.ones((2, 2), dtype=np.float32)},
    )
    [found] = trinity_es.from_hf_datasets(trinity_es.to_hf_datasets([made]))
    assert found.routed_experts.tolist() == np.arange(8).reshape(2, 2, 2).tolist()
    assert (found.multi_modal_inputs or {})["pixels"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_p54_what_fits_no_table_or_is_no_experience_is_an_error_that_says_so(datasets: None) -> None:
    mixed = [Experience(tokens=[1, 2], prompt_length=1, info={"a": a}) for a in (1, "x")]
    with pytest.raises(DataError, match="each key of info and metrics needs one type"):
        trinity_es.to_hf_datasets(mixed)
    with pytest.raises(DataError, match="row 0 of the dataset is not an experience"):
        trinity_es.from_hf_datasets(Dataset.from_list([{"reward": 1.0}]))


def test_p54_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        trinity_es.to_hf_datasets(experiences())
