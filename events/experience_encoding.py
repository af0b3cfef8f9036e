"""Fields of an experience in a payload: an item of JSON, and columns of arrays.

An item may be a difference from another experience, its base: `of` is `[source, number]` of the base, and `without`
names fields that only the base has. All other fields in the item or among the arrays replace those of the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

from trinity_es.events.eid import EID, CustomField
from trinity_es.events.errors import CorruptPayload
from trinity_es.events.payload_format import Array, Column, Payload

__all__ = ["JSON", "TEXTS", "VECTORS", "bases_of", "columns_of", "difference", "fields_in", "item_of", "same_array"]

Fields = dict[str, Any]
"""`__dict__` of an experience."""

TYPES: Final = ("single_turn", "multi_turn", "dpo")

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
# Field -> (dtype, whether its length is the response's). All are 1-D.
VECTORS: Final[dict[str, tuple[np.dtype[Any], bool]]] = {
    "tokens": (_INT32, False), "logprobs": (_FLOAT32, True), "token_level_reward": (_FLOAT32, True),
    "advantages": (_FLOAT32, True), "returns": (_FLOAT32, True), "action_mask": (np.dtype(np.bool_), True),
    "chosen": (_INT32, False), "rejected": (_INT32, False), "teacher_logprobs": (_FLOAT32, True),
}
ARRAYS: Final = (*VECTORS, "routed_experts")
TEXTS: Final = ("truncate_status", "prompt_text", "response_text")
JSON: Final = ("messages", "tools", "chosen_messages", "rejected_messages")
_EMPTY: Final[dict[str, Any]] = dict.fromkeys((*ARRAYS, *TEXTS, *JSON, "reward", "multi_modal_inputs"))


def columns_of(fields: Sequence[Fields]) -> Iterator[Column]:
    """Yield the columns of all array fields that any of these experiences has."""
    for name in ARRAYS:
        arrays = [f[name] for f in fields]
        if any(a is not None for a in arrays):
            yield Column(name, None, arrays)
    inputs = [f["multi_modal_inputs"] or {} for f in fields]  # one dict of arrays per experience
    for key in dict.fromkeys(key for arrays_by_key in inputs for key in arrays_by_key):
        yield Column("multi_modal_inputs", key, [arrays_by_key.get(key) for arrays_by_key in inputs])


def item_of(fields: Fields, eid: list[Any]) -> dict[str, Any]:
    """Return the item: all fields but the arrays, and but None and empty ones, which `fields_in` restores."""
    item = {"eid": eid, "type": TYPES.index(fields["experience_type"]), "prompt_length": fields["prompt_length"]}
    item |= {name: fields[name] for name in ("reward", *TEXTS, *JSON) if fields[name] is not None}
    item |= {name: fields[name] for name in ("info", "metrics") if fields[name]}
    if fields["custom_fields"]:
        item["custom_fields"] = [[c.source_field, c.destination_field, c.data_type] for c in fields["custom_fields"]]
    if fields["multi_modal_inputs"] is not None:
        item["multi_modal_inputs"] = list(fields["multi_modal_inputs"])
    return item


# --- differences ----------------------------------------------------------------------------------------------------
def difference(
    fields: Fields, item: dict[str, Any], base: Fields, base_item: dict[str, Any], base_place: tuple[int, int]
) -> tuple[dict[str, Any], Fields]:
    """Return the item and the arrays (for `columns_of`) by which an experience differs, in bits, from its base.

    `base_place`: index of the base's source in the new payload, and number of the base there.
    """
    new_item = {k: v for k, v in item.items() if k not in base_item or orjson.dumps(v) != orjson.dumps(base_item[k])}
    without = [k for k in base_item if k not in item]
    arrays: Fields = dict.fromkeys((*ARRAYS, "multi_modal_inputs"))
    for name in ARRAYS:
        if fields[name] is None:
            without += [name] if base[name] is not None else []
        elif not same_array(fields[name], base[name]):
            arrays[name] = fields[name]
    inputs, base_inputs = fields["multi_modal_inputs"] or {}, base["multi_modal_inputs"] or {}
    if "multi_modal_inputs" in new_item or any(not same_array(a, base_inputs.get(key)) for key, a in inputs.items()):
        if "multi_modal_inputs" in item:
            new_item["multi_modal_inputs"] = item["multi_modal_inputs"]
        arrays["multi_modal_inputs"] = inputs
    return {"of": base_place, **({"without": without} if without else {}), **new_item}, arrays


def same_array(a: Array, b: Array | None) -> bool:
    """Compare two arrays by dtype, shape and bits."""
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# --- reading --------------------------------------------------------------------------------------------------------
def bases_of(payload: Payload, numbers: Sequence[int]) -> dict[int, dict[int, int]]:
    """Return the base of each difference, as {source: {number of the base in that payload: index in `numbers`}}."""
    bases: dict[int, dict[int, int]] = {}
    for index, number in enumerate(numbers):
        base = payload.items[number].get("of")
        if base is not None:
            source, base_number = base
            bases.setdefault(source, {})[base_number] = index
    return bases


def fields_in(payload: Payload, numbers: Sequence[int], bases: Mapping[int, Fields]) -> list[Fields]:
    """Return the fields of these experiences of a payload.

    `bases` has the fields of each difference's base, by its index in `numbers`; the result reuses them.
    """
    items = payload.items
    all_fields = [_fields_of(items[number], bases.get(index)) for index, number in enumerate(numbers)]
    for name, key, arrays in payload.columns(numbers):
        for fields, array in zip(all_fields, arrays, strict=True):
            if array is not None and key is None:
                fields[name] = array
            elif array is not None:
                fields[name][key] = array
    return all_fields


def _fields_of(item: dict[str, Any], base: Fields | None) -> Fields:
    """Return an item's fields, without arrays of its own. For a difference this changes and returns `base`."""
    if "of" in item:
        if base is None:
            raise CorruptPayload("this payload holds only the differences from experiences in another payload: read it "
                                 "from the payload store with `read_experiences`")
        fields = base
        for name in item.get("without", ()):
            fields[name] = {} if name in ("info", "metrics") else [] if name == "custom_fields" else None
    else:
        fields = {**_EMPTY, "info": {}, "metrics": {}, "custom_fields": []}
    for name, value in item.items():
        if name == "eid":
            fields["eid"] = EID(*value)
        elif name == "type":
            fields["experience_type"] = TYPES[value]
        elif name == "custom_fields":
            fields["custom_fields"] = [CustomField(*c) for c in value]
        elif name == "multi_modal_inputs":
            fields[name] = dict.fromkeys(value)
        elif name != "of" and name != "without":
            fields[name] = value
    return fields
