"""Check of a config's arguments for a workflow, a reward or a trainer against their parameters.

It needs no engine, so a wrong argument is refused before one loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean

__all__ = ["call_problems", "reward_problems", "workflow_problems"]


def workflow_problems(
    key: str, workflow: Any, args: Mapping[str, Any], importing: Callable[[str, str], list[str]]
) -> list[str]:
    """Return the problems of the `workflow_args` at `key`, a line each.

    `importing(key, name)` returns the problems of a "module:name".
    """
    takes = workflow.taken_args() if hasattr(workflow, "taken_args") else None
    if takes is None:
        return []
    problems = _unknown(key, args, takes, workflow.__name__)
    for name in workflow.FUNCTION_ARGS:
        value = args.get(name)
        for function in value if isinstance(value, list) else [value]:
            if function is not None and not isinstance(function, str):
                problems.append(f"{key}.{name}: {function!r} is no \"module:name\"")
            elif function is not None:
                problems += importing(f"{key}.{name}", function)
    return problems


def reward_problems(key: str, reward: Any, args: Mapping[str, Any]) -> list[str]:
    """Return the problems of the `reward_fn_args` at `key`, a line each."""
    own = {name: value for name, value in args.items() if name != "grader_timeout"}  # any reward takes it
    return call_problems(key, reward, own)


def call_problems(key: str, called: Any, args: Mapping[str, Any], *, first: int = 0) -> list[str]:
    """Return the problems of the arguments at `key` that this callable does not take, a line each.

    `first` is the number of positional parameters. A callable without a signature is not checked.
    """
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    named = [p.name for p in parameters[first:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _unknown(key, args, named, getattr(called, "__name__", type(called).__name__))


def _unknown(key: str, args: Iterable[str], takes: Collection[str], who: str) -> list[str]:
    parameters = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none: leave it out"
    return [f"{key}.{name}: {who} has no argument {name!r}{did_you_mean(name, takes) or f'; {parameters}'}"
            for name in args if name not in takes]
