"""The command `export`, which writes a log, or some of its batches, to files for other tools."""

from __future__ import annotations

import time
from heapq import merge
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.audit.export import export_file, write_events, write_experiences
from trinity_es.audit.perfetto import OTHER_TYPES, write_trace
from trinity_es.cli import common
from trinity_es.events.values import BatchId
from trinity_es.projections.reading.log_reader import Log
from trinity_es.safe_text import plain

__all__ = ["export"]


def _file_option(help_text: str) -> Any:
    return typer.Option(metavar="FILE", help=help_text, dir_okay=False, show_default=False)


def export(
    batches: Annotated[list[str] | None, typer.Argument(
        metavar="[BATCH]...", help="Only of these batches.", show_default=False)] = None,
    experiences: Annotated[Path | None, _file_option("Experiences as rows: .parquet or .jsonl.")] = None,
    as_made: Annotated[bool, typer.Option(
        "--as-made", help="Experiences as runners reported them, before the pipeline.")] = False,
    events: Annotated[Path | None, _file_option("Events, a line of JSON each.")] = None,
    trace: Annotated[Path | None, _file_option("The run as a trace for Perfetto (ui.perfetto.dev): .json.")] = None,
    html: Annotated[Path | None, _file_option("One batch as a page that needs no other file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Write experiences, events, a trace or a batch's page to files. Exits 1 if a payload is missing or has changed.

    An experience has its prompt and completion (null if no text was kept), token ids, mask, logprobs, reward,
    advantages, the version of its weights, and its batch, task, run and step. A note names the batches whose payloads
    were freed. In .jsonl, NaN and infinite numbers are null.

    \b
    Examples:
      trinity-es export --experiences all.parquet
      trinity-es export 3 4 --experiences two.jsonl --events two-events.jsonl
      trinity-es export --trace run.json      # open it at ui.perfetto.dev
      trinity-es export 3 --html batch-3.html
    """
    if not any((experiences, events, trace, html)):
        raise typer.BadParameter("name at least one file: --experiences, --events, --trace or --html")
    if html is not None and len(batches or ()) != 1:
        raise typer.BadParameter("an HTML page shows one batch: name the batch, as in `trinity-es export 3 --html "
                                 "batch-3.html`",
                                 param_hint="--html")
    _require_writable([file for file in (experiences, events, trace, html) if file is not None], force=force)
    started_at = time.monotonic()
    written: dict[str, Any] = {}
    missing: list[str] = []
    with common.open_chosen(log, config) as opened:
        chosen = [common.find_batch(opened, b) for b in batches] if batches else None
        if experiences is not None:
            written["experiences"], missing = _write_experiences(opened, experiences, chosen, as_made=as_made)
        if events is not None:
            count = write_events(opened, events, chosen, common.progress_counter("written"))
            written["events"] = {"file": str(events), "written": count}
        if trace is not None:
            written["trace"] = {"file": str(trace), "written": _write_trace(opened, trace, chosen)}
        if html is not None and chosen is not None:
            from trinity_es.dashboard.batch_export import batch_page  # slow: it imports all pages

            page = batch_page(opened, chosen[0])
            with export_file(html) as file:
                file.write(page.encode(errors="replace"))
            written["html"] = {"file": str(html), "written": len(page)}
    if as_json:
        common.print_json({"log": opened.url, "seconds": time.monotonic() - started_at, **written})
    else:
        units = {"experiences": "experiences", "events": "events", "trace": "slices and instants", "html": "characters"}
        for kind, entry in written.items():
            print(f"{entry['file']}: {entry['written']:,} {units[kind]}")
    if missing:
        raise typer.Exit(1)


def _require_writable(files: list[Path], *, force: bool) -> None:
    """Raise typer.BadParameter if a file exists (unless `force`), is a database, or is named twice."""
    for number, file in enumerate(files):
        if file.resolve() in {other.resolve() for other in files[:number]}:
            raise typer.BadParameter(f"{file} is named twice: give each export another file")
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise typer.BadParameter(f"{file} is not a regular file: name another one")
        if not file.exists():
            continue
        with file.open("rb") as existing:
            if existing.read(16) == b"SQLite format 3\0":
                raise typer.BadParameter(f"{file} is a database, perhaps the log itself: name another file")
        if not force:
            raise typer.BadParameter(f"{file} exists already: --force overwrites it")


def _write_experiences(
    log: Log, path: Path, chosen: list[BatchId] | None, *, as_made: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write the experiences of these batches (None: of all). Returns the entry for `--json`, and missing payloads."""
    progress = common.progress_counter("written", "experiences")
    result = write_experiences(log, path, chosen, as_made=as_made, progress=progress)
    if result.freed:
        common.note(f"not in the file, because they were freed: the experiences of {len(result.freed)} batches: "
                    f"{plain(', '.join(map(str, result.freed)), 200)}")
    if evals := [b for b in chosen or () if log.batch_row(b).batch_type == "eval"]:
        common.note(f"not in the file, because evals keep no experiences: {plain(', '.join(map(str, evals)), 200)}")
    for problem in result.missing:
        common.note(plain(problem))
    entry = {"file": str(path), "written": result.written, "batches": result.batches, "freed": result.freed,
             "missing": result.missing}
    return entry, result.missing


def _write_trace(log: Log, path: Path, chosen: list[BatchId] | None) -> int:
    """Write a trace of these batches (None: of the whole log). Returns its number of slices and instants."""
    progress, last = common.progress_counter("drawn"), log.head().position
    recorded = log.events()
    if chosen is not None:  # with the events of runners and weights in between
        rows = [log.batch_row(b) for b in chosen]
        first, end = min(r.first_position for r in rows), max(r.last_position for r in rows)
        batch_events = [log.events(r.batch_id, r.first_position - 1) for r in rows]
        other_events = log.read_rare(OTHER_TYPES, after=first, before=end + 1)
        recorded = merge(*batch_events, other_events, key=lambda r: r.position)
    with export_file(path) as file:
        written = write_trace(file, recorded, lambda position: progress(min(position, last), last))
    progress(last, last)
    return written
