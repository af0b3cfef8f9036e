"""A log as files for other tools: experiences as rows, events as lines.

What a rollout wrote goes out as it is, as data: JSON escapes what could move a terminal, parquet keeps text as text.
Everything is streamed, a payload or a page of events at a time, and a file is there whole or not at all. What can't be
exported (payloads that were freed, are missing or were changed) is named, never skipped without a word. The trace of a
run for Perfetto is in `trinity_es.audit.perfetto`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import ConfigError, CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.experience_table import ParquetTable, json_lines, row_of
from trinity_es.events.store.payloads.experiences import ExperienceReader
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, tell_one
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_list import BatchRow
from trinity_es.text import event_document, harmless_json

__all__ = ["Exported", "experience_rows", "export_file", "write_events", "write_experiences"]

ROWS = 256
"""Number of experiences that are turned into rows, and written, at once."""


@dataclass(slots=True)
class Exported:
    """What an export did: how much was written, and what could not be."""

    written: int = 0
    batches: int = 0
    freed: list[BatchId] = field(default_factory=list)
    """Batches whose payloads were deleted on purpose (`store.retention`): their events are all that is left."""
    missing: list[str] = field(default_factory=list)
    """Payloads that should be there and are not, or are not what was written: a sentence each."""


# --- experiences ----------------------------------------------------------------------------------------------------
def experience_rows(
    log: Log, done: Exported, batch_ids: Sequence[BatchId] | None = None, *, as_made: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows by COLUMNS, at most `ROWS` at a time, batch after batch in the order of submission; arrays are numpy.

    What the pipeline delivered, in every try of a batch id that was submitted again; with `as_made` what the runners
    brought in, before any filter, also of batches that have not ended. `done` is counted up meanwhile. Raises
    LogNotFound where there is no payload store.
    """
    freed, store = log.freed(), None
    try:
        for row in _rows_of(log, batch_ids):
            taken = set[ev.PayloadRef]()
            for batch in _tries(log, row.batch_id):
                made = {(run.task, run.run): run for run in batch.rows if run.outcome == "finished"}
                refs = batch.state.experiences
                if as_made:  # what a later try took over is not made twice
                    found = [run.payload for run in batch.rows if run.payload is not None and run.payload not in taken]
                    taken.update(found)
                    refs = _in_one(found)
                if not refs:
                    continue
                if freed.get(batch_stream(row.batch_id), 0) > batch.first_position:
                    done.freed.append(row.batch_id)
                    continue
                done.batches += 1
                store = store or log.payloads()
                yield from _read(store, refs, f"batch {row.batch_id!r}", made, batch.state.trained_step, done)
        if batch_ids is None and not as_made:
            for item in log.read(stream="experiences", types=["ExperiencesProcessed"]):
                assert isinstance(item.event, ev.ExperiencesProcessed)
                store = store or log.payloads()
                yield from _read(store, item.event.experiences, f"position {item.position}", {}, None, done)
    finally:
        if store is not None:
            store.close()


def _tries(log: Log, batch_id: BatchId) -> Iterator[BatchTimeline]:
    """Yield every submission of a batch's id, each as it was when the next one began anew."""
    story: BatchTimeline | None = None
    for item in log.events(batch_id):
        if story is not None and isinstance(item.event, ev.BatchSubmitted):
            yield story
        story = tell_one(story, item)
    if story is not None:
        yield story


def _in_one(refs: Iterable[ev.PayloadRef]) -> list[ev.PayloadRef]:
    """Return what these name, each once: what lies side by side in one payload as one."""
    out: list[ev.PayloadRef] = []
    for ref, _ in groupby(refs):
        if out and (ref.digest, ref.first) == (out[-1].digest, out[-1].first + out[-1].count):
            out[-1] = replace(out[-1], count=out[-1].count + ref.count)
        else:
            out.append(ref)
    return out


def _rows_of(log: Log, batch_ids: Sequence[BatchId] | None) -> Iterator[BatchRow]:
    wanted = None if batch_ids is None else {batch_stream(b) for b in batch_ids}
    return (row for row in log.batches() if wanted is None or batch_stream(row.batch_id) in wanted)


def _read(
    store: PayloadStore, refs: Sequence[ev.PayloadRef], whose: str, made: dict[tuple[int, int], RunRow],
    trained_step: int | None, done: Exported,
) -> Iterator[list[dict[str, Any]]]:
    reader = ExperienceReader(store)  # a delivery is mostly one payload, and many refs may name it
    for ref in refs:
        for first in range(ref.first, ref.first + ref.count, ROWS):
            try:
                found = reader.read(ref.digest, first, min(ROWS, ref.first + ref.count - first))
            except (PayloadNotFound, CorruptPayload) as e:
                done.missing.append(f"{whose}: {e.message}")
                break
            done.written += len(found)
            yield [_row(e, made, trained_step) for e in found]


def _row(e: Experience, made: dict[tuple[int, int], RunRow], trained_step: int | None) -> dict[str, Any]:
    who = made.get((e.eid.task, e.eid.run)) if isinstance(e.eid.task, int) else None
    if who is None:
        # An answer of mode `serve` is of no batch, so its runner stands in its info alone.
        runner = e.info.get("runner") if "message_id" in e.info else None
        return row_of(e, runner=runner if isinstance(runner, str) else None, trained_step=trained_step)
    # The event's versions are those of the attempt: what the runner stamped is of this experience.
    return row_of(e, versions=(who.model_version, who.model_version_end), runner=who.runner, attempt=who.attempt,
                  trained_step=trained_step)


def write_experiences(
    log: Log, path: Path, batch_ids: Sequence[BatchId] | None = None, *, as_made: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Write all experiences (or those of these batches) into a `.parquet` or `.jsonl` file; `progress` counts them.

    In parquet `batch` and `task` are text, `messages, metrics` and `info` JSON; in .jsonl a number that is not finite
    (the logprob -inf) is null, since JSON has none. Raises ConfigError for another ending,
    and where pyarrow is not installed; LogNotFound where the log has no payload store.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: experiences are written as .parquet or .jsonl, not as {path.suffix or 'no ending'}")
    done = Exported()
    with export_file(path) as file:
        table = ParquetTable(file) if path.suffix == ".parquet" else None
        for rows in experience_rows(log, done, batch_ids, as_made=as_made):
            if table is None:
                file.write(harmless_json(json_lines(rows)))
            else:
                table.write(rows)
            if progress is not None:
                progress(done.written)
        if table is not None:
            table.close()
    return done


# --- events ---------------------------------------------------------------------------------------------------------
def write_events(
    log: Log, path: Path, batch_ids: Sequence[BatchId] | None = None, progress: Callable[[int, int], None] | None = None
) -> Exported:
    """Write every event (or those of these batches) as a line of JSON; `progress(position, last position)`."""
    done, last = Exported(), log.head().position
    sources = [log.events()] if batch_ids is None else [log.events(b) for b in batch_ids]
    with export_file(path) as file:
        for source in sources:
            while lines := [(r.position, event_document(r)) for r in islice(source, 1000)]:
                file.write(b"".join(line + b"\n" for _, line in lines))
                done.written += len(lines)
                if progress is not None:
                    progress(min(lines[-1][0], last), last)
    return done


def export_file(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Give a file to write, which is there whole or not at all. Raises ConfigError, LogNotFound for no such place."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise LogNotFound(f"no directory {path.parent} to write {path.name} to")
    umask = os.umask(0)
    os.umask(umask)
    return whole_file(path, mode=0o666 & ~umask)
