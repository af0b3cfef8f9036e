"""Tasks of a verifiers environment as a taskset file (`path: verifiers:NAME`).

The file is written once, in the environment's install folder, and never changes, since cursors count its rows. Another
install writes its own file; `tasks_revision` distinguishes the files.
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

from trinity_es.environments.environment_process import environment_variables
from trinity_es.environments.installs import PROGRAM, Installed, find
from trinity_es.events.errors import DataError, TasksetError

__all__ = [
    "PREFIX", "ensure_tasks_file", "environment_config", "environment_name", "tasks_file", "tasks_revision",
]

PREFIX = "verifiers:"
TASKS_SECONDS = 1800.0
"""Time limit for an environment to write its tasks: it may download a data set first."""
LAST_WORDS = 2000
"""Maximum number of characters shown of a failed program's output."""


def environment_name(args: Mapping[str, Any]) -> str:
    """Return the environment's name, `env` of the `workflow_args`. Raises DataError if it is missing."""
    name = args.get("env")
    if not isinstance(name, str) or not name:
        raise DataError("workflow_args.env is missing: name the environment (`trinity-es env list` lists the installed "
                        "ones)")
    return name


def environment_config(installed: Installed, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return verifiers' config of an environment, made of the `workflow_args`."""
    config = dict(args.get("config") or {})
    return {**config, "taskset": {"id": installed.taskset, **(config.get("taskset") or {})}}


def tasks_file(args: Mapping[str, Any]) -> Path:
    """Return the path of an environment's tasks file, which may not exist yet. Raises ConfigError, DataError."""
    installed = find(environment_name(args))
    key = orjson.dumps([environment_config(installed, args), args.get("tasks") or 0], option=orjson.OPT_SORT_KEYS)
    return installed.folder / "tasks" / f"{hashlib.sha256(key).hexdigest()[:16]}.jsonl"


def ensure_tasks_file(args: Mapping[str, Any]) -> Path:
    """Write an environment's tasks into `tasks_file(args)` unless it exists; return its path. Raises TasksetError."""
    file = tasks_file(args)
    if file.is_file():
        return file
    installed = find(environment_name(args))
    file.parent.mkdir(exist_ok=True)
    temporary_file = file.with_suffix(f".{uuid4().hex[:12]}")
    try:
        _write_tasks(installed, args, temporary_file)
        with contextlib.suppress(FileExistsError):  # another process was first, and its file may be in use
            os.link(temporary_file, file)
    finally:
        temporary_file.unlink(missing_ok=True)
    return file


def tasks_revision(args: Mapping[str, Any], file: Path) -> str:
    """Return the version of the environment and the SHA-256 of its tasks file."""
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return f"{find(environment_name(args)).version} sha256:{digest}"


def _write_tasks(installed: Installed, args: Mapping[str, Any], file: Path) -> None:
    """Run the environment's own Python to write its tasks. Raises TasksetError with the end of the output."""
    command = [str(installed.python), "-I", str(PROGRAM), "tasks", str(file), str(args.get("tasks") or 0)]
    config = orjson.dumps(environment_config(installed, args))  # may hold secrets: not for a command line
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            env=environment_variables(installed.python),
        )
        try:
            process.communicate(config, timeout=TASKS_SECONDS)
            problem = f"its process ended with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"its process was not done after {TASKS_SECONDS:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
        if problem:
            stderr.seek(0)
            output = stderr.read().decode(errors="replace")[-LAST_WORDS:].strip()
            raise TasksetError(f"environment {installed.name} can't write its tasks: {problem}: {output}")
