"""Monitors: where the metrics of steps, trainer steps and evals are written while a run goes on.

One protocol, `log(metrics, step)` and `close()`; names of metrics have slashes. `jsonl` is always on; `tensorboard`,
`wandb`, `trackio`, `mlflow` and `swanlab` need their packages (the extras of the same names); your own is
`module:Class`. A monitor that fails never stops a run: it is said once in the text log, and it is asked again with the
next step.

Nobody hands metrics to them: they follow the log (BatchFinalized and BatchTrained, and for the explorer's own metrics
what `trinity_es.telemetry.explorer_times` needs), wherever explorer and trainer run.
`metrics.jsonl` is written anew from the log when a run starts or goes on, then each line as it comes: no step has a
metric twice, what steps after the run's checkpoint had is left out (they are trained again), and what an earlier life
did not get to write is there. A line says at which position of the log its metrics stand.
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

from trinity_es.actors.plugins import build, find, look_in, registered
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.store.log import Recorded
from trinity_es.projections.reading.follow import look_again
from trinity_es.projections.reading.log_reader import Log
from trinity_es.telemetry import explorer_times
from trinity_es.telemetry.metrics_file import DIGITS, JsonlMonitor, Place, Row
from trinity_es.telemetry.monitor_services import Monitor
from trinity_es.telemetry.opentelemetry import start_traces

__all__ = ["Monitors"]

CLOSE_SECONDS = 10.0
"""How long monitors that run behind may take to catch up at the end."""
LOOK_SECONDS = 0.5
"""Interval between two looks at the log."""
_TYPES = (*explorer_times.TYPES, "BatchTrained")
_OF_STEPS = ("rollout/", "eval/", "bench/", "explorer/")
"""What begins so is a metric of a step or an eval: a trainer's gets `trainer/` before it."""
_SHAPE = "a class with log(metrics, step) and close()"
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


# --- all of a run's -------------------------------------------------------------------------------------------------
class Monitors:
    """All monitors of a run. `metrics.jsonl` has a thread, the others share another: none holds up the run."""

    def __init__(self, config: Config, *, after: float | None = None) -> None:
        """`after`: the run goes on behind this step, and trains later ones again (inf: none of them); None: it is new.

        Raises ConfigError for a name that is not found, a package that is missing and arguments that do not fit.
        """
        settings = config.monitor
        look_in(config.code_path, first=False)
        self._others: dict[str, Monitor] = {}
        strangers = settings.monitor_args.keys() - {*settings.monitor_type, "jsonl"}
        if strangers:
            raise ConfigError(f"monitor.monitor_args has {min(strangers)!r}, which monitor.monitor_type does not")
        for name in dict.fromkeys(n for n in settings.monitor_type if n != "jsonl"):
            make = find("monitor", name, registered("monitor"), _SHAPE)
            if hasattr(make, "of_run"):
                make = partial(make.of_run, config, after)
            monitor = build("monitor", name, settings.monitor_args.get(name, {}), {name: make}, _SHAPE)
            for method in ("log", "close"):
                if not callable(getattr(monitor, method, None)):
                    raise ConfigError(f"monitor {name} has no method {method}: give {_SHAPE}", monitor=name)
            self._others[name] = monitor
        path = Path(config.run_dir) / settings.monitor_args.get("jsonl", {}).get("path", "metrics.jsonl")
        self._url, self._after = config.store.url, after
        self._times = explorer_times.ExplorerTimes(
            config.synchronizer.sync_interval, "bench" if config.mode == "bench" else "eval"
        )
        self._position: int | None = None
        """Up to here in the log everything is written; None: it was not looked at yet."""
        self._failed: set[str] = set()
        self._writing = threading.Lock()
        self._jsonl: JsonlMonitor | None = None
        try:
            self._jsonl = JsonlMonitor(path)
        except OSError as e:
            self._complain("jsonl", e)
        self._traces = start_traces(self._url, settings.otlp_endpoint)
        self._queue: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._worker.start()
        self._stop = threading.Event()
        self._reader: threading.Thread | None = None

    def follow(self) -> None:
        """Write what the run's log has, as it comes, until `close`. The log may still have to be made."""
        complain = partial(self._complain, "(the log)")
        self._reader = threading.Thread(target=look_again, name="metrics", daemon=True,
                                        args=(self._url, self._look, self._stop, LOOK_SECONDS, complain))
        self._reader.start()

    def log(
        self, metrics: Mapping[str, float], step: int, prefix: str = "rollout", position: int | None = None,
        at: float | None = None,
    ) -> None:
        """Write metrics of a step. A name without a slash gets `prefix` before it; what is not finite is left out."""
        if plain := _plain(metrics, prefix):
            if self._jsonl is not None:
                with self._writing:
                    self._try("jsonl", partial(self._jsonl.log, plain, step, position, at))
            self._queue.put((plain, step))

    def close(self) -> None:
        """Write what the log has by now, and let the monitors end; one that takes too long is left behind."""
        self._stop.set()
        until = time.monotonic() + CLOSE_SECONDS
        if self._reader is not None:
            self._reader.join(CLOSE_SECONDS)
        if self._traces is not None:
            self._traces.close()
        self._queue.put(None)
        self._worker.join(max(0.1, until - time.monotonic()))
        if self._worker.is_alive():
            _LOG.warning("monitors %s did not end within %.0f s", ", ".join(self._others), CLOSE_SECONDS)
        if self._jsonl is not None:
            with self._writing:
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

    # --- following the log ------------------------------------------------------------------------------------------
    def _look(self, log: Log) -> None:
        if self._position is None:
            self._position = self._begin(log)
        until = log.head().position
        for recorded in log.read(types=_TYPES, after=self._position):
            if row := _row_of(recorded, self._times.take(recorded)):
                self.log(row[0], row[1], "", *row[2:])
            self._position = recorded.position
        self._position = max(self._position, until)

    def _begin(self, log: Log) -> int:
        """Write `metrics.jsonl` anew, and to the others what earlier lives did not; return where the log ended then.

        What was trained after the step that the run goes on from is trained again, so it does not count; else the last
        training of a step does.
        """
        end = log.head().position
        known: set[Place] = set()
        found: dict[Any, tuple[bool, Row]] = {}
        for recorded in takewhile(lambda r: r.position <= end, log.read(types=_TYPES)):
            row = _row_of(recorded, self._times.take(recorded))
            if row is None:
                continue
            step, trained = row[1], isinstance(recorded.event, ev.BatchTrained)
            known.add((step, recorded.position, round(recorded.recorded_at, DIGITS)))
            if self._after is not None and trained and step > self._after:
                continue
            key = recorded.position if self._after is None else (trained, recorded.stream)
            found.pop(key, None)  # the later one counts, in its place
            found[key] = self._after is None or (not trained and step > self._after), row
        written = 0
        if self._jsonl is not None:
            try:
                with self._writing:
                    written = self._jsonl.begin((row for _, row in found.values()), known)
            except OSError as e:
                self._complain("jsonl", e)
        for again, (metrics, step, position, _) in found.values():
            if again or (position or 0) > written:
                self._queue.put((metrics, step))
        return end


def _row_of(recorded: Recorded, beside: Mapping[str, float]) -> Row | None:
    """Return an event's metrics, with those that the explorer has `beside` them; None where it has none."""
    match recorded.event:
        case ev.BatchFinalized(result=result) if result.get("batch_type") != "collect":
            metrics = _plain({**result["metrics"], **beside}, "rollout")
            step = explorer_times.step_of(result["batch_id"])
        case ev.BatchTrained() as event:
            own = {f"trainer/{name}" if name.startswith(_OF_STEPS) else name: n for name, n in event.metrics.items()}
            metrics, step = _plain(own, "trainer"), event.step
        case _:
            return None
    return (metrics, step, recorded.position, recorded.recorded_at) if metrics and step >= 0 else None


def _plain(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    named = {name if "/" in name else f"{prefix}/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in named.items() if math.isfinite(value)}
