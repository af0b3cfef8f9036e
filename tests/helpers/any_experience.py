"""Experiences of every shape: hypothesis strategies, a small example, and a payload of several."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trinity_es.events.experience import EID, CustomField, Experience

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
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)  # also -0.0, which arrays preserve
any_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False, "allow_infinity": False} if "float" in dtype else None,
    )
)
token_ids = st.integers(0, 2**31 - 1)
eids = st.builds(
    EID,
    batch=st.integers(0, 2**62) | texts, task=st.integers(0, 99) | texts, run=st.integers(0, 99),
    step=st.integers(0, 99), suffix=texts,
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    tokens = draw(hnp.arrays(np.int32, st.integers(2, 8), elements=token_ids))
    kind = draw(st.sampled_from(["single", "multi", "dpo"]))
    prompt = draw(st.integers(1, len(tokens) - 1))
    more: dict[str, Any] = {}
    response = len(tokens) - prompt
    vector = st.none() | hnp.arrays(np.float32, response, elements=floats)
    if kind == "multi":
        more["action_mask"] = draw(hnp.arrays(np.bool_, response))
    if kind == "dpo":
        pair = hnp.arrays(np.int32, st.integers(0, 4), elements=token_ids)
        more |= {name: draw(pair) for name in ("chosen", "rejected")}
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
