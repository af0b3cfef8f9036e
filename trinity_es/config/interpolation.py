"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in the texts of a config.

The result is always text; a key that takes a number or a flag converts it (`convert_text`). A default is plain text,
text in quotes, or `null`. `\\${` is the text `${`. Any other `${...}` is refused, except a task's secret,
`${secret:...}`, which stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from trinity_es.actors.validation_errors import Path_
from trinity_es.events.secrets import Secret, is_reference, is_secret_key, marked_text

__all__ = ["convert_text", "escape_texts", "resolve_texts"]

_START = re.compile(r"(\\*)\$\{")
_INTERPOLATION = re.compile(
    r"""(?P<backslashes>\\*)\$\{(?:\s*oc\.env\s*:\s*(?P<name>[\w.-]+)\s*"""
    r"""(?P<default>,\s*(?:'(?P<single>(?:(?!\$\{)[^'])*)'|"(?P<double>(?:(?!\$\{)[^"])*)"|"""
    r"""(?P<plain>[^][{}'",]*?))\s*)?\})?"""
)
_TRUE, _FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


class _UnresolvableError(Exception):
    """An interpolation can't be resolved. The message continues a sentence that begins with the key."""


def resolve_texts(value: Any) -> tuple[Any, dict[Path_, str], set[Path_]]:
    """Return a config's data with each `${...}` resolved, the problems by path, and the paths of texts with variables.

    A text with a variable whose name is that of a secret (`JUDGE_API_KEY`) becomes a `Secret`.
    """
    problems: dict[Path_, str] = {}
    texts: set[Path_] = set()

    def resolve(value: Any, path: Path_) -> Any:
        if _is_secret(value):
            return value
        if isinstance(value, Mapping):
            return {key: resolve(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner, (*path, i)) for i, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            text, has_variable = _resolve_text(value, quotable=not (path and is_secret_key(str(path[-1]))))
        except _UnresolvableError as e:
            problems[path] = str(e)
            return value
        if has_variable:
            texts.add(path)
        return text

    return resolve(value, ()), problems, texts


def _is_secret(value: Any) -> bool:
    return isinstance(value, Secret) or is_reference(value) or marked_text(value) is not None


def escape_texts(value: Any) -> Any:
    """Return the data with each `${` escaped, so that `resolve_texts` returns the original."""
    if _is_secret(value):
        return value
    if isinstance(value, Mapping):
        return {key: escape_texts(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escape_texts(inner) for inner in value]
    return _START.sub(lambda m: rf"{2 * m[1]}\${{", value) if isinstance(value, str) else value


def convert_text(text: str, expected: str) -> Any:
    """Return the text as the bool, int or float that pydantic's error type `expected` asks for. Raises ValueError."""
    if expected == "bool_type" and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if expected in ("int_type", "float_type"):
        return int(text) if expected == "int_type" else float(text)
    raise ValueError(expected)


def _resolve_text(text: str, *, quotable: bool) -> tuple[str | None, bool]:
    """Return the text with its variables replaced, and whether it has any. `quotable`: errors may quote the text."""
    names: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        """Return the text for an interpolation. Two backslashes before it give one; an odd one escapes it."""
        backslashes, name = len(match["backslashes"]), match["name"]
        prefix = backslashes // 2 * "\\"
        if backslashes % 2:
            return prefix + match[0][backslashes:]
        if name is None:
            raise _UnresolvableError(
                f"holds {_quoted(text[match.start() + backslashes :], quotable)}, but only ${{oc.env:NAME}} and "
                f"${{oc.env:NAME,default}} are resolved: quote a default that holds a comma, bracket or brace, or "
                "write \\${ for the text ${ itself")
        names.append(name)
        if name not in os.environ and match["default"] is None:
            raise _UnresolvableError(
                f"needs the environment variable {name}, which is not set: set it, or write a default, as in "
                f"${{oc.env:{name},default}}")
        return prefix + os.environ.get(name, match["single"] or match["double"] or match["plain"] or "")

    resolved_text = _INTERPOLATION.sub(replacement, text)
    alone = _INTERPOLATION.fullmatch(text)  # a text that is one interpolation can be null
    if alone is not None and not alone["backslashes"] and alone["plain"] == "null" and names[0] not in os.environ:
        return None, True
    return Secret(resolved_text) if any(map(is_secret_key, names)) else resolved_text, bool(names)


def _quoted(text: str, quotable: bool) -> str:
    """Return the `${...}` that begins the text, for an error. Its default is left out, since it may be a secret."""
    head = re.match(r"\$\{([\w.]+\}|oc\.env:\w+|[\w.]+:)", text)
    if head is None or not quotable:
        return "${...}"
    return head[0] if head[0].endswith("}") else f"{head[0]}...}}"
