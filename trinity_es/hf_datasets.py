"""Experiences as a dataset of Hugging Face, and back: a row an experience, its fields the columns.

The package `datasets` is imported when a dataset is made, and is no dependency: `pip install datasets`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from trinity_es.events.errors import DataError
from trinity_es.events.experience import CustomField, Experience

__all__ = ["from_hf_datasets", "to_hf_datasets"]


def to_hf_datasets(experiences: Iterable[Experience]) -> Any:
    """Return a `datasets.Dataset` of these experiences, with a column for each field of `Experience`.

    `eid` and `custom_fields` are dicts, arrays are lists. A column has one type: an experience whose `info` holds a
    text where another's holds a number is a DataError, as are batch ids of both kinds. Raises DataError, which says
    what to install, where there is no package `datasets`.
    """
    try:
        dataset = importlib.import_module("datasets").Dataset
    except ImportError as e:
        raise DataError(
            f"to_hf_datasets needs the package datasets, which can't be imported ({e}): pip install datasets"
        ) from e
    rows = [_row(experience) for experience in experiences]
    try:
        return dataset.from_list(rows)
    except (TypeError, ValueError) as e:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"these experiences don't fit into one table ({e}): each key of info and metrics needs one type in all of "
            "them; change or remove those that differ"
        ) from e


def from_hf_datasets(dataset: Any) -> list[Experience]:
    """Return the experiences of a dataset that `to_hf_datasets` made: equal ones, with these exceptions.

    A table knows no missing key, so keys of dicts whose value is None are gone; arrays of `routed_experts` and
    `multi_modal_inputs` have 64 bits. Columns that are no fields of an experience are left out. Raises DataError,
    naming the row, for one that is no experience.
    """
    found = []
    for number, row in enumerate(dataset.to_list()):
        try:
            found.append(_experience(row))
        except (AttributeError, KeyError, TypeError, ValueError, DataError) as e:
            raise DataError(f"row {number} of the dataset is no experience: {e}") from e
    return found


_FIELDS = frozenset((*inspect.signature(Experience).parameters, "experience_type"))


def _row(experience: Experience) -> dict[str, Any]:
    experience.validate()
    row = {name: _listed(value) for name, value in experience.__dict__.items()}
    row["eid"] = experience.eid.to_dict()
    row["custom_fields"] = [asdict(field) for field in experience.custom_fields]
    return row


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {key: _listed(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _experience(row: Mapping[str, Any]) -> Experience:
    given = {name: _stripped(value) for name, value in row.items() if name in _FIELDS and value is not None}
    kind, mask = given.pop("experience_type", None), given.pop("action_mask", None)
    given["custom_fields"] = [CustomField(**field) for field in given.get("custom_fields", ())]
    if kind == "multi_turn":
        return Experience(**given, action_mask=mask)
    experience = Experience(**given)  # a mask that is given would make it one of several turns
    experience.action_mask = None if mask is None else np.asarray(mask, dtype=np.bool_)
    experience.validate()
    return experience


def _stripped(value: Any) -> Any:
    """Return a value without the Nones that a table put where a dict had no such key."""
    if isinstance(value, Mapping):
        return {key: _stripped(inner) for key, inner in value.items() if inner is not None}
    return [_stripped(inner) for inner in value] if isinstance(value, list) else value
