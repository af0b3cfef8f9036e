"""Graders that fail in all the ways of a process, and rewards that call them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.helpers.ways_to_end import WAYS
from trinity_es import RewardFn
from trinity_es.events.errors import DataError

FAULTS = ("sleep", "regex", "_exit", "SystemExit", "segfault", "SIGTERM", "memory", "raise", "forks", "no_json", "deaf")
"""Ways to fail."""


def half(*args: Any, **kwargs: Any) -> float:
    return 0.5


def echo(*args: Any, **kwargs: Any) -> Any:
    return [args, kwargs]


def pids() -> list[int]:
    return [os.getpid(), os.getpgrp(), os.getppid()]


def refuses(text: str) -> float:
    raise DataError(f"no grader for {text}")


def starts(seconds: float, note: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    with open(note, "a") as f:
        f.write(f"{child.pid}\n")
    return 1.0


def fault(how: str) -> Any:
    if how in WAYS:
        WAYS[how]()
    elif how == "memory":
        kept = []
        while True:
            kept.append(bytearray(16 * 2**20))
    elif how == "forks":  # the copy returns a reward, the original nothing
        if os.fork():
            os._exit(0)
    elif how == "no_json":
        return {1, 2}
    return 1.0


class Faulty(RewardFn):
    """Reward of 1, unless the answer's text names a way to fail."""

    grader_timeout = 1.0

    def __init__(self, **kwargs: Any) -> None:
        pass

    def __call__(self, response: str, **kwargs: Any) -> dict[str, float]:
        return {"accuracy": 1.0 if response not in FAULTS else fault(response)}
