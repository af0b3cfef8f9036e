"""The tasks of an environment of verifiers, as a taskset's file: `path: verifiers:NAME`.

They are written once, beside the environment, and read from there: cursors count rows of a file that does not change.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trinity_es.environments.installed import find
from trinity_es.environments.server import environment_variables
from trinity_es.events.errors import DataError, TasksetError

__all__ = ["PREFIX", "PROGRAM", "environment_config", "environment_named", "made_tasks", "tasks_file"]

PREFIX = "verifiers:"
PROGRAM = Path(__file__).with_name("verifiers_main.py")
LAST_WORDS = 2000
"""Maximum number of characters that are shown of what a program said before it failed."""


def environment_named(args: Mapping[str, Any]) -> str:
    """Return the environment that a workflow's arguments name. Raises DataError."""
    name = args.get("env")
    if not isinstance(name, str) or not name:
        raise DataError("workflow_args.env is missing: name the environment (`trinity-es env list` shows those here)")
    return name


def environment_config(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an environment, as verifiers reads it, of a workflow's arguments."""
    given = dict(args.get("config") or {})
    return {**given, "taskset": {"id": environment_named(args), **(given.get("taskset") or {})}}


def tasks_file(args: Mapping[str, Any]) -> Path:
    """Return the file of an environment's tasks, which may not be there yet. Raises ConfigError, DataError."""
    told = orjson.dumps([environment_config(args), args.get("tasks") or 0], option=orjson.OPT_SORT_KEYS)
    return find(environment_named(args)).folder / "tasks" / f"{hashlib.sha256(told).hexdigest()[:16]}.jsonl"


def made_tasks(args: Mapping[str, Any]) -> Path:
    """Return the same, once the environment has written its tasks there. Raises TasksetError with what it said."""
    file = tasks_file(args)
    if file.is_file():
        return file
    installed = find(environment_named(args))
    file.parent.mkdir(exist_ok=True)
    writing = file.with_suffix(".writing")
    command = [str(installed.python), "-I", str(PROGRAM), "tasks", str(writing),
               orjson.dumps(environment_config(args)).decode(), str(args.get("tasks") or 0)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment_variables(installed.python))
    if done.returncode:
        said = done.stderr[-LAST_WORDS:].strip()
        raise TasksetError(f"the tasks of environment {installed.name} can't be had: {said}")
    writing.rename(file)
    return file
