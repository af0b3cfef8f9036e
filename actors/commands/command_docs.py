"""Generator of docs/COMMANDS.md: `python -m trinity_es.actors.commands.command_docs > docs/COMMANDS.md`.

It parses the sources, like `trinity_es.events.event_docs`, because Python does not keep the string under a field.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from itertools import pairwise

from trinity_es.actors import commands
from trinity_es.actors.commands import batches, fields, serve, servers_and_hosts, trainer
from trinity_es.events.event_docs import documented_fields, fields_table

__all__ = ["markdown"]

_HEAD = """# Commands

Commands that a client can send to the coordinator, printed from `actors/commands/` by `make docs`. A command travels
as its name and plain values. The coordinator checks all of it before it acts, and answers a wrong field with DataError.
The answer is plain JSON, and is sent when everything that it reports is durable.

Every request has an id. A client may send a request again under the same id, also to a later coordinator: it gets its
answer, or goes on waiting.

Besides the errors of its own, every command may be answered with DataError (a wrong field), LogUnavailable, LogRewound,
and RequestRefused (it may have crashed coordinators). *Writes*: it is recorded in the log. *Waits*: its answer comes
when runners or other clients have done something. While the log can't be written for a reason that may pass, clients of
a command that waits go on waiting; other commands that write fail at once with LogUnavailable."""


def markdown() -> str:
    lines = [_HEAD]
    value_lines: list[str] = []
    for module in (batches, trainer, serve, servers_and_hosts):
        source = inspect.getsource(module)
        matches = ((number, re.match(r"# --- (.+?) -+$", line)) for number, line in enumerate(source.splitlines(), 1))
        titles = {number: match[1][0].upper() + match[1][1:] for number, match in matches if match}
        for node in [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]:
            for line_number in [number for number in titles if number < node.lineno]:
                lines += ["", f"## {titles.pop(line_number)}"]
            cls = getattr(module, node.name)
            if cls in commands.COMMANDS.values():
                lines += _command_section(node, cls)
            else:
                value_lines += _section(node.name, node)
    lines += ["", "## Values inside commands and answers", *value_lines]
    lines += ["", "## Types of fields", "", "| type | |", "|---|---|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in _field_types()]
    return "\n".join(lines) + "\n"


def _section(title: str, node: ast.ClassDef) -> list[str]:
    table = fields_table(documented_fields(node))
    return ["", f"### {title}", "", (ast.get_docstring(node) or "").strip(), *(["", *table] if table else [])]


def _command_section(node: ast.ClassDef, cls: type[commands.Command[object]]) -> list[str]:
    [base] = node.bases
    assert isinstance(base, ast.Subscript)
    answer = ast.unparse(base.slice)
    notes = [name for name, applies in (("Writes.", cls.writes), ("Waits.", cls.waits)) if applies]
    notes.append("Answer: nothing." if answer == "None" else f"Answer: `{answer}`.")
    return [*_section(f"{node.name} (`{cls.name}`)", node), "", " ".join(notes)]


def _field_types() -> list[tuple[str, str]]:
    """Return the name and the documentation of each type in `fields.py`."""
    body = ast.parse(inspect.getsource(fields)).body
    return [
        (node.targets[0].id, " ".join(str(after.value.value).split()))
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and ast.unparse(node.value).startswith(("Annotated[", "Literal["))
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    ]


if __name__ == "__main__":
    sys.stdout.write(markdown())
