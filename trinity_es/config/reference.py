"""Print docs/CONFIG.md: every key, its type, its default and its line."""

from __future__ import annotations

import sys

from trinity_es.config.config import Config
from trinity_es.config.explain import key_table

__all__ = ["describe"]


def describe() -> list[tuple[str, str, str, str]]:
    """Return every key as (key, type, default, description). Entries of `eval_tasksets` are those of `tasksets`."""
    return [row for row in key_table(Config) if not row[0].startswith("buffer.explorer_input.eval_tasksets[].")]


def _markdown() -> str:
    rows = "\n".join(f"| `{key}` | {kind} | `{default}` | {text} |" for key, kind, default, text in describe())
    return (
        "# Config\n\nOne YAML file; every key but those marked `required` may be left out. An unknown key is an error. "
        "Relative paths are relative to the folder of the config file. `--set a.b=c` overrides a key, "
        "`--set a.0.b=c` one in a list.\n\nThis page is printed by `python -m trinity_es.config.reference`.\n\n"
        f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(_markdown())
