"""Limits of schemas, regexes and grammars in requests, whose short repeat counts can cost gigabytes. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

__all__ = ["MOST_REPEATS", "exceeded_limit"]

MOST_BYTES = 2**20
"""Maximum size of a schema as JSON, or of a request's tools together."""
MOST_REPEATS = 10_000
"""Maximum of `minItems`, `maxLength` and the like. A million costs the grammar compiler ten seconds and a gigabyte."""
MOST_IN_PATTERN = 1000
"""Maximum of `{n,m}` in a regex or a grammar. Ten thousand cost the grammar compiler ten seconds."""
MOST_TOGETHER = 100_000
"""Maximum sum of all these counts in one schema; each `{n,m}` counts ten times."""
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
_PATTERNS = frozenset({"pattern", "regex", "grammar", "whitespace_pattern", "ebnf"})
_TEXTS = frozenset({"json", "structural_tag"})
"""Fields that may hold a schema as JSON text."""
_REPEAT = re.compile(r"(?:\{\s*|~\s*)(\d+)(?:\s*(?:,|\.\.)\s*(\d*))?")


def exceeded_limit(value: Any) -> str | None:
    """Return a message about the limit that a schema, or a request with schemas, exceeds; None if it is within all."""
    try:
        size = len(orjson.dumps(value))
    except TypeError as e:
        return f"it can't be written as JSON ({e})"
    if size > MOST_BYTES:
        return f"it has {size:,} bytes: the limit is {MOST_BYTES:,}"
    total, unread = 0, [("", value)]  # (name of the field, its value)
    while unread:
        name, node = unread.pop()
        if isinstance(node, dict):
            unread += node.items()
            if name == "patternProperties":
                unread += [("pattern", key) for key in node]
        elif isinstance(node, list):
            unread += [(name, item) for item in node]
        elif name in _TEXTS and isinstance(node, str):
            unread.append(("", _json_or_none(node)))
        elif name in _COUNTS and isinstance(node, int | float):
            if node > MOST_REPEATS:
                return f"{name} is {node:,.10g}: the limit is {MOST_REPEATS:,}"
            total += int(node)
        elif name in _PATTERNS and isinstance(node, str):
            for repeat in _REPEAT.finditer(node):
                count = max(int(n[:9] or 0) for n in repeat.groups("0"))  # nine digits are over the limit already
                if count > MOST_IN_PATTERN:
                    return f"{name} has the repeat {repeat[0][:40]}: the limit is {MOST_IN_PATTERN:,}"
                total += 10 * count
    if total > MOST_TOGETHER:
        return f"it asks for {total:,} repeats together: the limit is {MOST_TOGETHER:,}"
    return None


def _json_or_none(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None  # the engine refuses it
