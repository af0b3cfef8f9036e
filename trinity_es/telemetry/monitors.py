"""Monitors: receivers of the metrics of explorer steps, trainer steps and evals during a run.

All have `log(metrics, step)` and `close()`; names of metrics have slashes. `jsonl` is always on; `tensorboard`,
`wandb`, `trackio`, `mlflow` and `swanlab` need their packages (the extras of the same names); your own is
`module:Class`. A monitor that fails never stops a run: the text log names the failure once, and the monitor still gets
the next steps.

Monitors follow the log (BatchFinalized, BatchTrained, and the events of `trinity_es.telemetry.explorer_metrics`), so
they work wherever explorer and trainer run. When a run starts or resumes, `metrics.jsonl` is rewritten from the log,
then grows line by line. So no step has a metric twice, metrics of steps after the run's checkpoint are left out (these
steps are trained again), and lines that an earlier process had no time to write are added. Each line has its log
position.
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
from trinity_es.telemetry.metrics_file import DIGITS, JsonlMonitor, Place, Row
from trinity_es.telemetry.monitor_services import Monitor
from trinity_es.telemetry.opentelemetry import start_traces

__all__ = ["Monitors"]

CLOSE_SECONDS = 10.0
"""Maximum seconds to wait at the end for slow monitors."""
LOOK_SECONDS = 0.5
"""Interval between reads of the log."""
_TYPES = (*explorer_metrics.TYPES, "BatchTrained")
_STEP_PREFIXES = ("rollout/", "eval/", "bench/", "explorer/")
"""Prefixes of metrics of steps and evals. A trainer's metric with such a prefix gets `trainer/` before it."""
_SHAPE = "a class with log(metrics, step) and close()"
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


# --- all of a run's -------------------------------------------------------------------------------------------------
class Monitors:
    """All monitors of a run. `metrics.jsonl` has its own thread, the others share one, so none delays the run."""

    def __init__(self, config: Config, *, after: float | None = None) -> None:
        """`after`: step after which a resumed run trains again (inf: it repeats no step); None: a new run.

        Raises ConfigError for an unknown name, a missing package or wrong arguments.
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
        """Log position up to which everything is written; None before the first read."""
        self._warned_names: set[str] = set()
        self._jsonl_lock = threading.Lock()
        self._jsonl: JsonlMonitor | None = None
        try:
            self._jsonl = JsonlMonitor(path)
        except OSError as e:
            self._warn_once("jsonl", e)
        self._traces = start_traces(self._url, settings.otlp_endpoint)
        self._queue: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._worker.start()
        self._stop = threading.Event()
        self._reader: threading.Thread | None = None

    def follow(self) -> None:
        """Write the metrics of the log as they come, until `close`. The log need not exist yet."""
        complain = partial(self._warn_once, "(the log)")
        self._reader = threading.Thread(target=read_repeatedly, name="metrics", daemon=True,
                                        args=(self._url, self._write_new_metrics, self._stop, LOOK_SECONDS, complain))
        self._reader.start()

    def log(
        self, metrics: Mapping[str, float], step: int, prefix: str = "rollout", position: int | None = None,
        at: float | None = None,
    ) -> None:
        """Write metrics of a step. A name without a slash gets `prefix`; values that are not finite are left out."""
        finite_metrics = _finite_metrics(metrics, prefix)
        if finite_metrics:
            if self._jsonl is not None:
                with self._jsonl_lock:
                    self._try("jsonl", partial(self._jsonl.log, finite_metrics, step, position, at))
            self._queue.put((finite_metrics, step))

    def close(self) -> None:
        """Write what the log has by now and end the monitors, without waiting longer than `CLOSE_SECONDS`."""
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
                self._try("jsonl", self._jsonl.close)

    def _work(self) -> None:
        """Give the queued metrics to the monitors, in their thread, until `close` queues None; then close them."""
        while (item := self._queue.get()) is not None:
            for name, monitor in self._monitors.items():
                self._try(name, partial(monitor.log, *item))
        for name, monitor in self._monitors.items():
            self._try(name, monitor.close)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Call a monitor; its error is logged once."""
        try:
            call()
        except Exception as e:  # monitors are user code or call servers
            self._warn_once(name, e)

    def _warn_once(self, name: str, error: Exception) -> None:
        """Log a monitor's error, unless one of it was logged before."""
        if name not in self._warned_names:
            self._warned_names.add(name)
            _LOG.warning("monitor %s fails, the run goes on (said once): %s: %s", name, type(error).__name__, error)

    # --- following the log ------------------------------------------------------------------------------------------
    def _write_new_metrics(self, log: Log) -> None:
        """Write the metrics of the events since the last call; at the first call, those of the whole log."""
        if self._position is None:
            self._position = self._begin(log)
        end = log.head().position
        for recorded in log.read(types=_TYPES, after=self._position):
            if row := _row_of(recorded, self._times.take(recorded)):
                metrics, step, position, at = row
                self.log(metrics, step, "", position, at)
            self._position = recorded.position
        self._position = max(self._position, end)

    def _begin(self, log: Log) -> int:
        """Rewrite `metrics.jsonl`, give the other monitors what they lack, and return the log's last position.

        Steps trained after the resume step are trained again, so they don't count. If a step was trained several times,
        the last one counts.
        """
        end = log.head().position
        places: set[Place] = set()
        rows: dict[Any, tuple[bool, Row]] = {}
        for recorded in takewhile(lambda r: r.position <= end, log.read(types=_TYPES)):
            row = _row_of(recorded, self._times.take(recorded))
            if row is None:
                continue
            step, is_training = row[1], isinstance(recorded.event, ev.BatchTrained)
            places.add((step, recorded.position, round(recorded.recorded_at, DIGITS)))
            if self._after is not None and is_training and step > self._after:
                continue
            key = recorded.position if self._after is None else (is_training, recorded.stream)
            rows.pop(key, None)  # the later one counts, at its own place
            is_repeated = self._after is None or (not is_training and step > self._after)
            rows[key] = is_repeated, row
        written_position = 0
        if self._jsonl is not None:
            try:
                with self._jsonl_lock:
                    written_position = self._jsonl.begin((row for _, row in rows.values()), places)
            except OSError as e:
                self._warn_once("jsonl", e)
        for is_repeated, (metrics, step, position, _) in rows.values():
            if is_repeated or (position or 0) > written_position:
                self._queue.put((metrics, step))
        return end


def _row_of(recorded: Recorded, explorer: Mapping[str, float]) -> Row | None:
    """Return the row of an event's metrics together with the `explorer` metrics; None if it has none, or no step."""
    match recorded.event:
        case ev.BatchFinalized(result=result) if result.get("batch_type") != "collect":
            metrics = _finite_metrics({**result["metrics"], **explorer}, "rollout")
            step = explorer_metrics.step_of(result["batch_id"])
        case ev.BatchTrained() as event:
            trainer_metrics = {f"trainer/{name}" if name.startswith(_STEP_PREFIXES) else name: value
                               for name, value in event.metrics.items()}
            metrics, step = _finite_metrics(trainer_metrics, "trainer"), event.step
        case _:
            return None
    if not metrics or step < 0:  # below 0: the batch's id does not begin with a number
        return None
    return metrics, step, recorded.position, recorded.recorded_at


def _finite_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics with finite values; a name without a slash gets the prefix."""
    full_names = {name if "/" in name else f"{prefix}/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in full_names.items() if math.isfinite(value)}
