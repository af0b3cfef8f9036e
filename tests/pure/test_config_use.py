"""C8: every key of the config is documented, used and tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

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


@pytest.mark.parametrize("key", KEYS)
def test_c8_every_key_is_documented(key: str) -> None:
    rows = [line for line in (ROOT / "docs" / "CONFIG.md").read_text().splitlines() if line.startswith(f"| `{key}` |")]
    assert len(rows) == 1
    assert len(rows[0].rpartition("` |")[2].strip(" |")) >= 10, "it has no description"


@pytest.mark.parametrize("key", keys())
def test_c8_every_key_is_used(key: str) -> None:
    section, leaf = section_and_leaf(key)
    leaf = {"class": "trainer_class"}.get(leaf, leaf)
    used = [1 for text, names in sources() if leaf in names and section in text]
    assert used, f"nothing reads {key}: use it or remove it"


@pytest.mark.parametrize("key", keys())
def test_c8_every_key_is_tested(key: str) -> None:
    section, leaf = section_and_leaf(key)
    named = re.compile(rf"""["'.]{leaf}\b|\b{leaf}["']?\s*[:=]""")
    tested = [1 for text in texts_of_tests() if section in text and named.search(text)]
    assert tested, f"no test names {key}"
