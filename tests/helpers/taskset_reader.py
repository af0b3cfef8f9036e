"""Reader of tasksets in another process, with packages that this one lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TasksetReader:
    """Reader process with these environment variables, which `close` ends."""

    def __init__(self, script: Path, variables: Mapping[str, str], stderr: Path) -> None:
        self.stderr = stderr
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", **variables}
        with stderr.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(script)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=out, text=True)

    def open(self, *, recorded: Any = None, **config: Any) -> Any:
        self._process.stdin.write(json.dumps({"config": config, "recorded": recorded}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the process ended: {self.stderr.read_text()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
