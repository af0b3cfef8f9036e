"""Printer of docs/EVENTS.md: `python -m trinity_es.events.event_docs > docs/EVENTS.md`.

It parses the sources of `vocabulary/`, since Python itself drops the strings under fields.
"""

from __future__ import annotations

import ast
import inspect
import sys

from trinity_es.events import vocabulary

__all__ = ["documented_fields", "fields_table", "markdown"]


def documented_fields(cls: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Return (name, type, doc) of each field of a class. The doc is the string under the field."""
    documented: list[tuple[str, str, str]] = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not ast.unparse(node.annotation).startswith("ClassVar"):
                documented.append((node.target.id, ast.unparse(node.annotation), ""))
        elif documented and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            name, type_text, _ = documented[-1]
            documented[-1] = (name, type_text, " ".join(str(node.value.value).split()))
    return documented


def fields_table(fields: list[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a Markdown table with a row for each (name, type, doc); [] without fields."""
    rows = [f"| `{name}` | `{text.replace('|', chr(92) + '|')}` | {doc} |" for name, text, doc in fields]
    return ["| field | type | |", "|---|---|---|", *rows] if rows else []


def markdown() -> str:
    classes = {
        node.name: node
        for module in (
            vocabulary.system_events, vocabulary.host_events, vocabulary.batch_events, vocabulary.lease_events,
            vocabulary.delivery_events, vocabulary.base,
        )
        for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)
    }
    streams: dict[str, list[str]] = {}
    for name in classes:
        if name in vocabulary.EVENTS:
            streams.setdefault(vocabulary.EVENTS[name].stream, []).append(name)
    lines = [
        "# Events",
        "",
        "All events of the log, printed from `events/vocabulary/` by `make docs`. Besides its data, an event has a",
        "position (global order, without gaps), a stream and its version there, a time, a commit id, metadata (the",
        "writer's epoch and host) and a hash over itself and the event before it.",
    ]
    for stream, names in streams.items():
        lines += ["", f"## Stream `{stream}`"]
        for name in names:
            lines += _class_section(classes, name)
    lines += ["", "## Values inside events"]
    for name in ("Unit", "PayloadRef", "RunResult", "TakenItem", "Answer", "KnownEnd", "TasksetSource"):
        lines += _class_section(classes, name)
    return "\n".join(lines) + "\n"


def _class_section(classes: dict[str, ast.ClassDef], name: str) -> list[str]:
    cls = classes[name]
    version = getattr(getattr(vocabulary, name), "schema_version", None)
    lines = ["", f"### {name}" + (f" (schema {version})" if version else ""), "", ast.get_docstring(cls) or "", ""]
    base = cls.bases[0].id if cls.bases and isinstance(cls.bases[0], ast.Name) else ""
    if base in vocabulary.EVENTS:
        return [*lines, f"Fields as in {base}."]
    inherited = documented_fields(classes[base]) if base in classes else []
    return lines + fields_table(inherited + documented_fields(cls))


if __name__ == "__main__":
    sys.stdout.write(markdown())
