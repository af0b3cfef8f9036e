"""Monitors that use other packages: tensorboard, wandb, trackio, swanlab, mlflow. Packages are imported on use."""

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
    """Receiver of metrics. It is built once, with its `monitor_args`, and called from one thread.

    A class with a method `of_run(config, after, **monitor_args)` is built by that method. `after`: the step of the
    checkpoint that the run resumes from, or None.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take metrics of a step, by name; all are finite. A step may come in several calls, and after later steps."""

    def close(self) -> None:
        """Write all metrics that are not written yet."""


class TensorboardMonitor:
    """Monitor `tensorboard`: scalars in event files under `path` (default: `tensorboard/` in the run's folder).

    Needs the package tensorboard, but neither torch nor tensorflow. TensorBoard drops steps that a resumed run repeats.
    """

    @classmethod
    def of_run(cls, config: Config, after: float | None, path: str = "tensorboard") -> Self:
        return cls(str(Path(config.run_dir) / path), after=after)

    def __init__(self, path: str, *, after: float | None = None) -> None:
        writer = _import_package("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self._events = _import_package("tensorboard", "tensorboard.compat.proto.event_pb2")
        self._summaries = _import_package("tensorboard", "tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(path)
        if after is not None and math.isfinite(after):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=int(after) + 1, session_log=start)
            self._writer.flush()

    def _write(self, **fields: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), **fields))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        scalar_class = self._summaries.Summary.Value
        values = [scalar_class(tag=name, simple_value=value) for name, value in sorted(metrics.items())]
        self._write(step=step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ServiceMonitor:
    """Monitor that sends metrics to a run of wandb, swanlab or trackio; arguments are those of the package's `init`.

    The service's run has the config's project and name. wandb and swanlab are offline with `mode: offline`; trackio
    stays on this machine without a `space_id`. A resumed run continues the same run of the service, by an id made from
    project, name and store. Repeated steps then have both values; swanlab keeps the first one.

    An eval often ends after later steps, and wandb drops metrics of steps before its newest. So each call is a step of
    wandb, and the real step is the metric `step`, which is the x axis of all others.
    """

    package: ClassVar[str]

    @classmethod
    def of_run(cls, config: Config, after: float | None, **args: Any) -> Self:
        return cls(config, **args)

    def __init__(self, config: Config, /, **args: Any) -> None:
        package = self.package
        self._package = _import_package(package, package)
        run_id, folder = _run_id(config), config.run_dir
        short_id = sha256(run_id.encode()).hexdigest()[:20]
        names: dict[str, dict[str, Any]] = {
            "wandb": {"name": config.name, "id": run_id, "dir": folder},
            "swanlab": {"name": config.name, "id": short_id, "log_dir": f"{folder}/swanlab"},
            "trackio": {"name": run_id, "embed": False},
        }
        self._args = {"project": config.project, "resume": "allow", "config": config.masked(), **names[package], **args}
        self._folder = folder
        self._step_as_metric = package == "wandb"
        """True if the step is sent as a metric, because the service drops metrics of steps before its newest."""
        self._run: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step. The first call starts the service's run."""
        if self._run is None:  # at the first use, because init may call a server
            make_private_folder(self._args.get("dir", self._folder))
            self._run = self._package.init(**self._args)
            if self._step_as_metric:
                self._run.define_metric("step")
                self._run.define_metric("*", step_metric="step")
        if self._step_as_metric:
            self._run.log({**metrics, "step": step})
        else:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class WandbMonitor(_ServiceMonitor):
    """Monitor `wandb`, which needs the package wandb."""

    package = "wandb"


class TrackioMonitor(_ServiceMonitor):
    """Monitor `trackio`, which needs the package trackio."""

    package = "trackio"


class SwanlabMonitor(_ServiceMonitor):
    """Monitor `swanlab`, which needs the package swanlab."""

    package = "swanlab"


class MlflowMonitor:
    """Monitor `mlflow`: a run in the experiment of the config's project. Needs the package mlflow.

    `tracking_uri`: for example `http://localhost:5000` or `sqlite:///mlflow.db`; default: MLFLOW_TRACKING_URI.
    `experiment`: another name of the experiment. A resumed run continues the same run of MLflow, found by the tag
    `trinity_es.run`. In names of metrics `@` becomes `_at_`, and other characters that MLflow refuses become `_`.
    """

    @classmethod
    def of_run(cls, config: Config, after: float | None, **args: Any) -> Self:
        return cls(config, **args)

    def __init__(self, config: Config, *, tracking_uri: str | None = None, experiment: str = "") -> None:
        mlflow = _import_package("mlflow", "mlflow")
        self._metric_class = _import_package("mlflow", "mlflow.entities").Metric
        self._make_client: Callable[[], Any] = lambda: mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment or config.project
        self._name, self._run_tag = config.name, _run_id(config)
        self._client: Any = None
        self._mlflow_run_id = ""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step. The first call finds or creates the run in MLflow."""
        if self._client is None:  # at the first use, because it calls a server
            client = self._make_client()
            experiment = client.get_experiment_by_name(self._experiment)
            experiment_id = (client.create_experiment(self._experiment) if experiment is None
                             else experiment.experiment_id)
            runs = client.search_runs([experiment_id], f"tags.`trinity_es.run` = '{self._run_tag}'")
            tags = {"trinity_es.run": self._run_tag}
            run = runs[0] if runs else client.create_run(experiment_id, run_name=self._name, tags=tags)
            self._client, self._mlflow_run_id = client, run.info.run_id
            client.update_run(self._mlflow_run_id, status="RUNNING")
        milliseconds = round(time.time() * 1000)
        values = [self._metric_class(_mlflow_name(name), value, milliseconds, step)
                  for name, value in sorted(metrics.items())]
        for first in range(0, len(values), _MAX_MLFLOW_METRICS):
            self._client.log_batch(self._mlflow_run_id, metrics=values[first : first + _MAX_MLFLOW_METRICS])

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._mlflow_run_id)


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts for a metric. It has no "..", since MLflow may use it as a path."""
    valid_name = re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))
    return posixpath.normpath(valid_name).strip("./")[:_MAX_MLFLOW_CHARACTERS] or "_"


_MAX_MLFLOW_CHARACTERS = 250
"""Maximum length of a metric's name in MLflow, in characters."""
_MAX_MLFLOW_METRICS = 1000
"""Maximum number of metrics in a call of MLflow's REST API."""


def _run_id(config: Config) -> str:
    """Return an id that stays the same when the run is resumed."""
    store = sha256(config.masked()["store"]["url"].encode()).hexdigest()[:8]
    return f"{config.project}-{config.name}-{store}"


def _import_package(package: str, module: str) -> Any:
    """Import a module of a monitor's package. Raises ConfigError if the package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(
            f"the monitor {package} needs the package {package} ({e}): pip install 'trinity-es[{package}]', or "
            "remove it from monitor.monitor_type"
        ) from e
