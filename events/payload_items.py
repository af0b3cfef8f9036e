"""The fields of an experience as what a payload holds: an item of JSON, and columns of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from trinity_es.events.eid import EID, CustomField
from trinity_es.events.payload_format import Column

__all__ = ["JSON", "TEXTS", "VECTORS", "columns_of", "fields_of", "item_of"]

TYPES: Final = ("single_turn", "multi_turn", "dpo")

# Field -> (dtype, whether its length is the response's). All are 1-D.
VECTORS: Final[dict[str, tuple[np.dtype[Any], bool]]] = {
    "tokens": (np.dtype(np.int32), False),
    "logprobs": (np.dtype(np.float32), True),
    "token_level_reward": (np.dtype(np.float32), True),
    "advantages": (np.dtype(np.float32), True),
    "returns": (np.dtype(np.float32), True),
    "action_mask": (np.dtype(np.bool_), True),
    "chosen": (np.dtype(np.int32), False),
    "rejected": (np.dtype(np.int32), False),
    "teacher_logprobs": (np.dtype(np.float32), True),
}
ARRAYS: Final = (*VECTORS, "routed_experts")
TEXTS: Final = ("truncate_status", "prompt_text", "response_text")
JSON: Final = ("messages", "tools", "chosen_messages", "rejected_messages")
_EMPTY: Final[dict[str, Any]] = dict.fromkeys((*ARRAYS, *TEXTS, *JSON, "reward", "multi_modal_inputs"))


def columns_of(fields: Sequence[dict[str, Any]]) -> Iterator[Column]:
    """Yield every experience's arrays, for all that some experience has."""
    for name in ARRAYS:
        arrays = [f[name] for f in fields]
        if any(a is not None for a in arrays):
            yield Column(name, None, arrays)
    inputs = [f["multi_modal_inputs"] or {} for f in fields]
    for key in dict.fromkeys(key for mine in inputs for key in mine):
        yield Column("multi_modal_inputs", key, [mine.get(key) for mine in inputs])


def item_of(fields: dict[str, Any], eid: list[Any]) -> dict[str, Any]:
    """Return what is not an array. None and empty are left out; `fields_of` puts them back."""
    out = {"eid": eid, "type": TYPES.index(fields["experience_type"]), "prompt_length": fields["prompt_length"]}
    out |= {name: fields[name] for name in ("reward", *TEXTS, *JSON) if fields[name] is not None}
    out |= {name: fields[name] for name in ("info", "metrics") if fields[name]}
    if fields["custom_fields"]:
        out["custom_fields"] = [[c.source_field, c.destination_field, c.data_type] for c in fields["custom_fields"]]
    if fields["multi_modal_inputs"] is not None:
        out["multi_modal_inputs"] = list(fields["multi_modal_inputs"])
    return out


def fields_of(item: dict[str, Any]) -> dict[str, Any]:
    """Return what `item_of` wrote, without its arrays."""
    fields = {**_EMPTY, "info": {}, "metrics": {}, **item}
    fields["eid"] = EID(*item["eid"])
    fields["experience_type"] = TYPES[fields.pop("type")]
    fields["custom_fields"] = [CustomField(*c) for c in item.get("custom_fields", ())]
    if fields["multi_modal_inputs"] is not None:
        fields["multi_modal_inputs"] = dict.fromkeys(item["multi_modal_inputs"])
    return fields
