"""The keeper: a small process beside the actor system that starts it again when its guardian or its admin died.

Everything else is the guardian's to restart; the guardian and Thespian's admin above it have nobody. With either gone
the whole system ends (children die with their parent), and this process, which is no actor, ends what is left and
starts the system again on the same store, where it goes on. It does nothing else, and ends with an orderly `down`.

It holds a lock on a file of the store in the log folder, with its pid in it; its words are in `keeper.log`. The config
comes on standard input, so that no password stands on a command line or in a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from actors.supervision import Policy, coordinator_pause, remembered
from events.errors import TrinityError
from events.processes import process_lives
from trinity_es import system
from trinity_es.cleanup import end_leftovers
from trinity_es.config import Config

__all__ = ["locked", "main", "running", "start", "stop"]

START_SECONDS = 20.0
"""So long may a keeper take to come up."""

LOCK_TRIES = 20
"""Times that a lock is tried for, 0.01 s apart."""

_log = logging.getLogger("trinity_es.keeper")


def _lock_file(config: Config) -> Path:
    beside = system.output_file(config)  # its name is this store's alone, also in a folder that others share
    return beside.with_name(beside.name.replace("launch", "keeper")).with_suffix(".lock")


def start(config: Config, admin: dict[str, Any]) -> None:
    """Start a keeper for the running system of this config, whose admin this is. One that runs already stays."""
    folder = Path(config.system.log_dir)
    with (folder / "keeper.log").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "trinity_es.keeper"],
            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps({"config": config.to_dict(), "admin": admin}).encode())
    # One that is still starting could not be stopped, and would start again what was ended meanwhile.
    deadline = time.monotonic() + START_SECONDS
    while running(config) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def running(config: Config) -> int | None:
    """Its pid; None where none runs."""
    try:
        with _lock_file(config).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0) or None
    except (FileNotFoundError, ValueError):
        return None
    return None


def stop(config: Config) -> None:
    """End the keeper, so that the system may end. Nothing happens where none runs."""
    pid = running(config)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while running(config) is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def _wait_for_end(processes: list[tuple[int, object]]) -> None:
    """Until one of these processes, each a pid and its start, has ended."""
    handles = []
    try:
        for pid, started in processes:
            try:
                handles.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            if started is not None and not process_lives(pid, started):
                return
        select.select(handles, [], [])
    finally:
        for handle in handles:
            os.close(handle)


def keep(config: Config, admin: dict[str, Any], policy: Policy) -> None:
    """Watch the system and start it again, until this process is ended."""
    deaths: list[float] = []
    born = time.monotonic()
    while True:
        _wait_for_end([(admin["pid"], admin["started"]), (admin["guardian"], admin.get("guardian_started"))])
        now = time.monotonic()
        served = now - born
        deaths = remembered(policy, deaths, now, served)
        pause = coordinator_pause(policy, len(deaths), served, random.random())
        _log.warning("guardian or admin (%s, %s) is gone; next start in %.1f s", admin["guardian"], admin["pid"], pause)
        time.sleep(pause)
        admin = _start_again(config, admin)
        born = time.monotonic()
        _log.warning("the system is up again: admin %s", admin["pid"])


def _start_again(config: Config, admin: dict[str, Any]) -> dict[str, Any]:
    pause = 1.0
    while True:
        try:
            found = system.find(config)
            if found is not None and found["pid"] != admin["pid"]:
                return found  # somebody was faster
            end_leftovers(config)  # the admin may live, and then the system seems to run
            return system.start(config, keeper=False)
        except TrinityError as e:
            _log.error("not started: %s; once more in %.0f s", e, pause)
        except Exception:
            _log.exception("not started; once more in %.0f s", pause)
        time.sleep(pause)
        pause = min(60.0, 2 * pause)


def locked(lock: IO[str]) -> bool:
    """Take the lock of this file. Who only looks whether it is held (`running`) holds it for a moment too."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    given = json.load(sys.stdin.buffer)  # the admin too: it may be dead before this process could look for it
    config = Config.from_dict(given["config"], folder="/")
    with _lock_file(config).open("a+") as lock:
        if not locked(lock):
            return 0  # another one keeps this system
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        keep(config, given["admin"], Policy())
    return 0


if __name__ == "__main__":
    sys.exit(main())
