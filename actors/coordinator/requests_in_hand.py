"""What a coordinator has in hand, in a file that outlives it: so that what ends coordinators is known by the next one.

A request stands there while it is handled, up to the end of its turn, and a batch while its experiences go through
the pipeline. Whatever stands there when a coordinator starts was in hand when the one before it ended, for whatever
reason. After `DEATHS` such ends in a row it is refused; done once without one it is forgiven. A request is known by its
content: another client that sends the same is refused too. Another start of the system forgets all of it.
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
"""Coordinators that a request may be in the hands of when they end; it is refused then."""
JOB_DEATHS = 3
"""The same of a pipeline, which takes long: a coordinator may well be killed by somebody else meanwhile."""
REMEMBERED = 64
"""Maximum number of suspects that are remembered, the newest."""


@dataclass(slots=True)
class _Suspect:
    """What was in hand when coordinators ended."""

    what: str
    deaths: int
    said: str = ""
    """The error of its handler, where it said one."""


def fingerprint(request: CommandRequest[Any]) -> str:
    """Return what a request asks for, whoever asks: the same for the same content."""
    return hashlib.sha256(repr(request.command).encode(errors="replace")).hexdigest()[:32]


class RequestsInHand:
    """What is in hand now, and what was in hand when coordinators before this one ended."""

    def __init__(self, path: Path | None = None, life: str = "") -> None:
        """Read what the last coordinator left in the file. `life` names a start of the system. Without a path it is
        kept in memory alone."""
        self._life = life
        self._held: dict[str, str] = {}
        """Requests of this turn."""
        self._jobs: dict[str, str] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._file, self._length = -1, 0
        if path is not None:
            with contextlib.suppress(OSError):  # then what ends coordinators is not remembered
                make_private_folder(path.parent)
                self._file = open_private(path)
                self._read(os.pread(self._file, 1 << 20, 0))
        self._write()

    def _read(self, data: bytes) -> None:
        try:
            left: dict[str, Any] = orjson.loads(data)
            if left["life"] != self._life:
                return
            self._suspects = {key: _Suspect(**suspect) for key, suspect in left["suspects"].items()}
            for key, what in left["held"].items():
                deaths = self._suspects.pop(key).deaths if key in self._suspects else 0
                self._suspects[key] = _Suspect(what, deaths + 1)
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # no such file yet, or half of one
        while len(self._suspects) > REMEMBERED:
            del self._suspects[next(iter(self._suspects))]

    def _write(self) -> None:
        if self._file < 0:
            return
        held = self._held | self._jobs
        suspects = {key: asdict(suspect) for key, suspect in self._suspects.items()}
        data = orjson.dumps({"life": self._life, "held": held, "suspects": suspects})
        with contextlib.suppress(OSError):
            os.pwrite(self._file, data.ljust(self._length), 0)  # spaces over what was longer: it is JSON at any time
            self._length = max(self._length, len(data))

    # --- requests ---------------------------------------------------------------------------------------------------
    def take(self, request: CommandRequest[Any]) -> None:
        """Note that a request is about to be handled. Raises RequestRefused where that ended coordinators."""
        key, name = fingerprint(request), request.command.name
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= DEATHS:
            said = f" with {suspect.said}" if suspect.said else ""
            raise RequestRefused(
                f"request {name!r} is refused: the last {suspect.deaths} coordinators that handled it ended while they "
                f"did{said}; coordinator.log and guardian.log tell more. Ask for something else, or start the system "
                "anew to have it tried again", command=name, deaths=suspect.deaths,
            )
        self._held[key] = f"request {name!r}"
        self._write()

    def blame(self, request: CommandRequest[Any], error: Exception) -> None:
        """Suspect a request whose handler broke, which ends this coordinator: once is enough, as it is no chance."""
        self._held.pop(fingerprint(request), None)
        said = f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
        self._suspects[fingerprint(request)] = _Suspect(f"request {request.command.name!r}", DEATHS, said)
        self._write()

    def put_aside(self, request: CommandRequest[Any]) -> None:
        """Something has to be read for it first: that says nothing about it."""
        self._held.pop(fingerprint(request), None)
        self._write()

    def let_go(self) -> None:
        """Note that the turn has ended, and that this coordinator lives."""
        if self._held:
            for key in self._held:
                self._suspects.pop(key, None)
            self._held = {}
            self._write()

    # --- pipelines --------------------------------------------------------------------------------------------------
    def take_job(self, key: str) -> None:
        """Note that a pipeline is about to run. Raises PipelineError where that ended coordinators."""
        suspect = self._suspects.get(key)
        if suspect is not None and suspect.deaths >= JOB_DEATHS:
            raise PipelineError(
                f"the pipeline is not run for {key}: the last {suspect.deaths} coordinators ended while it was; "
                "its operators run in that process. Mend them, and start the system anew", deaths=suspect.deaths,
            )
        self._jobs[key] = f"the pipeline for {key}"
        self._write()

    def end_job(self, key: str) -> None:
        """Note that the pipeline has come to an end, and that this coordinator lives."""
        self._jobs.pop(key, None)
        self._suspects.pop(key, None)
        self._write()
