"""`workflows`: the workflows and rewards that come with the package."""

from __future__ import annotations

import inspect

from rich.table import Table

from trinity_es.cli.common import JsonOption, print_json
from trinity_es.cli.render import tables
from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS, WorkflowRegistry

__all__ = ["workflows"]


def workflows(as_json: JsonOption = False) -> None:
    """List the names that a taskset's `workflow` and `reward_fn` may be, besides "module:Class".

    \b
    Examples:
      trinity-es workflows
      trinity-es workflows --json
    """
    found = {registry.kind: _lines(registry) for registry in (WORKFLOWS, REWARD_FUNCTIONS)}
    if as_json:
        print_json(found)
        return
    for what, lines in found.items():
        table = Table(what, "", box=None)
        for name, line in lines.items():
            table.add_row(name, line)
        tables.console().print(table)


def _lines(registry: WorkflowRegistry) -> dict[str, str]:
    """Return the first line of each one's docstring, by its name; that of an async form is the other's."""
    found = {name: (inspect.getdoc(registry.get(name)) or "").partition("\n")[0] for name in registry.names()}
    return {name: found.get(name.removeprefix("async_"), line) for name, line in found.items()}
