"""Starting an actor system, waiting until it is ready, and ending it in order."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_es.config.config import Config
from trinity_es.events.errors import StartupError
from trinity_es.events.private_files import make_private_folder, open_private, take_lock
from trinity_es.events.processes import process_start_time
from trinity_es.events.store.checks.log_end import Claim
from trinity_es.events.store.payloads.object_store import Objects
from trinity_es.events.store.payloads.payload_place import folder_of
from trinity_es.safe_text import does
from trinity_es.system.launch import launch
from trinity_es.system.leftovers import end_all_leftovers
from trinity_es.system.running_system import end, processes, wait_gone

__all__ = ["start", "start_here", "stop", "wait_ready"]


_log = logging.getLogger(__name__)
START_LOCK_SECONDS = 120.0
"""Seconds to wait for another start in the same log folder."""
BUCKET_SECONDS = 20.0
"""Seconds to wait for a payload bucket that does not answer."""


def start(
    config: Config, *, keeper: bool | None = None, detach: bool | None = None, create: bool = True
) -> dict[str, Any]:
    """Start the actor system of this store, and return its admin when the coordinator has its lease.

    Engines still load then (`wait_ready` waits for them). Processes left by an earlier start, which may hold a GPU, are
    ended first. The system ends with this process; with `detach` it stays up until `trinity-es down`. `keeper` and
    `detach` override `system.keeper` and `system.detach`. Without `create` the log must exist. Waits for a payload
    bucket that does not answer. Raises AlreadyRunning, LogNotFound, LogUnavailable, ConfigError, WrongKey, LogRewound,
    StartupError (with the end of the failed process's log).
    """
    config.check()
    make_private_folder(config.system.log_dir)
    place = config.store.payloads
    if place and folder_of(place) is None:  # before the keeper starts, whose warnings only its log shows
        Objects(place, BUCKET_SECONDS, lambda e: _log.warning("the start waits: %s", e)).require_bucket()
    detach = config.system.detach if detach is None else detach
    owner = None if detach else {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    if config.system.keeper if keeper is None else keeper:
        return _start_by_keeper(config, create, owner)
    return start_here(config, create=create, owner=owner)


def start_here(
    config: Config, *, create: bool, owner: Mapping[str, Any] | None, keeper: Mapping[str, Any] | None = None,
    claims: Sequence[Claim] = (),
) -> dict[str, Any]:
    """Start the system from this process and return its admin. `start` calls this, or the keeper, passing `keeper`.

    `owner`: process with which the system ends. `claims`: events that the log must have, besides those in this host's
    memory. Without `create` the log must exist, so that a deleted log is not replaced by an empty one.
    """
    log_dir = Path(config.system.log_dir)
    make_private_folder(log_dir)
    with _start_lock(log_dir / "start.lock"):  # two systems on one store would fence each other for ever
        return launch(config, log_dir, create, owner, keeper, claims)


def _start_by_keeper(config: Config, create: bool, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    keeper_log = Path(config.system.log_dir) / "keeper.log"
    with os.fdopen(open_private(keeper_log, os.O_WRONLY | os.O_APPEND), "ab") as out:
        log_start = out.seek(0, os.SEEK_END)  # the lines before are of earlier keepers
        process = subprocess.Popen(
            [sys.executable, "-m", "trinity_es.system.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=out, start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({"config": config.to_dict(), "create": create, "owner": owner}).encode())
        with process.stdout as answer:
            reply = answer.read()
    except BaseException:
        process.kill()
        end_all_leftovers(config)
        raise
    if not reply:
        process.wait()
        end_all_leftovers(config)
        lines = keeper_log.read_bytes()[log_start:].decode(errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else "it logged nothing"
        raise StartupError(f"the keeper, which starts the system, did not come up: {last_line} ({keeper_log})")
    outcome = pickle.loads(reply)
    if isinstance(outcome, BaseException):
        process.wait()
        raise outcome
    admin: dict[str, Any] = outcome
    return admin


@contextlib.contextmanager
def _start_lock(path: Path) -> Iterator[None]:
    """Hold the lock for starts in a log folder. Raises StartupError if another process holds it for 120 s."""
    handle = open_private(path)
    try:
        holder = take_lock(handle, seconds=START_LOCK_SECONDS, tell=lambda holder: _log.warning(
            "%s starts a system in this log folder: waiting for it (it holds %s)", holder, path))
        if holder is not None:
            raise StartupError(
                f"no system can be started: {holder} has held the lock for starts, {path}, for "
                f"{START_LOCK_SECONDS:.0f} s. Resume that process if it is suspended, or end it"
            )
        yield
    finally:
        os.close(handle)


def wait_ready(
    status: Callable[[], dict[str, Any]], timeout: float, *, progress: Callable[[dict[str, Any]], None] | None = None,
    runners: int, servers: int = 0, logs: str,
) -> None:
    """Wait until all runners are ready and load no weights. Raises StartupError if one failed, or after `timeout`.

    `status` returns the system's status, `progress` is called with each, and errors name `logs`, the folder of the text
    logs. Of the `runners`, `servers` are for external servers. If external servers are removed meanwhile, their runners
    are not waited for, but at least one is.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = status()
        if progress is not None:
            progress(answer)
        listed = answer.get("servers", [])
        leaving = {s["runner"] for s in listed if not s["wanted"]}
        needed = runners - servers + min(servers, max(1, len(listed) - len(leaving)))
        runner_rows = {r["runner"]: r for r in answer["runners"] if r["runner"] not in leaving}
        for child in answer.get("system", {}).get("children", []):
            if child["state"] == "quarantined" and child["name"] not in leaving:
                raise StartupError(
                    f"{child['name']} ended {child['deaths']} times and is quarantined ({child['reason']}); "
                    f"{child['name']}.log in {logs} tells more"
                )
        failed = [r for r in runner_rows.values() if r["state"] == "failed"]
        if failed:
            problem = "serves nothing" if failed[0].get("refused") else "could not start its engine"
            name = failed[0]["runner"]
            raise StartupError(f"{name} {problem}: {failed[0]['reason']} ({name}.log in {logs} tells more)")
        if sum(r["state"] == "ready" and r.get("loading") is None for r in runner_rows.values()) >= needed:
            return
        if time.monotonic() > deadline:
            waiting = [f"{name} {does(r)}" for name, r in runner_rows.items()]
            waiting += [answer["server_list"]] if answer.get("server_list") else []
            raise StartupError(
                f"not all of {needed} runners were ready after {timeout} s: {'; '.join(waiting) or 'none answered'}"
            )
        time.sleep(0.1)


def stop(admin: dict[str, Any], retire: Callable[[], Any], timeout: float = 20.0) -> int:
    """End a running system, engines first, then the actors. Return how many processes had to be killed.

    `retire` asks the guardian to end everything, which may take `timeout` seconds. If it returns False, the guardian
    can't be reached, and all processes are killed at once.
    """
    system_processes = processes(admin)
    patience = 0.0 if retire() is False else timeout
    return end(wait_gone(system_processes, patience))
