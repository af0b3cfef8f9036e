"""Releasing leases in processes of their own (`release_main.py`): one for what is due of one provider."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

import orjson

from trinity_es.actors.base import kill_group
from trinity_es.actors.reports import clean_text
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE
from trinity_es.events.secrets import masked_text
from trinity_es.projections.leases import OpenLease

__all__ = ["LeaseReleases"]

RELEASE_SECONDS = 60.0
"""How long one release may take."""
START_SECONDS = 60.0
"""How long such a process may take on top of that: to start, to import, and for its turn where many are released."""
KILL_SECONDS = 10.0
"""How long it may take to end once it was killed."""

Done = Callable[[dict[str, str], str], None]


class LeaseReleases:
    """Starts the processes. `post` runs a callable in the actor's loop."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post

    def start(self, leases: Sequence[OpenLease], done: Done) -> None:
        """Release these leases of one provider; `done` is called in the actor's loop with what `released` returns."""

        def work() -> None:
            try:
                found, trouble = released(leases)
            except Exception as e:  # a provider is tried again only when its process has ended
                found, trouble = {}, f"{type(e).__name__}: {e}"
            self._post(lambda: done(found, trouble))

        # A thread for each: PDEATHSIG comes when the thread ends that started a process.
        threading.Thread(target=work, name="lease release", daemon=True).start()


def released(
    leases: Sequence[OpenLease], seconds: float = RELEASE_SECONDS, more_seconds: float = START_SECONDS
) -> tuple[dict[str, str], str]:
    """Release these leases of one provider in a process.

    Returns an error for each, empty where it was released, and what to say of those that the process said nothing of.
    """
    given = {"seconds": seconds, "leases": [
        {"lease": e.taken.lease, "provider": e.taken.provider, "args": e.taken.args, "handle": e.handle} for e in leases
    ]}
    # As a worker: it finds the user's modules where this process does, and has no business with the system's key.
    main = "trinity_es.actors.coordinator.release_main"
    code = f"import sys; sys.path[:] = {sys.path!r}; from {main} import main; main()"
    environment = {k: v for k, v in os.environ.items() if k not in (KEY_VARIABLE, FILE_VARIABLE)}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:  # no pipes: what it starts may keep those
        asked.write(orjson.dumps(given))
        asked.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(os.getpid())], stdin=asked, stdout=said, env=environment,
                start_new_session=True,
            )
        except OSError as e:
            trouble = f"no process could be started to release it: {e}"
        else:
            trouble = _ended(process, seconds + more_seconds)
        said.seek(0)
        lines = said.read().splitlines()
    answers: dict[str, str] = {}
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError, KeyError):  # it was cut off
            answer = orjson.loads(line)
            answers[answer["lease"]] = clean_text(masked_text(answer["error"], os.environ))
    return answers, trouble


def _ended(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for its end, and end what it leaves behind in its session; returns what to say where it said nothing."""
    try:
        process.wait(seconds)
        trouble = f"the process that was to release it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        trouble = f"the process that was to release it had not ended after {seconds:g} s"
    kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it: a file system that does not answer
        process.wait(KILL_SECONDS)
    return trouble
