"""Graders that go wrong in every way that a process can, and rewards that call them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from trinity_es import RewardFn
from trinity_es.events.errors import DataError

FAULTS = (
    "hangs", "regex", "exits", "exits_well", "segfault", "signals", "memory", "raises", "forks", "no_json", "deaf",
)
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
    """Leave a process behind."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    with open(note, "a") as f:
        f.write(f"{child.pid}\n")
    return 1.0


def fault(how: str) -> Any:
    """Go wrong like this."""
    if how == "hangs":
        time.sleep(3600)
    elif how == "regex":  # holds the GIL: no thread and no signal handler of Python's gets a turn
        re.match(r"(a+)+$", "a" * 64 + "b")
    elif how == "exits":
        os._exit(3)
    elif how == "exits_well":
        sys.exit(0)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "signals":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3600)
    elif how == "memory":
        kept = []
        while True:
            kept.append(bytearray(16 * 2**20))
    elif how == "raises":
        raise RuntimeError("no idea")
    elif how == "forks":  # the copy says the same, the original nothing
        if os.fork():
            os._exit(0)
    elif how == "no_json":
        return {1, 2}
    elif how == "deaf":
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    return 1.0


class Faulty(RewardFn):
    """1 for every answer, but for those of which it dies: their text is how."""

    grader_timeout = 1.0

    def __init__(self, **kwargs: Any) -> None:
        pass

    def __call__(self, response: str, **kwargs: Any) -> dict[str, float]:
        return {"accuracy": 1.0 if response not in FAULTS else fault(response)}
