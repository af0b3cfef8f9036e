"""File of unfinished requests and pipelines, so that after a crash the next coordinator sees which one caused it.

The file has each request from the start of its handling to the end of its turn, and each batch while its pipeline runs.
A new coordinator reads the file: its entries were unfinished when the previous coordinator ended, for whatever reason.
If `REQUEST_DEATHS` coordinators in a row ended while they handled a request, it is refused; one success clears it.
Requests are compared by content, so the same request of another client is refused too. A restart of the system clears
the file.
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

REQUEST_DEATHS = 2
"""Number of coordinators that may end while they handle a request, before it is refused."""
PIPELINE_DEATHS = 3
"""The same number for a pipeline. It is higher, since a long pipeline may meet a kill that it did not cause."""
REMEMBERED = 64
"""Maximum number of suspects kept; the newest stay."""


@dataclass(slots=True)
class _Suspect:
    """Request or pipeline that coordinators had not finished when they ended."""

    what: str
    """Name of the request or pipeline in errors and in the file."""
    deaths: int
    """Number of coordinators that ended before they had finished it."""
    said: str = ""
    """Error of the request's handler, if it raised one."""


def fingerprint(request: CommandRequest[Any]) -> str:
    """Return a key of the request's content, the same for every client."""
    return hashlib.sha256(repr(request.command).encode(errors="replace")).hexdigest()[:32]


class RequestsInHand:
    """Requests and pipelines begun and not finished, and suspects: those that earlier coordinators left so."""

    def __init__(self, path: Path | None = None, system_start: str = "") -> None:
        """Read the file of the previous coordinator, or keep all in memory if there is no path. `system_start` names a
        start of the system; a file of another start is ignored."""
        self._system_start = system_start
        self._requests: dict[str, str] = {}
        """Names of this turn's requests, by fingerprint."""
        self._pipelines: dict[str, str] = {}
        """Names of the running pipelines, by key."""
        self._suspects: dict[str, _Suspect] = {}
        """Suspects by fingerprint or key, the oldest first."""
        self._file = -1
        """Descriptor of the file; -1 without one."""
        self._length = 0
        """Bytes of the longest content of the file so far."""
        if path is not None:
            with contextlib.suppress(OSError):  # without the file, nothing is remembered
                make_private_folder(path.parent)
                self._file = open_private(path)
                self._take_suspects(os.pread(self._file, 1 << 20, 0))
        self._write()

    def _take_suspects(self, data: bytes) -> None:
        """Read the suspects from the file's content. Each request and pipeline that was unfinished becomes one."""
        try:
            content: dict[str, Any] = orjson.loads(data)
            if content["life"] != self._system_start:
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
        unfinished = self._requests | self._pipelines
        suspects = {key: asdict(suspect) for key, suspect in self._suspects.items()}
        data = orjson.dumps({"life": self._system_start, "held": unfinished, "suspects": suspects})
        with contextlib.suppress(OSError):
            os.pwrite(self._file, data.ljust(self._length), 0)  # spaces pad it: the file is JSON at any time
            self._length = max(self._length, len(data))

    # --- requests ---------------------------------------------------------------------------------------------------
    def begin_request(self, request: CommandRequest[Any]) -> None:
        """Note in the file that a request begins. Raises RequestRefused if REQUEST_DEATHS coordinators died in it."""
        key, name = fingerprint(request), request.command.name
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= REQUEST_DEATHS:
            error = f" with {suspect.said}" if suspect.said else ""
            raise RequestRefused(
                f"request {name!r} is refused: the last {suspect.deaths} coordinators ended while they handled it"
                f"{error}. See coordinator.log and guardian.log; to have it tried again, restart the system",
                command=name, deaths=suspect.deaths,
            )
        self._requests[key] = f"request {name!r}"
        self._write()

    def blame(self, request: CommandRequest[Any], error: Exception) -> None:
        """Suspect a request whose handler crashed this coordinator. One crash is enough to refuse the request from now
        on, since its cause is clear."""
        self._requests.pop(fingerprint(request), None)
        message = f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
        self._suspects[fingerprint(request)] = _Suspect(f"request {request.command.name!r}", REQUEST_DEATHS, message)
        self._write()

    def suspend_request(self, request: CommandRequest[Any]) -> None:
        """Take a request out of the file of suspects while it waits for a read, and so can't end this process."""
        self._requests.pop(fingerprint(request), None)
        self._write()

    def end_turn(self) -> None:
        """Clear the turn's requests of suspicion, since this coordinator survived them."""
        if self._requests:
            for key in self._requests:
                self._suspects.pop(key, None)
            self._requests = {}
            self._write()

    # --- pipelines --------------------------------------------------------------------------------------------------
    def begin_pipeline(self, key: str) -> None:
        """Note in the file that a pipeline begins. Raises PipelineError if PIPELINE_DEATHS coordinators died in it."""
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= PIPELINE_DEATHS:
            raise PipelineError(
                f"the pipeline is not run for {key}: the last {suspect.deaths} coordinators ended while they ran it. "
                "Fix its operators, which run in that process, and restart the system", deaths=suspect.deaths,
            )
        self._pipelines[key] = f"the pipeline for {key}"
        self._write()

    def end_pipeline(self, key: str) -> None:
        """Clear a pipeline of suspicion, since it has ended and this coordinator survived it."""
        self._pipelines.pop(key, None)
        self._suspects.pop(key, None)
        self._write()
