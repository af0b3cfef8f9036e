"""What a taskset is read from: a file, a dataset of the hub at a commit, an environment or reasoning-gym of a version.

A file is what lies there. The others are names, which may come to mean something else while a run goes on, or
between its beginning and its resumption: what they were found to be is in the log (`TasksetResolved`), and a run that
goes on reads that, or says why it can't.
"""

from __future__ import annotations

import orjson

from trinity_es.config.buffer import TasksetConfig
from trinity_es.environments.verifiers_tasks import tasks_revision
from trinity_es.events.errors import TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.files import RowFile, open_file
from trinity_es.tasksets.generated import Generated
from trinity_es.tasksets.hub import HubRows

__all__ = ["open_source"]


def open_source(
    config: TasksetConfig, recorded: TasksetSource | None, *, is_eval: bool
) -> tuple[RowFile, TasksetSource | None]:
    """Return the rows of a taskset, and what they are read from; None: a file.

    `recorded`: what the log has of it: the same is opened. Raises TasksetError for a config that asks for something
    else than that, and for what can't be opened.
    """
    if recorded is not None:
        _require_same(config, recorded)
    rows: RowFile
    subset = config.subset
    match config.kind:
        case "file":
            return open_file(config), None
        case "verifiers":
            rows, revision = open_file(config), tasks_revision(config.workflow_args, config.file)
        case "hub":
            hub = HubRows(config, *((recorded.revision, recorded.subset) if recorded else ()))
            rows, revision, subset = hub, hub.revision, hub.subset
        case "reasoning_gym":
            made = Generated(config)
            rows, revision = made, made.revision
    source = TasksetSource(
        taskset=config.name, is_eval=is_eval, path=config.path, subset=subset, split=config.split,
        asked=config.revision, revision=revision, args=_args(config), rows=len(rows),
    )
    if recorded is not None and (source.revision, source.rows) != (recorded.revision, recorded.rows):
        raise TasksetError(
            f"taskset {config.name}: {config.path} is {_told(source)} here, and the run in this log began with "
            f"{_told(recorded)}: {_way_back(config, recorded)}, or start a new run under another `name`"
        )
    return rows, recorded or source


def _require_same(config: TasksetConfig, recorded: TasksetSource) -> None:
    """Require that the config asks for what the log has. The commit itself may be asked for in place of a branch, and
    the default subset by its name, or as none.
    """
    subset = config.subset or recorded.subset
    wanted = {"path": config.path, "subset": subset, "split": config.split, "args": _args(config)}
    before = {"path": recorded.path, "subset": recorded.subset, "split": recorded.split, "args": recorded.args}
    if config.revision not in (recorded.asked, recorded.revision):
        wanted["revision"] = config.revision or "the main branch"
        before["revision"] = f"{recorded.asked or 'the main branch'}, which was commit {recorded.revision}"
    for key, value in wanted.items():
        if value != before[key]:
            raise TasksetError(
                f"taskset {config.name}: its {key} is {value} in the config, and the run in this log began with "
                f"{before[key]}: put that back, or start a new run under another `name`"
            )


def _args(config: TasksetConfig) -> str:
    return orjson.dumps(config.args, option=orjson.OPT_SORT_KEYS).decode() if config.kind == "reasoning_gym" else ""


def _told(source: TasksetSource) -> str:
    return f"{source.rows} rows at {source.revision}"


def _way_back(config: TasksetConfig, recorded: TasksetSource) -> str:
    if config.kind == "reasoning_gym":
        return f"`pip install reasoning-gym=={recorded.revision}`"
    if config.kind == "verifiers":
        version = recorded.revision.partition(" ")[0]
        return f"put its config back, or version {version} of the environment (`trinity-es env install`)"
    return "remove it from the cache (HF_HOME), so that it is fetched again"
