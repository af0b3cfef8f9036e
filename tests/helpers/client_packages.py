"""Clients from PyPI in environments of their own, since their pins are not ours; and the scripts that run in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TRL", "ask", "installed"]

TRL = ["trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "pytz==2026.6", "multiprocess==0.70.19", "xxhash==4.1.0"]
"""TRL, and what it imports that is not beside vLLM already. pyarrow has to be where Python has its packages: else dill
takes its classes for a user's.
"""

INSTALL_SECONDS, ASK_SECONDS = 600, 300


def installed(folder: Path, *packages: str, beside: bool = False) -> dict[str, str]:
    """Install packages from the index that the environment names; returns the variables to run a script with them.

    With `beside` they stand beside our own, without what they depend on. Skips where they can't be installed.
    """
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        pytest.skip(f"{packages[0]} can't be installed: there is no uv here")
    pips = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}  # as the Makefile hands them on
    given = {mine: os.environ[its] for mine, its in pips.items() if its in os.environ}
    if beside:
        commands = [[uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder), *packages]]
    else:
        commands = [[uv, "venv", "--python", sys.executable, str(folder)],
                    [uv, "pip", "install", "--python", str(folder / "bin" / "python"), *packages]]
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, env={**given, **os.environ}, check=False)
        if done.returncode:
            pytest.skip(f"{packages[0]} can't be installed here: {done.stderr.strip()[-300:]}")
    return {"PYTHONPATH": str(folder)} if beside else {"PYTHON": str(folder / "bin" / "python")}


def ask(script: Path, variables: dict[str, str], **given: Any) -> Any:
    """Return what a script prints last, as JSON; it gets its arguments as JSON, too."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    done = subprocess.run(
        [variables.get("PYTHON", sys.executable), str(script), json.dumps(given)], capture_output=True, text=True,
        timeout=ASK_SECONDS, env=environment, check=False)
    assert done.returncode == 0, f"{script.name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
