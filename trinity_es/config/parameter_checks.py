"""Check of the names and arguments in a config for workflows, rewards and trainers, before an engine loads."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean, load, missing_attribute, name_suggestion

__all__ = ["call_problems", "import_problems", "reward_problems", "workflow_problems"]


def import_problems(key: str, written: str | None, known: Mapping[str, Any] = {}) -> list[str]:
    """Return why the value of `key` can't be imported, as at most one line. It is "module:name" or a `known` name."""
    name = written if written is None else known.get(written, written)
    if not isinstance(name, str) or (written in known and name.startswith("trinity_es.")):
        return []
    if ":" not in name:
        names = ", ".join(sorted(known)) or "none"
        return [f"{key}: there is no {name!r} (known: {names}){name_suggestion(name, known)}"]
    module = name.partition(":")[0]
    try:
        load(module)
    except (Exception, SystemExit) as e:  # a user's module may raise anything at its top level
        return [f"{key}: {name}: importing {module} failed ({type(e).__name__}: {e}); the module must lie in the "
                "config file's folder (or code_path), in the working directory, or be installed"]
    missing = missing_attribute(name)
    return [f"{key}: {name}: {missing}"] if missing else []


def workflow_problems(key: str, workflow: Any, args: Mapping[str, Any]) -> list[str]:
    """Return the problems of the `workflow_args` at `key`, a line each."""
    parameters = workflow.taken_args() if hasattr(workflow, "taken_args") else None
    if parameters is None:
        return []
    problems = _unknown_argument_problems(key, args, parameters, workflow.__name__)
    for name in workflow.FUNCTION_ARGS:
        value = args.get(name)
        for path in value if isinstance(value, list) else [value]:  # "module:name", a list of them, or None
            if isinstance(path, str | None):
                problems += import_problems(f"{key}.{name}", path)
            else:
                problems.append(f"{key}.{name}: {path!r} is no \"module:name\"")
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
