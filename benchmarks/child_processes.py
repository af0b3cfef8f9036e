"""Child processes that answer lines with lines, or over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


def environment_without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


class LineProcess:
    def __init__(self, words: Sequence[str], patience: float | None = None, **how: Any) -> None:
        """Start a process. `patience`: time limit of an answer in seconds; `how`: arguments for Popen."""
        self.process: Any = subprocess.Popen(
            words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)
        self.patience = patience

    def answer(self) -> str:
        """Return the next line. Ends this process if none comes."""
        if self.patience is not None and not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.process.kill()
            raise SystemExit(f"{self.process.args[0]} did not answer in {self.patience} s")
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.process.args[0]} ended with exit code {self.process.wait()}")
        return str(line).strip()

    def ask(self, order: str) -> str:
        """Send a line, and return the answer."""
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(120)


@contextmanager
def piped(target: Callable[..., None], *args: Any, patience: float = 60.0) -> Iterator[tuple[Connection, int]]:
    """Run `target(*args, pipe)` in a process for this block. Yields our end of the pipe, and the process's pid.

    After the block the process has `patience` seconds to end.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()  # so that `recv` ends if the process dies
    try:
        yield ours, process.pid or 0
    finally:
        ours.close()
        process.join(patience)
        process.kill()
