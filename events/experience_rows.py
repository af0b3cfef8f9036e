"""Experiences as rows of one table, for `export` and for the outputs of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import orjson

from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience

__all__ = ["COLUMNS", "ParquetTable", "json_lines", "require_parquet", "row_of"]

COLUMNS = (
    "eid", "batch", "task", "run", "step", "suffix", "type", "prompt", "completion", "messages", "tokens",
    "prompt_length", "action_mask", "logprobs", "reward", "advantages", "returns", "oldest_version", "newest_version",
    "runner", "attempt", "trained_step", "truncated", "metrics", "info",
)
"""Columns of the table. `tokens` are prompt and completion, the first `prompt_length` are the prompt; `action_mask,
logprobs, advantages, returns` have a value per completion token. `prompt` and `completion` are None if the rollout kept
no text: nothing is decoded here. The versions are the oldest and newest weights that made any of its tokens. `runner,
attempt, trained_step` come from the log, and are None in an output's file."""


def row_of(
    e: Experience, *, versions: tuple[int | None, int | None] = (None, None), runner: str | None = None,
    attempt: int | None = None, trained_step: int | None = None,
) -> dict[str, Any]:
    """Return an experience as a row of COLUMNS; arrays are numpy.

    `versions`: oldest and newest weights, for an experience whose runner did not record them in it.
    """
    oldest, newest = e.model_versions if isinstance(e.model_versions[0], int) else versions
    return {
        "eid": e.eid.uid, **e.eid.to_dict(), "type": e.experience_type, "prompt": e.prompt_text,
        "completion": e.response_text, "messages": e.messages, "tokens": e.tokens, "prompt_length": e.prompt_length,
        "action_mask": e.action_mask, "logprobs": e.logprobs, "reward": e.reward, "advantages": e.advantages,
        "returns": e.returns, "oldest_version": oldest, "newest_version": newest, "runner": runner, "attempt": attempt,
        "trained_step": trained_step, "truncated": e.truncate_status, "metrics": e.metrics, "info": e.info,
    }


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as lines of JSON, with null for numbers that are not finite."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    return b"".join(orjson.dumps(row, option=options) for row in rows)


def require_parquet() -> Any:
    """Return the module pyarrow, with its parquet part imported. Raises ConfigError if it is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as e:
        raise ConfigError(f"parquet needs pyarrow ({e}): pip install 'trinity-es[parquet]', or write jsonl") from e
    return pa


class ParquetTable:
    """Parquet file of rows. `batch` and `task` are text, `messages, metrics` and `info` JSON."""

    def __init__(self, file: IO[bytes], compression: str = "zstd") -> None:
        self._pa = pa = require_parquet()
        text_type, integer, floats = pa.string(), pa.int64(), pa.list_(pa.float32())
        types = {
            "run": integer, "step": integer, "tokens": pa.list_(pa.int32()), "prompt_length": integer,
            "action_mask": pa.list_(pa.bool_()), "logprobs": floats, "reward": pa.float64(), "advantages": floats,
            "returns": floats, "oldest_version": integer, "newest_version": integer, "attempt": integer,
            "trained_step": integer,
        }
        self._schema = pa.schema([(name, types.get(name, text_type)) for name in COLUMNS])
        self._writer = pa.parquet.ParquetWriter(file, self._schema, compression=compression)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append these rows to the file. Changes them: ids become text, dicts and lists JSON."""
        for row in rows:
            row |= {"batch": str(row["batch"]), "task": str(row["task"])}
            for name in ("messages", "metrics", "info"):
                row[name] = None if row[name] is None else orjson.dumps(row[name]).decode()
        self._writer.write_table(self._pa.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
