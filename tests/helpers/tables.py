"""Tables of rows in users' formats: parquet files, and folders of `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet


def write_parquet(path: Path, samples: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(samples), path, row_group_size=3)
    return path


def write_dataset(folder: Path, samples: list[dict[str, Any]], **state: Any) -> Path:
    """Write a folder as `datasets.Dataset.save_to_disk` does, in two shards."""
    folder.mkdir(parents=True)
    half = len(samples) // 2
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, rows in zip(names, (samples[:half], samples[half:]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(folder / name), table.schema) as out:
            out.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder
