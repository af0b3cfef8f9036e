"""Printer of docs/CONFIG.md: every key, its type, its default and its meaning."""

from __future__ import annotations

import sys

from trinity_es.config.config import Config
from trinity_es.config.config_problems import key_table

__all__ = ["describe"]


_ENVIRONMENT = """\
## Environment variables
`${oc.env:NAME}` in a value is replaced by an environment variable, `${oc.env:NAME,default}` by the variable or a
default, in the file and in `--set`, as in OmegaConf. It may be part of a longer text, also several times:

```yaml
checkpoint_root_dir: ${oc.env:CHECKPOINTS,./checkpoints}
store: {url: "postgresql+psycopg://${oc.env:PGUSER}:${oc.env:PGPASSWORD}@db/runs"}
buffer: {batch_size: "${oc.env:BATCH,16}"}
```

- A variable's value is always text. A key that takes a number or true/false converts it (`8`, `1e-3`, `yes`); a key
  that takes anything (`trainer.args`) gets the text.
- A default ends at the brace. Quote it (`'a, b'`) if it contains a comma, a bracket, a brace or a quote. Spaces around
  it are ignored, and `null` means no value. It keeps its spelling (OmegaConf turns `1.50` into `1.5`), and can't
  contain another `${...}`.
- An empty variable is an empty text. An unset variable without a default is an error.
- Any other `${...}` is an error, also `${HOME}` and `${model.model_path}`. `\\${` is the text `${` itself.
- Values are resolved once, when the config is read. The value is recorded, so a run that is resumed from its log has
  the values that it was started with. A value is masked as if it were written in the config. In a key that takes
  anything it is also masked if the variable has the name of a secret (`JUDGE_API_KEY`).

## Keys"""


def describe() -> list[tuple[str, str, str, str]]:
    """Return every key as (key, type, default, description), without `eval_tasksets[]`, whose keys `tasksets[]` has."""
    return [row for row in key_table(Config) if not row[0].startswith("buffer.explorer_input.eval_tasksets[].")]


def _markdown() -> str:
    rows = "\n".join(f"| `{key}` | {type_} | `{default}` | {text} |" for key, type_, default, text in describe())
    return (
        "# Config\n\nOne YAML file; every key but those marked `required` may be left out. An unknown key is an error. "
        "Relative paths are relative to the folder of the config file. `--set a.b=c` overrides a key, "
        "`--set a.0.b=c` one in a list.\n\n"
        f"{_ENVIRONMENT}\n"
        "This page is printed by `python -m trinity_es.config.config_docs`.\n\n"
        f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n")


if __name__ == "__main__":
    sys.stdout.write(_markdown())
