"""Keys of Trinity-RFT's config that do not exist here, and their replacements (`trinity_rft_keys.yaml`).

docs/TRINITY_RFT_KEYS.md is printed by `python -m trinity_es.config.trinity_rft_keys`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

__all__ = ["foreign_keys", "foreign_values", "markdown"]


@functools.cache
def _read() -> dict[str, dict[str, Any]]:
    import yaml

    sections: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return sections


def foreign_keys() -> dict[str, str]:
    """Return {key of Trinity-RFT: clause that names its replacement here}; `[]` in a key stands for any index."""
    table = dict(_read()["keys"])
    own_names = {"tasksets[]": "tasksets[]", "taskset": "tasksets[]", "eval_tasksets[]": "eval_tasksets[]"}
    # (section of the file, prefix of its keys in Trinity-RFT, prefix here)
    prefixes = [("of_a_taskset", f"buffer.explorer_input.{theirs}", f"buffer.explorer_input.{ours}")
                for theirs, ours in own_names.items()]
    prefixes += [("of_a_model", prefix, prefix)
                 for prefix in ("explorer.rollout_model", "explorer.auxiliary_models[]")]
    for section, theirs, ours in prefixes:
        table |= {f"{theirs}.{name}": text.replace("{}", ours) for name, text in _read()[section].items()}
        if theirs.endswith("eval_tasksets[]"):
            table[f"{theirs}.task_selector"] = "there is none here: an eval plays every row once"
    return table


def foreign_values() -> dict[tuple[str, str], str]:
    """Return {(key, value as text): replacement} for values that Trinity-RFT takes and the same key here refuses."""
    return {(key, value): text for key, texts in _read()["values"].items() for value, text in texts.items()}


def markdown() -> str:
    """Return the text of docs/TRINITY_RFT_KEYS.md. A key that several sections share appears once."""
    repeated = (".taskset.", ".eval_tasksets[].", ".auxiliary_models[].")
    texts = {key: text for key, text in foreign_keys().items() if not any(part in key for part in repeated)}
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in texts.items())
    values = "\n".join(f"| `{key}: {value}` | {text} |" for (key, value), text in foreign_values().items())
    return (
        "# Keys of Trinity-RFT's config\n\nThis page lists the keys that have another name here, or none; all others "
        "mean the same. The error for an unknown key says the same as this page. If a section is listed without its "
        "keys, its line is for all of them. The guide is [FROM_TRINITY_RFT.md](FROM_TRINITY_RFT.md).\n\nThis page is "
        "printed by `python -m trinity_es.config.trinity_rft_keys`.\n\n"
        f"| Trinity-RFT | here |\n|---|---|\n{rows}\n{values}\n")


if __name__ == "__main__":
    sys.stdout.write(markdown())
