"""One task of a taskset, played in this process without actor system and log, to see what a workflow does.

Engine, workflow, reward function and sampling are those of the config, as in a run. The results go into a folder:
`experiences.jsonl` for people, `experiences.safetensors` for `Experience.deserialize_many`, and `result.json`, in which
errors have their whole tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.actors.engines.devices import device_environment
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.plugin_lookup import add_import_folders, resolve
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workflow_runner import AuxiliaryModel, WorkflowRunner
from trinity_es.actors.server_addresses import no_proxy_variables
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.client.argument_checks import encode_tasks
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, TasksetError
from trinity_es.events.experience import Experience
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.values import FailureKind, Task
from trinity_es.tasksets.taskset import Taskset

__all__ = ["PlayedTask", "choose", "play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """Result of playing a task."""

    task: Task
    runs: int
    experiences: list[Experience]
    texts: list[list[str]]
    """Text of each token, per experience. Tokens are decoded alone, so a character of several tokens is missing."""
    metrics: list[dict[str, float]]
    """Metrics of each run that completed."""
    failures: list[tuple[int, str, str]]
    """(run, kind, message) of each run that failed."""
    tracebacks: list[str]
    seconds: float
    folder: Path

    def as_dict(self) -> dict[str, Any]:
        return {
            "taskset": self.task.index["taskset"], "index": self.task.index["index"], "runs": self.runs,
            "completed_runs": len(self.metrics), "seconds": self.seconds, "folder": str(self.folder),
            "metrics": self.metrics, "experiences": [e.to_dict() for e in self.experiences],
            "failures": [{"run": run, "kind": kind, "message": message} for run, kind, message in self.failures],
            "tracebacks": self.tracebacks,
        }


def choose(config: Config, taskset: str | None, index: int, workflow: str | None = None) -> Task:
    """Return the task at row `index` (from 0) of the named taskset, of training or eval (None: the first one).

    `workflow` replaces the taskset's workflow. Raises TasksetError and ConfigError.
    """
    inputs = config.buffer.explorer_input
    tasksets: list[tuple[TasksetConfig, bool]] = [
        *((section, False) for section in inputs.tasksets), *((section, True) for section in inputs.eval_tasksets)
    ]
    matches = [(section, is_eval) for section, is_eval in tasksets if taskset in (None, section.name)]
    if not matches:
        names = ", ".join(dict.fromkeys(section.name for section, _ in tasksets)) or "none"
        raise ConfigError(f"there is no taskset {taskset or ''} in the config (there are: {names})".replace("  ", " "))
    section, is_eval = matches[0]
    if workflow is not None:
        section = section.model_copy(update={"workflow": workflow})
    rows = Taskset(section, is_eval=is_eval)
    if not 0 <= index < len(rows):
        raise TasksetError(
            f"taskset {section.name} has {len(rows)} rows, 0 to {len(rows) - 1}: there is no row {index}")
    return rows.task(index)


async def play(config: Config, task: Task, *, runs: int | None = None, folder: Path) -> PlayedTask:
    """Play a task with the config's engine, and write the results to a folder. Failed runs are part of the result.

    Raises UnknownWorkflow, ConfigError and the errors of the engine's start.
    """
    config.check()
    add_import_folders(config.code_path)
    [encoded] = encode_tasks([task], config)
    task.workflow = encoded["workflow"]  # as a runner gets it
    explorer, run_count = config.explorer, runs or task.repeat_times or 1
    engines: list[Any] = []
    server: EngineServer | None = None
    first_device, models = 0, [explorer.rollout_model, *explorer.auxiliary_models]
    device_count = sum(model.tensor_parallel_size for model in models)
    os.environ.update(no_proxy_variables(os.environ))  # as in a run
    try:
        for model in models:
            engines.append(resolve(model.engine_class, {}, "engine")(_engine_config(model)))
            with _device_environment(first_device, model.tensor_parallel_size, device_count):
                await engines[-1].start()
            first_device += model.tensor_parallel_size
        server = EngineServer(
            engines[0], name=explorer.rollout_model.model_path or "rollout", token=uuid.uuid4().hex,
            defaults=explorer.rollout_model.rollout_args(),
        )
        await server.start()
        runner = _TracebackRunner(
            engines[0], defaults=explorer.rollout_model.rollout_args(),
            auxiliary=[AuxiliaryModel(model.name, engine, model.rollout_args())
                       for model, engine in zip(explorer.auxiliary_models, engines[1:], strict=True)],
            concurrent_mode=explorer.concurrent_mode, timeout=explorer.max_timeout, server=server,
        )
        done = await runner.execute(task, "debug", range(run_count))
        decode = engines[0].tokenizer.decode
        texts = [[decode([token]) for token in e.tokens.tolist()] for e in done.experiences]
    finally:
        if server is not None:
            await server.stop()
        for engine in engines:
            await engine.stop()
    played = PlayedTask(
        task=task, runs=run_count, experiences=done.experiences, texts=texts,
        metrics=[dict(r.metrics) for r in done.results],
        failures=[*done.failures], tracebacks=runner.tracebacks, seconds=done.seconds,
        folder=folder,
    )
    await asyncio.to_thread(_write, played)
    return played


def _engine_config(model: RolloutModelConfig) -> EngineConfig:
    """Return the config of an engine for this model. An HTTP engine gets the first server of `servers.urls`."""
    settings, servers = model.engine_config(), model.servers
    if model.engine_type != "http":
        return settings
    if not servers.urls:
        raise ConfigError("a single task is played on one server: name the server in servers.urls, in place of "
                          f"servers.{servers.keys_in_use[0]}")
    return replace(settings, options={**settings.options, "url": servers.urls[0]})


@contextlib.contextmanager
def _device_environment(first: int, count: int, total: int) -> Iterator[None]:
    """Set the environment so that an engine started in this block gets `count` of `total` devices, as in a run."""
    variables = device_environment(first, count, total)
    previous_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _TracebackRunner(WorkflowRunner):
    """Workflow runner that keeps whole tracebacks; a log keeps only their ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracebacks: list[str] = []

    def _kind_and_message(self, error: Exception, out: UnitResult) -> tuple[FailureKind, str]:
        self.tracebacks.append("".join(traceback.format_exception(error)).rstrip())
        return super()._kind_and_message(error, out)


def _write(played: PlayedTask) -> None:
    folder = played.folder
    make_private_folder(folder)
    lines = [orjson.dumps({**e.to_dict(), "tokens": e.tokens.tolist()}) for e in played.experiences]
    (folder / "experiences.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / "experiences.safetensors").write_bytes(Experience.serialize_many(played.experiences))
    result = {key: value for key, value in played.as_dict().items() if key != "experiences"}
    (folder / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
