"""Monitors: where the metrics of steps, trainer steps and evals are written while a run goes on (P37).

One protocol, `log(metrics, step)` and `close()`; names of metrics have slashes. `jsonl` is always on; `tensorboard` and
`wandb` need their packages (the extras of the same names); your own is `module:Class`. A monitor that fails never stops
a run: it is said once in the text log, and it is asked again with the next step.

All of it is in the log of events too (`BatchFinalized.result`, `BatchTrained.metrics`), so a run that goes on after a
crash makes `metrics.jsonl` whole: what its last life did not get to write is added, and what the steps after its last
checkpoint had written is taken out, because they are done again. No step has a metric twice.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import orjson

from actors.named import build
from events import vocabulary as ev
from events.errors import ConfigError
from events.values import BatchLifecycleState, batch_stream
from projections.audit import Log
from trinity_es.config import Config

__all__ = ["MONITORS", "JsonlMonitor", "Monitor", "Monitors", "TensorboardMonitor", "WandbMonitor", "read_metrics"]

CLOSE_SECONDS = 10.0
"""So long may monitors that run behind take to catch up at the end."""
REMEMBERED_STEPS = 1000
"""Newest steps of `metrics.jsonl` in which what is there already is not written again."""
_SHAPE = "a class with log(metrics, step) and close()"
_LOG = logging.getLogger("trinity_es.monitors")


class Monitor(Protocol):
    """Where metrics go. Built once with its `monitor_args`, then called from one thread."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a step: finite numbers by names with slashes. A step may come in several calls."""

    def close(self) -> None:
        """Write what is left."""


# --- the ones that we know ------------------------------------------------------------------------------------------
class JsonlMonitor:
    """`jsonl`: one JSON object a line, `{"step", "time" (unix seconds), "<metric>": number, ...}`, appended."""

    def __init__(self, path: str | Path, *, after: int | None = None) -> None:
        """`after`: the run goes on behind this step; what the file has of later ones is taken out, and what it has of
        earlier ones is not written again. None: the run is new, and whatever is there is another's.

        A last line that a crash cut off is taken out.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._names: dict[int, set[str]] = {}
        self.last = -1
        """The last step in the file; -1: none."""
        self._clean(after)
        self._file = self.path.open("ab")

    def _clean(self, after: int | None) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = []
        for line in lines:
            try:
                row = orjson.loads(line)
                step = int(row["step"])
            except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
                if line is not lines[-1]:  # somebody else's, not one that was cut off
                    kept.append(line)
                continue
            if line.endswith(b"\n") and (after is None or step <= after):
                kept.append(line)
                if after is not None:
                    self._note(step, row.keys())
        if len(kept) < len(lines):
            written = self.path.with_name(f".{self.path.name}.unfinished")
            written.write_bytes(b"".join(kept))
            os.replace(written, self.path)

    def _note(self, step: int, names: Any) -> None:
        self._names.setdefault(step, set()).update(names)
        self.last = max(self.last, step)
        while len(self._names) > REMEMBERED_STEPS:
            del self._names[next(iter(self._names))]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append what the file does not have of this step."""
        new = {name: metrics[name] for name in sorted(metrics.keys() - self._names.get(step, set()))}
        if not new:
            return
        row = {"step": step, "time": round(time.time(), 3), **new}
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        self._note(step, new)

    def close(self) -> None:
        self._file.close()


class TensorboardMonitor:
    """`tensorboard`: scalars in event files under `path` (default: `tensorboard/` in the run's folder).

    Needs the package tensorboard, and neither torch nor tensorflow. A run that goes on tells TensorBoard to forget the
    steps that are done again.
    """

    def __init__(self, path: str, *, after: int | None = None) -> None:
        writer = _needed("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self._events = _needed("tensorboard", "tensorboard.compat.proto.event_pb2")
        self._summaries = _needed("tensorboard", "tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(path)
        if after is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=after + 1, session_log=start)
            self._writer.flush()

    def _write(self, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), **what))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in sorted(metrics.items())]
        self._write(step=step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """`wandb`: a run of the config's project and name; further arguments are those of `wandb.init`.

    Needs the package wandb; offline with `mode: offline` or WANDB_MODE. A run that goes on is the same run there (by an
    id made from project, name and store), and steps that are done again keep what they had, as wandb has it.
    """

    def __init__(self, config: Config, **args: Any) -> None:
        self._wandb = _needed("wandb", "wandb")
        name = f"{config.project}-{config.name}"
        same = sha256(config.masked()["store"]["url"].encode()).hexdigest()[:8]
        self._args = {
            "project": config.project, "name": config.name, "id": f"{name}-{same}", "resume": "allow",
            "dir": config.run_dir, "config": config.masked(), **args,
        }
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is None:  # not before: it may ask a server
            Path(self._args["dir"]).mkdir(parents=True, exist_ok=True)
            self._run = self._wandb.init(**self._args)
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _needed(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(
            f"the monitor {package} needs the package {package} ({e}): pip install 'trinity-es[{package}]', or take it "
            "out of monitor.monitor_type"
        ) from e


MONITORS = ("jsonl", "tensorboard", "wandb")
"""Monitors by the name that a config gives; your own is named "module:Class" there."""


def _known(config: Config, after: int | None) -> dict[str, Callable[..., Monitor]]:
    run = Path(config.run_dir)
    return {
        "tensorboard": lambda path="tensorboard": TensorboardMonitor(str(run / path), after=after),
        "wandb": lambda **args: WandbMonitor(config, **args),
    }


# --- all of a run's -------------------------------------------------------------------------------------------------
class Monitors:
    """All monitors of a run. `metrics.jsonl` is written at once, the others by a thread: none holds up the run."""

    def __init__(self, config: Config, *, after: int | None = None, log: Log | None = None) -> None:
        """`after`: the run goes on behind this step; with `log`, what `metrics.jsonl` lacks up to it is added.

        Raises ConfigError for a name that is not found, a package that is missing and arguments that do not fit.
        """
        settings = config.monitor
        if config.code_path not in sys.path:
            sys.path.append(config.code_path)
        self._others: dict[str, Monitor] = {}
        strangers = settings.monitor_args.keys() - {*settings.monitor_type, "jsonl"}
        if strangers:
            raise ConfigError(f"monitor.monitor_args has {min(strangers)!r}, which monitor.monitor_type does not")
        for name in dict.fromkeys(n for n in settings.monitor_type if n != "jsonl"):
            monitor = build("monitor", name, settings.monitor_args.get(name, {}), _known(config, after), _SHAPE)
            for method in ("log", "close"):
                if not callable(getattr(monitor, method, None)):
                    raise ConfigError(f"monitor {name} has no method {method}: give {_SHAPE}", monitor=name)
            self._others[name] = monitor
        path = Path(config.run_dir) / settings.monitor_args.get("jsonl", {}).get("path", "metrics.jsonl")
        self._failed: set[str] = set()
        self._jsonl: JsonlMonitor | None = None
        try:
            self._jsonl = JsonlMonitor(path, after=after)
            if log is not None and after is not None:
                self._add_missing(log, self._jsonl.last - config.synchronizer.sync_interval, after)
        except OSError as e:
            self._complain("jsonl", e)
        self._queue: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int, prefix: str = "rollout") -> None:
        """Write metrics of a step. A name without a slash gets `prefix` before it; what is not finite is left out."""
        plain = _plain(metrics, prefix)
        if plain:
            if self._jsonl is not None:
                self._try("jsonl", partial(self._jsonl.log, plain, step))
            self._queue.put((plain, step))

    def close(self) -> None:
        """Let the monitors write what is left; one that takes too long is left behind."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _LOG.warning("monitors %s did not end within %.0f s", ", ".join(self._others), CLOSE_SECONDS)
        if self._jsonl is not None:
            self._try("jsonl", self._jsonl.close)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            for name, monitor in self._others.items():
                self._try(name, partial(monitor.log, *item))
        for name, monitor in self._others.items():
            self._try(name, monitor.close)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:  # a user's code, or a server's: the run goes on
            self._complain(name, e)

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            _LOG.warning("monitor %s fails, the run goes on (said once): %s: %s", name, type(error).__name__, error)

    def _add_missing(self, log: Log, since: int, until: int) -> None:
        """What the last life did not get to write: it died between an event and its line."""
        assert self._jsonl is not None
        for row in log.batches():
            number = re.match(r"\d+", str(row.batch_id))
            step = -1 if number is None else int(number.group())
            if row.state != BatchLifecycleState.FINALIZED.value or not since <= step <= until:
                continue
            result: dict[str, Any] = {}
            trained: dict[str, float] = {}
            for recorded in log.read(stream=batch_stream(row.batch_id), types=["BatchFinalized", "BatchTrained"]):
                match recorded.event:
                    case ev.BatchFinalized() as event:
                        result, trained = event.result["metrics"], {}
                    case ev.BatchTrained() as event:
                        trained = event.metrics
            self._jsonl.log(_plain(result, "rollout") | _plain(trained, "trainer"), step)


def _plain(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    named = {name if "/" in name else f"{prefix}/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in named.items() if math.isfinite(value)}


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """A `metrics.jsonl` by step: all its metrics, without the times of writing."""
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_bytes().splitlines():
        row = orjson.loads(line)
        step = row.pop("step")
        del row["time"]
        steps.setdefault(step, {}).update(row)
    return steps
