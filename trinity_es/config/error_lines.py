"""Mistakes in a config as lines that say what to do, and the table of its keys."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trinity_es.events.errors import ConfigError, TrinityError
from trinity_es.events.secrets import MASK, Secret, is_secret_key

__all__ = ["Path_", "config_error", "dotted", "explain", "key_table"]


Path_ = tuple[str | int, ...]
"""Where in the config: keys, and indices of lists."""


_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text", "list_type": "a list",
    "dict_type": "a mapping of keys", "model_type": "a mapping of keys",
}


def config_error(problems: Sequence[str], cls: type[TrinityError] = ConfigError) -> TrinityError:
    """Return one error for all problems: alone on its line, or a list with a line each.

    `details["problems"]` has them.
    """
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(f"- {p}" for p in problems)
    return cls(text, problems=list(problems))


def dotted(path: Path_, *, any_index: bool = False) -> str:
    """Write `("a", 0, "b")` as `a[0].b`, or as `a[].b`."""
    text = ""
    for piece in path:
        text += (f"[{'' if any_index else piece}]") if isinstance(piece, int) else f".{piece}"
    return text.removeprefix(".")


def explain(
    errors: Sequence[ErrorDetails], model: type[BaseModel], where: Callable[[Path_], str], *,
    foreign: Mapping[str, str], foreign_values: Mapping[tuple[str, str], str], unexpanded: Mapping[Path_, str],
    as_text: Callable[[Path_], tuple[str, str]],
) -> TrinityError:
    """Return all of pydantic's errors as one ConfigError, a line each. `where` says from where a key came, `as_text`
    what was written there, and how to write it where it is to be text.

    An unknown key gets a pointer: what `foreign` says of it, of a key in it or of the section that it is in, else the
    nearest known key. A refused value gets what `foreign_values` says of (key, value). `unexpanded` has a line for each
    value that is to be written out first: it stands instead of what is wrong with that text as a value, and not at all
    where the key is unknown.
    """
    known = [row[0] for row in key_table(model)]
    problems = []
    left = dict(unexpanded)
    for error in errors:
        path = tuple(p for p in error["loc"] if isinstance(p, int) or p != "[key]")
        if error["type"] == "extra_forbidden":
            left = {at: line for at, line in left.items() if at[: len(path)] != path}
            for at in dict.fromkeys(_answered(path, error["input"], foreign)) or [path]:
                problems.append(f"{where(at)}: unknown key {dotted(at)}{_pointer(at, known, foreign)}")
        elif path not in unexpanded:
            told = foreign_values.get((dotted(path, any_index=True), _text(error["input"], str)))
            problems.append(f"{where(path)}: {_line(error, path, *as_text(path))}" + (f"; {told}" if told else ""))
    return config_error([*left.values(), *problems])


def _answered(path: Path_, value: Any, foreign: Mapping[str, str]) -> Iterator[Path_]:
    """Yield the longest start that `foreign` answers of the path of each key in a value of an unknown key."""
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    found = False
    for key, below in inner:
        found = True
        yield from _answered((*path, key), below, foreign)
    while not found and path and dotted(path, any_index=True) not in foreign:
        path = path[:-1]
    if not found and path:
        yield path


def _line(error: ErrorDetails, path: Path_, written: str, as_text: str) -> str:
    kind, key, value = error["type"], dotted(path) or "the config", error["input"]
    if isinstance(value, Secret) and kind == "value_error":  # a validator that quotes it
        return f"{key} {str(error['ctx']['error']).replace(repr(str(value)), MASK)}"
    if isinstance(value, Secret) or (path and is_secret_key(str(path[-1])) and isinstance(value, str | int | float)):
        value = MASK
    if kind == "missing":
        return f"{key} is required"
    if kind == "string_type" and isinstance(value, int | float) and 0 < len(written) <= 80:
        return f"{key} must be text, not {written}; in quotes it is: {as_text}"
    if kind in _EXPECTED:
        return f"{key} must be {_EXPECTED[kind]}, not {quoted(value)}"
    if kind == "literal_error":
        return f"{key} must be one of {error['ctx']['expected'].replace(' or ', ', ')}, not {quoted(value)}"
    if kind == "value_error":
        return f"{key} {error['ctx']['error']}"
    message = re.sub("^(Input|String|Value) should ", "must ", error["msg"])
    return f"{key} {message}, not {quoted(value)}"


def _pointer(path: Path_, known: list[str], foreign: Mapping[str, str]) -> str:
    asked = dotted(path, any_index=True)
    if asked in foreign:
        return f"; {foreign[asked]}"
    parent, _, leaf = asked.rpartition(".")
    prefix = f"{parent}." if parent else ""
    siblings = [k.removeprefix(prefix).partition(".")[0].removesuffix("[]") for k in known if k.startswith(prefix)]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7):
        return f"; did you mean {dotted((*path[:-1], near[0]))}?"
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    nearest = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.0)
    return f"; the nearest known key is {prefix}{nearest[0]}"


def _text(value: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a whole number of more than 4,300 digits"


def quoted(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping of keys"
    if isinstance(value, list | tuple):
        return "a list"
    text = re.sub(r"://[^/@]*@", "://***@", _text(value, repr))  # a database URL, with its password, in the wrong place
    return text if len(text) <= 60 else f"{text[:57]}..."


def key_table(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return every key of a model, depth first, as (key, type, default, description).

    Entries of a list are `key[].name`.
    """
    rows = []
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        inner, in_list = _inner_model(info.annotation)
        if inner is None or in_list:
            rows.append((key, _type(info), _default(info), " ".join((info.description or "").split())))
        if inner is not None:
            rows += key_table(inner, f"{key}[]." if in_list else f"{key}.")
    return rows


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if typing.get_origin(annotation) is types.UnionType:  # a section that may be null
        [annotation] = [a for a in typing.get_args(annotation) if a is not type(None)][:1]
    if typing.get_origin(annotation) is list:
        return _inner_model(typing.get_args(annotation)[0])[0], True
    return (annotation, False) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else (None, False)


_TYPES = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "dict": "mapping",
          "list": "list", "NoneType": "null"}


def _type(info: FieldInfo) -> str:
    def told(annotation: Any) -> str:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Literal:
            return ", ".join(str(a) for a in args)
        if origin is typing.Annotated:
            return told(args[0])
        if origin in (list, dict):
            return _TYPES[origin.__name__]
        if args:
            return " or ".join(told(a) for a in args)
        return _TYPES.get(getattr(annotation, "__name__", ""), str(annotation))

    return told(info.annotation)


def _default(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "shown" in extra:
        return str(extra["shown"])
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "null"
    if value == "":
        return "not set"
    if isinstance(value, list):
        return "[" + ", ".join(str(getattr(v, "name", v)) for v in value) + "]"
    return quoted(value) if isinstance(value, bool) else str(value)
