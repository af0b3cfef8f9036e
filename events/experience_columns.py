"""Experiences as columns, for trainers: one flat array per field instead of an object per experience."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Self, overload

import numpy as np

from trinity_es.events.errors import DataError
from trinity_es.events.experience import Experience
from trinity_es.events.experience_encoding import JSON, TEXTS, TYPES, VECTORS, Decoded, Decoder, fields_of
from trinity_es.events.experience_rows import arrow_table
from trinity_es.events.flat_columns import Array, FlatColumn, Rows
from trinity_es.events.payload_format import Payload
from trinity_es.events.token_versions import model_versions
from trinity_es.events.values import shown

__all__ = ["ArrayDict", "ExperienceColumns"]

_ALIGNED = tuple(name for name, (_, per_response) in VECTORS.items() if per_response)
_FIELDS = ("prompt_length", "reward", *TEXTS, *JSON, "info", "metrics")
_DTYPES = {name: dtype for name, (dtype, _) in VECTORS.items()}


class ArrayDict(dict[str, Array]):
    """Arrays by name."""

    def to_torch(self, device: Any = None) -> dict[str, Any]:
        """Return the arrays as torch tensors on `device`. None: on the CPU, sharing memory with the arrays."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in self.items()}
        return tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}


class ExperienceColumns(Sequence[Experience]):
    """N experiences as columns.

    For code that expects a list, this is also a sequence of Experience: `len`, iteration and `columns[i]` work, and
    make the objects on first use. `columns[rows]` with a slice, a bool mask [N] or integers returns the columns of
    these rows. A field that is assigned in an Experience does not change the columns.

    Vectors are FlatColumns: `values` flat and writable, `offsets` int64 [N + 1], `present` bool [N]. Arrays with one
    value per experience, such as `rewards`, are read-only. An experience has S tokens: a prompt of P and a response of
    R = S - P.

    - `tokens` int32, S values each; `chosen, rejected` int32, of preference pairs
    - `logprobs, advantages, returns, token_level_reward, teacher_logprobs` float32, `action_mask` bool, R values each
    """

    def __init__(self, decoded: Decoded) -> None:
        self._decoded = decoded

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{name} of these columns can't be assigned: use a variable of your own")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        names = sorted({name for name, *_ in self._decoded.columns})
        return f"<columns of {len(self)} experiences: {', '.join(names)}>"

    @classmethod
    def of(cls, experiences: Sequence[Experience]) -> Self:
        """Return columns with copies of these experiences' arrays. Raises DataError as `Experience.validate`."""
        payload, decoder = Payload(bytearray(Experience.serialize_many(experiences)), checked=True), Decoder()
        decoder.add(payload, range(len(experiences)), {})
        return cls(decoder.decoded())

    # --- as a sequence ----------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._decoded.items)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self._experiences)

    @overload
    def __getitem__(self, rows: int) -> Experience: ...
    @overload
    def __getitem__(self, rows: slice | Array | Sequence[int]) -> Self: ...
    def __getitem__(self, rows: int | slice | Array | Sequence[int]) -> Experience | Self:
        """Return the experience with this number, or the columns of a slice, a bool mask [N] or integers.

        The columns are copies, unless all rows are selected in order. Raises DataError for a mask of another length or
        for other values, IndexError for a number beyond the end.
        """
        if isinstance(rows, int | np.integer) and not isinstance(rows, bool | np.bool_):
            return self._experiences[rows]
        chosen = np.arange(len(self))[self._row_index(rows)]
        all_items, by_number = self._decoded.items, Rows([len(self)], chosen)
        columns = {key: by_number.gather([whole]) or FlatColumn.empty(len(chosen), whole.values.dtype)
                   for key, whole in self._decoded.columns.items()}
        part = type(self)(Decoded([all_items[row] for row in chosen.tolist()], columns))
        if "_experiences" in self.__dict__:
            part.__dict__["_experiences"] = [self._experiences[row] for row in chosen.tolist()]
        return part

    def _row_index(self, rows: Any) -> Any:
        """Return `rows` as a numpy index: a slice, or an array of bools or integers. Raises DataError."""
        if isinstance(rows, slice):
            return rows
        array = np.asarray(rows)
        if array.ndim != 1 or (array.dtype.kind not in "biu" and array.size):
            raise DataError(f"rows are {shown(rows)}: use a slice, a mask of {len(self)} bools, or integers")
        if array.dtype.kind == "b" and len(array) != len(self):
            raise DataError(f"the mask has {len(array)} bools for {len(self)} experiences: give one for each")
        return array if array.size else array.astype(np.int64)

    @cached_property
    def _experiences(self) -> list[Experience]:
        return Experience.of_fields(fields_of(self._decoded))

    def experiences(self) -> list[Experience]:
        """Return the experiences, the same objects at each call. Their arrays are views of the columns."""
        return list(self._experiences)

    def with_info(self, name: str, values: Iterable[Any]) -> Self:
        """Return these columns with one more key in the `info` of each experience, from one value each."""
        items = [{**item, "info": {**item.get("info", {}), name: value}}
                 for item, value in zip(self._decoded.items, values, strict=True)]
        return type(self)(Decoded(items, self._decoded.columns))

    # --- vectors ----------------------------------------------------------------------------------------------------
    def column(self, name: str) -> FlatColumn:
        """Return the column of a vector field, such as "advantages". Raises DataError for another name."""
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise DataError(f"{shown(name)} is not a vector of an experience: use {', '.join(_DTYPES)}")
        column = self._decoded.columns.get((name, None, dtype.name))
        return column if column is not None else FlatColumn.empty(len(self), dtype)

    def _has_column(self, name: str) -> bool:
        """Return True if any experience has this vector, including those of columns from which these were selected."""
        return (name, None, _DTYPES[name].name) in self._decoded.columns

    @property
    def tokens(self) -> FlatColumn:
        """Token ids of prompts and responses: int32."""
        return self.column("tokens")

    @property
    def logprobs(self) -> FlatColumn:
        """Log probability of each response token when it was sampled: float32, nats."""
        return self.column("logprobs")

    @property
    def action_mask(self) -> FlatColumn:
        """Mask of the response tokens that the model generated: bool."""
        return self.column("action_mask")

    @property
    def advantages(self) -> FlatColumn:
        """Advantage of each response token: float32."""
        return self.column("advantages")

    @property
    def returns(self) -> FlatColumn:
        """Return of each response token: float32."""
        return self.column("returns")

    # --- a value for each experience --------------------------------------------------------------------------------
    def field(self, name: str) -> list[Any]:
        """Return a list with each experience's value of a field that is no array, such as `info` or `response_text`.

        An experience without the field has None ({} for `info` and `metrics`). Don't change the values, because
        experiences may share them. Raises DataError for another name.
        """
        if name not in _FIELDS:
            raise DataError(f"{shown(name)} is not a field that `field` returns: use {', '.join(_FIELDS)}")
        empty: Any = {} if name in ("info", "metrics") else None
        return [item.get(name, empty) for item in self._decoded.items]

    @cached_property
    def prompt_lengths(self) -> Array:
        """int64 [N]: number of tokens of each prompt."""
        return _make_read_only(np.array([item["prompt_length"] for item in self._decoded.items], np.int64))

    @cached_property
    def rewards(self) -> Array:
        """float64 [N]: reward, NaN for an experience without one."""
        return _make_read_only(np.array([item.get("reward") for item in self._decoded.items], np.float64))

    @cached_property
    def versions(self) -> Array:
        """int64 [N, 2]: oldest and newest version of the weights that made any of the tokens, -1 if unknown."""
        versions = [version for info in self.field("info") for version in model_versions(info)]
        return _make_read_only(np.array([v if type(v) is int else -1 for v in versions], np.int64).reshape(-1, 2))

    @cached_property
    def groups(self) -> Array:
        """int64 [N]: number of the experience's group (all runs of one task), from 0 in order of appearance."""
        numbers: dict[tuple[Any, Any], int] = {}
        return _make_read_only(np.array([numbers.setdefault((e[0], e[1]), len(numbers)) for e in self._eids], np.int64))

    @property
    def batches(self) -> list[int | str]:
        """Batch of each experience."""
        return [eid[0] for eid in self._eids]

    @property
    def tasks(self) -> list[int | str]:
        """Task of each experience, as its position in the batch."""
        return [eid[1] for eid in self._eids]

    @cached_property
    def runs(self) -> Array:
        """int64 [N]: number of the run in its task."""
        return _make_read_only(np.array([eid[2] for eid in self._eids], np.int64))

    @cached_property
    def steps(self) -> Array:
        """int64 [N]: number of the turn in its run, from 0."""
        return _make_read_only(np.array([eid[3] for eid in self._eids], np.int64))

    @cached_property
    def truncated(self) -> Array:
        """str [N]: "prompt_truncated", "response_truncated", or "" if not truncated."""
        return _make_read_only(np.array([item.get("truncate_status", "") for item in self._decoded.items], np.str_))

    @property
    def uids(self) -> list[str]:
        """Id of each experience, `batch/task/run/step/suffix`."""
        return ["/".join(map(str, eid)) for eid in self._eids]

    @property
    def _eids(self) -> list[list[Any]]:
        return [item["eid"] for item in self._decoded.items]

    # --- input of a model -------------------------------------------------------------------------------------------
    def padded(
        self, *, side: Literal["left", "right"] = "right", multiple_of: int = 1, pad_id: int = 0
    ) -> ArrayDict:
        """Return arrays padded on one side to the length L: the largest S, rounded up to `multiple_of`.

        - `tokens` int32 [N, L], padded with `pad_id`; `attention_mask` bool [N, L]
        - those of `logprobs, token_level_reward, advantages, returns, action_mask, teacher_logprobs` that any
          experience has, [N, L], aligned with the tokens: 0 for prompts, padding and preference pairs

        Raises DataError for other arguments.
        """
        if type(pad_id) is not int or not -(2**31) <= pad_id < 2**31:
            raise DataError(f"pad_id is {shown(pad_id)}: give the id of a token, an int32")
        if side not in ("left", "right"):
            raise DataError(f"side is {shown(side)}: use \"left\" or \"right\"")
        lengths = self.tokens.lengths
        width = -(-int(lengths.max(initial=0)) // _require_positive("multiple_of", multiple_of)) * multiple_of
        positions = np.arange(width) - (width - lengths[:, None] if side == "left" else 0)
        mask = (positions >= 0) & (positions < lengths[:, None])
        out = ArrayDict(attention_mask=mask)
        for name, values in self._vectors_by_token().items():
            out[name] = np.full(mask.shape, pad_id if name == "tokens" else 0, values.dtype)
            out[name][mask] = values
        return out

    def packed(self, max_tokens: int) -> list[ArrayDict]:
        """Pack whole experiences into sequences of at most `max_tokens` tokens, the longest experiences first.

        A pack of K experiences and T tokens has
        - `rows` int64 [K], the experiences' numbers; `offsets` int32 [K + 1], their first tokens (`cu_seqlens`)
        - `tokens` int32 [T], `position_ids` int32 [T], from 0 in each experience
        - the same vectors as `padded`, [T]

        Raises DataError if an experience is longer than `max_tokens`.
        """
        lengths = self.tokens.lengths
        if (too_long := np.flatnonzero(lengths > _require_positive("max_tokens", max_tokens))).size:
            row = int(too_long[0])
            raise DataError(f"experience {self.uids[row]} has {lengths[row]} tokens, more than "
                            f"max_tokens={max_tokens}: raise it, or select other rows")
        packs, room = list[list[int]](), list[int]()
        for row in np.argsort(-lengths, kind="stable").tolist():
            size = int(lengths[row])
            number = next((i for i, free in enumerate(room) if free >= size), len(packs))
            if number == len(packs):
                packs.append([])
                room.append(max_tokens)
            packs[number].append(row)
            room[number] -= size
        return [self._pack_rows(np.array(rows)) for rows in packs]

    def _pack_rows(self, rows: Array) -> ArrayDict:
        chosen = self[rows]
        tokens = chosen.tokens
        positions = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        return ArrayDict(rows=rows, offsets=tokens.offsets.astype(np.int32), position_ids=positions.astype(np.int32),
                         **chosen._vectors_by_token())

    def _vectors_by_token(self) -> dict[str, Array]:
        """Return the tokens, and each existing response vector with a value per token (0 in prompts), all flat."""
        tokens, out = self.tokens, {"tokens": self.tokens.values}
        responses = tokens.lengths - self.prompt_lengths
        positions = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        for name in _ALIGNED:
            column = self.column(name)
            if not self._has_column(name):
                continue
            fits = column.present & (column.lengths == responses)
            begins = np.where(fits, self.prompt_lengths, tokens.lengths)
            out[name] = np.zeros(len(positions), column.values.dtype)
            out[name][positions >= np.repeat(begins, tokens.lengths)] = column.values[np.repeat(fits, column.lengths)]
        return out

    def arrays(self) -> ArrayDict:
        """Return all numeric fields: every vector that exists, flat, with its `<name>_offsets`, and `prompt_lengths,
        rewards, versions, groups, runs, steps` with a row per experience.
        """
        out = ArrayDict()
        for name in _DTYPES:
            if self._has_column(name):
                column = self.column(name)
                out |= {name: column.values, f"{name}_offsets": column.offsets}
        for name in ("prompt_lengths", "rewards", "versions", "groups", "runs", "steps"):
            out[name] = getattr(self, name).copy()
        return out

    def to_torch(self, device: Any = None) -> dict[str, Any]:
        """Return `arrays()` as torch tensors on `device`. None: on the CPU, sharing memory with the columns."""
        return self.arrays().to_torch(device)

    # --- as a table -------------------------------------------------------------------------------------------------
    def table(self) -> dict[str, Any]:
        """Return `experience_rows.COLUMNS` by name, each a list or FlatColumn. Columns from the log hold only None."""
        oldest, newest = ([None if v < 0 else v for v in column] for column in self.versions.T.tolist())
        fields = {name: self.field(name) for name in ("messages", "prompt_length", "reward", "metrics", "info")}
        vectors = {name: self.column(name) for name in ("tokens", "action_mask", "logprobs", "advantages", "returns")}
        batches, tasks, runs, steps, suffixes = map(list, zip(*self._eids, strict=True)) if len(self) else ([],) * 5
        unknown = [None] * len(self)
        return {
            **fields, **vectors, "eid": self.uids, "batch": batches, "task": tasks, "run": runs, "step": steps,
            "suffix": suffixes, "type": [TYPES[item["type"]] for item in self._decoded.items],
            "prompt": self.field("prompt_text"), "completion": self.field("response_text"),
            "oldest_version": oldest, "newest_version": newest, "truncated": self.field("truncate_status"),
            "runner": unknown, "attempt": unknown, "trained_step": unknown,
        }

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with a row for each experience, with the columns of an export.

        Raises ConfigError if pyarrow (the extra `parquet`) is not installed, DataError for more than 2**31 - 1 values
        in a column.
        """
        return arrow_table(self.table())


def _make_read_only(array: Array) -> Array:
    """Make an array read-only and return it. A change would not reach the Experience objects and selected parts."""
    array.flags.writeable = False
    return array


def _require_positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{name} is {shown(value)}: give a whole number from 1")
    return value
