"""Print docs/CONFIG.md: every key, its type, its default and its line."""

from __future__ import annotations

import sys

from trinity_es.config.config import Config
from trinity_es.config.error_lines import key_table

__all__ = ["describe"]


_ENVIRONMENT = """\
## Environment variables
`${oc.env:NAME}` in a value stands for an environment variable, `${oc.env:NAME,default}` for it or for a default, in the
file and in `--set`, as in OmegaConf; also within a longer text, and several in one:

```yaml
checkpoint_root_dir: ${oc.env:CHECKPOINTS,./checkpoints}
store: {url: "postgresql+psycopg://${oc.env:PGUSER}:${oc.env:PGPASSWORD}@db/runs"}
buffer: {batch_size: "${oc.env:BATCH,16}"}
```

- A variable's value is a text, whatever it looks like. A key that takes a number or true/false converts it (`8`,
  `1e-3`, `yes`); a key that takes anything (`trainer.args`) gets the text.
- A default ends at the brace: quote it (`'a, b'`) where it holds a comma, a bracket, a brace or a quote. Spaces around
  it do not count, `null` is no value. It keeps its spelling (OmegaConf makes `1.5` of `1.50`), and holds no other
  `${...}`.
- A variable that is set to nothing is an empty text; one that is not set and has no default is an error.
- Any other `${...}` is an error, also `${HOME}` and `${model.model_path}`. `\\${` is the text `${` itself.
- It is resolved once, when the config is read. What is recorded is the value, so a run that is resumed from its log
  alone has what it was started with. A value is masked as if it had been written there, and in a key that takes
  anything also where the variable has the name of a secret (`JUDGE_API_KEY`).

## Keys"""


def describe() -> list[tuple[str, str, str, str]]:
    """Return every key as (key, type, default, description). Entries of `eval_tasksets` are those of `tasksets`."""
    return [row for row in key_table(Config) if not row[0].startswith("buffer.explorer_input.eval_tasksets[].")]


def _markdown() -> str:
    rows = "\n".join(f"| `{key}` | {kind} | `{default}` | {text} |" for key, kind, default, text in describe())
    return (
        "# Config\n\nOne YAML file; every key but those marked `required` may be left out. An unknown key is an error. "
        "Relative paths are relative to the folder of the config file. `--set a.b=c` overrides a key, "
        "`--set a.0.b=c` one in a list.\n\n"
        f"{_ENVIRONMENT}\n"
        "This page is printed by `python -m trinity_es.config.config_docs`.\n\n"
        f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(_markdown())
