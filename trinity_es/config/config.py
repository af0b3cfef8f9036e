"""The config: one YAML file, checked whole before anything starts.

`load_config` reads a file (with `--set a.b=c` overrides), `Config.from_dict` a dict. Both return a frozen `Config` with
every default filled in, every path absolute and every `${oc.env:NAME}` resolved, or raise one `ConfigError` that lists
all problems, a line each. An unknown key is refused, with the nearest known one. `check()` checks what depends on the
machine: files, and names to import. `trinity_es.actors.config` documents the keys, and docs/CONFIG.md is printed from
it (`python -m trinity_es.config.config_docs > docs/CONFIG.md`).

**Relative paths are relative to the folder of the config file**, wherever the command runs, also in `--set`. Without a
folder, `from_dict` takes the working directory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import operator
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails
from sqlalchemy.engine import make_url

from trinity_es.actors.config.config import RunConfig
from trinity_es.actors.config.data_sections import SCORER, TasksetConfig
from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.actors.config.section import Section
from trinity_es.actors.plugin_lookup import add_import_folders, load, registered
from trinity_es.actors.validation_errors import Path_, dotted_path
from trinity_es.config.config_problems import config_error, explain
from trinity_es.config.interpolation import convert_text, escape_texts, resolve_texts
from trinity_es.config.parameter_checks import call_problems, import_problems, reward_problems, workflow_problems
from trinity_es.config.yaml_file import apply_overrides, read_yaml
from trinity_es.events.errors import ConfigError, DataError, UnknownWorkflow
from trinity_es.events.store.database.urls import file_of, file_url

__all__ = ["Config", "load_config"]

_Section = TypeVar("_Section", bound=Section)
_Model = TypeVar("_Model", bound=RolloutModelConfig)
_TASKSETS = ("tasksets", "eval_tasksets")

RENAMED = {
    "explorer.places": "it is explorer.max_concurrency now",
    "hosts.tls": "hosts speak TLS by themselves, leave it out",
}
"""Keys of earlier releases, and their replacements."""


class Config(RunConfig):
    """The whole config, with absolute paths. Build it with `load_config`, `Config.from_dict`, or by keyword."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, folder: str | Path | None = None, source: str = "config") -> Config:
        """Return the checked config. Relative paths are relative to `folder` (default: the working directory).

        Raises ConfigError, which lists every problem and calls the dict `source`.
        """
        return _validate(dict(data), folder, lambda path: source)

    @model_validator(mode="after")
    def _check_cut(self) -> Self:
        """Raise ValueError if `synchronizer.in_flight` is cut and another key keeps tasks from going on later."""
        explorer, sync, retention = self.explorer, self.synchronizer, self.store.retention
        steps_ahead, max_staleness = sync.steps_ahead, explorer.max_staleness
        conditions = {
            "explorer.over_rollout.ratio is 0, so no step leaves a task unfinished: give the share that it may leave":
                explorer.over_rollout.ratio == 0,
            "explorer.progress.seconds is 0, so there is no journal from which a task could go on: set it to 1":
                explorer.progress.seconds == 0,
            "explorer.over_rollout.return_partial_tasks delivers the finished runs of a task without the others: leave "
            "it out": explorer.over_rollout.return_partial_tasks,
            "explorer.max_repeat_times_per_runner splits the runs of a task, and a group goes on as a whole: leave it "
            "out": explorer.max_repeat_times_per_runner is not None,
            f"explorer.max_staleness is {max_staleness}, so answers that go on would be dropped: set it to "
            f"{steps_ahead} or more": max_staleness is not None and max_staleness < steps_ahead,
            f"store.retention is {retention}, and the tokens of a cut task may be needed {steps_ahead} steps later: "
            "raise it": retention is not None and retention < steps_ahead,
        }
        reason = next((text for text, is_true in conditions.items() if is_true), "")
        if reason and sync.in_flight == "cut":
            raise ValueError(f"synchronizer.in_flight is 'cut', but {reason}")
        return self

    @model_validator(mode="after")
    def _resolve(self, info: ValidationInfo) -> Self:
        """Make every path absolute and fill in defaults that depend on other keys. Raises ValueError."""
        folder = Path((info.context or {}).get("folder") or Path.cwd())
        explorer, inputs, hosts, rollout = self.explorer, self.buffer.explorer_input, self.hosts, self.rollout
        if hosts.address and self.synchronizer.sync_method == "nccl":
            raise ValueError(
                "hosts.address is set, and synchronizer.sync_method is nccl: engines on other hosts can't join an NCCL "
                "group. Set synchronizer.sync_method to memory, or to checkpoint: hosts pull from the head what they "
                "can't read")
        if rollout.engine_type == "http" and self.synchronizer.sync_method == "nccl":
            raise ValueError(
                "explorer.rollout_model.engine_type is http, and synchronizer.sync_method is nccl: external "
                "servers can't join an NCCL group. Set synchronizer.sync_method to checkpoint, or to memory if the "
                "servers are on the trainer's host")
        run_folder = folder / "runs" / self.project / self.name
        if self.mode == "bench":  # it begins again with the first weights, in its own log
            run_folder = run_folder / "bench"
        url = make_url(self.store.url or file_url(run_folder / "log.sqlite"))
        if url.get_backend_name() == "sqlite":
            if hosts.address:
                raise ValueError(
                    "hosts.address is set, and the store is a SQLite file, which only one host can use: its locks and "
                    "its write-ahead log do not reach over a network. Set store.url to a PostgreSQL database")
            file = _absolute_path(str(url.database), folder)
            url, run_folder = make_url(file_url(file)), Path(file).parent
        default_model = _model_path(self.model.model_path, folder)

        def with_paths(model: _Model) -> _Model:
            path = _model_path(model.model_path, folder) or default_model
            return _copy_with(model, model_path=path, servers=_with_absolute_paths(model.servers, folder, "file"))

        system = _with_absolute_paths(self.system, folder, "log_dir", "key_file")
        self.__dict__.update(  # the only write to a frozen config, before any caller has it
            model=_copy_with(self.model, model_path=default_model),
            run_dir=_absolute_path(self.run_dir or str(run_folder), folder),
            checkpoint_root_dir=_absolute_path(self.checkpoint_root_dir, folder),
            code_path=_absolute_path(self.code_path or ".", folder),
            explorer=_copy_with(
                explorer, rollout_model=with_paths(rollout),
                auxiliary_models=[*map(with_paths, explorer.auxiliary_models)],
                proxy_tls=_with_absolute_paths(explorer.proxy_tls, folder, "cert", "key"),
            ),
            buffer=_copy_with(self.buffer, explorer_input=_copy_with(inputs, **{
                group: [_with_absolute_paths(section, folder, "path") if section.kind == "file" else section
                        for section in getattr(inputs, group)]
                for group in _TASKSETS
            })),
            store=_copy_with(self.store, url=url.render_as_string(hide_password=False)),
            system=_copy_with(system, log_dir=system.log_dir or _absolute_path(str(run_folder / "logs"), folder)),
            hosts=_with_absolute_paths(hosts, folder, "key_file", "weights_dir"),
        )
        return self

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint_root_dir) / self.project / self.name

    @property
    def another_run(self) -> str:
        """Advice for errors on how to begin another run: change `name`, or `store.url` if the config sets it."""
        if f"/runs/{self.project}/{self.name}/" in str(file_of(self.store.url)):
            return "choose another `name` (or `--set name=...`)"
        return "give another `store.url` (or `--set store.url=...`), for this config names its own"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, from which `from_dict` makes an equal config. Secrets are in it; `masked` hides them."""
        return dict(escape_texts(self.plain()))

    def check(self) -> None:
        """Check the parts of a config that depend on this machine: model, tasksets, and names to import.

        Raises ConfigError (UnknownWorkflow if only workflows are wrong) with every problem, a line each. Importing runs
        the top level of the user's modules in this process.
        """
        from trinity_es.actors.coordinator.delivery.operators import (
            OPERATORS,  # here, because programs that only read a log need none
        )
        from trinity_es.actors.coordinator.delivery.outputs import OUTPUTS, build_outputs
        from trinity_es.actors.coordinator.delivery.pipeline import Pipeline
        from trinity_es.actors.coordinator.handlers.experience_queue import PRIORITIES, build_priority
        from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS, missing_package

        problems: list[str] = []
        workflows: list[str] = []
        inputs, pipeline, queue = self.buffer.explorer_input, self.buffer.pipeline, self.buffer.queue
        models = {"explorer.rollout_model": self.rollout}
        models |= {f"explorer.auxiliary_models[{i}]": m for i, m in enumerate(self.explorer.auxiliary_models)}
        if any(m.engine_type in ("vllm", "http") and not m.model_path for m in models.values()):
            problems.append("model.model_path is not set: give a folder or a hub id (or engine_type: scripted)")
        paths = {m.model_path: f"{key}.model_path" for key, m in models.items()}
        paths[self.model.model_path] = "model.model_path"
        problems += [f"{key}: no folder {p}" for p, key in paths.items() if os.path.isabs(p) and not os.path.isdir(p)]
        if self.trainer.trainer_class is not None:
            folders = (self.checkpoint_dir, *self.checkpoint_dir.parents)
            problems += [f"checkpoint_root_dir: {path} is a file: name a folder" for path in folders if path.is_file()]
        if self.hosts.address and importlib.util.find_spec("cryptography") is None:
            problems.append("hosts.address: the connection between hosts needs cryptography: pip install "
                            "'trinity-es[postgres]'")
        tls = self.explorer.proxy_tls
        problems += [f"explorer.proxy_tls.{name}: {path} can't be read: give a file that this user may read"
                     for name, path in (("cert", tls.cert), ("key", tls.key))
                     if self.mode == "serve" and path and not os.access(path, os.R_OK)]
        with self._importing():
            for key, taskset in ((f"buffer.explorer_input.{group}[{i}]", taskset) for group in _TASKSETS
                                 for i, taskset in enumerate(getattr(inputs, group))):
                problems += _taskset_problems(key, taskset)
                unknown = import_problems(f"{key}.workflow", taskset.workflow, WORKFLOWS.paths)
                wrong = import_problems(f"{key}.reward_fn", taskset.reward_fn, REWARD_FUNCTIONS.paths)
                if not (unknown or wrong) and (missing := missing_package(taskset.workflow, taskset.reward_fn)):
                    wrong = [f"{key}: {missing}"]
                rows = taskset.format  # if rows name their own, the arguments are for those
                workflow = None if unknown or rows.workflow_key else WORKFLOWS.get(taskset.workflow)
                is_puzzle = taskset.kind == "reasoning_gym"
                default_reward = SCORER if is_puzzle else getattr(workflow, "default_reward", None)
                if not (wrong or rows.reward_fn_key) and (reward := taskset.reward_fn or default_reward):
                    function = REWARD_FUNCTIONS.get(reward)
                    wrong = reward_problems(f"{key}.reward_fn_args", function, taskset.reward_fn_args)
                wrong += workflow_problems(f"{key}.workflow_args", workflow, taskset.workflow_args)
                workflows += unknown
                problems += wrong
            built: list[tuple[str, str, str, Mapping[str, Any], Callable[[], Any]]] = [
                *((f"buffer.pipeline.operators[{i}]", "name", one.name, OPERATORS,
                   partial(Pipeline, [one.model_dump()])) for i, one in enumerate(pipeline.operators)),
                *((f"buffer.pipeline.outputs[{i}]", "name", one.name, OUTPUTS,
                   partial(build_outputs, [one.model_dump()], self.run_dir)) for i, one in enumerate(pipeline.outputs)),
                ("buffer.queue", "priority_fn", queue.priority_fn, PRIORITIES,
                 partial(build_priority, queue.priority_fn, queue.priority_fn_args)),
            ]
            for key, leaf, name, known, build in built:
                problems += import_problems(f"{key}.{leaf}", name, known) or _build_problems(build, key)
            for name in self.monitor.monitor_type:
                problems += import_problems("monitor.monitor_type", name, {"jsonl": None, **registered("monitor")})
            unbuilt = import_problems("trainer.class", self.trainer.trainer_class)
            if self.trainer.trainer_class is not None and not unbuilt:
                trainer = load(self.trainer.trainer_class)
                unbuilt = call_problems("trainer.args", trainer, self.trainer.args, positional_count=1)  # model_path
            problems += unbuilt
            for key, m in models.items():
                problems += import_problems(f"{key}.engine_type", m.engine_type, registered("engine"))
        if problems or workflows:
            raise config_error(problems + workflows, ConfigError if problems else UnknownWorkflow)

    @contextmanager
    def _importing(self) -> Iterator[None]:
        old_path = list(sys.path)
        add_import_folders(self.code_path, str(Path.cwd()))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path[:] = old_path


def _taskset_problems(key: str, taskset: TasksetConfig) -> list[str]:
    if taskset.kind != "file":
        path = registered("environment")[taskset.kind]
        check = None if (problems := import_problems(f"{key}.path", path)) else getattr(load(path), "check", None)
        return _build_problems(partial(check, taskset), f"{key}.path") if check is not None else problems
    file = taskset.file
    if file.is_dir() and not (file / "state.json").is_file():
        return [f"{key}.path: {file} is a folder: choose <split>.jsonl in it with {key}.split (or .parquet, or a "
                "dataset's split)"]
    if file.is_file() or file.is_dir():
        return []
    return [f"{key}.path: no file {file}{taskset.path_hint}"]


def _build_problems(build: Callable[[], Any], key: str) -> list[str]:
    try:
        build()
    except (ConfigError, DataError) as e:
        return [f"{key}: {e}"]
    return []


def _absolute_path(path: str, folder: Path) -> str:
    return os.path.normpath(folder.absolute() / Path(path).expanduser())


def _copy_with(section: _Section, **changes: Any) -> _Section:
    return section.model_copy(update=changes)


def _with_absolute_paths(section: _Section, folder: Path, *keys: str) -> _Section:
    paths = {key: getattr(section, key) for key in keys}
    return _copy_with(section, **{key: path and _absolute_path(path, folder) for key, path in paths.items()})


def _model_path(path: str, folder: Path) -> str:
    """Return a local path (it begins with ., ~ or /, or it or its parent folder exists) as absolute, a hub id as is."""
    if not path:
        return path
    local = Path(_absolute_path(path, folder))
    looks_local = path.startswith((".", "~", "/")) or local.exists() or ("/" in path and local.parent.is_dir())
    return str(local) if looks_local else path


def _validate(
    data: dict[str, Any], folder: str | Path | None, origin_of: Callable[[Path_], str],
    as_text: Callable[[Path_], tuple[str, str]] = lambda path: ("", ""),
) -> Config:
    """Return the config of this data. Raises ConfigError; `origin_of` and `as_text` serve its lines (`explain`)."""
    plain, problems, texts = resolve_texts(data)
    unresolved = {
        path: f"{origin_of(path)}: {dotted_path(path)} {problem}; or give the value with --set {dotted_path(path)}=..."
        for path, problem in problems.items()
    }
    for may_convert in (True, False):
        try:
            config = Config.model_validate(plain, context={"folder": folder})
        except ValidationError as e:
            errors = e.errors(include_url=False)
            if may_convert and _convert_texts(plain, errors, texts):
                continue
            from trinity_es.config.trinity_rft_keys import foreign_keys, foreign_values  # it reads a file

            raise explain(
                errors, Config, origin_of, hints=foreign_keys() | RENAMED, foreign_values=foreign_values(),
                unexpanded=unresolved, as_text=as_text,
            ) from None
        break
    if unresolved:
        raise config_error(list(unresolved.values()))
    return config


def _convert_texts(data: Any, errors: Sequence[ErrorDetails], texts: Container[Path_]) -> bool:
    """Convert those of the `texts` (paths in `data`) that pydantic refused for their type. Return whether any were."""
    has_converted = False
    for error in errors:
        path: Path_ = error["loc"]
        if path in texts:
            parent = reduce(operator.getitem, path[:-1], data)
            with contextlib.suppress(ValueError):
                parent[path[-1]] = convert_text(parent[path[-1]], error["type"])
                has_converted = True
    return has_converted


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, with overrides such as `"buffer.batch_size=8"` on top (their values are YAML).

    Raises ConfigError, which lists every problem with its file and line.
    """
    file = Path(path).absolute()
    data, lines = read_yaml(file)
    overridden = apply_overrides(data, overrides)

    def origin_of(key: Path_) -> str:
        for end in range(len(key), 0, -1):
            if key[:end] in overridden:
                return overridden[key[:end]][0]
            if key[:end] in lines:
                return f"{path} line {lines[key[:end]][0]}"
        return str(path)

    def as_text(key: Path_) -> tuple[str, str]:
        if key in overridden:
            name, text = overridden[key]
            return text, f"--set {shlex.quote(name.removeprefix('--set ') + '=' + json.dumps(text))}"
        text = lines.get(key, (0, ""))[1]
        return text, json.dumps(text)

    return _validate(data, file.parent, origin_of, as_text)
