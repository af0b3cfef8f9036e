"""Reader of the config's YAML file and of `--set` overrides. Its errors name the file and line, or the override."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from trinity_es.actors.validation_errors import Path_, dotted_path, quote_value
from trinity_es.events.errors import ConfigError

__all__ = ["apply_overrides", "read_yaml"]


MOST_VALUES = 100_000
"""Maximum number of values after aliases are expanded: nine levels of ten aliases would make a billion."""


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, reads numbers as YAML 1.2 does, and keeps dates as text.

    So 1e-3 is a number, 010 is ten, and 1:30 is text.
    """


def _construct_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            is_repeated = key in out
        except TypeError:
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark) from None
        if is_repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} appears twice: remove one of them", key_node.start_mark)
        out[key] = loader.construct_object(value_node, deep=True)
    return out


def _construct_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return a whole number as YAML 1.2 reads it. Raises ConstructorError above 4,000 characters."""
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > 4000:  # Python reads no number with more than 4,300 digits
        raise yaml.constructor.ConstructorError(
            None, None, f"{text:.20}... is a whole number of more than 64 bits", node.start_mark)
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"^([-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^([-+]?([0-9][0-9_]*\.?|[0-9][0-9_]*\.[0-9_]+|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_NUMBERS, "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Path_, tuple[int, str]]]:
    """Return the mapping in a YAML file, and {path of a key: (line, value as written)}.

    The written value of a mapping or list is "". An empty file is an empty mapping. Raises ConfigError if the file
    can't be read, is not YAML, has a key twice or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{path}: can't be read ({e.strerror})", file=str(path)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start}): save it as UTF-8", file=str(path)) from e
    try:
        data, node = _parse(text)
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None) or str(e)
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not usable YAML: {problem}", file=str(path)) from e
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, such as `name: run`, not {quote_value(data)}",
                          file=str(path))
    return data, dict(_lines(node, ()))


def _parse(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text and its root node; (None, None) for an empty text.

    Raises YAMLError, also if aliases would expand it to more than MOST_VALUES values.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        sizes: dict[int, int] = {}
        if _size(node, sizes) > max(MOST_VALUES, len(sizes)):
            raise yaml.constructor.ConstructorError(
                None, None, f"the aliases (*name) expand to more than {MOST_VALUES:,} values: write the values out",
                node.start_mark,
            )
        return loader.construct_document(node), node
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node with each alias expanded. `sizes` caches the numbers by id of the node.

    A node inside itself counts as zero.
    """
    if id(node) not in sizes:
        sizes[id(node)] = 0
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = [n for item in inner for n in (item if isinstance(item, tuple) else (item,))]  # (key, value) or item
        sizes[id(node)] = 1 + sum(_size(n, sizes) for n in nodes)
    return sizes[id(node)]


def _lines(node: yaml.Node | None, path: Path_) -> Iterator[tuple[Path_, tuple[int, str]]]:
    """Yield (path, (line, value as written)) for each key and list item below a node, whose own path is `path`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), (key.start_mark.line + 1, _written(value))
            yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), (value.start_mark.line + 1, _written(value))
            yield from _lines(value, (*path, i))


def _written(node: yaml.Node) -> str:
    """Return a plain value as it is written; "" for a mapping or a list."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[Path_, tuple[str, str]]:
    """Write each override `a.b=c` into `data`, in order. `c` is YAML; `a.0.b` or `a[0].b` names a list item.

    Returns {path: (override's name, value as written)}. Raises ConfigError for an override that can't be read, or
    whose path leads through a plain value.
    """
    written: dict[Path_, tuple[str, str]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        name = f"--set {key}"  # without the value, which may hold a password
        pieces = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        if not equals or not all(pieces):
            raise ConfigError(f"{name}: write the override as KEY=VALUE, such as a.b=c")
        try:
            value, _ = _parse(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"{name}: {quote_value(text)} is not usable YAML ({getattr(e, 'problem', e)})") from e
        parent: Any = data
        path: Path_ = ()
        for i, piece in enumerate(pieces):
            key_or_index: str | int = piece
            if isinstance(parent, list):
                if not piece.isdecimal() or int(piece) >= len(parent):
                    raise ConfigError(f"{name}: {dotted_path(path)} is a list of {len(parent)}; write an index "
                                      f"below {len(parent)} instead of {piece!r}")
                key_or_index = int(piece)
            elif not isinstance(parent, dict):
                raise ConfigError(f"{name}: {dotted_path(path)} is {quote_value(parent)}, not a section, so it can't "
                                  f"have the key {piece!r}")
            path = (*path, key_or_index)
            if i == len(pieces) - 1:
                parent[key_or_index] = value
            elif isinstance(parent, dict) and parent.get(key_or_index) is None:
                parent[key_or_index] = {}
            parent = parent[key_or_index]
        written[path] = name, text
    return written
