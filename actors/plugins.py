"""Lookup of what a config names: a registered name, or a user's own "module:Class".

Installed packages register workflows, rewards, monitors, engines, environments and commands as entry points. Operators,
outputs, priority functions and monitors are built here, so all of them are refused in the same words.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from trinity_es.events.errors import ConfigError, UnknownWorkflow

__all__ = ["build", "did_you_mean", "find", "lacking", "load", "look_in", "registered", "resolve", "way_out"]

MOVED = {"trinity_es.workflows_simple": "trinity_es.workflows.simple"}
"""Modules of this package that logs of earlier releases name, and where they are now."""


def look_in(*folders: str, first: bool = True) -> None:
    """Let modules of the user's be imported from these folders, before all others or (not `first`) after them."""
    at = 0 if first else len(sys.path)
    sys.path[at:at] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def load(path: str) -> Any:
    """Return what "module:Class" names, or a module. Raises what importing it raises; AttributeError: it has no such.
    """
    module, _, attribute = path.partition(":")
    found = importlib.import_module(MOVED.get(module, module))
    return attrgetter(attribute)(found) if attribute else found


def lacking(path: str) -> str:
    """Return what the module of "module:Class" does not have; "" where it has all, or was never imported whole."""
    name, _, attribute = path.partition(":")
    module: Any = sys.modules.get(MOVED.get(name, name))
    found = module
    for piece in attribute.split(".") if module is not None else ():
        if not hasattr(found, piece):
            near = did_you_mean(piece, (known for known in dir(found) if not known.startswith("__")))
            return f"{name} ({getattr(module, '__file__', None) or name}) has no {piece}{near}"
        found = getattr(found, piece)
    return ""


@cache
def registered(kind: str) -> Mapping[str, str]:
    """Return "module:Class" by name for all that installed packages, this one too, register as this kind.

    `kind`: workflow, reward, monitor, engine, environment or command; the entry points of the group `trinity_es.` and
    its plural. Raises ConfigError if two packages give one name to different things.
    """
    points: dict[str, EntryPoint] = {}
    for point in _entry_points().select(group=f"trinity_es.{kind}s"):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(f"two packages register the {kind} {point.name!r}: {_package(other)} and "
                              f"{_package(point)}. Uninstall one of them", **{kind: point.name})
    return {name: point.value for name, point in points.items()}


@cache
def _entry_points() -> Any:  # of another type before Python 3.12. Reading those of 200 packages takes 6 ms
    return entry_points()


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def find(kind: str, name: str, known: Mapping[str, Callable[..., Any] | str], shape: str) -> Callable[..., Any]:
    """Return what makes the `kind` of this name. `known` has callables, or paths of them, by name.

    `shape` says what a user's own must be. Raises ConfigError.
    """
    path = known.get(name, name)
    if not isinstance(path, str):
        return path
    module, colon, _ = path.partition(":")
    names = ", ".join(sorted(known))
    if not colon:
        raise ConfigError(
            f'there is no {kind} {name!r}; known: {names}. Give your own as "module:Class", {shape}', **{kind: name}
        )
    try:
        found = load(path)
    except Exception as e:  # importing runs a user's module, which may raise anything
        if missing := isinstance(e, AttributeError) and lacking(path):
            raise ConfigError(f"{kind} {name!r}: {missing}", **{kind: name}) from e
        raise ConfigError(
            f"{kind} {name!r} can't be imported ({type(e).__name__}: {e}): is {module!r} installed, or on PYTHONPATH, "
            f"where it is to run? Known without importing: {names}", **{kind: name},
        ) from e
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is a {type(found).__name__}, not a class", **{kind: name})
    return found  # type: ignore[no-any-return]  # any callable; what it makes is checked by who asked


def build(
    kind: str, name: str, args: Mapping[str, Any], known: Mapping[str, Callable[..., Any]], shape: str
) -> Any:
    """Return the `kind` of this name, built with `args`. Raises ConfigError, naming it, whatever the class raised."""
    make = find(kind, name, known, shape)
    try:
        return make(**args)
    except Exception as e:  # a user's class: say which one, whatever it raised
        raise ConfigError(f"{kind} {name} can't be built with {dict(args)!r}: {e}", **{kind: name}) from e


def resolve(name: str, registry: Mapping[str, str], what: str) -> type[Any]:
    """Return the class of this name: a registered one, or "module:Class".

    Raises UnknownWorkflow, naming the way out.
    """
    path = registry.get(name, name)
    if not path.partition(":")[2]:
        known = ", ".join(sorted(registry)) or "none"
        raise UnknownWorkflow(f"{what} {name!r} is not registered (known: {known}){way_out(name, registry)}")
    try:
        return load(path)  # type: ignore[no-any-return]  # a class or callable of the user's
    except (Exception, SystemExit) as e:
        if missing := isinstance(e, AttributeError) and lacking(path):
            raise UnknownWorkflow(f"{what} {name!r}: {missing}") from e
        raise UnknownWorkflow(
            f"{what} {name!r} can't be imported: {type(e).__name__}: {e}; put its module where the runner finds it "
            "(next to the config file, or installed)"
        ) from e


def way_out(name: str, registered: Iterable[str]) -> str:
    """Return what to do about a name that nobody registered: take the one that is spelt like it, or register it."""
    return did_you_mean(name, registered) or '; register it, or give it as "module:name"'


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the known name that is spelt like this one, as the end of an error; "" where none is."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
