"""C8: every key of the config is documented, used and tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.helpers.paths import ROOT
from trinity_es.config.config_docs import describe

KEYS = [row[0] for row in describe()]
OF_ONE_MODEL = "explorer.auxiliary_models[]."
"""Its keys are those of explorer.rollout_model, read by the same code."""


def keys() -> list[str]:
    return [k for k in KEYS if not k.startswith(OF_ONE_MODEL) or k.endswith(".name")]


def section_and_leaf(key: str) -> tuple[str, str]:
    """("over_rollout", "ratio"); a list's section is its singular, as the code calls an item of it."""
    pieces = key.split(".")
    section = pieces[-2] if len(pieces) > 1 else "config"
    return (section.removesuffix("s[]") if section.endswith("s[]") else section), pieces[-1]


def reads(tree: ast.AST) -> Iterator[str]:
    """Names that are read as an attribute (`x.leaf`) or by key (`x["leaf"]`, `get("leaf")`, `getattr(x, "leaf")`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def sources() -> list[tuple[str, frozenset[str]]]:
    """(text, names read) of every module that may use a key; of the config's own modules, what is no check of it."""
    found = []
    for room in ("events", "projections", "actors", "trinity_es"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text)
            if path.name in ("config.py", "config_keys.py"):
                uses = [
                    node for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
                    and not any("validator" in ast.unparse(d) for d in node.decorator_list)
                ]
                names = frozenset(name for use in uses for name in reads(use))
            elif path.name.startswith("config_"):
                continue
            else:
                names = frozenset(reads(tree))
            found.append((text, names))
    return found


@cache
def texts_of_tests() -> list[str]:
    skipped = {"test_config_use.py", "test_config_foreign.py"}
    return [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path.name not in skipped]


def test_c8_every_key_is_documented() -> None:
    rows: dict[str, list[str]] = {key: [] for key in KEYS}
    for line in (ROOT / "docs" / "CONFIG.md").read_text().splitlines():
        if (key := line.removeprefix("| `").partition("` |")[0]) in rows:
            rows[key].append(line.rpartition("` |")[2].strip(" |"))
    assert [key for key, found in rows.items() if len(found) != 1] == [], "not one row each"
    assert [key for key, [description] in rows.items() if len(description) < 10] == [], "no description"


def test_c8_every_key_is_used() -> None:
    for key in keys():
        section, leaf = section_and_leaf(key)
        leaf = {"class": "trainer_class"}.get(leaf, leaf)
        used = any(leaf in names and section in text for text, names in sources())
        assert used, f"nothing reads {key}: use it or remove it"


def test_c8_every_key_is_tested() -> None:
    for key in keys():
        section, leaf = section_and_leaf(key)
        named = re.compile(rf"""["'.]{leaf}\b|\b{leaf}["']?\s*[:=]""")
        assert any(section in text and named.search(text) for text in texts_of_tests()), f"no test names {key}"
