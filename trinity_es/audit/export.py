"""Export of a log for other tools: experiences as table rows, events as lines of JSON.

Texts of rollouts are exported unchanged; in JSON, terminal control characters are escaped. Exports stream one payload
or page of events at a time. If an export fails, no partial file is left. Payloads that can't be exported (freed,
missing or changed) are reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import ConfigError, CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.experience_rows import ParquetTable, json_lines
from trinity_es.events.store.payloads.experiences import ExperienceReader
from trinity_es.events.store.payloads.payloads import PayloadStore, open_lazily
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, evolve_timeline
from trinity_es.projections.reading.log_reader import Log
from trinity_es.safe_text import event_document, harmless_json

__all__ = ["Exported", "experience_tables", "export_file", "write_events", "write_experiences"]

CHUNK_ROWS = 256


@dataclass(slots=True)
class Exported:
    """Result of an export: the number of written experiences, and the payloads that could not be read."""

    written: int = 0
    batches: int = 0
    freed: list[BatchId] = field(default_factory=list)
    """Batches whose payloads `store.retention` deleted."""
    missing: list[str] = field(default_factory=list)
    """One sentence for each payload that is missing or corrupt."""


# --- experiences ----------------------------------------------------------------------------------------------------
def experience_tables(
    log: Log, result: Exported, batch_ids: Sequence[BatchId] | None = None, *, as_made: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield tables of at most CHUNK_ROWS experiences, batch by batch in the order of submission.

    A table maps the names of COLUMNS to lists. Its rows are the experiences that the pipeline delivered, for every
    submission of a batch id. With `as_made` they are the experiences that the runners produced, before any filter, also
    of open batches. Updates `result` meanwhile. Raises LogNotFound if there is no payload store.
    """
    freed = log.freed()
    streams = None if batch_ids is None else {batch_stream(b) for b in batch_ids}
    with closing(open_lazily(log.payloads)) as store:
        for row in log.batches():
            if streams is not None and batch_stream(row.batch_id) not in streams:
                continue
            exported_refs = set[ev.PayloadRef]()
            for batch in _submissions(log, row.batch_id):
                run_rows = {(run.task, run.run): run for run in batch.rows if run.outcome == "finished"}
                refs = batch.state.experiences
                if as_made:  # a later submission may reuse payloads; each is exported once
                    made_refs = [r.payload for r in batch.rows if r.payload and r.payload not in exported_refs]
                    exported_refs.update(made_refs)
                    refs = _merge_adjacent(made_refs)
                if not refs:
                    continue
                if freed.get(batch_stream(row.batch_id), 0) > batch.first_position:
                    result.freed.append(row.batch_id)
                    continue
                result.batches += 1
                owner, trained_step = f"batch {row.batch_id!r}", batch.state.trained_step
                yield from _read_tables(store, refs, owner, run_rows, trained_step, result)
        if batch_ids is None and not as_made:
            for item in log.read(stream="experiences", types=["ExperiencesProcessed"]):
                assert isinstance(item.event, ev.ExperiencesProcessed)
                yield from _read_tables(store, item.event.experiences, f"position {item.position}", {}, None, result)


def _submissions(log: Log, batch_id: BatchId) -> Iterator[BatchTimeline]:
    """Yield the final state of each submission of a batch id."""
    timeline: BatchTimeline | None = None
    for item in log.events(batch_id):
        if timeline is not None and isinstance(item.event, ev.BatchSubmitted):
            yield timeline
        timeline = evolve_timeline(timeline, item)
    if timeline is not None:
        yield timeline


def _merge_adjacent(refs: Iterable[ev.PayloadRef]) -> list[ev.PayloadRef]:
    """Drop repeated references, and merge references to adjacent parts of one payload."""
    merged: list[ev.PayloadRef] = []
    for ref, _ in groupby(refs):
        if merged and (ref.digest, ref.first) == (merged[-1].digest, merged[-1].first + merged[-1].count):
            merged[-1] = replace(merged[-1], count=merged[-1].count + ref.count)
        else:
            merged.append(ref)
    return merged


def _read_tables(
    store: PayloadStore, refs: Sequence[ev.PayloadRef], owner: str, run_rows: dict[tuple[int, int], RunRow],
    trained_step: int | None, result: Exported,
) -> Iterator[dict[str, Any]]:
    """Yield tables of these experiences. `owner`: their batch, as in errors; `run_rows`: its runs by (task, run)."""
    reader = ExperienceReader(store)  # caches the payload, as many refs name the same one
    for ref in refs:
        for first in range(ref.first, ref.first + ref.count, CHUNK_ROWS):
            try:
                columns = reader.read(ref.digest, first, min(CHUNK_ROWS, ref.first + ref.count - first))
            except (PayloadNotFound, CorruptPayload) as e:
                result.missing.append(f"{owner}: {e.message}")
                break
            result.written += len(columns)
            yield _table(columns, run_rows, trained_step)


def _table(
    columns: ExperienceColumns, run_rows: dict[tuple[int, int], RunRow], trained_step: int | None
) -> dict[str, Any]:
    """Return experiences as a table (COLUMNS), with the versions, runner and attempt of their runs in `run_rows`."""
    table = columns.table()
    runs = [run_rows.get((task, run)) if isinstance(task, int) else None
            for task, run in zip(columns.tasks, columns.runs.tolist(), strict=True)]
    # An experience's info has its own versions; the run's are those of the whole attempt.
    oldest, newest = table["oldest_version"], table["newest_version"]
    for i, run in enumerate(runs):
        if run is not None and oldest[i] is None:
            oldest[i], newest[i] = run.model_version, run.model_version_end
    return table | {
        "runner": [_serving_runner(info) if run is None else run.runner
                   for run, info in zip(runs, table["info"], strict=True)],
        "attempt": [None if run is None else run.attempt for run in runs],
        "trained_step": [trained_step] * len(columns),
    }


def _serving_runner(info: dict[str, Any]) -> str | None:
    """Return the runner of an answer of mode `serve`, which belongs to no batch; None for other experiences."""
    runner = info.get("runner") if "message_id" in info else None
    return runner if isinstance(runner, str) else None


def write_experiences(
    log: Log, path: Path, batch_ids: Sequence[BatchId] | None = None, *, as_made: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Write all experiences (or those of these batches) to a `.parquet` or `.jsonl` file.

    `progress` is called with the number written so far. In parquet `batch` and `task` are text, `messages, metrics` and
    `info` JSON. In .jsonl a number that is not finite (the logprob -inf) is null, since JSON has none. Raises
    ConfigError for another suffix or if pyarrow is not installed, and LogNotFound without a payload store.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path} is not a .parquet or .jsonl file: give a name with one of these endings")
    result = Exported()
    with export_file(path) as file:
        table = ParquetTable(file) if path.suffix == ".parquet" else None
        for columns in experience_tables(log, result, batch_ids, as_made=as_made):
            if table is None:
                file.write(harmless_json(json_lines(columns)))
            else:
                table.write(columns)
            if progress is not None:
                progress(result.written)
        if table is not None:
            table.close()
    return result


# --- events ---------------------------------------------------------------------------------------------------------
def write_events(
    log: Log, path: Path, batch_ids: Sequence[BatchId] | None, progress: Callable[[int, int], None]
) -> int:
    """Write all events (or those of these batches), a line of JSON each, and return their number.

    Calls `progress(position, last position)`.
    """
    written, last_position = 0, log.head().position
    sources = [log.events()] if batch_ids is None else [log.events(b) for b in batch_ids]
    with export_file(path) as file:
        for source in sources:
            while events := list(islice(source, 1000)):
                file.write(b"".join(event_document(r) + b"\n" for r in events))
                written += len(events)
                progress(min(events[-1].position, last_position), last_position)
    return written


def export_file(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Open a file for writing; an error leaves no partial file. Raises ConfigError, LogNotFound (no such folder)."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise LogNotFound(f"{path.name} can't be written, because there is no folder {path.parent}: create it first")
    umask = os.umask(0)  # no call only reads the umask
    os.umask(umask)
    return whole_file(path, mode=0o666 & ~umask)
