"""Arguments that a config gives to a workflow, a reward or a trainer, against what these take.

A wrong one is known without an engine: it is refused before one loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trinity_es.actors.plugins import did_you_mean

__all__ = ["call_problems", "reward_problems", "workflow_problems"]


def workflow_problems(
    key: str, workflow: Any, args: Mapping[str, Any], importing: Callable[[str, str], list[str]]
) -> list[str]:
    """Return what is wrong with the `workflow_args` at `key`, a line each.

    `importing(key, name)` says what is wrong with a "module:name".
    """
    takes = workflow.taken_args() if hasattr(workflow, "taken_args") else None
    if takes is None:
        return []
    problems = _unknown(key, args, takes, workflow.__name__)
    for name in workflow.FUNCTION_ARGS:
        given = args.get(name)
        for one in given if isinstance(given, list) else [given]:
            if one is not None and not isinstance(one, str):
                problems.append(f"{key}.{name}: {one!r} is no \"module:name\"")
            elif one is not None:
                problems += importing(f"{key}.{name}", one)
    return problems


def reward_problems(key: str, reward: Any, args: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the `reward_fn_args` at `key`, a line each."""
    own = {name: value for name, value in args.items() if name != "grader_timeout"}  # it is any reward's
    return call_problems(key, reward, own)


def call_problems(key: str, called: Any, args: Mapping[str, Any], *, first: int = 0) -> list[str]:
    """Return which of the arguments at `key` this has no parameter for, a line each.

    `first`: how many parameters are given by position. What has no signature is not looked at.
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
    known = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none: leave it out"
    return [f"{key}.{name}: {who} has no argument {name!r}{did_you_mean(name, takes) or f'; {known}'}"
            for name in args if name not in takes]
