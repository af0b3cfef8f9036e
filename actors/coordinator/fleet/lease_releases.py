"""Release of leases in separate processes (`release_main.py`). One process releases the due leases of a provider."""

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
from trinity_es.actors.storable_text import clean_text
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE
from trinity_es.events.secrets import masked_text
from trinity_es.projections.leases import OpenLease

__all__ = ["release_in_thread"]

RELEASE_SECONDS = 60.0
"""Time limit of one release."""
START_SECONDS = 60.0
"""Additional time limit of a process: to start, to import, and to wait while many leases are released."""
KILL_SECONDS = 10.0
"""Time limit for the end of a killed process."""


def release_in_thread(
    post: Callable[[Callable[[], None]], None], leases: Sequence[OpenLease], done: Callable[[dict[str, str], str], None]
) -> None:
    """Call `release_in_process` in a thread, then `done` with its result in the actor's loop, where `post` runs it."""

    def work() -> None:
        try:
            errors, trouble = release_in_process(leases)
        except Exception as e:  # without `done` the provider would never be tried again
            errors, trouble = {}, f"{type(e).__name__}: {e}"
        post(lambda: done(errors, trouble))

    # One thread per process: PDEATHSIG comes when the thread ends that started a process.
    threading.Thread(target=work, name="lease release", daemon=True).start()


def release_in_process(
    leases: Sequence[OpenLease], seconds: float = RELEASE_SECONDS, start_seconds: float = START_SECONDS
) -> tuple[dict[str, str], str]:
    """Release leases of one provider in a process. Returns each lease's error, "" if it was released, and one error for
    leases that the process did not report."""
    request = {"seconds": seconds, "leases": [
        {"lease": e.taken.lease, "provider": e.taken.provider, "args": e.taken.args, "handle": e.handle} for e in leases
    ]}
    # Like a worker, it finds the user's modules where this process does, and must not have the system key.
    main = "trinity_es.actors.coordinator.release_main"
    code = f"import sys; sys.path[:] = {sys.path!r}; from {main} import main; main()"
    environment = {k: v for k, v in os.environ.items() if k not in (KEY_VARIABLE, FILE_VARIABLE)}
    with tempfile.TemporaryFile() as input_, tempfile.TemporaryFile() as output:  # its children could hold pipes open
        input_.write(orjson.dumps(request))
        input_.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(os.getpid())], stdin=input_, stdout=output, env=environment,
                start_new_session=True,
            )
        except OSError as e:
            trouble = f"no process could be started to release it: {e}"
        else:
            trouble = _wait_and_clean_up(process, seconds + start_seconds)
        output.seek(0)
        lines = output.read().splitlines()
    answers: dict[str, str] = {}
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError, KeyError):  # a line that was cut off
            answer = orjson.loads(line)
            answers[answer["lease"]] = clean_text(masked_text(answer["error"], os.environ))
    return answers, trouble


def _wait_and_clean_up(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for the process, then kill the rest of its session. Return the error for leases that it did not report."""
    try:
        process.wait(seconds)
        trouble = f"the process that was to release it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        trouble = f"the process that was to release it had not ended after {seconds:g} s"
    kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a file system that does not answer
        process.wait(KILL_SECONDS)
    return trouble
