"""Page of all commands, docs/CLI.md. `python -m trinity_es.cli.cli_docs` prints it from the commands' `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from trinity_es.cli import app

__all__ = ["markdown"]

_HEAD = """# The command line

The text of `trinity-es COMMAND --help` for each command, made from the code by `make docs`. Exit codes: 0 yes, 1 the
answer is no, 2 an error. `--json`, wherever a command has it, prints the same data for programs."""


def markdown() -> str:
    return "\n".join([_HEAD, *_pages(get_command(app), "trinity-es", None)]) + "\n"


def _pages(command: Any, name: str, parent: Any) -> Iterator[str]:
    """Yield a section with the help of a command (not for `trinity-es` itself), then those of its subcommands."""
    own_name = name.rpartition(" ")[2]
    context = command.make_context(own_name, [], parent=parent, resilient_parsing=True, max_content_width=110,
                                   terminal_width=110)
    if parent is not None:
        yield f"\n{'#' * len(name.split())} {name}\n```text\n{command.get_help(context).rstrip()}\n```"
    for child_name in getattr(command, "commands", ()):
        if (child := command.get_command(context, child_name)) is not None:
            yield from _pages(child, f"{name} {child_name}", context)


if __name__ == "__main__":
    print(markdown(), end="")
