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

import errno
import importlib
import logging
import math
import os
import posixpath
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

import orjson

from trinity_es.actors.plugins import build, look_in
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import ConfigError
from trinity_es.events.private_files import make_private_folder, open_private
from trinity_es.events.store.log import Recorded
from trinity_es.projections.reading.follow import look_again
from trinity_es.projections.reading.log_reader import Log
from trinity_es.telemetry import explorer_times
from trinity_es.telemetry.opentelemetry import start_traces

__all__ = [
    "JsonlMonitor", "MlflowMonitor", "Monitor", "Monitors", "ServiceMonitor", "TensorboardMonitor", "read_metrics",
]

CLOSE_SECONDS = 10.0
"""How long monitors that run behind may take to catch up at the end."""
LOOK_SECONDS = 0.5
"""Interval between two looks at the log."""
_TYPES = (*explorer_times.TYPES, "BatchTrained")
_OF_STEPS = ("rollout/", "eval/", "bench/", "explorer/")
"""What begins so is a metric of a step or an eval: a trainer's gets `trainer/` before it."""
_DIGITS = 3
"""Of a time in `metrics.jsonl`: milliseconds."""
_SHAPE = "a class with log(metrics, step) and close()"
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


class Monitor(Protocol):
    """Where metrics go. Built once with its `monitor_args`, then called from one thread."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step: finite numbers by names with slashes. A step may come in several calls, and
        after later ones.
        """

    def close(self) -> None:
        """Write what is left."""


# --- the ones that we know ------------------------------------------------------------------------------------------
class JsonlMonitor:
    """`jsonl`: one JSON object a line: `step`, `time` (unix seconds), `position` in the log, and metrics by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        make_private_folder(self.path.parent)
        self._unwritten: list[bytes] = []
        """Lines that the disk did not take yet, the oldest first."""
        self._open()

    def _open(self) -> None:
        self._file = os.fdopen(open_private(self.path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def begin(self, rows: Iterable[_Row], known: Collection[_Place]) -> int:
        """Write the file anew with these rows; return the last position of the log that an earlier life wrote.

        A file with a line that is none of `known` is somebody else's: it is kept under another name.
        """
        there = self.path.read_bytes().splitlines(keepends=True)
        if len(there) > 1 and not there[-1].endswith(b"\n"):
            there.pop()  # it was being written when its run was killed
        written = [_place(line) for line in there]
        with whole_file(self.path) as file:
            file.writelines(map(_line, rows))
            file.flush()
            if not set(written) <= set(known):  # not before: what could not be written would be appended to theirs
                names = (self.path.with_name(f"{self.path.name}.{n}") for n in count(1))
                aside = next(path for path in names if not path.exists())
                os.replace(self.path, aside)
                _LOG.warning("%s has lines that are not of this run: it is %s now", self.path, aside)
                written = []
        self._file.close()
        self._open()
        return max((position for _, position, _ in written), default=0)

    def log(
        self, metrics: Mapping[str, float], step: int, position: int | None = None, at: float | None = None
    ) -> None:
        """Append a line. Raises OSError where the disk takes no more: the line is kept, and comes with the next."""
        self._unwritten.append(_line((metrics, step, position, at)))
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            whole, line = os.fstat(self._file.fileno()).st_size, self._unwritten[0]
            if self._file.write(line) != len(line):  # the disk is full: no half line may stay
                os.ftruncate(self._file.fileno(), whole)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            del self._unwritten[0]

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()


_Row = tuple[Mapping[str, float], int, int | None, float | None]
"""Metrics, step, position in the log, and when they were recorded."""
_Place = tuple[int, int, float]
"""Step, position and time of a line: two runs alike have the same steps at the same positions, at other times."""


def _line(row: _Row) -> bytes:
    metrics, step, position, at = row
    where = {} if position is None else {"position": position}
    when = round(time.time() if at is None else at, _DIGITS)
    told = {"step": step, "time": when, **where, **dict(sorted(metrics.items()))}
    return orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)


def _place(line: bytes) -> _Place:
    """Return where a line is from; (-1, -1, 0) where it does not say."""
    try:
        row = orjson.loads(line)
        return int(row["step"]), int(row["position"]), float(row["time"])
    except (AttributeError, TypeError, KeyError, ValueError):
        return -1, -1, 0.0


class TensorboardMonitor:
    """`tensorboard`: scalars in event files under `path` (default: `tensorboard/` in the run's folder).

    Needs the package tensorboard, and neither torch nor tensorflow. A run that goes on tells TensorBoard to forget the
    steps that are done again.
    """

    def __init__(self, path: str, *, after: float | None = None) -> None:
        writer = _needed("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self._events = _needed("tensorboard", "tensorboard.compat.proto.event_pb2")
        self._summaries = _needed("tensorboard", "tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(path)
        if after is not None and math.isfinite(after):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=int(after) + 1, session_log=start)
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


class ServiceMonitor:
    """`wandb`, `trackio`, `swanlab`: a run of the config's project and name; arguments are those of its `init`.

    Needs the package. wandb and swanlab are offline with `mode: offline`, trackio is on this machine alone unless it is
    given a `space_id`. A run that goes on is the same run there, by an id made from project, name and store. Steps that
    are done again are there with both values; swanlab keeps the first one.

    An eval often ends after later steps. wandb drops what comes with a step before its newest, so it counts our calls
    as its own steps, and our step is the metric `step`, the x axis of all others.
    """

    def __init__(self, package: str, config: Config, args: Mapping[str, Any]) -> None:
        self._package = _needed(package, package)
        one, folder = _id_of(config), config.run_dir
        short = sha256(one.encode()).hexdigest()[:20]
        names: dict[str, dict[str, Any]] = {
            "wandb": {"name": config.name, "id": one, "dir": folder},
            "swanlab": {"name": config.name, "id": short, "log_dir": f"{folder}/swanlab"},
            "trackio": {"name": one, "embed": False},
        }
        self._args = {"project": config.project, "resume": "allow", "config": config.masked(), **names[package], **args}
        self._folder, self._in_order = folder, package == "wandb"
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is None:  # not before: it may ask a server
            make_private_folder(self._args.get("dir", self._folder))
            self._run = self._package.init(**self._args)
            if self._in_order:
                self._run.define_metric("step")
                self._run.define_metric("*", step_metric="step")
        if self._in_order:
            self._run.log({**metrics, "step": step})
        else:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MlflowMonitor:
    """`mlflow`: a run in the experiment of the config's project; needs the package mlflow.

    `tracking_uri`: where, such as `http://localhost:5000` or `sqlite:///mlflow.db`; MLFLOW_TRACKING_URI where it is not
    given. `experiment`: its name. A run that goes on is the same run there, found by the tag `trinity_es.run`. Names
    have `_at_` for `@` and `_` for other characters that MLflow refuses, with all metrics of that call.
    """

    def __init__(self, config: Config, *, tracking_uri: str | None = None, experiment: str = "") -> None:
        mlflow = _needed("mlflow", "mlflow")
        self._metric = _needed("mlflow", "mlflow.entities").Metric
        self._begin: Callable[[], Any] = lambda: mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment, self._name, self._id = experiment or config.project, config.name, _id_of(config)
        self._client: Any = None
        self._run = ""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._client is None:  # not before: it asks a server
            client = self._begin()
            there = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if there is None else there.experiment_id
            runs = client.search_runs([experiment], f"tags.`trinity_es.run` = '{self._id}'")
            tags = {"trinity_es.run": self._id}
            run = runs[0] if runs else client.create_run(experiment, run_name=self._name, tags=tags)
            self._client, self._run = client, run.info.run_id
            client.update_run(self._run, status="RUNNING")
        at = round(time.time() * 1000)
        found = [self._metric(_mlflow_name(name), value, at, step) for name, value in sorted(metrics.items())]
        for begin in range(0, len(found), _MLFLOW_MOST):
            self._client.log_batch(self._run, metrics=found[begin : begin + _MLFLOW_MOST])

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)


def _mlflow_name(name: str) -> str:
    """Return a metric's name as MLflow takes it, which may make files of it."""
    plain = re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))
    return posixpath.normpath(plain).strip("./")[:_MLFLOW_LONGEST] or "_"


_MLFLOW_LONGEST = 250
"""Maximum length of a metric's name in MLflow, in characters."""
_MLFLOW_MOST = 1000
"""Maximum of metrics in a call, as MLflow's REST API has it."""


def _id_of(config: Config) -> str:
    """Return what a run and all that go on with it are called alike."""
    same = sha256(config.masked()["store"]["url"].encode()).hexdigest()[:8]
    return f"{config.project}-{config.name}-{same}"


def _needed(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(
            f"the monitor {package} needs the package {package} ({e}): pip install 'trinity-es[{package}]', or take it "
            "out of monitor.monitor_type"
        ) from e


def _service(package: str, config: Config, /, **args: Any) -> ServiceMonitor:
    return ServiceMonitor(package, config, args)


def _known(config: Config, after: float | None) -> dict[str, Callable[..., Monitor]]:
    run = Path(config.run_dir)
    return {
        "tensorboard": lambda path="tensorboard": TensorboardMonitor(str(run / path), after=after),
        "mlflow": lambda **args: MlflowMonitor(config, **args),
        **{package: partial(_service, package, config) for package in ("wandb", "trackio", "swanlab")},
    }


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
            monitor = build("monitor", name, settings.monitor_args.get(name, {}), _known(config, after), _SHAPE)
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
        known: set[_Place] = set()
        found: dict[Any, tuple[bool, _Row]] = {}
        for recorded in takewhile(lambda r: r.position <= end, log.read(types=_TYPES)):
            row = _row_of(recorded, self._times.take(recorded))
            if row is None:
                continue
            step, trained = row[1], isinstance(recorded.event, ev.BatchTrained)
            known.add((step, recorded.position, round(recorded.recorded_at, _DIGITS)))
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


def _row_of(recorded: Recorded, beside: Mapping[str, float]) -> _Row | None:
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


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Return a `metrics.jsonl` by step: all its metrics."""
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_bytes().splitlines():
        row = orjson.loads(line)
        step = row.pop("step")
        for name in ("time", "position"):
            row.pop(name, None)
        steps.setdefault(step, {}).update(row)
    return steps
