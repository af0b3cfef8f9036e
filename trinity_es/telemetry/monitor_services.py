"""The monitors of other packages: tensorboard, wandb, trackio, swanlab, mlflow. Each is imported when it is used."""

from __future__ import annotations

import importlib
import math
import posixpath
import re
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.events.private_files import make_private_folder

__all__ = ["MlflowMonitor", "Monitor", "SwanlabMonitor", "TensorboardMonitor", "TrackioMonitor", "WandbMonitor"]


class Monitor(Protocol):
    """Destination of metrics. Built once with its `monitor_args`, then called from one thread.

    A class with a method `of_run(config, after, **monitor_args)` is built by it. `after` is that of `Monitors`.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step: finite numbers by names with slashes. A step may come in several calls, and
        after later ones.
        """

    def close(self) -> None:
        """Write what is left."""


class TensorboardMonitor:
    """`tensorboard`: scalars in event files under `path` (default: `tensorboard/` in the run's folder).

    Needs the package tensorboard, and neither torch nor tensorflow. A run that goes on tells TensorBoard to forget the
    steps that are done again.
    """

    @classmethod
    def of_run(cls, config: Config, after: float | None, path: str = "tensorboard") -> Self:
        return cls(str(Path(config.run_dir) / path), after=after)

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


class _Service:
    """A run of the config's project and name; arguments are those of the package's `init`.

    wandb and swanlab are offline with `mode: offline`, trackio is on this machine alone unless it is
    given a `space_id`. A run that goes on is the same run there, by an id made from project, name and store. Steps that
    are done again are there with both values; swanlab keeps the first one.

    An eval often ends after later steps. wandb drops what comes with a step before its newest, so it counts our calls
    as its own steps, and our step is the metric `step`, the x axis of all others.
    """

    package: ClassVar[str]

    @classmethod
    def of_run(cls, config: Config, after: float | None, **args: Any) -> Self:
        return cls(config, **args)

    def __init__(self, config: Config, /, **args: Any) -> None:
        package = self.package
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


class WandbMonitor(_Service):
    """`wandb`; needs the package."""

    package = "wandb"


class TrackioMonitor(_Service):
    """`trackio`; needs the package."""

    package = "trackio"


class SwanlabMonitor(_Service):
    """`swanlab`; needs the package."""

    package = "swanlab"


class MlflowMonitor:
    """`mlflow`: a run in the experiment of the config's project; needs the package mlflow.

    `tracking_uri`: where, such as `http://localhost:5000` or `sqlite:///mlflow.db`; MLFLOW_TRACKING_URI where it is not
    given. `experiment`: its name. A run that goes on is the same run there, found by the tag `trinity_es.run`. Names
    have `_at_` for `@` and `_` for other characters that MLflow refuses, with all metrics of that call.
    """

    @classmethod
    def of_run(cls, config: Config, after: float | None, **args: Any) -> Self:
        return cls(config, **args)

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
