"""Shared parts of the commands: choice of a log and a batch, parsing of positions and times, printing of data.

With `--json` stdout holds one JSON document and nothing else; messages for the user go to stderr. This module does not
import thespian, torch or vllm, so a log can be read without them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from trinity_es.events.errors import BatchNotFound, DataError, LogError, LogNotFound, LogUnavailable
from trinity_es.events.store.database.urls import masked
from trinity_es.events.values import BatchId, batch_stream, with_offset
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.tables.runner_history import natural_key
from trinity_es.safe_text import batch_named, harmless_json, name_of

if TYPE_CHECKING:  # slow to import, and reading a log does not need it
    from trinity_es.config.config import Config

__all__ = [
    "MAX_INTEGER", "ConfigArgument", "ConfigOption", "JsonOption", "LogOption", "SetOption", "choose_log",
    "find_batch", "note", "open_chosen", "parse_at", "position_before", "print_json", "progress_counter", "read_config",
    "require_runner",
]

_TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?")

MAX_INTEGER = 2**63 - 1
"""Largest integer that a database column holds."""
MAX_DIGITS = 18
"""Nearest batches are looked up only for batch numbers of at most this many digits."""
LOG_VARIABLE = "TRINITY_ES_LOG"
RUN_LOGS = ("runs/log.sqlite", "runs/*/log.sqlite", "runs/*/*/log.sqlite", "runs/*/runs/*/*/log.sqlite")
"""Patterns of the logs of runs (of a trainer, of a config, of `trinity-es demo`), from the working directory."""
LOGS_HERE = ("*.sqlite", "*.db")

LogOption = Annotated[
    str | None,
    typer.Option("--log", metavar="URL_OR_PATH", help="The log to read. Default: that of --config, else the "
                 f"environment's {LOG_VARIABLE}, else the newest run under ./runs, else the log in this folder."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="CONFIG", help="Config file of the run, which names its log.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config, as in buffer.batch_size=8; repeat."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text for people.")]


def note(text: str) -> None:
    """Print a message to stderr, as stdout is for a command's result."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as indented JSON, with control characters in strings escaped."""
    document = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    write_json(harmless_json(document).decode())


def write_json(line: str) -> None:
    """Write a line of JSON to stdout. Characters that the output's encoding lacks become JSON escapes."""
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(json.loads(line))
    sys.stdout.write(line + "\n")
    sys.stdout.flush()  # a program may be reading from a pipe while the command continues


def read_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a config file and apply `KEY=VALUE` overrides. Raises ConfigError."""
    from trinity_es.config.config import load_config

    return load_config(path, overrides or [])


def choose_log(log: str | None, config: Path | None = None) -> str:
    """Return the URL or path of the log. Without options, choose a log and name it on stderr. Raises LogNotFound."""
    if log is not None:
        return log
    if config is not None:
        return read_config(config).store.url
    if url := os.environ.get(LOG_VARIABLE):
        note(f"log: {masked(url)} (from {LOG_VARIABLE})")
        return url
    logs = [path for pattern in RUN_LOGS for path in Path().glob(pattern)]
    if not logs:
        return _only_log_here()
    newest = max(logs, key=_last_written_at)
    note(f"log: {newest} (the newest run here; --log chooses another)")
    return str(newest)


def _only_log_here() -> str:
    """Return the only log directly in the working directory. Raises LogNotFound if there are none or several."""
    logs = sorted(path for pattern in LOGS_HERE for path in Path().glob(pattern) if _is_log(path))
    if len(logs) == 1:
        note(f"log: {logs[0]} (the one in this folder; --log chooses another)")
        return str(logs[0])
    several = f", and {len(logs)} logs in this folder ({', '.join(map(str, logs[:3]))})" if logs else ""
    raise LogNotFound(
        f"there is no run under {Path.cwd() / 'runs'} (no log.sqlite, NAME/log.sqlite or PROJECT/NAME/log.sqlite)"
        f"{several}: name a log with --log, or its config with --config")


def _is_log(path: Path) -> bool:
    """Return True if this file is a log that this release can read, even if the file is locked now."""
    try:
        open_log(str(path)).close()
    except LogUnavailable:  # locked
        return True
    except (LogError, OSError):
        return False
    return True


def _last_written_at(path: Path) -> float:
    """Return the time of the last write to a SQLite log or its `-wal` file, in unix seconds."""
    files = (path, path.with_name(path.name + "-wal"))
    return max(f.stat().st_mtime for f in files if f.exists())


def open_chosen(log: str | None, config: Path | None = None) -> Log:
    """Open the log that `choose_log` names. Raises LogNotFound, NotALog, LogTooNew, LogUnavailable."""
    return open_log(choose_log(log, config))


def find_batch(log: Log, text: str) -> BatchId:
    """Return the id of the batch that a user named (see `batch_named`). Raises BatchNotFound with suggestions."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BatchNotFound(f"no batch {text!r} in {log.url}: the name is not UTF-8. `trinity-es batches` lists all "
                            "batches") from None
    if (batch_id := batch_named(log, text)) is not None:
        return batch_id
    # The ids of evals begin with their step, as in 12/letters.
    evals_of_step = [name_of(row.batch_id) for row in log.batches() if name_of(row.batch_id).startswith(f"{text}/")]
    suggestions = evals_of_step[:3] or _nearest_batches(log, text)
    if suggestions:
        hint = f" did you mean {' or '.join(suggestions)}?"
    else:
        hint = "" if log.count_batches() else " it holds none yet;"
    raise BatchNotFound(f"no batch {text} in {log.url}:{hint} `trinity-es batches` lists all batches")


def require_runner(log: Log, runner: str, option: str) -> None:
    """Raise typer.BadParameter if the log lacks a runner of this name. The error lists the log's runners."""
    runners = sorted({life.runner for life in log.runner_lives()}, key=natural_key)
    if runner not in runners:
        raise typer.BadParameter(f"there is no runner {runner!r}. The runners are: {', '.join(runners) or 'none'}",
                                 param_hint=option)


def _nearest_batches(log: Log, text: str) -> list[str]:
    """Return the numbers of the nearest batches: the next one below `text` and the next one above it."""
    if not text.isdecimal() or not text.isascii() or len(text) > MAX_DIGITS:
        return []
    numbers = [row.batch_id for row in log.batches() if isinstance(row.batch_id, int)]
    below = [n for n in numbers if n <= int(text)]
    above = [n for n in numbers if n > int(text)]
    return [str(n) for n in (*sorted(below)[-1:], *sorted(above)[:1])]


def parse_at(
    text: str | None, log: Log | None = None, batch_id: BatchId | None = None, option: str = "--at"
) -> int | datetime | None:
    """Parse the log position or the time that a user wrote; None for None.

    A time without an offset is local. A time without a date is the first such time since the batch began; without a
    batch it is on the day of the log's last event. If the clock was stepped near that time, a note is printed. Raises
    typer.BadParameter, also for a position after the log's end.
    """
    if text is None:
        return None
    at = _position_or_moment(text, log, batch_id, option)
    if log is not None and isinstance(at, datetime) and (clock_note := log.clock_note(at)):
        note(clock_note)
    return at


def position_before(log: Log, at: int | datetime | None) -> int:
    """Return the last position before `at`, a position or a time."""
    if isinstance(at, int):
        return at - 1
    position = log.position_of(at) or 0
    # `position_of` returns the last event until `at`; events of exactly that time are not before it.
    while position and at is not None and (r := log.at(position)) is not None and r.recorded_at == at.timestamp():
        position -= 1
    return position


def _position_or_moment(text: str, log: Log | None, batch_id: BatchId | None, option: str) -> int | datetime:
    """Parse a position or a time as `parse_at` does, without printing a note. Raises typer.BadParameter."""
    if text.isdecimal():
        if log is not None and int(text) > (head := log.head().position):
            raise typer.BadParameter(f"{text} is after the log's last position: give at most {head}", param_hint=option)
        return int(text)
    try:
        if log is None or not _TIME_OF_DAY.fullmatch(text):
            return with_offset(datetime.fromisoformat(text))
        reference = log.at(log.head().position) if batch_id is None else next(log.read(stream=batch_stream(batch_id)))
        began_at = datetime.fromtimestamp(time.time() if reference is None else reference.recorded_at).astimezone()
        day = began_at.astimezone(datetime.fromisoformat(f"{began_at.date()}T{text}").tzinfo).date()
        moment = with_offset(datetime.fromisoformat(f"{day}T{text}"))
        if batch_id is None or moment >= began_at.replace(microsecond=0):
            return moment
        last = log.at(log.batch_row(batch_id).last_position)
        if last is None:
            return moment
        next_day = with_offset(datetime.fromisoformat(f"{day + timedelta(days=1)}T{text}"))
        # The user means a time before the batch, or one after the next midnight: take the nearer to the batch.
        return next_day if next_day.timestamp() - last.recorded_at < (began_at - moment).total_seconds() else moment
    except DataError as e:
        raise typer.BadParameter(e.message, param_hint=option) from e
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a position (a number, as in `trinity-es events`) nor a time (as in "
            "2026-03-01T12:30:00, or 12:30:00)", param_hint=option,
        ) from None


def progress_counter(verb: str, unit: str = "events") -> Callable[..., None]:
    """Return a callback `(done, total)` that prints `VERB done of total UNIT` on stderr; `total` may be omitted.

    On a terminal it updates one line; elsewhere it prints a line every ten seconds.
    """
    begun_at = printed_at = time.monotonic()

    def print_progress(done: int, total: int | None = None) -> None:
        nonlocal printed_at
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        is_last = total is not None and done >= total and is_terminal
        if now - printed_at < (0.1 if is_terminal else 10.0) and not is_last:
            return
        printed_at = now
        rate = done / max(now - begun_at, 1e-6)
        of_total = "" if total is None else f" of {total:,}"
        line = f"{verb} {done:,}{of_total} {unit}, {rate:,.0f} a second"
        if is_terminal:
            sys.stderr.write(f"\r{line}" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return print_progress
