"""Client packages from PyPI, each installed once into an environment in `.venv/beside`, and scripts that use them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.warm_python import WarmPython
from trinity_es.environments import installs as environments
from trinity_es.events.errors import ConfigError

DATASETS = ["datasets==5.2.0", "pandas==3.1.1", "python-dateutil==4.0.0", "pytz==2026.6", "multiprocess==0.70.19",
            "xxhash==4.1.0"]
"""The package, and what it imports that is not beside vLLM already. pyarrow has to be where Python has its packages:
else dill takes its classes for a user's.
"""
TRL = ["trl==1.16.0", *DATASETS]
OPENENV = "openenv==0.10.0"
LETTERS = ROOT / "tests" / "full" / "environments" / "letters"
"""Folder of a verifiers 0.4.0 environment."""

INSTALL_SECONDS, ASK_SECONDS = 600, 300
BESIDE = Path(sys.prefix) / "beside"


def once(contents: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return the folder of these contents; `make` fills it where no process has done so yet."""
    folder = BESIDE / hashlib.sha256(json.dumps([sys.version, *contents]).encode()).hexdigest()[:16]
    BESIDE.mkdir(exist_ok=True)
    with folder.with_suffix(".complete").open("a+") as complete:
        fcntl.flock(complete, fcntl.LOCK_EX)
        if os.fstat(complete.fileno()).st_size == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
            make(folder)
            complete.write("it is complete\n")
    return folder


def installed(*packages: str, beside: bool = False) -> dict[str, str]:
    """Install packages, `beside` our own without dependencies; return the variables for scripts. Skips if it can't."""
    def make(folder: Path) -> None:
        uv = environments.uv()
        if uv is None:
            pytest.skip(f"{packages[0]} can't be installed: there is no uv here")
        pips = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}  # the Makefile sets these
        given = {mine: os.environ[its] for mine, its in pips.items() if its in os.environ}
        install = [uv, "pip", "install", "--python"]
        if beside:
            commands = [[*install, sys.executable, "--no-deps", "--target", str(folder), *packages]]
        else:
            commands = [[uv, "venv", "--python", sys.executable, str(folder)],
                        [*install, str(folder / "bin" / "python"), *packages]]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS,
                                  env={**given, **os.environ}, check=False)
            if done.returncode:
                pytest.skip(f"{packages[0]} can't be installed here: {done.stderr.strip()[-300:]}")

    folder = once(["beside" if beside else "alone", *packages], make)
    return {"PYTHONPATH": str(folder)} if beside else {"PYTHON": str(folder / "bin" / "python")}


def environment(package: Path, name: str | None = None) -> environments.Installed:
    """Return a verifiers environment as `install` makes it, with a link to a venv that was installed once. Skips if it
    can't.
    """
    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("TRINITY_ES_ENVIRONMENTS", str(folder))
            try:
                environments.install(str(package))
            except ConfigError as e:
                pytest.skip(f"{package.name} can't be installed here: {e}")

    texts = [file.read_text() for file in sorted(package.iterdir()) if file.is_file()]
    made = once([str(package), Path(environments.__file__).read_text(), *texts], make)
    [file] = made.glob("*/environment.json")
    told = json.loads(file.read_text())
    home = environments.environments_folder() / (name or told["name"])
    (home / told["folder"]).mkdir(parents=True)
    (home / told["folder"] / "venv").symlink_to(file.parent / told["folder"] / "venv")
    (home / file.name).write_text(json.dumps({**told, "name": home.name}))
    return environments.find(home.name)


def ask(script: Path, where: dict[str, str] | WarmPython, **given: Any) -> Any:
    """Return the last JSON line of a script with JSON arguments. `where`: variables and "PYTHON", or the Python that
    forks it.
    """
    arguments = [str(script), json.dumps(given)]
    if isinstance(where, WarmPython):
        done = where.run(arguments, timeout=ASK_SECONDS)
    else:
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **where}
        done = subprocess.run([where.get("PYTHON", sys.executable), *arguments], capture_output=True, text=True,
                              timeout=ASK_SECONDS, env=variables, check=False)
    assert done.returncode == 0, f"{script.name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
