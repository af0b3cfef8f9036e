"""The list of servers that a file or a command gives, read again and again in a thread of its own.

One that can't be read, also one of its lines, changes nothing. It is told once in the text log, and by `trouble`.
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

from trinity_es.actors.addresses import checked_url
from trinity_es.actors.config.schema import ServersConfig
from trinity_es.events.private_files import require_regular

__all__ = ["ServerList", "read_lines"]

_log = logging.getLogger(__name__)

COMMAND_SECONDS = 60.0
"""How long a command that lists servers may take."""
LIST_BYTES = 2**20
"""Maximum size of a list: a command that never stops printing fills the coordinator's memory otherwise."""


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

    def __init__(self, settings: ServersConfig, tell: Callable[[list[str]], None]) -> None:
        self._settings, self._tell = settings, tell
        self.trouble = ""
        """What is wrong with the list as it was read last; empty: nothing."""

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
        told = f"the list of servers ({self._settings.file or 'servers.command'}): {'; '.join(problems)}"
        if problems and told != self.trouble:
            _log.warning("%s", told)
        self.trouble = told if problems else ""
        if not problems:
            self._tell(urls)

    def _text(self) -> str:
        if self._settings.file:
            require_regular(self._settings.file)
            with Path(self._settings.file).open("rb") as file:
                return _decoded(file.read(LIST_BYTES + 1))
        # A session of its own: what a command that hangs has started is ended with it.
        process = subprocess.Popen(
            self._settings.command, shell=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        late = threading.Event()

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def end_late() -> None:
            late.set()
            end()

        timer = threading.Timer(COMMAND_SECONDS, end_late)
        timer.start()
        assert process.stdout is not None
        with process.stdout:
            try:
                text = _decoded(process.stdout.read(LIST_BYTES + 1))
                process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    end()
                    process.wait()
        if late.is_set():
            raise ValueError(f"the command had not ended after {COMMAND_SECONDS:g} s")
        if process.returncode != 0:  # what it printed may be half of the list
            raise ValueError(
                f"the command failed (exit status {process.returncode}; what it wrote on stderr is in launch-*.log)"
            )
        return text


def _decoded(data: bytes) -> str:
    if len(data) > LIST_BYTES:
        raise ValueError(f"it has more than {LIST_BYTES:,} bytes: a list has a URL a line")
    return data.decode()
