"""File format of payloads: the JSON and the arrays of many experiences.

The format, version 2, is a safetensors file:
- metadata `trinity_es`: JSON `{"version": 2, "crc32": int}`, the checksum over all tensors.
- tensor `header`: uint8, the JSON `{"items": [...], "columns": [...], "sources": [...]}`. An item holds the fields of
  an experience that are no arrays. Sources are digests of other payloads; items refer to them by index.
- tensors `0`, `1`, ...: one flat tensor per (field, dtype), the concatenated arrays of all experiences in C order. The
  entry in `columns`, `[field, key, dtype, shapes]`, has each experience's shape: null (no array), a number (1-D) or a
  list. `shapes` may be the index of an earlier column with the same shapes.
- tensors `0.lengths`, `1.lengths`, ...: run lengths, if tensor `0`, `1`, ... holds one value per run of bitwise equal
  values, such as an advantage that is the same for a whole response.

Version 1 has no sources, no run lengths and no index in place of shapes. Payloads are addressed by content, so the same
input gives the same bytes. This module reads and writes the format itself, because the safetensors library copies all
that it reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from trinity_es.events.errors import CorruptPayload
from trinity_es.events.flat_columns import Array, FlatColumn, expanded

__all__ = ["DTYPES", "Array", "Column", "ColumnKey", "Payload", "decoding", "encode"]

ColumnKey = tuple[str, str | None, str]
"""Field, key in the field (if it is a dict of arrays), and name of the dtype."""

_VERSION: Final = 2
_VERSIONS: Final = (1, 2)
_METADATA: Final = "trinity_es"
_TENSOR_ENTRY_BYTES: Final = 80
"""Approximate bytes of a tensor's entry in the file's header."""

_CODES: Final = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}
_DTYPES: Final = {code: np.dtype(name) for name, code in _CODES.items()}
DTYPES: Final = {np.dtype(name): name for name in _CODES}
"""Dtypes that numpy and every supported release of safetensors can hold."""

_NONE: Final[Array] = np.empty(0, np.uint8)


class Column(NamedTuple):
    """Arrays of one field to write, one per experience."""

    name: str
    key: str | None
    """Key in the field, if it is a dict of arrays."""
    arrays: list[Array | None]
    """Array of each experience; None if it has none."""


# --- writing --------------------------------------------------------------------------------------------------------
def encode(items: list[dict[str, Any]], columns: Iterable[Column], sources: Sequence[str] = ()) -> bytes:
    """Return a payload file with these items (one per experience), columns of arrays, and digests of sources."""
    entries: list[list[Any]] = []
    all_shapes: list[list[Any]] = []
    tensors: dict[str, Array] = {}
    for name, key, arrays in columns:
        for dtype in dict.fromkeys(a.dtype for a in arrays if a is not None):
            arrays_of_dtype = [a if a is not None and a.dtype == dtype else None for a in arrays]
            shapes = [None if a is None else a.size if a.ndim == 1 else a.shape for a in arrays_of_dtype]
            flat_array = np.concatenate([a.ravel() for a in arrays_of_dtype if a is not None])
            tensor_name = str(len(entries))
            tensors |= _run_length_encoded(tensor_name, flat_array) or {tensor_name: flat_array}
            shapes_or_column = all_shapes.index(shapes) if shapes in all_shapes else shapes
            entries.append([name, key, DTYPES[dtype], shapes_or_column])
            all_shapes.append(shapes)
    header = {"items": items, "columns": entries} | ({"sources": list(sources)} if sources else {})
    tensors["header"] = np.frombuffer(orjson.dumps(header), np.uint8)
    return _safetensors_file(tensors, orjson.dumps({"version": _VERSION, "crc32": _checksum(tensors)}).decode())


def _run_length_encoded(name: str, flat_array: Array) -> dict[str, Array] | None:
    """Return a flat array run-length encoded, as two tensors of values and lengths, or None if that is not smaller."""
    if not flat_array.size or flat_array.size >= 2**32:
        return None
    bits = flat_array.view(f"u{flat_array.itemsize}")  # compared by bits, -0.0 differs from 0.0 and a NaN equals itself
    later_starts = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    if (len(later_starts) + 1) * (flat_array.itemsize + 4) + _TENSOR_ENTRY_BYTES >= flat_array.nbytes:
        return None
    bounds = np.concatenate([[0], later_starts, [flat_array.size]])
    return {name: flat_array[bounds[:-1]], f"{name}.lengths": np.diff(bounds).astype(np.uint32)}


def _safetensors_file(tensors: dict[str, Array], metadata: str) -> bytes:
    """Return a safetensors file. The widest dtypes come first, so that each tensor is aligned to its item size."""
    header: dict[str, Any] = {"__metadata__": {_METADATA: metadata}}
    parts = list[Any]()
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda named: (-named[1].itemsize, named[0])):
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, end]}
        parts.append(tensor.view(np.uint8).data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _checksum(tensors: dict[str, Array]) -> int:
    """Return the CRC-32 over the header and every column's dtype, shape and bytes."""
    crc = zlib.crc32(tensors["header"].data)
    for number in range(len(tensors)):
        for name in (str(number), f"{number}.lengths"):
            if name in tensors:
                tensor = tensors[name]
                crc = zlib.crc32(f"{tensor.dtype.name}{tensor.shape}".encode(), crc)
                crc = zlib.crc32(tensor.view(np.uint8).data, crc)
    return crc


# --- reading --------------------------------------------------------------------------------------------------------
@contextmanager
def decoding() -> Iterator[None]:
    """Turn any error in the block, which decodes untrusted bytes, into CorruptPayload."""
    try:
        yield
    except CorruptPayload:
        raise
    except Exception as e:
        raise CorruptPayload(f"this payload can't be decoded ({type(e).__name__}: {e})") from e


class Payload:
    """An open payload: its items, and its columns as views of the bytes.

    Raises CorruptPayload for an unknown version or a wrong checksum. Invalid bytes may raise any error: use `decoding`.
    """

    def __init__(self, data: bytes | bytearray | mmap, *, checked: bool = False) -> None:
        """Open a payload. With `checked` the checksum is skipped, because the caller compared the bytes' SHA-256."""
        metadata, self._tensors = _open_file(data)
        if metadata["version"] not in _VERSIONS:
            raise CorruptPayload(
                f"this payload has format version {metadata['version']!r}, and this software reads up to {_VERSION}: "
                "upgrade trinity-es"
            )
        if not checked and metadata["crc32"] != _checksum(self._tensors):
            raise CorruptPayload("this payload's checksum is wrong: its bytes were changed since it was written")
        header = orjson.loads(self._tensors["header"].data)
        self.items: list[dict[str, Any]] = header["items"]
        self.sources: list[str] = header.get("sources", [])
        self.columns: dict[ColumnKey, FlatColumn] = {}
        in_order: list[FlatColumn] = []
        for number, (name, key, dtype, shapes) in enumerate(header["columns"]):
            column = in_order[shapes] if isinstance(shapes, int) else FlatColumn.of_shapes(_NONE, shapes)
            column = replace(column, values=self._flat_array(str(number), int(column.offsets[-1])))
            in_order.append(column)
            self.columns[name, key, dtype] = column
        if any(len(column.present) != len(self.items) for column in in_order):
            raise CorruptPayload("this payload is damaged: a column does not have an entry for each experience")

    def part(self, first: int, count: int | None) -> range:
        """Return the range of `count` experiences from `first` on (None: to the end). Raises CorruptPayload."""
        last = len(self.items) if count is None else first + count
        if not first <= last <= len(self.items):
            raise CorruptPayload(f"this payload holds {len(self.items)} experiences, but {last} were requested")
        return range(first, last)

    def _flat_array(self, name: str, size: int) -> Array:
        """Return a column's flat tensor of `size` numbers, expanded if it is run-length encoded."""
        flat_array, lengths = self._tensors[name], self._tensors.get(f"{name}.lengths")
        if lengths is not None:
            if int(lengths.sum(dtype=np.int64)) != size:
                raise CorruptPayload("this payload is damaged: an array's run lengths do not add up to its size")
            return expanded(flat_array, lengths, size)
        if flat_array.size != size:
            raise CorruptPayload("this payload is damaged: an array does not have the size in the header")
        return flat_array


def _open_file(data: bytes | bytearray | mmap) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return our metadata in a safetensors file, and its tensors as views. Invalid bytes may raise any error."""
    body_start = 8 + int.from_bytes(data[:8], "little")
    header = orjson.loads(memoryview(data)[8:body_start])
    metadata = orjson.loads(header.pop("__metadata__")[_METADATA])
    body = np.frombuffer(data, np.uint8)[body_start:]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = body[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if max(entry["data_offsets"][1] for entry in header.values()) != len(body):
        raise CorruptPayload("this payload is not as long as its header says: it was cut, or data was added")
    return metadata, tensors
