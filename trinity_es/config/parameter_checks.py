"""Check of the config's arguments for a workflow, a reward or a trainer, before an engine loads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean

__all__ = ["call_problems", "reward_problems", "workflow_problems"]


def workflow_problems(
    key: str, workflow: Any, args: Mapping[str, Any], import_problems: Callable[[str, str], list[str]]
) -> list[str]:
    """Return the problems of the `workflow_args` at `key`. `import_problems(key, name)`: those of a "module:name"."""
    parameters = workflow.taken_args() if hasattr(workflow, "taken_args") else None
    if parameters is None:
        return []
    problems = _unknown_argument_problems(key, args, parameters, workflow.__name__)
    for name in workflow.FUNCTION_ARGS:
        value = args.get(name)  # a function, a list of them, or None
        for function in value if isinstance(value, list) else [value]:
            if function is not None and not isinstance(function, str):
                problems.append(f"{key}.{name}: {function!r} is no \"module:name\"")
            elif function is not None:
                problems += import_problems(f"{key}.{name}", function)
    return problems


def reward_problems(key: str, reward: Any, args: Mapping[str, Any]) -> list[str]:
    """Return the problems of the `reward_fn_args` at `key`, a line each."""
    reward_args = {name: value for name, value in args.items() if name != "grader_timeout"}  # any reward takes it
    return call_problems(key, reward, reward_args)


def call_problems(key: str, function: Any, args: Mapping[str, Any], *, positional_count: int = 0) -> list[str]:
    """Return a line for each argument at `key` that this function or class does not take.

    The config can't set the first `positional_count` parameters. A callable without a signature is not checked.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = [p.name for p in parameters[positional_count:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _unknown_argument_problems(key, args, names, getattr(function, "__name__", type(function).__name__))


def _unknown_argument_problems(
    key: str, args: Iterable[str], parameters: Collection[str], function_name: str
) -> list[str]:
    advice = f"it takes {', '.join(sorted(parameters))}" if parameters else "it takes none: leave it out"
    return [f"{key}.{name}: {function_name} has no argument {name!r}{did_you_mean(name, parameters) or f'; {advice}'}"
            for name in args if name not in parameters]
