"""Experiences as a table with a row for each, for `export` and for the outputs of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Final

import orjson

from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.flat_columns import FlatColumn

__all__ = ["COLUMNS", "ParquetTable", "arrow_table", "json_lines", "require_parquet"]

LARGEST_COLUMN: Final = 2**31 - 1
"""Maximum number of values in a column of arrow's lists."""

COLUMNS = (
    "eid", "batch", "task", "run", "step", "suffix", "type", "prompt", "completion", "messages", "tokens",
    "prompt_length", "action_mask", "logprobs", "reward", "advantages", "returns", "oldest_version", "newest_version",
    "runner", "attempt", "trained_step", "truncated", "metrics", "info",
)
"""Columns of the table. `tokens` are prompt and completion, and the first `prompt_length` of them are the prompt.
`action_mask, logprobs, advantages, returns` have a value per completion token. `prompt` and `completion` are None if
the rollout kept no text, because tokens are not decoded here. `oldest_version` and `newest_version` are those of the
weights that made any of the tokens. `runner, attempt, trained_step` come from the log; a pipeline's output has None."""


def json_lines(columns: Mapping[str, Any]) -> bytes:
    """Return the rows of these COLUMNS as lines of JSON, with null for numbers that are not finite."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    lists = [v.arrays() if isinstance(v := columns[name], FlatColumn) else v for name in COLUMNS]
    rows = zip(*lists, strict=True)
    return b"".join(orjson.dumps(dict(zip(COLUMNS, row, strict=True)), option=options) for row in rows)


def require_parquet() -> Any:
    """Return the module pyarrow, with its parquet part imported. Raises ConfigError if it is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as e:
        raise ConfigError(f"parquet needs pyarrow ({e}): pip install 'trinity-es[parquet]', or write jsonl") from e
    return pa


def arrow_table(columns: Mapping[str, Any]) -> Any:
    """Return these COLUMNS as a `pyarrow.Table`: `batch` and `task` as text, `messages`, `metrics`, `info` as JSON.

    Raises ConfigError if pyarrow is not installed.
    """
    pa = require_parquet()
    text_type, integer, floats = pa.string(), pa.int64(), pa.list_(pa.float32())
    types = {
        "run": integer, "step": integer, "tokens": pa.list_(pa.int32()), "prompt_length": integer,
        "action_mask": pa.list_(pa.bool_()), "logprobs": floats, "reward": pa.float64(), "advantages": floats,
        "returns": floats, "oldest_version": integer, "newest_version": integer, "attempt": integer,
        "trained_step": integer,
    }
    schema = pa.schema([(name, types.get(name, text_type)) for name in COLUMNS])
    return pa.Table.from_arrays([_arrow_array(pa, f.name, columns[f.name], f.type) for f in schema], schema=schema)


def _arrow_array(pa: Any, name: str, values: Any, type_: Any) -> Any:
    """Return the values of one column as an arrow array. Raises DataError if they are too many for one."""
    if isinstance(values, FlatColumn):
        if values.offsets[-1] > LARGEST_COLUMN:
            raise DataError(f"{name} have {values.offsets[-1]:,} values, and a column of arrow holds "
                            f"{LARGEST_COLUMN:,}: take slices")
        return pa.ListArray.from_arrays(pa.array(values.offsets, pa.int32()), pa.array(values.values, type_.value_type),
                                        mask=pa.array(~values.present))
    if name in ("messages", "metrics", "info"):
        values = [None if value is None else orjson.dumps(value).decode() for value in values]
    elif name in ("batch", "task"):
        values = [str(value) for value in values]
    return pa.array(values, type_)


class ParquetTable:
    """Writer of a Parquet file with the columns of `arrow_table`."""

    def __init__(self, file: IO[bytes], compression: str = "zstd") -> None:
        schema = arrow_table(dict.fromkeys(COLUMNS, ())).schema
        self._writer = require_parquet().parquet.ParquetWriter(file, schema, compression=compression)

    def write(self, columns: Mapping[str, Any]) -> None:
        self._writer.write_table(arrow_table(columns))

    def close(self) -> None:
        self._writer.close()
