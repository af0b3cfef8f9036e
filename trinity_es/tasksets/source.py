"""What a taskset is read from: a file, a dataset of the hub at a commit, an environment or reasoning-gym of a version.

A path is a name, which may come to mean something else while a run goes on, or between its beginning and its
resumption: a file has another row, a branch another commit. What it was found to be is in the log (`TasksetResolved`),
with the order in which rows are read, and a run that goes on reads that, or says why it can't: its cursor counts them.
"""

from __future__ import annotations

from typing import Any

import orjson

from trinity_es.actors.config.buffer import TasksetConfig
from trinity_es.environments.verifiers_tasks import tasks_file, tasks_revision
from trinity_es.events.errors import TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.files import RowFile, open_file
from trinity_es.tasksets.generated import Generated
from trinity_es.tasksets.hub import HubRows

__all__ = ["open_source"]

FILE = "sha256:"
"""Beginning of the revision of a file."""


def open_source(
    config: TasksetConfig, recorded: TasksetSource | None, *, is_eval: bool
) -> tuple[RowFile, TasksetSource]:
    """Return the rows of a taskset, and what they are read from.

    `recorded`: what the log has of it: the same is opened. Raises TasksetError for a config that asks for something
    else than that, and for what can't be opened.
    """
    if recorded is not None:
        _require_same(config, recorded)
    rows: RowFile
    match config.kind:
        case "hub":
            rows = HubRows(config, *((recorded.revision, recorded.subset) if recorded else ()))
        case "reasoning_gym":
            rows = Generated(config)
        case _:
            rows = open_file(config)
    revision = rows.revision
    if config.kind == "verifiers":
        revision = tasks_revision(config.workflow_args, tasks_file(config.workflow_args))
    source = TasksetSource(
        taskset=config.name, is_eval=is_eval, path=config.path, subset=getattr(rows, "subset", config.subset),
        split=config.split, asked=config.revision, revision=revision, args=_args(config), rows=len(rows),
        order="" if is_eval else _order(config),
    )
    if recorded is not None and (source.revision, source.rows) != (recorded.revision, recorded.rows):
        raise TasksetError(
            f"taskset {config.name}: {config.path} has {_told(source)} here, and the run in this log began with "
            f"{_told(recorded)}: {_way_back(config, recorded)}, or start a new run under another `name` "
            "(another `store.url` where the config has one)"
        )
    return rows, recorded or source


def _require_same(config: TasksetConfig, recorded: TasksetSource) -> None:
    """Require that the config asks for what the log has. The commit itself may be asked for in place of a branch, and
    the default subset by its name, or as none.
    """
    subset = config.subset or recorded.subset
    wanted = {"path": config.path, "subset": subset, "split": config.split, "args": _args(config)}
    before = {"path": recorded.path, "subset": recorded.subset, "split": recorded.split, "args": recorded.args}
    if config.kind == "file" and recorded.revision.startswith(FILE):  # wherever it lies now
        wanted, before = {}, {}
    if not recorded.is_eval and recorded.order is not None:
        wanted["order"], before["order"] = (order or "that of the file" for order in (_order(config), recorded.order))
    if config.revision not in (recorded.asked, recorded.revision):
        wanted["revision"] = config.revision or "the main branch"
        before["revision"] = f"{recorded.asked or 'the main branch'}, which was commit {recorded.revision}"
    for key, value in wanted.items():
        if value != before[key]:
            raise TasksetError(
                f"taskset {config.name}: its {key} is {value} in the config, and the run in this log began with "
                f"{before[key]}: put that back, or start a new run under another `name` "
                "(another `store.url` where the config has one)"
            )


def _args(config: TasksetConfig) -> str:
    return orjson.dumps(config.args, option=orjson.OPT_SORT_KEYS).decode() if config.kind == "reasoning_gym" else ""


def _order(config: TasksetConfig) -> str:
    """Return how rows are chosen, as JSON; "" where they are read in the order of the file."""
    selector = config.data_selector
    order: dict[str, Any] = {"shuffle": True, "seed": config.seed} if config.shuffle else {}
    if selector is not None and selector.selector_type != "sequential":
        order = {"data_selector": selector.model_dump()}
    return orjson.dumps(order, option=orjson.OPT_SORT_KEYS).decode() if order else ""


def _told(source: TasksetSource) -> str:
    return f"{source.rows} rows, {source.revision}"


def _way_back(config: TasksetConfig, recorded: TasksetSource) -> str:
    if config.kind == "file":
        return "put the old file back"
    if config.kind == "reasoning_gym":
        return f"`pip install reasoning-gym=={recorded.revision}`"
    if config.kind == "verifiers":
        version = recorded.revision.partition(" ")[0]
        return f"put its config back, or version {version} of the environment (`trinity-es env install`)"
    return "remove it from the cache (HF_HOME), so that it is fetched again"
