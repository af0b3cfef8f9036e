"""The list of servers that a file or a command gives, read again and again in a thread of its own.

One that can't be read, also one of its lines, changes nothing, and is told once in the text log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from trinity_es.actors.settings import ServersSettings, checked_url

__all__ = ["ServerList", "read_lines"]

_log = logging.getLogger(__name__)

COMMAND_SECONDS = 60.0
"""How long a command that lists servers may take."""


def read_lines(text: str) -> tuple[list[str], list[str]]:
    """Return the URLs of a list, and what is wrong with its other lines. `#` begins a comment."""
    urls: dict[str, None] = {}
    problems = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            urls[checked_url(line)] = None
        except ValueError as e:
            problems.append(f"a server {e}")
    return list(urls), problems


class ServerList:
    """Reads the list; `tell` is called, in the thread, with what it says whenever all of it could be read."""

    def __init__(self, settings: ServersSettings, tell: Callable[[list[str]], None]) -> None:
        self._settings, self._tell = settings, tell
        self._told = ""

    def start(self) -> None:
        """Begin to read, until the process ends."""
        threading.Thread(target=self._run, name="server list", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.read()
            pause.wait(self._settings.poll_interval)

    def read(self) -> None:
        """Read it once."""
        try:
            urls, problems = read_lines(self._text())
        except (OSError, ValueError) as e:
            urls, problems = [], [str(e)]
        told = "; ".join(problems)
        if told and told != self._told:
            _log.warning("the list of servers (%s): %s", self._settings.file or "servers.command", told)
        self._told = told
        if not problems:
            self._tell(urls)

    def _text(self) -> str:
        if self._settings.file:
            return Path(self._settings.file).read_text()
        # A session of its own: what a command that hangs has started is ended with it.
        process = subprocess.Popen(
            self._settings.command, shell=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True,
        )
        try:
            text, _ = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:  # its own text has the command in it, which may hold a key
            raise ValueError(f"the command had not ended after {COMMAND_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode != 0:  # what it printed may be half of the list
            raise ValueError(f"the command failed (exit status {process.returncode})")
        return text
