"""How a config is read and how its mistakes are told: YAML, overrides, error lines, the key table.

Knows pydantic models but none in particular; `trinity_es.config` has the keys. Every problem is one line that names
the file and the line in it (or the override), the key, what stands there and the way out.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trinity_es.events.errors import ConfigError, TrinityError
from trinity_es.events.secrets import MASK, is_secret_key

__all__ = ["Path_", "apply_overrides", "config_error", "dotted", "explain", "key_table", "read_yaml"]

Path_ = tuple[str | int, ...]
"""Where in the config: keys, and indices of lists."""

_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text", "list_type": "a list",
    "dict_type": "a mapping of keys", "model_type": "a mapping of keys",
}


class _Loader(yaml.SafeLoader):
    """YAML without its surprises: no key twice, 1e-3 is a number, and a date is the text that stands there."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            twice = key in out
        except TypeError:
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark) from None
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands here a second time: remove one", key_node.start_mark
            )
        out[key] = loader.construct_object(value_node, deep=True)
    return out


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def config_error(problems: Sequence[str], cls: type[TrinityError] = ConfigError) -> TrinityError:
    """Return one error for all problems: alone on its line, or a list with a line each. `details["problems"]` has them.
    """
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(f"- {p}" for p in problems)
    return cls(text, problems=list(problems))


def dotted(path: Path_, *, any_index: bool = False) -> str:
    """Write `("a", 0, "b")` as `a[0].b`, or as `a[].b`."""
    text = ""
    for piece in path:
        text += (f"[{'' if any_index else piece}]") if isinstance(piece, int) else f".{piece}"
    return text.removeprefix(".")


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Path_, int]]:
    """Return the mapping in a YAML file, and the line on which each key stands. An empty file is an empty mapping.

    Raises ConfigError when it can't be read, is not YAML, has a key twice or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{path}: can't be read ({e.strerror})", file=str(path)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start}): save it as UTF-8", file=str(path)) from e
    try:
        data = _parse(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None) or str(e)
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not usable YAML: {problem}", file=str(path)) from e
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, such as `name: run`, not {_told(data)}", file=str(path))
    return data, dict(_lines(node, ()))


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader


def _lines(node: yaml.Node | None, path: Path_) -> Iterator[tuple[Path_, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), value.start_mark.line + 1
            yield from _lines(value, (*path, i))


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[Path_, str]:
    """Write every `a.b=c` into `data`; the value is YAML, an item of a list is `a.0.b` or `a[0].b`; later ones win.

    Returns which override set what. Raises ConfigError for one that can't be read or leads through a plain value.
    """
    written: dict[Path_, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        name = f"--set {key}"  # without the value, which may hold a password
        pieces = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        if not equals or not all(pieces):
            raise ConfigError(f"{name}: write it as a.b=c")
        try:
            value = _parse(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"{name}: {_told(text)} is not usable YAML ({getattr(e, 'problem', e)})") from e
        here: Any = data
        path: Path_ = ()
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            at: str | int = piece
            if isinstance(here, list):
                if not piece.isdecimal() or int(piece) >= len(here):
                    raise ConfigError(f"{name}: {dotted(path)} is a list of {len(here)}; write an index "
                                      f"below {len(here)} instead of {piece!r}")
                at = int(piece)
            elif not isinstance(here, dict):
                raise ConfigError(f"{name}: {dotted(path)} is {_told(here)}, so {piece!r} can't be in it")
            path = (*path, at)
            if last:
                here[at] = value
            elif isinstance(here, list):
                here = here[int(at)]
            else:
                if here.get(at) is None:
                    here[at] = {}
                here = here[at]
        written[path] = name
    return written


def explain(
    errors: Sequence[ErrorDetails],
    model: type[BaseModel],
    where: Callable[[Path_], str],
    *,
    foreign: Mapping[str, str],
    foreign_values: Mapping[tuple[str, str], str],
    unexpanded: Mapping[Path_, str],
) -> TrinityError:
    """Return all of pydantic's errors as one ConfigError, a line each. `where` says from where a key came.

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
            told = foreign_values.get((dotted(path, any_index=True), str(error["input"])))
            problems.append(f"{where(path)}: {_line(error, path)}" + (f"; {told}" if told else ""))
    return config_error([*left.values(), *problems])


def _answered(path: Path_, value: Any, foreign: Mapping[str, str]) -> Iterator[Path_]:
    """For each key in a value of an unknown key: the longest start of its path that `foreign` has an answer for."""
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


def _line(error: ErrorDetails, path: Path_) -> str:
    kind, key, value = error["type"], dotted(path) or "the config", error["input"]
    if path and is_secret_key(str(path[-1])) and isinstance(value, str | int | float):
        value = MASK
    if kind == "missing":
        return f"{key} is required"
    if kind in _EXPECTED:
        return f"{key} must be {_EXPECTED[kind]}, not {_told(value)}"
    if kind == "literal_error":
        return f"{key} must be one of {error['ctx']['expected'].replace(' or ', ', ')}, not {_told(value)}"
    if kind == "value_error":
        return f"{key} {error['ctx']['error']}"
    message = re.sub("^(Input|String|Value) should ", "must ", error["msg"])
    return f"{key} {message}, not {_told(value)}"


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


def _told(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping of keys"
    if isinstance(value, list | tuple):
        return "a list"
    text = re.sub(r"://[^/@]*@", "://***@", repr(value))  # a database URL, with its password, in the wrong place
    return text if len(text) <= 60 else f"{text[:57]}..."


def key_table(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return every key of a model, depth first, as (key, type, default, description); entries of a list are
    `key[].name`.
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
    return _told(value) if isinstance(value, bool) else str(value)
