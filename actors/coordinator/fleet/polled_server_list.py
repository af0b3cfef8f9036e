"""List of external servers from a file or a command, read every `poll_interval` in its own thread.

A list with an invalid line changes nothing. The problem is logged once, and stays in `trouble` until it is mended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trinity_es.actors.config.models import ServersConfig
from trinity_es.actors.server_addresses import checked_url
from trinity_es.events.private_files import require_regular

__all__ = ["ServerList", "parse_list"]

_log = logging.getLogger(__name__)

COMMAND_SECONDS = 60.0
"""Time limit of a command that lists servers."""
LIST_BYTES = 2**20
"""Maximum size of a list, so that a command that never stops printing can't fill the coordinator's memory."""


def parse_list(text: str) -> tuple[list[str], list[str]]:
    """Return the URLs in a list, and a problem for each invalid line. `#` begins a comment."""
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
    """Reader of the list of external servers. After each reading without problems, its thread calls `on_list`."""

    def __init__(self, settings: ServersConfig, on_list: Callable[[list[str]], None]) -> None:
        self._settings, self._on_list = settings, on_list
        self.trouble = ""
        """Problem with the list when it was last read; empty if there was none."""

    def start(self) -> None:
        """Read the list every `poll_interval` until the process ends."""
        threading.Thread(target=self._run, name="server list", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.read()
            time.sleep(self._settings.poll_interval)

    def read(self) -> None:
        """Read the list once, and pass it to `on_list` or put its problems into `trouble`."""
        try:
            urls, problems = parse_list(self._read_text())
        except (OSError, ValueError) as e:
            urls, problems = [], [str(e)]
        trouble = f"the list of servers ({self._settings.file or 'servers.command'}): {'; '.join(problems)}"
        if problems and trouble != self.trouble:
            _log.warning("%s", trouble)
        self.trouble = trouble if problems else ""
        if not problems:
            self._on_list(urls)

    def _read_text(self) -> str:
        """Return the text of the list's file, or the output of its command. Raises OSError, ValueError."""
        if self._settings.file:
            require_regular(self._settings.file)
            with Path(self._settings.file).open("rb") as file:
                return _decode_list(file.read(LIST_BYTES + 1))
        return self._command_output()

    def _command_output(self) -> str:
        """Run the command and return its output. Raises ValueError if it fails or takes too long."""
        # In its own session, so that the children of a command that hangs are ended with it.
        process = subprocess.Popen(
            self._settings.command, shell=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        timed_out = threading.Event()

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def time_out() -> None:
            timed_out.set()
            kill()

        timer = threading.Timer(COMMAND_SECONDS, time_out)
        timer.start()
        assert process.stdout is not None
        with process.stdout:
            try:
                text = _decode_list(process.stdout.read(LIST_BYTES + 1))
                process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    kill()
                    process.wait()
        if timed_out.is_set():
            raise ValueError(f"servers.command did not end within {COMMAND_SECONDS:g} s: let it print the list and end")
        if process.returncode != 0:  # its output may be half of the list
            raise ValueError(
                f"servers.command failed with exit status {process.returncode}: see launch-*.log"
            )
        return text


def _decode_list(data: bytes) -> str:
    """Return a list's bytes as text. Raises ValueError for more than LIST_BYTES, or if they are not UTF-8."""
    if len(data) > LIST_BYTES:
        raise ValueError(f"the list has more than {LIST_BYTES:,} bytes: write one URL on each line")
    return data.decode()
