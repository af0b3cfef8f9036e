"""The command `workflows`."""

from __future__ import annotations

import inspect

from rich.table import Table

from trinity_es.cli.common import JsonOption, print_json
from trinity_es.cli.render import batch_tables
from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS, WorkflowRegistry

__all__ = ["workflows"]


def workflows(as_json: JsonOption = False) -> None:
    """List the workflows and rewards of the package, by their names for `workflow` and `reward_fn` of a taskset.

    Workflows and rewards of your own are named "module:Class".

    \b
    Examples:
      trinity-es workflows
      trinity-es workflows --json
    """
    lines_by_kind = {registry.kind: _first_lines(registry) for registry in (WORKFLOWS, REWARD_FUNCTIONS)}
    if as_json:
        print_json(lines_by_kind)
        return
    for kind, lines in lines_by_kind.items():
        table = Table(kind, "", box=None)
        for name, line in lines.items():
            table.add_row(name, line)
        batch_tables.console().print(table)


def _first_lines(registry: WorkflowRegistry) -> dict[str, str]:
    """Return the first docstring line of each entry, by name. An `async_` variant has the line of the sync one."""
    lines = {name: (inspect.getdoc(registry.get(name)) or "").partition("\n")[0] for name in registry.names()}
    return {name: lines.get(name.removeprefix("async_"), line) for name, line in lines.items()}
