"""Encoding of an experience's fields in a payload: a JSON item, and columns of arrays.

An item may hold only the differences from another experience, its base, in another payload, its source. Then `of` is
`[source, number]` of the base, and `without` names fields that only the base has. All other fields in the item or in
the arrays replace those of the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from trinity_es.events.eid import EID, CustomField
from trinity_es.events.errors import CorruptPayload
from trinity_es.events.flat_columns import Array, FlatColumn, Rows, presence
from trinity_es.events.payload_format import Column, ColumnKey, Payload

__all__ = [
    "JSON", "TEXTS", "VECTORS", "Decoded", "Decoder", "array_fields_of", "columns_of", "difference", "fields_of",
    "item_of", "same_array", "source_numbers",
]

Fields = dict[str, Any]
"""`__dict__` of an experience, or an item."""

TYPES: Final = ("single_turn", "multi_turn", "dpo")

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
# Field -> (dtype, True if it has a value per response token). All are 1-D.
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
    """Yield a column for each array field that any of these experiences has."""
    for name in ARRAYS:
        arrays = [f[name] for f in fields]
        if any(a is not None for a in arrays):
            yield Column(name, None, arrays)
    inputs = [f["multi_modal_inputs"] or {} for f in fields]  # one dict of arrays per experience
    for key in dict.fromkeys(key for arrays_by_key in inputs for key in arrays_by_key):
        yield Column("multi_modal_inputs", key, [arrays_by_key.get(key) for arrays_by_key in inputs])


def item_of(fields: Fields, eid: list[Any]) -> dict[str, Any]:
    """Return the JSON item of an experience: its fields without arrays, None and empty values."""
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
    """Return the item and the arrays (for `columns_of`) in which an experience differs from its base, bit by bit.

    `base_place`: index of the base's payload in the new payload's sources, and number of the base in that payload.
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
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# --- reading --------------------------------------------------------------------------------------------------------
class Decoded(NamedTuple):
    """Experiences as items and columns."""

    items: list[Fields]
    """Item of each experience, with all fields but the arrays. Experiences may share values."""
    columns: dict[ColumnKey, FlatColumn]


class Decoder:
    """Collector of experiences from open payloads. Rows are numbered through all these payloads."""

    def __init__(self) -> None:
        self._firsts: dict[int, int] = {}
        """Row of the first experience of each payload, by the payload's `id`."""
        self._payloads: list[Payload] = []
        self._rows = 0
        self._items: list[Fields] = []
        self._own: list[Array] = []
        """Row of each experience."""
        self._bases: list[Array] = []
        """Row of each experience's base; -1 without one."""
        self._without: dict[str, list[int]] = {}
        """Field -> experiences (indices) that lack the array which their base has."""

    def add(self, payload: Payload, numbers: range, sources: Mapping[int, Payload]) -> None:
        """Add these experiences of a payload. `sources` are the payloads of their bases. Raises CorruptPayload."""
        items, bases = payload.items[numbers.start : numbers.stop], [-1] * len(numbers)
        source_parts = {source: self._source_part(payload.sources[source], sources.get(source))
                        for source in sorted(source_numbers(payload, numbers))}
        for number, item in enumerate(items if source_parts else ()):
            base = item.get("of")
            if base is not None:
                source, base_number = base
                first, source_items = source_parts[source]
                if not 0 <= base_number < len(source_items):
                    digest = payload.sources[source]
                    raise CorruptPayload(f"payload {digest} holds {len(source_items)} experiences, and another payload "
                                         f"refers to number {base_number}", digest=digest)
                bases[number] = first + base_number
                items[number] = self._completed(item, source_items[base_number], len(self._items) + number)
        self._own.append(np.arange(numbers.start, numbers.stop) + self._first_row(payload))
        self._bases.append(np.array(bases, np.int64))
        self._items += items

    def _source_part(self, digest: str, source: Payload | None) -> tuple[int, list[Fields]]:
        """Return the row of a source's first experience, and its items. Raises CorruptPayload if they have bases."""
        if source is None:
            raise CorruptPayload("this payload holds only the differences from experiences in another payload: read it "
                                 "from the payload store with `read_experiences`")
        if source.sources:
            raise CorruptPayload(f"payload {digest} holds only the differences from experiences in another payload, "
                                 "and a further payload refers to it", digest=digest)
        return self._first_row(source), source.items

    def _first_row(self, payload: Payload) -> int:
        """Return the row of a payload's first experience. A new payload gets the next rows."""
        if id(payload) not in self._firsts:
            self._firsts[id(payload)] = self._rows
            self._payloads.append(payload)
            self._rows += len(payload.items)
        return self._firsts[id(payload)]

    def _completed(self, item: Fields, base: Fields, number: int) -> Fields:
        """Return the item of experience `number`, completed with the fields of its base."""
        if len(item) == 1:
            return base
        without = item.get("without", ())
        for name in (*without, *(("multi_modal_inputs",) if "multi_modal_inputs" in item else ())):
            self._without.setdefault(name, []).append(number)
        return {k: v for k, v in {**base, **item}.items() if k not in without and k not in ("of", "without")}

    def decoded(self) -> Decoded:
        """Return all added experiences, in order."""
        counts = [len(payload.items) for payload in self._payloads]
        own, bases = _concatenated(self._own), _concatenated(self._bases)
        names = dict[str, list[ColumnKey]]()
        for key in dict.fromkeys(key for payload in self._payloads for key in payload.columns):
            names.setdefault(key[0], []).append(key)
        columns = dict[ColumnKey, FlatColumn]()
        choices = dict[bytes, Rows]()
        for name, keys in names.items():
            by_key = {key: [payload.columns.get(key) for payload in self._payloads] for key in keys}
            from_base = (bases >= 0) & ~np.any([presence(files, counts)[own] for files in by_key.values()], axis=0)
            from_base[self._without.get(name, [])] = False
            choice = from_base.tobytes()
            if choice not in choices:
                choices[choice] = Rows(counts, np.where(from_base, bases, own))
            columns |= {key: column for key, files in by_key.items()
                        if (column := choices[choice].gather(files)) is not None}
        return Decoded(self._items, columns)


def source_numbers(payload: Payload, numbers: range) -> set[int]:
    """Return the indices in `payload.sources` of the payloads that hold these experiences' bases."""
    items = payload.items[numbers.start : numbers.stop] if payload.sources else []
    return {item["of"][0] for item in items if "of" in item}


def _concatenated(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def fields_of(decoded: Decoded) -> list[Fields]:
    """Return the fields of each experience. Arrays are views of the columns, JSON values are copies."""
    all_fields = [_fields_without_arrays(item) for item in orjson.loads(orjson.dumps(decoded.items))]
    _set_arrays(all_fields, decoded.columns)
    return all_fields


def array_fields_of(payload: Payload) -> list[Fields]:
    """Return the array fields of each experience of a payload without sources, as views of the payload."""
    all_fields: list[Fields] = [{**dict.fromkeys(ARRAYS), "multi_modal_inputs": {}} for _ in payload.items]
    _set_arrays(all_fields, payload.columns)
    return all_fields


def _set_arrays(all_fields: Sequence[Fields], columns: Mapping[ColumnKey, FlatColumn]) -> None:
    for (name, key, _), column in columns.items():
        for fields, array in zip(all_fields, column.arrays(), strict=True):
            if array is not None and key is None:
                fields[name] = array
            elif array is not None:
                fields[name][key] = array


def _fields_without_arrays(item: Fields) -> Fields:
    """Return an experience's fields from its item. Arrays, and other fields that the item lacks, are None or empty."""
    fields = {**_EMPTY, "info": {}, "metrics": {}, **item, "eid": EID(*item["eid"])}
    fields["experience_type"] = TYPES[fields.pop("type")]
    fields["custom_fields"] = [CustomField(*c) for c in item.get("custom_fields", ())]
    if "multi_modal_inputs" in item:
        fields["multi_modal_inputs"] = dict.fromkeys(item["multi_modal_inputs"])
    return fields
