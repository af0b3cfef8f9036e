"""Counts of modules, lines, import circles and paths, long files and docstrings: `python tests/counts.py [CHECKOUT]`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOMS = ("events", "projections", "actors", "trinity_es")
BESIDE = ("tests", "benchmarks")
LONG = 450
"""Lines above which a file is long."""


def modules(root: Path) -> dict[str, Path]:
    """The rooms' modules by name, without the package's: `events.store.log`. Links are not followed."""
    found = {}
    for room in ROOMS:
        for path in (root / room).rglob("*.py"):
            inside = path.relative_to(root)
            if not any((root / parent).is_symlink() for parent in [inside, *inside.parents]):
                found[".".join(inside.with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What a module imports in these statements."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _in_rooms(name: str) -> str:
    inner = name.removeprefix("trinity_es.")
    return inner if inner.partition(".")[0] in ROOMS[:-1] else name


def circles(edges: dict[str, set[str]]) -> int:
    """How many modules import themselves by way of others."""
    left = dict(edges)
    while free := [name for name, to in left.items() if not to & left.keys()]:
        for name in free:
            del left[name]
    return len(left)


def main(root: Path) -> int:
    files = modules(root)
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    edges, at_any_time = (
        {name: {m for i in imported(nodes(tree)) if (m := _in_rooms(i)) in files and m != name}
         for name, tree in trees.items()}
        for nodes in (lambda tree: tree.body, ast.walk))
    print(f"{len(files)} modules, {sum(lines.values())} lines, {circles(edges)} modules in circles of imports, "
          f"{circles(at_any_time)} with imports for the type checker and in functions")
    folders: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        folders[path.parent.relative_to(root).as_posix()].append(name)

    for folder in sorted(folders):
        names = set(folders[folder])

        @cache
        def depth(name: str, names: frozenset[str] = frozenset(names)) -> int:
            return 1 + max((depth(to) for to in edges[name] & names), default=0)

        path = str(max(map(depth, names))) if circles({n: edges[n] & names for n in names}) == 0 else "a circle"
        print(f"  {folder}: {len(names)} files, longest path of imports {path}")
    beside = {path: len(path.read_text().splitlines()) for room in BESIDE for path in (root / room).rglob("*.py")}
    for path, count in sorted((beside | {files[n]: c for n, c in lines.items()}).items(), key=lambda item: -item[1]):
        if count > LONG:
            print(f"  {path.relative_to(root)}: {count} lines")
    docs = [text for tree in trees.values() for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node))]
    relative = sum(bool(re.match(r"(What|Whether|Where|Who|Which|How|Those|So|Of|As|These)\b", text)) for text in docs)
    print(f"{relative} of {len(docs)} docstrings of functions begin with a bare relative word")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
