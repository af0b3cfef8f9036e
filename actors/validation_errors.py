"""Pydantic's errors as sentences that say which value is wrong and what it must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from trinity_es.events.secrets import MASK, Secret, is_secret_key

__all__ = ["Path_", "dotted_path", "error_path", "error_sentence", "quote_value", "try_format"]

Path_ = tuple[str | int, ...]
"""Keys and list indices that lead to a value of the config."""
_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text", "list_type": "a list",
    "dict_type": "a mapping of keys", "model_type": "a mapping of keys", "dataclass_type": "a mapping of keys",
}


def dotted_path(path: Path_, *, any_index: bool = False) -> str:
    """Write `("a", 0, "b")` as `a[0].b`, or as `a[].b`."""
    text = ""
    for piece in path:
        name = f"[{'' if any_index else piece}]" if isinstance(piece, int) else f".{piece}"
        text += name if name.isprintable() else repr(name)
    return text.removeprefix(".")


def error_path(error: ErrorDetails) -> Path_:
    """Return the path of the wrong value or key that one of pydantic's errors is about."""
    return tuple(piece for piece in error["loc"] if piece != "[key]")


def error_sentence(error: ErrorDetails, whole: str, shown: str = "", as_text: str = "") -> str:
    """Return one of pydantic's errors as a sentence. `whole` names the value if the error is not about a key in it.
    `shown` is the value as the config file has it, and `as_text` the same value in quotes."""
    path = error_path(error)
    key = dotted_path(path) or whole
    kind, value = error["type"], error["input"]
    if isinstance(value, Secret) and kind == "value_error":  # the validator's message may quote it
        return f"{key} {str(error['ctx']['error']).replace(repr(str(value)), MASK)}"
    if isinstance(value, Secret) or (path and is_secret_key(str(path[-1])) and isinstance(value, str | int | float)):
        value = MASK
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {quote_value(key)}"
    if kind == "missing":
        return f"{key} is required"
    if kind == "string_type" and isinstance(value, int | float) and 0 < len(shown) <= 80:
        return f"{key} must be text, not {shown}; put it in quotes: {as_text}"
    if kind in _EXPECTED:
        return f"{key} must be {_EXPECTED[kind]}, not {quote_value(value)}"
    if kind == "literal_error":
        return f"{key} must be one of {error['ctx']['expected'].replace(' or ', ', ')}, not {quote_value(value)}"
    if kind == "value_error":
        return f"{key} {error['ctx']['error']}"
    message = re.sub(r"^\w+ should ", "must ", error["msg"])
    return f"{key} {message}, not {quote_value(value)}"


def try_format(value: Any, form: Callable[[Any], str]) -> str:
    """Return `form(value)`, such as its `repr`, or a description of the value if `form` raises."""
    try:
        return form(value)
    except Exception:  # Python refuses numbers of more than 4,300 digits, and an object's own code may raise anything
        return "a whole number of more than 4,300 digits" if isinstance(value, int) else f"a {type(value).__name__}"


def quote_value(value: Any) -> str:
    """Return a value as an error message shows it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping of keys"
    if isinstance(value, list | tuple):
        return "a list"
    text = re.sub(r"://[^/@]*@", "://***@", try_format(value, repr))  # a database's password, under a wrong key
    return text if len(text) <= 60 else f"{text[:57]}..."
