"""A machine whose clock is stepped: a mount namespace with its own /proc/stat, so processes seem to start at other
times.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def _lacks() -> str | None:
    if shutil.which("unshare") is None:
        return "there is no unshare here"
    tried = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount --bind /proc/uptime /proc/stat"], capture_output=True, text=True,
        timeout=30, check=False,
    )
    return tried.stderr.strip() or None if tried.returncode else None


class SteppedClock:
    """Clock that commands from `command` see. `step(seconds)` moves it."""

    def __init__(self, folder: Path) -> None:
        if (reason := _lacks()) is not None:
            pytest.skip(f"needs the right to make a mount namespace: {reason}")
        self._file = folder / "stat"
        self._text = Path("/proc/stat").read_text()
        self.step(0.0)

    def step(self, seconds: float) -> None:
        def later(m: re.Match[str]) -> str:
            return f"btime {int(m[1]) + round(seconds)}"

        self._file.write_text(re.sub(r"(?m)^btime (\d+)", later, self._text))

    def command(self, *argv: str) -> list[str]:
        """Return a command that runs `argv` under the stepped clock."""
        return ["unshare", "--mount", "sh", "-c", f'mount --bind {self._file} /proc/stat && exec "$@"', "sh", *argv]
