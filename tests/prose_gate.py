"""Prose gate of `make lint`: odd constructions per 1,000 words of docstrings, comments and pages (`--list`: all)."""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.5
"""Hits per 1,000 words that a room, or docs with README.md, may have."""
SHOWN = 15
PATTERNS = {
    "passive without an actor": r"\b(?:is|are|was|were|been|be) (?:told|said|asked|given|known|meant|wanted|had)\b",
    "condition with where": r"\b[Ww]here (?:that|there|it|nothing|one|they|he|who|none)\b",
    "unnamed person": r"\b(?:[Nn]o|[Ss]ome|[Ee]very)body\b|(?:\bW|[;:] w)ho \w+",
    "clause as subject": r"(?:\bW|[;:] w)hat (?:is|was|are|it|they|a|the|others?) ",
    "old word": r"\b(?:anew|whereof|thereof|[Ss]o (?:many|long|much))\b",
    "has without do": r"\b(?:has|have|had) not (?:an?|the|any|its|their|enough)\b",
    "relative with of": r"\bof (?:which|whom)\b|\b(?:by|at|in|on|to|for|with) (?:that|those) (?:is|are|which)\b",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring and comment of a module, or of each line of a page outside code."""
    source = path.read_text()
    if path.suffix == ".md":
        code = False
        for number, line in enumerate(source.splitlines(), 1):
            code ^= line.startswith("```")
            if not code:
                yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "x", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


failed = False
for room in ("events", "projections", "actors", "trinity_es", "docs"):
    suffix = "md" if room == "docs" else "py"
    paths = [*sorted((ROOT / room).rglob(f"*.{suffix}")), *([ROOT / "README.md"] if room == "docs" else [])]
    paths = [path for path in paths if not any(up.is_symlink() for up in (path, *path.parents) if ROOT in up.parents)]
    parts = [(path.relative_to(ROOT), line, text) for path in paths for line, text in texts(path)]
    hits = [(path, line + text.count("\n", 0, hit.start()), kind, hit[0].strip()) for path, line, text in parts
            for kind, pattern in PATTERNS.items() for hit in re.finditer(pattern, text)]
    rate, by_file = 1000 * len(hits) / sum(len(text.split()) for *_, text in parts), Counter(hit[0] for hit in hits)
    failed |= rate > LIMIT
    print(f"{room}: {rate:.2f} odd constructions per 1,000 words (at most {LIMIT})")
    shown = len(hits) if "--list" in sys.argv else SHOWN if rate > LIMIT else 0
    for path, line, kind, words in sorted(hits, key=lambda hit: (-by_file[hit[0]], hit[:2]))[:shown]:
        print(f"{path}:{line}: {kind}: {words}")
sys.exit(failed)
