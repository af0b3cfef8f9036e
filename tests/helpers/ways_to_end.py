"""Ways in which user code ends its process, for workflows and graders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def loop() -> None:
    while True:
        pass


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            loop()


def raises() -> None:
    raise RuntimeError("on purpose")


WAYS: dict[str, Callable[[], Any]] = {
    # --- it never comes back
    "sleep": lambda: time.sleep(3600),
    "loop": loop,
    "C": lambda: ctypes.PyDLL(None).sleep(3600),  # holds the GIL, so no other thread or signal handler runs
    "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),  # holds the GIL too
    "deaf": deaf,
    # --- it ends
    "_exit": lambda: os._exit(3),
    "_exit 0": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SystemExit": lambda: sys.exit(0),
    "raise": raises,
}
