"""Errors of a config, a line per problem with its remedy, and the table of all keys."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trinity_es.actors.validation_errors import Path_, dotted_path, error_path, error_sentence, quote_value, try_format
from trinity_es.events.errors import ConfigError, TrinityError
from trinity_es.events.event_docs import documented_fields

__all__ = ["config_error", "explain", "key_table"]


def config_error(problems: Sequence[str], cls: type[TrinityError] = ConfigError) -> TrinityError:
    """Return one error that lists the problems, a line each; `details["problems"]` has them as a list."""
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(f"- {p}" for p in problems)
    return cls(text, problems=list(problems))


def explain(
    errors: Sequence[ErrorDetails], model: type[BaseModel], origin_of: Callable[[Path_], str], *,
    hints: Mapping[str, str], foreign_values: Mapping[tuple[str, str], str], unexpanded: Mapping[Path_, str],
    as_text: Callable[[Path_], tuple[str, str]],
) -> TrinityError:
    """Return pydantic's errors as one ConfigError, a line each.

    `origin_of(key)` returns the file and line of a key. `as_text(key)` returns its value as written, and how to write
    that as text. An unknown key gets a hint: the text in `hints` for this key, for a key below it or for its section,
    otherwise the nearest known key. A refused value gets the text in `foreign_values` for (key, value). `unexpanded`
    has a line for each value whose `${...}` can't be resolved. This line replaces pydantic's error for the value.
    """
    known_keys = [row[0] for row in key_table(model)]
    problems = []
    unexpanded_lines = dict(unexpanded)
    for error in errors:
        path = error_path(error)
        if error["type"] == "extra_forbidden":
            unexpanded_lines = {p: line for p, line in unexpanded_lines.items() if p[: len(path)] != path}
            for key_path in dict.fromkeys(_foreign_paths(path, error["input"], hints)) or [path]:
                key_hint = _key_hint(key_path, known_keys, hints)
                problems.append(f"{origin_of(key_path)}: unknown key {dotted_path(key_path)}{key_hint}")
        elif path not in unexpanded:
            hint = foreign_values.get((dotted_path(path, any_index=True), try_format(error["input"], str)))
            problem = error_sentence(error, "the config", *as_text(path))
            problems.append(f"{origin_of(path)}: {problem}" + (f"; {hint}" if hint else ""))
    return config_error([*unexpanded_lines.values(), *problems])


def _foreign_paths(path: Path_, value: Any, hints: Mapping[str, str]) -> Iterator[Path_]:
    """For each leaf key of `value`, which stands at `path`, yield the longest prefix of its path that has a hint."""
    if isinstance(value, Mapping | list) and value:
        for key, inner_value in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _foreign_paths((*path, key), inner_value, hints)
        return
    while path and dotted_path(path, any_index=True) not in hints:
        path = path[:-1]
    if path:
        yield path


def _key_hint(path: Path_, known_keys: list[str], hints: Mapping[str, str]) -> str:
    key = dotted_path(path, any_index=True)
    if key in hints:
        return f"; {hints[key]}"
    parent, _, leaf = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    siblings = [k.removeprefix(prefix).partition(".")[0].removesuffix("[]") for k in known_keys if k.startswith(prefix)]
    elsewhere = [k for k in known_keys if k.rpartition(".")[2] == leaf]
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7):
        return f"; did you mean {dotted_path((*path[:-1], near[0]))}?"
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    nearest = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.0)
    return f"; the nearest known key is {prefix}{nearest[0]}"


def key_table(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return every key of a model, depth first, as (key, type, default, description); list entries are `key[].name`."""
    rows = []
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        inner, in_list = _inner_model(info.annotation)
        if inner is None or in_list:
            rows.append((key, _type_text(info), _default_text(info), _description(model, name)))
        if inner is not None:
            rows += key_table(inner, f"{key}[]." if in_list else f"{key}.")
    return rows


def _description(model: type[BaseModel], name: str) -> str:
    """Return the docstring of a field, from the first class in the model's MRO that has one."""
    classes = [cls for cls in model.__mro__ if cls.__module__.startswith("trinity_es.")]
    docs = (_field_docs(inspect.getfile(cls)).get(cls.__name__, {}).get(name) for cls in classes)
    return next(filter(None, docs), "")


@functools.cache
def _field_docs(file: str) -> dict[str, dict[str, str]]:
    classes = [node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: {name: doc for name, _, doc in documented_fields(node)} for node in classes}


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model of a section or of a list of sections, None for other fields; and whether it is a list."""
    if typing.get_origin(annotation) is types.UnionType:  # a section that may be null
        [annotation] = [a for a in typing.get_args(annotation) if a is not type(None)][:1]
    if typing.get_origin(annotation) is list:
        return _inner_model(typing.get_args(annotation)[0])[0], True
    return (annotation, False) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else (None, False)


_TYPES = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "dict": "mapping",
          "list": "list", "NoneType": "null"}


def _type_text(info: FieldInfo) -> str:
    def text_of(annotation: Any) -> str:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Literal:
            return ", ".join(str(a) for a in args)
        if origin is typing.Annotated:
            return text_of(args[0])
        if origin in (list, dict):
            return _TYPES[origin.__name__]
        if args:
            return " or ".join(text_of(a) for a in args)
        return _TYPES.get(getattr(annotation, "__name__", ""), str(annotation))

    return text_of(info.annotation)


def _default_text(info: FieldInfo) -> str:
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
    return quote_value(value) if isinstance(value, bool) else str(value)
