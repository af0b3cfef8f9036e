"""Files of tasksets: rows of plain JSON, addressed by number.

A file is JSONL, parquet or a Hugging Face dataset directory (`save_to_disk`). All rows are checked when a file is
opened, so a bad row stops a run before it starts. Rows are read on demand, so a file may be larger than memory. Parquet
and dataset directories need pyarrow (`pip install 'trinity-es[parquet]'`).
"""

from __future__ import annotations

import bisect
import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.environments.verifiers_tasks import ensure_tasks_file, tasks_file, tasks_revision
from trinity_es.events.errors import TasksetError
from trinity_es.events.private_files import require_regular
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets import row_checks

__all__ = ["EnvironmentLines", "RowFile", "open_file"]

LINE_BYTES = 2**28
"""Maximum size of a line, so a sparse file of zeros can't fill the memory."""
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"PK\x03\x04", b"\xfd7zXZ"
"""Beginnings of files of gzip, zstd, bzip2, zip and xz."""
_ONE_ARRAY = "a file of rows has an object a line; one array becomes that with `jq -c '.[]' FILE`"


class RowFile(Protocol):
    """Rows of a taskset; `len()` is their number."""

    revision: str
    """Identity of these rows: a SHA-256, a commit or a version."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows in this order. Raises TasksetError if the file changed since it was opened."""


def open_file(config: TasksetConfig) -> RowFile:
    """Open the taskset's file and check its rows. Raises TasksetError, which names the file and the line or row."""
    file = config.file
    _require_one_split(config, file)
    try:
        rows: RowFile
        if file.is_dir():
            rows = _dataset_rows(config, file)
        elif file.suffix == ".parquet":
            rows = _parquet_rows(config, file)
        else:
            rows = _Lines(config, file)
    except OSError as e:
        hint = config.path_hint if isinstance(e, FileNotFoundError) else ""
        raise TasksetError(
            f"taskset {config.name}: {file} can't be read ({e.strerror or e}){hint}", file=str(file)
        ) from e
    if not len(rows):
        raise TasksetError(f"{file} is empty: a taskset has at least one row", file=str(file))
    return rows


def _require_one_split(config: TasksetConfig, file: Path) -> None:
    if config.split is None:
        return
    if file == Path(config.path) and file.is_file():
        raise TasksetError(f"taskset {config.name}: {file} is one file, which has no split {config.split!r}: leave out "
                           "split, or name its folder", file=str(file))
    names = f"{config.split}.jsonl", f"{config.split}.parquet"
    candidates = [name for name in names if file.with_name(name).exists()]
    if len(candidates) > 1 and file.is_file():
        raise TasksetError(f"taskset {config.name}: {file.parent} has {' and '.join(candidates)}, and split "
                           f"{config.split!r} may be either: name the file in path, without split", file=str(file))


class _UnchangedFiles:
    """Check that files have not changed since they were opened, because a run's cursors count their rows."""

    def __init__(self, config: TasksetConfig, files: Sequence[Path]) -> None:
        for file in files:
            require_regular(file)
        self._name, self._files = config.name, files
        self._identity = self._sizes_and_mtimes()

    def _sizes_and_mtimes(self) -> list[tuple[int, int]]:
        return [(s.st_size, s.st_mtime_ns) for s in (os.stat(file) for file in self._files)]

    def require(self) -> None:
        with suppress(OSError):
            if self._sizes_and_mtimes() == self._identity:
                return
        raise TasksetError(
            f"{self._files[0]} was changed while taskset {self._name} was in use, so its row numbers may now mean "
            "other rows. Put the old file back, or start a new run", file=str(self._files[0]),
        )


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


# --- JSONL ----------------------------------------------------------------------------------------------------------
class _Lines:
    """Rows of a JSONL file, found by the offsets of its lines. Blank lines and a byte order mark are skipped."""

    def __init__(self, config: TasksetConfig, file: Path) -> None:
        self.config, self._file = config, file
        self._offsets = array("Q")
        self._files_check = _UnchangedFiles(config, [file])
        self._keys: dict[str, None] = {}
        self._named_keys = set(row_checks.named_keys(config).values())
        self._check_row = row_checks.RowCheck(config).check
        with file.open("rb") as f:
            self._check(f)
        self.revision = _sha256([file])
        if self._offsets:
            row_checks.require_named_keys(file, self._keys, config)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        self._files_check.require()
        samples: list[dict[str, Any]] = []
        with self._file.open("rb") as f:
            for row in rows:
                f.seek(self._offsets[row])
                samples.append(row_checks.parse_row(f.readline()))
        return samples

    def _check(self, f: IO[bytes]) -> None:
        """Check each line that is not blank, and store its offset. Raises TasksetError, which names the line."""
        start = 0
        for number, line in enumerate(iter(partial(f.readline, LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise TasksetError(f"{self._file} line {number} has more than {LINE_BYTES:,} bytes: write one JSON "
                                   "object per line", file=str(self._file), line=number)
            skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[skip:].strip():
                self._check_line(number, line[skip:])
                self._offsets.append(start + skip)
            start += len(line)

    def _check_line(self, number: int, line: bytes) -> None:
        """Raise TasksetError unless the line is a valid row. Note its keys until all in `format` were seen."""
        where = f"{self._file} line {number}"
        details = {"file": str(self._file), "line": number}
        try:
            row: Any = row_checks.parse_row(line)
        except ValueError as e:
            if number == 1 and (line.startswith(_COMPRESSED) or self._file.suffix in (".csv", ".tsv")):
                raise TasksetError(f"{self._file} is compressed, or a table in text form such as CSV, but rows are "
                                   "lines of JSON or parquet: unpack or convert the file", **details) from e
            try:
                line.decode()
            except UnicodeDecodeError as bad:
                raise TasksetError(f"{where}: not UTF-8 (byte {bad.start}): save the file as UTF-8", **details) from e
            advice = _ONE_ARRAY if number == 1 and line.startswith(b"[") else "fix or remove the line"
            raise TasksetError(f"{where}: not JSON ({getattr(e, 'msg', e)}): {advice}", **details) from e
        if not isinstance(row, dict):
            kind = "a list" if isinstance(row, list) else f"{line.strip().decode():.40}"
            advice = _ONE_ARRAY if number == 1 and isinstance(row, list) else "fix or remove the line"
            raise TasksetError(f"{where}: must be a JSON object, not {kind}: {advice}", **details)
        try:
            row_checks.require_single_keys(line, row)
        except ValueError as e:
            raise TasksetError(f"{where}: {e}: leave one of them out", **details) from e
        key = self.config.format.prompt_key
        if key not in row and key not in orjson.loads(line):
            raise TasksetError(f"{where}: {row_checks.no_prompt_text(key, list(row))}", **details)
        self._check_row(row, where, details)
        if not self._named_keys <= self._keys.keys():
            self._keys.update(dict.fromkeys(row))


class EnvironmentLines(_Lines):
    """Rows of a verifiers environment, which writes its tasks into a JSONL file once (`verifiers_tasks`)."""

    def __init__(self, config: TasksetConfig, recorded: TasksetSource | None = None) -> None:
        file = ensure_tasks_file(config.workflow_args)
        super().__init__(config, file)
        self.revision = tasks_revision(config.workflow_args, file)

    @staticmethod
    def check(config: TasksetConfig) -> None:
        """Raise ConfigError or DataError unless the environment is installed."""
        tasks_file(config.workflow_args)


# --- columns --------------------------------------------------------------------------------------------------------
def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise TasksetError(
            f"{file} needs pyarrow, which is not installed: `pip install 'trinity-es[parquet]'`, or give the taskset "
            "as JSONL", file=str(file),
        ) from None
    return pyarrow


class _Columns:
    """Rows of Arrow tables, in groups that are read on demand. The group read last stays in memory."""

    def __init__(self, config: TasksetConfig, files: Sequence[Path]) -> None:
        self._files_check = _UnchangedFiles(config, files)
        self._groups: list[tuple[row_checks.TableRows, Callable[[], Any]]] = []
        self._ends: list[int] = []
        """Number of the row after each group."""
        self._loaded_group: tuple[int, Any] = (-1, None)
        """Index and table of the group that was read last."""
        self.revision = _sha256(files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(self, reader: row_checks.TableRows, load_group: Callable[[], Any]) -> None:
        """Check the group of rows that `load_group` returns, and add it. Raises TasksetError, which names the row."""
        table = load_group()
        reader.check(table, len(self))
        self._ends.append(len(self) + table.num_rows)
        self._groups.append((reader, load_group))

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        self._files_check.require()
        samples: dict[int, dict[str, Any]] = {}
        for row in sorted(set(rows)):  # a group is loaded once, whatever the order
            group = bisect.bisect_right(self._ends, row)
            reader, load_group = self._groups[group]
            if self._loaded_group[0] != group:
                self._loaded_group = group, load_group()
            first_row = self._ends[group - 1] if group else 0
            samples[row] = reader.row(self._loaded_group[1], row - first_row, row)
        return [dict(samples[row]) for row in rows]


def _parquet_rows(config: TasksetConfig, file: Path) -> _Columns:
    """Return the rows of a parquet file, with one row group in memory at a time."""
    arrow = _pyarrow(file)
    import pyarrow.parquet as parquet

    columns = _Columns(config, [file])
    try:
        parquet_file = parquet.ParquetFile(file)
    except arrow.ArrowException as e:
        raise TasksetError(f"{file} is not a parquet file ({e}): convert it, or name another file",
                           file=str(file)) from e
    rows = row_checks.TableRows(file, parquet_file.schema_arrow, config)
    for group in range(parquet_file.metadata.num_row_groups):
        columns.add(rows, partial(parquet_file.read_row_group, group))
    return columns


def _dataset_rows(config: TasksetConfig, folder: Path) -> _Columns:
    """Return the rows of a Hugging Face dataset folder. Raises TasksetError, with the remedy, for other folders."""
    if (folder / "state.json").is_file():
        return _arrow_rows(config, folder)
    details = {"file": str(folder)}
    if (folder / "dataset_dict.json").is_file():
        splits = _json_object(folder / "dataset_dict.json").get("splits", [])
        raise TasksetError(
            f"taskset {config.name}: {folder} holds the splits {', '.join(map(str, splits))}: set split to one of them",
            **details,
        )
    raise TasksetError(
        f"taskset {config.name}: {folder} is a directory without the state.json of a Hugging Face dataset. To take "
        "<split>.jsonl or <split>.parquet in the directory, set split", **details,
    )


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as e:
        raise TasksetError(f"{file}: not JSON ({e})", file=str(file)) from e
    return value if isinstance(value, dict) else {}


def _arrow_rows(config: TasksetConfig, folder: Path) -> _Columns:
    """Return the rows of a dataset written by `save_to_disk`: Arrow streams, mapped into memory."""
    arrow = _pyarrow(folder)
    state = _json_object(folder / "state.json")
    if state.get("_indices_data_files"):
        raise TasksetError(
            f"{folder} was saved with an order beside its rows (by an old `datasets`): call `flatten_indices()` "
            "and save it again", file=str(folder),
        )
    files = [folder / str(named["filename"]) for named in state.get("_data_files", [])]
    if not files:
        raise TasksetError(f"{folder}/state.json names no data files: write the folder again with `save_to_disk`",
                           file=str(folder))
    columns = _Columns(config, files)
    for file in files:
        try:
            with arrow.ipc.open_stream(arrow.memory_map(str(file))) as stream:
                rows = row_checks.TableRows(folder, stream.schema, config)
                for batch in stream:
                    columns.add(rows, partial(lambda batch: batch, batch))  # the file is mapped, not read
        except arrow.ArrowException as e:
            raise TasksetError(f"{file} is not an Arrow stream ({e}): write the folder again with `save_to_disk`",
                               file=str(file)) from e
    return columns
