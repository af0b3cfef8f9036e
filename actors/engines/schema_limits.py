"""Limits of schemas, regexes and grammars in requests: a repeat count of a few bytes can cost gigabytes. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

__all__ = ["MOST_REPEATS", "oversized"]

MOST_BYTES = 2**20
"""Maximum size of a schema as JSON, or of a request's tools together."""
MOST_REPEATS = 10_000
"""Maximum of `minItems`, `maxLength` and the like. A million costs a grammar's compiler ten seconds and a gigabyte."""
MOST_IN_PATTERN = 1000
"""Maximum of `{n,m}` in a regex or a grammar: ten thousand costs a compiler ten seconds."""
MOST_TOGETHER = 100_000
"""Maximum sum of these counts in one schema, with each `{n,m}` counted ten times."""
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
_PATTERNS = frozenset({"pattern", "regex", "grammar", "whitespace_pattern", "ebnf"})
_TEXTS = frozenset({"json", "structural_tag"})
"""Fields that may hold a schema as JSON text."""
_REPEAT = re.compile(r"(?:\{\s*|~\s*)(\d+)(?:\s*(?:,|\.\.)\s*(\d*))?")


def oversized(value: Any) -> str | None:
    """Return in words which limit a schema, or a request that contains schemas, exceeds; None if it exceeds none."""
    try:
        size = len(orjson.dumps(value))
    except TypeError as e:
        return f"it is no JSON that can be passed on ({e})"
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
            unread.append(("", _parsed(node)))
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


def _parsed(text: str) -> Any:
    """Return a text's JSON; None if it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None  # the engine refuses it
