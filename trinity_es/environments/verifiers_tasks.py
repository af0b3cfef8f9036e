"""The tasks of an environment of verifiers, as a taskset's file: `path: verifiers:NAME`.

They are written once, beside the environment, and read from there: cursors count rows of a file that does not change.
Another install writes its own: `tasks_revision` tells them apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from trinity_es.environments.installed import PROGRAM, Installed, find
from trinity_es.environments.server import environment_variables
from trinity_es.events.errors import DataError, TasksetError

__all__ = [
    "PREFIX", "environment_config", "environment_named", "made_tasks", "tasks_file", "tasks_revision",
]

PREFIX = "verifiers:"
TASKS_SECONDS = 1800.0
"""How long an environment may take to write its tasks: it may fetch a data set first."""
LAST_WORDS = 2000
"""Maximum number of characters that are shown of what a program said before it failed."""


def environment_named(args: Mapping[str, Any]) -> str:
    """Return the environment that a workflow's arguments name. Raises DataError."""
    name = args.get("env")
    if not isinstance(name, str) or not name:
        raise DataError("workflow_args.env is missing: name the environment (`trinity-es env list` shows those here)")
    return name


def environment_config(installed: Installed, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an environment, as verifiers reads it, of a workflow's arguments."""
    given = dict(args.get("config") or {})
    return {**given, "taskset": {"id": installed.taskset, **(given.get("taskset") or {})}}


def tasks_file(args: Mapping[str, Any]) -> Path:
    """Return the file of an environment's tasks, which may not be there yet. Raises ConfigError, DataError."""
    installed = find(environment_named(args))
    told = orjson.dumps([environment_config(installed, args), args.get("tasks") or 0], option=orjson.OPT_SORT_KEYS)
    return installed.folder / "tasks" / f"{hashlib.sha256(told).hexdigest()[:16]}.jsonl"


def made_tasks(args: Mapping[str, Any]) -> Path:
    """Return the same, once the environment has written its tasks there. Raises TasksetError with what it said."""
    file = tasks_file(args)
    if file.is_file():
        return file
    installed = find(environment_named(args))
    file.parent.mkdir(exist_ok=True)
    writing = file.with_suffix(f".{uuid4().hex[:12]}")
    try:
        _write(installed, args, writing)
        with contextlib.suppress(FileExistsError):  # of several who make them the first counts: it may be read by now
            os.link(writing, file)
    finally:
        writing.unlink(missing_ok=True)
    return file


def tasks_revision(args: Mapping[str, Any], file: Path) -> str:
    """Return which tasks these are: the version of the environment, and the hash of their file."""
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return f"{find(environment_named(args)).version} sha256:{digest}"


def _write(installed: Installed, args: Mapping[str, Any], file: Path) -> None:
    """Have the environment write its tasks. Raises TasksetError."""
    command = [str(installed.python), "-I", str(PROGRAM), "tasks", str(file), str(args.get("tasks") or 0)]
    config = orjson.dumps(environment_config(installed, args))  # may hold secrets: not for a command line
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env=environment_variables(installed.python),
        )
        try:
            process.communicate(config, timeout=TASKS_SECONDS)
            why = f"it ended with {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"they were not there after {TASKS_SECONDS:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
        if why:
            said.seek(0)
            words = said.read().decode(errors="replace")[-LAST_WORDS:].strip()
            raise TasksetError(f"the tasks of environment {installed.name} can't be had: {why}: {words}")
