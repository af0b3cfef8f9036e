"""Sources of tasksets: a file, a dataset of the hub at a commit, an environment or reasoning-gym at a version.

A path is a name whose meaning may change during a run or before its resumption: a file gets another row, a branch
another commit. So the log records what it meant (`TasksetResolved`) and the order of rows. A resumed run reads exactly
that, because its cursor counts those rows, or says why it can't.
"""

from __future__ import annotations

from typing import Any

import orjson

from trinity_es.actors.config.buffer import TasksetConfig
from trinity_es.actors.plugins import registered, resolve
from trinity_es.events.errors import TasksetError, TrinityError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.files import RowFile, open_file
from trinity_es.tasksets.rows import no_prompt

__all__ = ["open_source"]

FILE = "sha256:"
"""Beginning of the revision of a file."""


def open_source(
    config: TasksetConfig, recorded: TasksetSource | None, *, is_eval: bool
) -> tuple[RowFile, TasksetSource]:
    """Return the rows of a taskset, and their source.

    `recorded` is the source in the log, and the same one is opened. Raises TasksetError if the config asks for another
    one, or if it can't be opened.
    """
    if recorded is not None:
        _require_same(config, recorded)
    rows = open_file(config) if config.kind == "file" else _environment(config, recorded)
    source = TasksetSource(
        taskset=config.name, is_eval=is_eval, path=config.path, subset=getattr(rows, "subset", config.subset),
        split=config.split, asked=config.revision, revision=rows.revision, args=_args(config), rows=len(rows),
        order="" if is_eval else _order(config),
    )
    if recorded is not None and (source.revision, source.rows) != (recorded.revision, recorded.rows):
        raise TasksetError(
            f"taskset {config.name}: {config.path} has {_told(source)} here, and the run in this log began with "
            f"{_told(recorded)}: {_way_back(config, recorded)}, or start a new run under another `name` "
            "(another `store.url` where the config has one)"
        )
    return rows, recorded or source


def _environment(config: TasksetConfig, recorded: TasksetSource | None) -> RowFile:
    """Return the rows of a registered environment. Raises TasksetError, which names it, for every failure."""
    try:
        rows: RowFile = resolve(config.kind, registered("environment"), "environment")(config, recorded)
        if not isinstance(rows.revision, str):
            raise TypeError(f"its revision is {rows.revision!r}, not a text")
        if not len(rows):
            raise TasksetError(f"taskset {config.name}: {config.path} is empty: a taskset has at least one row")
        [first] = rows.read([0])
        if (key := config.format.prompt_key) not in first:
            raise TasksetError(f"taskset {config.name}: {config.path} row 0: {no_prompt(key, list(first))}")
    except TrinityError:
        raise
    except Exception as e:  # code of another package
        raise TasksetError(f"taskset {config.name}: environment {config.path} failed ({type(e).__name__}: {e})") from e
    return rows


def _require_same(config: TasksetConfig, recorded: TasksetSource) -> None:
    """Require that the config asks for the recorded source. The commit itself may stand for its branch, and the default
    subset may have its name or none.
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
    takes = config.kind not in ("file", "hub", "verifiers")
    return orjson.dumps(config.args, option=orjson.OPT_SORT_KEYS).decode() if takes else ""


def _order(config: TasksetConfig) -> str:
    """Return the order of rows as JSON; "" for the order of the file."""
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
    if config.kind != "hub":
        return f"put revision {recorded.revision} of {config.kind} back"
    return "remove it from the cache (HF_HOME), so that it is fetched again"
