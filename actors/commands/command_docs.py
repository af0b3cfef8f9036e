"""docs/COMMANDS.md, made from the vocabulary: `python -m trinity_es.actors.commands.command_docs > docs/COMMANDS.md`.

Reads the sources, as `trinity_es.events.event_docs` does: the string under a field is documentation that Python itself
throws away.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from itertools import pairwise

from trinity_es.actors import commands
from trinity_es.actors.commands import batches, fields, serve, servers, trainer
from trinity_es.events.event_docs import documented_fields, fields_table

__all__ = ["markdown"]

_HEAD = """# Commands

What a client can ask of the coordinator, made from `actors/commands/` by `make docs`. A command travels as its name
and plain values, and is checked whole where it arrives: nobody but who sent it hears of a field that can't be. Its
answer is plain JSON, and is sent when what it says is durable.

A request has an id: sent again under it, also to a coordinator that took over, it gets its answer, or goes on waiting.

Besides its own errors every command may be answered with DataError (a field is not what it must be), LogUnavailable,
LogRewound, and RequestRefused (it ended coordinators). *Writes*: what it asks for is recorded. *Waits*: it is answered
when runners, or other clients, have got something done. While the log can't be written and that may pass, the client of
a command that waits goes on waiting; who asks for another one that writes is told so at once."""


def markdown() -> str:
    lines, values = [_HEAD], []
    for module in (batches, trainer, serve, servers):
        source = inspect.getsource(module)
        titles = dict(_titles(source))
        for node in [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]:
            for line in [line for line in titles if line < node.lineno]:
                lines += ["", f"## {titles.pop(line)}"]
            cls = getattr(module, node.name)
            if cls in commands.COMMANDS.values():
                lines += _command(node, cls)
            else:
                values += _entry(node.name, node)
    lines += ["", "## Values inside commands and answers", *values]
    lines += ["", "## Types of fields", "", "| type | |", "|---|---|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in _kinds()]
    return "\n".join(lines) + "\n"


def _titles(source: str) -> list[tuple[int, str]]:
    found = [(n, re.match(r"# --- (.+?) -+$", line)) for n, line in enumerate(source.splitlines(), 1)]
    return [(n, match[1][0].upper() + match[1][1:]) for n, match in found if match]


def _entry(title: str, node: ast.ClassDef) -> list[str]:
    table = fields_table(documented_fields(node))
    return ["", f"### {title}", "", (ast.get_docstring(node) or "").strip(), *(["", *table] if table else [])]


def _command(node: ast.ClassDef, cls: type[commands.Command[object]]) -> list[str]:
    [base] = node.bases
    assert isinstance(base, ast.Subscript)
    answer = ast.unparse(base.slice)
    told = [name for name, is_so in (("Writes.", cls.writes), ("Waits.", cls.waits)) if is_so]
    told.append("Answer: nothing." if answer == "None" else f"Answer: `{answer}`.")
    return [*_entry(f"{node.name} (`{cls.name}`)", node), "", " ".join(told)]


def _kinds() -> list[tuple[str, str]]:
    """Return the kinds of fields, each with what it says of itself."""
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
