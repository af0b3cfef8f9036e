"""Monitors: receivers of the metrics of explorer steps, trainer steps and evals during a run.

A monitor has the methods `log(metrics, step)` and `close()`. `jsonl` is always on. `tensorboard`, `wandb`, `trackio`,
`mlflow` and `swanlab` need their packages (the extras of the same names); your own is `module:Class`. A monitor that
fails never stops a run: the failure is logged once, and the monitor still gets the next steps.

Metrics are read from the log (BatchFinalized, BatchTrained, and the events of `trinity_es.telemetry.explorer_metrics`),
so monitors work wherever explorer and trainer run. When a run starts or resumes, `metrics.jsonl` is rewritten from the
log; then it grows line by line. So no step has a metric twice, and lines that a killed process did not write are added.
Metrics of steps after the run's checkpoint are left out, because these steps are trained again.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from trinity_es.actors.plugin_lookup import add_import_folders, build, find, registered
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.store.log import Recorded
from trinity_es.projections.reading.log_reader import Log, read_repeatedly
from trinity_es.telemetry import explorer_metrics
from trinity_es.telemetry.metrics_file import DIGITS, JsonlMonitor, LineId, Row
from trinity_es.telemetry.monitor_services import Monitor
from trinity_es.telemetry.opentelemetry import start_traces

__all__ = ["Monitors", "finite_metrics"]

CLOSE_SECONDS = 10.0
READ_SECONDS = 0.5
_TYPES = (*explorer_metrics.TYPES, "BatchTrained")
_STEP_PREFIXES = ("rollout/", "eval/", "bench/", "explorer/")
"""Prefixes of the explorer's metrics. A trainer's metric with such a prefix gets `trainer/` before it."""
_SHAPE = "a class with log(metrics, step) and close()"
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


# --- all of a run's -------------------------------------------------------------------------------------------------
class Monitors:
    """All monitors of a run. They never delay it: one thread writes `metrics.jsonl`, another calls the others."""

    def __init__(self, config: Config, *, after: float | None = None) -> None:
        """Build the monitors. Raises ConfigError for an unknown name, a missing package or wrong arguments.

        `after`: the step of the checkpoint that the run resumes from (inf: it repeats no step); None for a new run.
        """
        settings = config.monitor
        add_import_folders(config.code_path, first=False)
        self._monitors: dict[str, Monitor] = {}
        unknown = settings.monitor_args.keys() - {*settings.monitor_type, "jsonl"}
        if unknown:
            raise ConfigError(f"monitor.monitor_args has {min(unknown)!r}, which is not in monitor.monitor_type: add "
                              "it there, or remove its arguments")
        for name in dict.fromkeys(n for n in settings.monitor_type if n != "jsonl"):
            make_monitor = find("monitor", name, registered("monitor"), _SHAPE)
            if hasattr(make_monitor, "of_run"):
                make_monitor = partial(make_monitor.of_run, config, after)
            monitor = build("monitor", name, settings.monitor_args.get(name, {}), {name: make_monitor}, _SHAPE)
            for method in ("log", "close"):
                if not callable(getattr(monitor, method, None)):
                    raise ConfigError(f"monitor {name} has no method {method}: give {_SHAPE}", monitor=name)
            self._monitors[name] = monitor
        path = Path(config.run_dir) / settings.monitor_args.get("jsonl", {}).get("path", "metrics.jsonl")
        self._url, self._after = config.store.url, after
        self._times = explorer_metrics.ExplorerTimes(
            config.synchronizer.sync_interval, "bench" if config.mode == "bench" else "eval"
        )
        self._position: int | None = None
        """Log position up to which all metrics are written; None before the first read."""
        self._warned_names: set[str] = set()
        self._jsonl_lock = threading.Lock()
        self._jsonl: JsonlMonitor | None = None
        try:
            self._jsonl = JsonlMonitor(path)
        except OSError as e:
            self._warn_once("jsonl", e)
        self._traces = start_traces(self._url, settings.otlp_endpoint)
        self._queue: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run_monitors, name="monitors", daemon=True)
        self._worker.start()
        self._stop = threading.Event()
        self._reader: threading.Thread | None = None

    def follow(self) -> None:
        """Start a thread that writes new metrics of the log until `close`. The log need not exist yet."""
        on_error = partial(self._warn_once, "(the log)")
        self._reader = threading.Thread(target=read_repeatedly, name="metrics", daemon=True,
                                        args=(self._url, self._write_new_metrics, self._stop, READ_SECONDS, on_error))
        self._reader.start()

    def log(self, row: Row) -> None:
        """Write metrics of a step. All are finite."""
        if self._jsonl is not None:
            with self._jsonl_lock:
                self._call_monitor("jsonl", partial(self._jsonl.log, *row))
        self._queue.put(row[:2])

    def close(self) -> None:
        """Write the metrics that the log has by now, and close the monitors. Waits at most about CLOSE_SECONDS."""
        self._stop.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        if self._reader is not None:
            self._reader.join(CLOSE_SECONDS)
        if self._traces is not None:
            self._traces.close()
        self._queue.put(None)
        self._worker.join(max(0.1, deadline - time.monotonic()))
        if self._worker.is_alive():
            _LOG.warning("monitors %s did not end within %.0f s", ", ".join(self._monitors), CLOSE_SECONDS)
        if self._jsonl is not None:
            with self._jsonl_lock:
                self._call_monitor("jsonl", self._jsonl.close)

    def _run_monitors(self) -> None:
        """Pass queued metrics to the monitors until `close` queues None; then close the monitors. Runs in a thread."""
        while (item := self._queue.get()) is not None:
            for name, monitor in self._monitors.items():
                self._call_monitor(name, partial(monitor.log, *item))
        for name, monitor in self._monitors.items():
            self._call_monitor(name, monitor.close)

    def _call_monitor(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:  # monitors are user code or call servers
            self._warn_once(name, e)

    def _warn_once(self, name: str, error: Exception) -> None:
        if name not in self._warned_names:
            self._warned_names.add(name)
            _LOG.warning("monitor %s fails, the run goes on (said once): %s: %s", name, type(error).__name__, error)

    # --- following the log ------------------------------------------------------------------------------------------
    def _write_new_metrics(self, log: Log) -> None:
        """Write the metrics of all events since the last call; at the first call, of the whole log."""
        if self._position is None:
            self._position = self._rewrite_jsonl(log)
        end = log.head().position
        for recorded in log.read(types=_TYPES, after=self._position):
            if row := _metrics_row(recorded, self._times.take(recorded)):
                self.log(row)
            self._position = recorded.position
        self._position = max(self._position, end)

    def _rewrite_jsonl(self, log: Log) -> int:
        """Rewrite `metrics.jsonl`, pass new metrics to the other monitors, and return the log's last position.

        Training steps after the run's checkpoint are left out, because they are trained again. If a step was trained
        several times, the last time counts.
        """
        end = log.head().position
        line_ids: set[LineId] = set()
        rows: dict[Any, tuple[bool, Row]] = {}
        for recorded in takewhile(lambda r: r.position <= end, log.read(types=_TYPES)):
            row = _metrics_row(recorded, self._times.take(recorded))
            if row is None:
                continue
            step, is_training = row[1], isinstance(recorded.event, ev.BatchTrained)
            line_ids.add((step, recorded.position, round(recorded.recorded_at, DIGITS)))
            if self._after is not None and is_training and step > self._after:
                continue
            key = recorded.position if self._after is None else (is_training, recorded.stream)
            rows.pop(key, None)  # the later row counts, in its own order
            is_repeated = self._after is None or (not is_training and step > self._after)
            rows[key] = is_repeated, row
        written_position = 0
        if self._jsonl is not None:
            try:
                with self._jsonl_lock:
                    written_position = self._jsonl.rewrite((row for _, row in rows.values()), line_ids)
            except OSError as e:
                self._warn_once("jsonl", e)
        for is_repeated, (metrics, step, position, _) in rows.values():
            if is_repeated or (position or 0) > written_position:
                self._queue.put((metrics, step))
        return end


def _metrics_row(recorded: Recorded, explorer: Mapping[str, float]) -> Row | None:
    """Return an event's metrics and the `explorer` metrics as a row; None if the event has no metrics or no step."""
    match recorded.event:
        case ev.BatchFinalized(result=result) if result.get("batch_type") != "collect":
            metrics = finite_metrics({**result["metrics"], **explorer}, "rollout")
            step = explorer_metrics.step_of(result["batch_id"])
        case ev.BatchTrained() as event:
            trainer_metrics = {f"trainer/{name}" if name.startswith(_STEP_PREFIXES) else name: value
                               for name, value in event.metrics.items()}
            metrics, step = finite_metrics(trainer_metrics, "trainer"), event.step
        case _:
            return None
    if not metrics or step < 0:  # below 0: the batch's id does not begin with a number
        return None
    return metrics, step, recorded.position, recorded.recorded_at


def finite_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics with finite values. Names without a slash get the prefix."""
    full_names = {name if "/" in name else f"{prefix}/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in full_names.items() if math.isfinite(value)}
