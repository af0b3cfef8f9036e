"""File of the requests and pipelines in work, so that after a crash the next coordinator sees which one caused it.

The file has each request from the start of its handling to the end of its turn, and each batch while its pipeline runs.
A coordinator that starts reads the file: its entries were in work when the previous coordinator ended, for whatever
reason. A request that was in work at `DEATHS` ends in a row is refused; one success clears it. A request is identified
by its content, so the same request of another client is refused too. A restart of the system clears the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trinity_es.actors.commands import CommandRequest
from trinity_es.events.errors import PipelineError, RequestRefused
from trinity_es.events.private_files import make_private_folder, open_private

__all__ = ["RequestsInHand", "fingerprint"]

DEATHS = 2
"""Number of coordinators that may end while they handle a request, before it is refused."""
JOB_DEATHS = 3
"""The same number for a pipeline; it is higher since a pipeline runs long, and kills have other causes too."""
REMEMBERED = 64
"""Maximum number of suspects kept; the newest stay."""


@dataclass(slots=True)
class _Suspect:
    """Request or pipeline that was in work when coordinators ended."""

    what: str
    deaths: int
    said: str = ""
    """Error of its handler, if it raised one."""


def fingerprint(request: CommandRequest[Any]) -> str:
    """Return a key of the request's content, the same for every client."""
    return hashlib.sha256(repr(request.command).encode(errors="replace")).hexdigest()[:32]


class RequestsInHand:
    """Requests and pipelines in work now, and suspects: those in work when earlier coordinators ended."""

    def __init__(self, path: Path | None = None, life: str = "") -> None:
        """Read the file of the previous coordinator, or keep all in memory if there is no path.

        `life` names a start of the system; a file of another start is ignored.
        """
        self._life = life
        self._held: dict[str, str] = {}
        """Requests of this turn by fingerprint."""
        self._jobs: dict[str, str] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._file, self._length = -1, 0
        if path is not None:
            with contextlib.suppress(OSError):  # without the file, nothing is remembered
                make_private_folder(path.parent)
                self._file = open_private(path)
                self._read(os.pread(self._file, 1 << 20, 0))
        self._write()

    def _read(self, data: bytes) -> None:
        try:
            content: dict[str, Any] = orjson.loads(data)
            if content["life"] != self._life:
                return
            self._suspects = {key: _Suspect(**suspect) for key, suspect in content["suspects"].items()}
            for key, what in content["held"].items():
                deaths = self._suspects.pop(key).deaths if key in self._suspects else 0
                self._suspects[key] = _Suspect(what, deaths + 1)
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # there is no file yet, or half of one
        while len(self._suspects) > REMEMBERED:
            del self._suspects[next(iter(self._suspects))]

    def _write(self) -> None:
        if self._file < 0:
            return
        held = self._held | self._jobs
        suspects = {key: asdict(suspect) for key, suspect in self._suspects.items()}
        data = orjson.dumps({"life": self._life, "held": held, "suspects": suspects})
        with contextlib.suppress(OSError):
            os.pwrite(self._file, data.ljust(self._length), 0)  # spaces pad it: the file is JSON at any time
            self._length = max(self._length, len(data))

    # --- requests ---------------------------------------------------------------------------------------------------
    def take(self, request: CommandRequest[Any]) -> None:
        """Note that a request is about to be handled. Raises RequestRefused if it ended earlier coordinators."""
        key, name = fingerprint(request), request.command.name
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= DEATHS:
            error = f" with {suspect.said}" if suspect.said else ""
            raise RequestRefused(
                f"request {name!r} is refused: the last {suspect.deaths} coordinators ended while they handled it"
                f"{error}. See coordinator.log and guardian.log; to have it tried again, restart the system",
                command=name, deaths=suspect.deaths,
            )
        self._held[key] = f"request {name!r}"
        self._write()

    def blame(self, request: CommandRequest[Any], error: Exception) -> None:
        """Suspect a request whose handler crashed this coordinator.

        One crash is enough to refuse the request from now on, since its cause is clear.
        """
        self._held.pop(fingerprint(request), None)
        message = f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
        self._suspects[fingerprint(request)] = _Suspect(f"request {request.command.name!r}", DEATHS, message)
        self._write()

    def put_aside(self, request: CommandRequest[Any]) -> None:
        """Note that a request waits for a read, so it can't end this coordinator now."""
        self._held.pop(fingerprint(request), None)
        self._write()

    def end_turn(self) -> None:
        """Note that the turn has ended and this coordinator lives."""
        if self._held:
            for key in self._held:
                self._suspects.pop(key, None)
            self._held = {}
            self._write()

    # --- pipelines --------------------------------------------------------------------------------------------------
    def take_job(self, key: str) -> None:
        """Note that a pipeline is about to run. Raises PipelineError if it ended earlier coordinators."""
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= JOB_DEATHS:
            raise PipelineError(
                f"the pipeline is not run for {key}: the last {suspect.deaths} coordinators ended while they ran it. "
                "Fix its operators, which run in that process, and restart the system", deaths=suspect.deaths,
            )
        self._jobs[key] = f"the pipeline for {key}"
        self._write()

    def end_job(self, key: str) -> None:
        """Note that the pipeline has ended and this coordinator lives."""
        self._jobs.pop(key, None)
        self._suspects.pop(key, None)
        self._write()
