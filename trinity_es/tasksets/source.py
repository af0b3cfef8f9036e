"""Sources of tasksets: a file, a dataset of the hub at a commit, an environment or reasoning-gym at a version.

The data behind a path may change before a run is resumed: a file gets another row, a branch another commit. So the log
records the revision (`TasksetResolved`) and the order of rows. A resumed run opens exactly this revision, because its
cursor counts the rows, or fails with the reason.
"""

from __future__ import annotations

from typing import Any

import orjson

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.actors.plugin_lookup import registered, resolve
from trinity_es.events.errors import TasksetError, TrinityError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.files import RowFile, open_file
from trinity_es.tasksets.row_checks import no_prompt_text

__all__ = ["open_source"]

FILE = "sha256:"
"""Beginning of the revision of a file."""


def open_source(
    config: TasksetConfig, recorded: TasksetSource | None, *, is_eval: bool
) -> tuple[RowFile, TasksetSource]:
    """Return the rows of a taskset, and their source.

    `recorded`: the source in the log, to open again. Raises TasksetError if the config names another source, or if the
    source can't be opened.
    """
    if recorded is not None:
        _require_same_source(config, recorded)
    rows = open_file(config) if config.kind == "file" else _environment_rows(config, recorded)
    source = TasksetSource(
        taskset=config.name, is_eval=is_eval, path=config.path, subset=getattr(rows, "subset", config.subset),
        split=config.split, asked=config.revision, revision=rows.revision, args=_args_json(config), rows=len(rows),
        order="" if is_eval else _order_json(config),
    )
    if recorded is not None and (source.revision, source.rows) != (recorded.revision, recorded.rows):
        raise TasksetError(
            f"taskset {config.name}: {config.path} has {source.rows} rows, {source.revision} here, but the run in this "
            f"log began with {recorded.rows} rows, {recorded.revision}: {_remedy(config, recorded)}, or start a new "
            "run under another `name` (another `store.url` if the config sets one)"
        )
    return rows, recorded or source


def _environment_rows(config: TasksetConfig, recorded: TasksetSource | None) -> RowFile:
    """Return the rows of a registered environment. An error in its code becomes a TasksetError that names it."""
    try:
        rows: RowFile = resolve(config.kind, registered("environment"), "environment")(config, recorded)
        if not isinstance(rows.revision, str):
            raise TypeError(f"the revision of the rows is {rows.revision!r}, not a text")
        if not len(rows):
            raise TasksetError(f"taskset {config.name}: {config.path} is empty: a taskset has at least one row")
        [first_row] = rows.read([0])
        prompt_key = config.format.prompt_key
        if prompt_key not in first_row:
            problem = no_prompt_text(prompt_key, list(first_row))
            raise TasksetError(f"taskset {config.name}: {config.path} row 0: {problem}")
    except TrinityError:
        raise
    except Exception as e:  # code of another package
        raise TasksetError(f"taskset {config.name}: environment {config.path} failed ({type(e).__name__}: {e})") from e
    return rows


def _require_same_source(config: TasksetConfig, recorded: TasksetSource) -> None:
    """Raise TasksetError if the config names another source than the recorded one.

    The same are: a branch and its recorded commit, no subset and the default subset.
    """
    subset = config.subset or recorded.subset
    config_values = {"path": config.path, "subset": subset, "split": config.split, "args": _args_json(config)}
    recorded_values = {"path": recorded.path, "subset": recorded.subset, "split": recorded.split, "args": recorded.args}
    if config.kind == "file" and recorded.revision.startswith(FILE):  # wherever it lies now
        config_values, recorded_values = {}, {}
    if not recorded.is_eval and recorded.order is not None:
        config_values["order"] = _order_json(config) or "that of the file"
        recorded_values["order"] = recorded.order or "that of the file"
    if config.revision not in (recorded.asked, recorded.revision):
        config_values["revision"] = config.revision or "the main branch"
        recorded_values["revision"] = f"{recorded.asked or 'the main branch'}, which was commit {recorded.revision}"
    for key, value in config_values.items():
        if value != recorded_values[key]:
            raise TasksetError(
                f"taskset {config.name}: its {key} is {value} in the config, but the run in this log began with "
                f"{recorded_values[key]}: put that value back, or start a new run under another `name` (another "
                "`store.url` if the config sets one)"
            )


def _args_json(config: TasksetConfig) -> str:
    """Return a taskset's `args` as JSON; "" if the rows of its kind do not depend on them."""
    has_args = config.kind not in ("file", "hub", "verifiers")
    return orjson.dumps(config.args, option=orjson.OPT_SORT_KEYS).decode() if has_args else ""


def _order_json(config: TasksetConfig) -> str:
    """Return the config's order of rows as JSON; "" for the order of the file."""
    selector = config.data_selector
    order: dict[str, Any] = {"shuffle": True, "seed": config.seed} if config.shuffle else {}
    if selector is not None and selector.selector_type != "sequential":
        order = {"data_selector": selector.model_dump()}
    return orjson.dumps(order, option=orjson.OPT_SORT_KEYS).decode() if order else ""


def _remedy(config: TasksetConfig, recorded: TasksetSource) -> str:
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
