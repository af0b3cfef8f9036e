"""The bytes of a payload: the JSON and the arrays of many experiences in one file. What they mean is not known here.

The format, version 1, is a safetensors file:
- metadata `trinity_es`: JSON `{"version": 1, "crc32": int}`, the checksum over all that follows. One key only:
  safetensors writes several in random order, and equal experiences must give equal bytes (payloads are addressed by
  content).
- tensor `header`: uint8, the JSON `{"items": [...], "columns": [...]}`. An item holds what is not an array.
- tensors `0`, `1`, ...: one flat tensor per (field, dtype), all experiences' arrays one after the other, C order; its
  column `[field, key, dtype, shapes]` tells every experience's shape: null (None), a number (1-D) or a list.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

import numpy as np
import orjson
import safetensors
import safetensors.numpy

from trinity_es.events.errors import CorruptPayload

__all__ = ["DTYPES", "Array", "Column", "decode", "encode"]

Array = np.ndarray[Any, np.dtype[Any]]

_VERSION: Final = 1
_METADATA: Final = "trinity_es"

DTYPES: Final = {
    np.dtype(name): name
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "float32", "float64",
    )
}
"""What both numpy and every safetensors release that we allow can hold."""


class Column(NamedTuple):
    """A field's arrays, one an experience."""

    name: str
    key: str | None
    """Where the field is a dict of arrays: which of them."""
    arrays: list[Array | None]
    """None: this experience has none, or, in what `decode` gives, has it in another column, of another dtype."""


def encode(items: list[dict[str, Any]], columns: Iterable[Column]) -> bytes:
    """Return the file: what is not an array, an item an experience, and the arrays.

    The same input gives the same bytes.
    """
    written: list[list[Any]] = []
    tensors: dict[str, Array] = {}
    for name, key, arrays in columns:
        for dtype in dict.fromkeys(a.dtype for a in arrays if a is not None):
            mine = [a if a is not None and a.dtype == dtype else None for a in arrays]
            shapes = [None if a is None else a.size if a.ndim == 1 else a.shape for a in mine]
            tensors[str(len(written))] = np.concatenate([a.ravel() for a in mine if a is not None])
            written.append([name, key, DTYPES[dtype], shapes])
    tensors["header"] = np.frombuffer(orjson.dumps({"items": items, "columns": written}), np.uint8)
    mark = orjson.dumps({"version": _VERSION, "crc32": _checksum(tensors, len(written))}).decode()
    return safetensors.numpy.save(tensors, metadata={_METADATA: mark})


def decode(data: bytes, first: int, count: int | None) -> tuple[list[dict[str, Any]], list[Column]]:
    """Return items and columns of `count` experiences (None: all that follow) from `first` on, with writable arrays.

    Raises CorruptPayload where the version is not known, the checksum is wrong or there are fewer; for bytes that are
    something else, whatever decoding them raises.
    """
    tensors = {name: _tensor(entry) for name, entry in safetensors.deserialize(data)}  # type: ignore[no-untyped-call]
    mark = _mark(data)
    if mark["version"] != _VERSION:
        raise CorruptPayload(
            f"this payload has format version {mark['version']!r}, this software reads {_VERSION}: was it written by a "
            "newer one?"
        )
    header = orjson.loads(tensors["header"].tobytes())
    items, columns = header["items"], header["columns"]
    if mark["crc32"] != _checksum(tensors, len(columns)):
        raise CorruptPayload("this payload's checksum is wrong: its bytes were changed since it was written")
    last = len(items) if count is None else first + count
    if not first <= last <= len(items):
        raise CorruptPayload(f"this payload holds {len(items)} experiences, not {last}, as its reader expects")
    return items[first:last], [
        Column(name, key, list(_split(tensors[str(i)], shapes, first, last)))
        for i, (name, key, _, shapes) in enumerate(columns)
    ]


def _checksum(tensors: dict[str, Array], columns: int) -> int:
    """CRC-32 over the header, then every column's type and bytes: a flipped bit anywhere that matters changes it."""
    crc = zlib.crc32(tensors["header"].data)
    for i in range(columns):
        tensor = tensors[str(i)]
        crc = zlib.crc32(f"{tensor.dtype.name}{tensor.shape}".encode(), crc)
        crc = zlib.crc32(tensor.view(np.uint8).data, crc)
    return crc


def _mark(data: bytes) -> dict[str, Any]:
    """Our metadata; `safetensors.deserialize` checks the file but does not give it out."""
    size = int.from_bytes(data[:8], "little")
    mark = orjson.loads(orjson.loads(data[8 : 8 + size])["__metadata__"][_METADATA])
    return cast(dict[str, Any], mark)


_BY_NAME: Final = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64",
}


def _tensor(entry: dict[str, Any]) -> Array:
    dtype = np.dtype(_BY_NAME[entry["dtype"]])
    return np.frombuffer(entry["data"], dtype).reshape(entry["shape"])


def _split(flat: Array, shapes: list[Any], first: int, last: int) -> Iterator[Array | None]:
    """Yield one column's arrays of the experiences first..last."""
    sizes = [0 if s is None else s if isinstance(s, int) else math.prod(s) for s in shapes]
    begin = sum(sizes[:first])
    if last - first < len(shapes):
        # Of a part only its own bytes are kept: a view would keep the whole payload in memory.
        flat = flat[begin : begin + sum(sizes[first:last])].copy()
        begin = 0
    for shape, size in zip(shapes[first:last], sizes[first:last], strict=True):
        end = begin + size
        if shape is None:
            yield None
        else:
            yield flat[begin:end] if isinstance(shape, int) else flat[begin:end].reshape(shape)
        begin = end
