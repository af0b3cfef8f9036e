"""What a schema, a regex or a grammar may ask of an engine: counts in few bytes cost gigabytes of memory. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

__all__ = ["MOST_REPEATS", "oversized"]

MOST_BYTES = 2**20
"""Maximum size of a schema as JSON, or of a request's tools together."""
MOST_REPEATS = 10_000
"""Maximum of `minItems`, `maxLength` and the like. A million take a grammar's compiler ten seconds and a gigabyte."""
MOST_IN_PATTERN = 1000
"""Maximum of `{n,m}` in a regex or a grammar: ten thousand take a compiler ten seconds."""
MOST_TOGETHER = 100_000
"""Maximum of all of these in one schema, each `{n,m}` ten times."""
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
_PATTERNS = frozenset({"pattern", "regex", "grammar", "whitespace_pattern", "ebnf"})
_TEXTS = frozenset({"json", "structural_tag"})
"""Fields that may hold a schema as JSON text."""
_REPEAT = re.compile(r"(?:\{\s*|~\s*)(\d+)(?:\s*(?:,|\.\.)\s*(\d*))?")


def oversized(value: Any) -> str | None:
    """Return what of a schema, or of what holds some, is too much; None: nothing."""
    try:
        size = len(orjson.dumps(value))
    except TypeError as e:
        return f"it is no JSON that can be passed on ({e})"
    if size > MOST_BYTES:
        return f"it has {size:,} bytes: {MOST_BYTES:,} are the most"
    together, left = 0, [("", value)]
    while left:
        name, found = left.pop()
        if isinstance(found, dict):
            left += found.items()
            if name == "patternProperties":
                left += [("pattern", key) for key in found]
        elif isinstance(found, list):
            left += [(name, item) for item in found]
        elif name in _TEXTS and isinstance(found, str):
            left.append(("", _parsed(found)))
        elif name in _COUNTS and isinstance(found, int | float):
            if found > MOST_REPEATS:
                return f"{name} is {found:,.10g}: {MOST_REPEATS:,} are the most"
            together += int(found)
        elif name in _PATTERNS and isinstance(found, str):
            for repeat in _REPEAT.finditer(found):
                most = max(int(n[:9] or 0) for n in repeat.groups("0"))  # of longer ones nine digits are too many
                if most > MOST_IN_PATTERN:
                    return f"{name} has the repeat {repeat[0][:40]}: {MOST_IN_PATTERN:,} are the most"
                together += 10 * most
    if together > MOST_TOGETHER:
        return f"it asks for {together:,} repeats together: {MOST_TOGETHER:,} are the most"
    return None


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None  # who takes it says so
