"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in the texts of a config.

The result is a text, even if it looks like a number; a key of a number or flag converts it (see `converted`). A default
is the following text, a text in quotes, or `null`. `\\${` is the text `${`. Nothing else may be in `${...}` except a
task's secret, `${secret:...}`, which is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from trinity_es.actors.validation_errors import Path_
from trinity_es.events.secrets import Secret, is_reference, is_secret_key, marked_text

__all__ = ["converted", "escaped", "resolved"]

_OPEN = re.compile(r"(\\*)\$\{")
_FOUND = re.compile(
    r"""(?P<kept>\\*)\$\{(?:\s*oc\.env\s*:\s*(?P<name>[\w.-]+)\s*"""
    r"""(?P<default>,\s*(?:'(?P<one>(?:(?!\$\{)[^'])*)'|"(?P<two>(?:(?!\$\{)[^"])*)"|(?P<plain>[^][{}'",]*?))\s*)?\})?"""
)
_TRUE, _FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


class _Refused(Exception):
    """Reason why an interpolation can't be resolved, as the rest of a sentence that begins with the key."""


def resolved(value: Any) -> tuple[Any, dict[Path_, str], set[Path_]]:
    """Return a config's data with its texts resolved, the problems by path, and the paths of resolved texts.

    A text that used a variable with the name of a secret is a `Secret`.
    """
    problems: dict[Path_, str] = {}
    texts: set[Path_] = set()

    def one(value: Any, path: Path_) -> Any:
        if _kept(value):
            return value
        if isinstance(value, Mapping):
            return {key: one(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [one(inner, (*path, i)) for i, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            text, varies = _read(value, quotable=not (path and is_secret_key(str(path[-1]))))
        except _Refused as e:
            problems[path] = str(e)
            return value
        if varies:
            texts.add(path)
        return text

    return one(value, ()), problems, texts


def _kept(value: Any) -> bool:
    return isinstance(value, Secret) or is_reference(value) or marked_text(value) is not None


def escaped(value: Any) -> Any:
    """Return data from which `resolved` makes this again."""
    if _kept(value):
        return value
    if isinstance(value, Mapping):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(one) for one in value]
    return _OPEN.sub(lambda m: rf"{2 * m[1]}\${{", value) if isinstance(value, str) else value


def converted(text: str, expected: str) -> Any:
    """Return a resolved text as the number or flag of its key; `expected` is the type of pydantic's error.

    Raises ValueError if it is none.
    """
    if expected == "bool_type" and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if expected in ("int_type", "float_type"):
        return int(text) if expected == "int_type" else float(text)
    raise ValueError(expected)


def _read(text: str, *, quotable: bool) -> tuple[str | None, bool]:
    """Return the value of a text, and whether it contains a variable. `quotable`: an error may quote it."""
    names: list[str] = []

    def one(match: re.Match[str]) -> str:
        backslashes, name = len(match["kept"]), match["name"]
        kept = backslashes // 2 * "\\"
        if backslashes % 2:
            return kept + match[0][backslashes:]
        if name is None:
            raise _Refused(
                f"holds {_quoted(text[match.start() + backslashes :], quotable)}, which is not resolved here: only "
                "${oc.env:NAME} and ${oc.env:NAME,default} are (a default that holds a comma, a bracket or a brace in "
                "quotes), and \\${ is the text ${ itself"
            )
        names.append(name)
        if name not in os.environ and match["default"] is None:
            raise _Refused(
                f"needs the environment variable {name}, which is not set: set it, or write a default, as in "
                f"${{oc.env:{name},default}}"
            )
        return kept + os.environ.get(name, match["one"] or match["two"] or match["plain"] or "")

    whole = _FOUND.sub(one, text)
    alone = _FOUND.fullmatch(text)
    if alone is not None and not alone["kept"] and alone["plain"] == "null" and names[0] not in os.environ:
        return None, True
    return Secret(whole) if any(map(is_secret_key, names)) else whole, bool(names)


def _quoted(text: str, quotable: bool) -> str:
    """Return the interpolation at the beginning of a text, without its default, which may be a secret."""
    head = re.match(r"\$\{([\w.]+\}|oc\.env:\w+|[\w.]+:)", text)
    if head is None or not quotable:
        return "${...}"
    return head[0] if head[0].endswith("}") else f"{head[0]}...}}"
