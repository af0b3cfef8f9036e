"""Start a system, wait until it is ready, end it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_es.actors.orphaned import owner_gone
from trinity_es.config.config import Config
from trinity_es.events.errors import StartupError
from trinity_es.events.private_files import make_private_folder, open_private, take_lock
from trinity_es.events.processes import process_start_time
from trinity_es.events.store.checks.log_end import Claim
from trinity_es.system import keeper_lock
from trinity_es.system.launch import launch
from trinity_es.system.leftovers import end_all_leftovers
from trinity_es.system.running_system import end, last_known, processes, wait_gone
from trinity_es.text import does

__all__ = ["start", "stop", "wait_ready"]


_log = logging.getLogger(__name__)
START_LOCK_SECONDS = 120.0
"""How long another start in the same log folder is waited for."""


def start(
    config: Config, *, keeper: bool | None = None, detach: bool | None = None, create: bool = True,
    owner: Mapping[str, Any] | None = None, claims: Sequence[Claim] = (),
) -> dict[str, Any]:
    """Start the actor system of this store in a clean interpreter; returns when its coordinator has the lease.

    Engines go on loading: `wait_ready` waits for them. What an earlier life of it left, which may hold a GPU, is ended
    first. It ends with this process, however that ends (or with `owner`: `pid`, `started`); with `detach` it stays up
    until `trinity-es down`. `keeper` and `detach` override `system.keeper` and `system.detach`; without
    `create` there must be a log: one that was deleted is not begun again, empty; `claims`: what its caller knows of
    the log, besides this host's memory. Raises AlreadyRunning, LogNotFound, ConfigError, WrongKey, LogRewound,
    StartupError (with the end of the log of what failed).
    """
    config.check()
    log_dir = Path(config.system.log_dir)
    detach = owner is None and (config.system.detach if detach is None else detach)
    owner = owner or {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    make_private_folder(log_dir)
    with _start_lock(log_dir / "start.lock"):  # two systems on one store would fence each other for ever
        last = last_known(config)
        if last is not None and owner_gone(last.get("owner")):
            keeper_lock.stop(config)  # of a system that ends just now
        admin = launch(config, log_dir, create, None if detach else owner, claims)
    if config.system.keeper if keeper is None else keeper:
        try:
            keeper_lock.start(config, admin)
        except StartupError:
            end_all_leftovers(config)  # nobody would start it again
            raise
    return admin


@contextlib.contextmanager
def _start_lock(path: Path) -> Iterator[None]:
    handle = open_private(path)
    try:
        who = take_lock(handle, seconds=START_LOCK_SECONDS, tell=lambda who: _log.warning(
            "%s starts a system in this log folder: waiting for it (it holds %s)", who, path))
        if who is not None:
            raise StartupError(
                f"no system can be started: {who} has held {path} for {START_LOCK_SECONDS:.0f} s, which a start holds "
                "while it goes on; let it go on if it is stopped, or end it"
            )
        yield
    finally:
        os.close(handle)


def wait_ready(
    status: Callable[[], dict[str, Any]], timeout: float, *, progress: Callable[[dict[str, Any]], None] | None = None,
    runners: int, servers: int = 0, logs: str,
) -> None:
    """Wait until all runners serve, and load no weights. Raises StartupError with the reason of the first that failed.

    `status` asks the system; `progress` is told each answer; `logs` is the folder of its text logs. `servers`: so many
    of the runners are for servers of others. Where fewer are wanted by now, those are waited for, and one at least.
    """
    deadline = time.monotonic() + timeout
    while True:
        now = status()
        if progress is not None:
            progress(now)
        told = now.get("servers", [])
        leaving = {s["runner"] for s in told if not s["wanted"]}
        needed = runners - servers + min(servers, max(1, len(told) - len(leaving)))
        states = {r["runner"]: r for r in now["runners"] if r["runner"] not in leaving}
        children = now.get("system", {}).get("children", [])
        for child in children:
            if child["state"] == "quarantined" and child["name"] not in leaving:
                raise StartupError(
                    f"{child['name']} ended {child['deaths']} times and is quarantined ({child['reason']}); "
                    f"{child['name']}.log in {logs} tells more"
                )
        failed = [r for r in states.values() if r["state"] == "failed"]
        if failed:
            what = "serves nothing" if failed[0].get("refused") else "could not start its engine"
            name = failed[0]["runner"]
            raise StartupError(f"{name} {what}: {failed[0]['reason']} ({name}.log in {logs} tells more)")
        if sum(r["state"] == "ready" and r.get("loading") is None for r in states.values()) >= needed:
            return
        if time.monotonic() > deadline:
            waiting = [f"{name} {does(r)}" for name, r in states.items()]
            waiting += [now["server_list"]] if now.get("server_list") else []
            raise StartupError(
                f"not all of {needed} runners were ready after {timeout} s: {'; '.join(waiting) or 'none answered'}"
            )
        time.sleep(0.1)


def stop(admin: dict[str, Any], retire: Callable[[], Any], timeout: float = 20.0) -> int:
    """End a running system: engines first, then the actors; what is left after `timeout` seconds is killed.

    `retire` asks the guardian to bring everyone down; False: it can't be asked, so there is nothing to wait for.
    Returns how many processes had to be killed.
    """
    family = processes(admin)
    return end(wait_gone(family, 0.0 if retire() is False else timeout))
