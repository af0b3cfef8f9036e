"""Conversion between experiences and Hugging Face datasets: one row per experience, one column per field.

The package `datasets` is optional (`pip install datasets`) and imported only when a dataset is made.
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
from trinity_es.events.json_values import without_nulls

__all__ = ["from_hf_datasets", "to_hf_datasets"]


def to_hf_datasets(experiences: Iterable[Experience]) -> Any:
    """Return a `datasets.Dataset` with a row per experience and a column for each field of `Experience`.

    `eid` and `custom_fields` become dicts, arrays become lists. Raises DataError if a column would need two types (a
    key of `info` that is text in one experience and a number in another, batch ids of both kinds), or if the package
    `datasets` is missing.
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
    """Return the experiences of a dataset that `to_hf_datasets` made.

    They equal the originals, except that dict keys whose value is None are dropped (a table cannot tell them from
    missing ones) and arrays of `routed_experts` and `multi_modal_inputs` have 64 bits. Columns that are not fields of
    `Experience` are ignored. Raises DataError, which names the row, if a row is not an experience.
    """
    experiences = []
    for number, row in enumerate(dataset.to_list()):
        try:
            experiences.append(_experience(row))
        except (AttributeError, KeyError, TypeError, ValueError, DataError) as e:
            raise DataError(f"row {number} of the dataset is not an experience: {e}") from e
    return experiences


_FIELDS = frozenset((*inspect.signature(Experience).parameters, "experience_type"))


def _row(experience: Experience) -> dict[str, Any]:
    """Return the experience's fields as plain lists and dicts. Raises DataError if the experience is not valid."""
    experience.validate()
    row = {name: _with_lists(value) for name, value in experience.__dict__.items()}
    row["eid"] = experience.eid.to_dict()
    row["custom_fields"] = [asdict(field) for field in experience.custom_fields]
    return row


def _with_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {key: _with_lists(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _experience(row: Mapping[str, Any]) -> Experience:
    # The table added a None for each missing dict key.
    fields = {name: without_nulls(value) for name, value in row.items() if name in _FIELDS and value is not None}
    experience_type = fields.pop("experience_type", None)
    mask = fields.pop("action_mask", None)
    fields["custom_fields"] = [CustomField(**field) for field in fields.get("custom_fields", ())]
    if experience_type == "multi_turn":
        return Experience(**fields, action_mask=mask)
    experience = Experience(**fields)  # passing the mask would make it multi-turn
    experience.action_mask = None if mask is None else np.asarray(mask, dtype=np.bool_)
    experience.validate()
    return experience
