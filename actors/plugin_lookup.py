"""Lookup of the classes and functions that a config names: by a registered name, or as a user's own "module:Class".

Installed packages register workflows, rewards, monitors, engines, environments and commands as entry points. Operators,
outputs, priority functions and monitors are built here, so their errors read the same.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import count
from operator import attrgetter
from typing import Any

from trinity_es.events.errors import ConfigError, UnknownWorkflow

__all__ = [
    "add_import_folders", "build", "did_you_mean", "find", "label_of", "load", "missing_attribute", "name_suggestion",
    "registered", "resolve",
]

MOVED = {"trinity_es.workflows_simple": "trinity_es.workflows.simple"}
"""Former names of modules, which logs of earlier releases contain, and their present names."""


def add_import_folders(*folders: str, first: bool = True) -> None:
    """Add folders to the import path: before all others, or after them with `first=False`."""
    index = 0 if first else len(sys.path)
    sys.path[index:index] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def load(path: str) -> Any:
    """Import a module, or the attribute of it that "module:Class" names. Raises whatever the import raises, and
    AttributeError if the module lacks the attribute."""
    module, _, attribute = path.partition(":")
    imported = importlib.import_module(MOVED.get(module, module))
    return attrgetter(attribute)(imported) if attribute else imported


def missing_attribute(path: str) -> str:
    """Return a sentence that the module of "module:Class" has no such attribute, with a similar name if there is one.
    Returns "" if the module has the attribute, or is not imported."""
    name, _, attribute = path.partition(":")
    module: Any = sys.modules.get(MOVED.get(name, name))
    if module is None:
        return ""
    value = module
    for piece in attribute.split("."):
        if not hasattr(value, piece):
            hint = did_you_mean(piece, (other for other in dir(value) if not other.startswith("__")))
            return f"{name} ({getattr(module, '__file__', None) or name}) has no {piece}{hint}"
        value = getattr(value, piece)
    return ""


@cache
def registered(kind: str) -> Mapping[str, str]:
    """Return "module:Class" by name for everything that installed packages, this one too, register as this kind.

    `kind`: workflow, reward, monitor, engine, environment or command. Its entry points are in the group of its plural,
    such as `trinity_es.workflows`. Raises ConfigError if two packages give one name to different things.
    """
    points: dict[str, EntryPoint] = {}
    for point in _entry_points().select(group=f"trinity_es.{kind}s"):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(f"two packages register the {kind} {point.name!r}: {_package_name(other)} and "
                              f"{_package_name(point)}. Uninstall one of them", **{kind: point.name})
    return {name: point.value for name, point in points.items()}


@cache
def _entry_points() -> Any:  # another type before Python 3.12. Reading the entry points of 200 packages takes 6 ms
    return entry_points()


def _package_name(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def find(kind: str, name: str, known: Mapping[str, Callable[..., Any] | str], shape: str) -> Callable[..., Any]:
    """Return the class or function with this name: one of `known`, or the user's own "module:Class".

    `known` has callables, or their paths, by name. Errors name the `kind`, and describe by `shape` what a user's own
    class must offer. Raises ConfigError.
    """
    path = known.get(name, name)
    if not isinstance(path, str):
        return path
    names = ", ".join(sorted(known))
    if ":" not in path:
        raise ConfigError(
            f'there is no {kind} {name!r}; known: {names}. Give your own as "module:Class", {shape}', **{kind: name}
        )
    try:
        factory = load(path)
    except Exception as e:  # importing runs a user's module, which may raise anything
        raise ConfigError(f"{kind} {name!r}{_import_problem(path, e)}. Known: {names}", **{kind: name}) from e
    if not callable(factory):
        raise ConfigError(f"{kind} {name!r} is a {type(factory).__name__}, not a class: name {shape}", **{kind: name})
    return factory  # type: ignore[no-any-return]  # any callable; the caller checks what it returns


def build(
    kind: str, name: str, args: Mapping[str, Any], known: Mapping[str, Callable[..., Any]], shape: str,
    methods: Iterable[str] = (),
) -> Any:
    """Return an object of the class that `find` returns, built with `args`. Raises ConfigError for any failure, and for
    an object that lacks one of these methods."""
    factory = find(kind, name, known, shape)
    try:
        built = factory(**args)
    except Exception as e:  # a user's class may raise anything
        raise ConfigError(f"{kind} {name} can't be built with {dict(args)!r}: {e}", **{kind: name}) from e
    for method in methods:
        if not callable(getattr(built, method, None)):
            raise ConfigError(f"{kind} {name} has no method {method}: give {shape}", **{kind: name})
    return built


def label_of(name: str, taken: Collection[str]) -> str:
    """Return the last part of a plugin's name; `<part>_2`, `<part>_3` and so on if that is among the `taken` labels."""
    label = name.rpartition(":")[2]
    labels = (label if number == 1 else f"{label}_{number}" for number in count(1))
    return next(free for free in labels if free not in taken)


def resolve(name: str, registry: Mapping[str, str], what: str) -> type[Any]:
    """Return the class for a name in `registry`, or for a "module:Class". Raises UnknownWorkflow if there is none.

    `what` is the kind of class as the error names it: "workflow".
    """
    path = registry.get(name, name)
    if not path.partition(":")[2]:
        known = ", ".join(sorted(registry)) or "none"
        raise UnknownWorkflow(f"{what} {name!r} is not registered (known: {known}){name_suggestion(name, registry)}")
    try:
        return load(path)  # type: ignore[no-any-return]  # a class or callable of the user's
    except (Exception, SystemExit) as e:
        raise UnknownWorkflow(f"{what} {name!r}{_import_problem(path, e)}") from e


def _import_problem(path: str, error: BaseException) -> str:
    """Return why `load` failed, to follow the name in an error message."""
    if isinstance(error, AttributeError) and (missing := missing_attribute(path)):
        return f": {missing}"
    return (f" can't be imported ({type(error).__name__}: {error}): put its module next to the config file or on "
            "PYTHONPATH, or install it, on each machine that needs it")


def name_suggestion(name: str, registered: Iterable[str]) -> str:
    """Return the end of an error about an unregistered name. It suggests a similar name, or to register this one."""
    return did_you_mean(name, registered) or '; register it, or give it as "module:name"'


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for a known name of similar spelling, as the end of an error; "" if none is."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
