"""The running system of a store: start it, find it, end it.

Where it runs stands in the log's database (the coordinator's lease), so a store is all that one needs to find it; a
process is named by pid and start time, so a pid that was given to somebody else is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from trinity_es import known
from trinity_es.actors.ending import owner_gone
from trinity_es.actors.transport import FILE_VARIABLE, make_key, read_key
from trinity_es.config import Config
from trinity_es.events.errors import AlreadyRunning, LogNotFound, LogUnavailable, NotRunning, StartupError
from trinity_es.events.private import create_private, make_private_folder, open_private, take_lock, tighten
from trinity_es.events.processes import process_lives, process_start_time
from trinity_es.events.secrets import unmarked
from trinity_es.events.store.database import parse_url
from trinity_es.events.store.known import Claim, Mark, claim_to_dict
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.retry import within
from trinity_es.projections.tables.read_models import last_incarnation, projectors

__all__ = ["end", "find", "output_file", "processes", "start", "stop", "wait_gone", "wait_ready"]

_LAUNCH_SECONDS = 60.0
START_LOCK_SECONDS = 120.0
"""How long another start in the same log folder is waited for."""

_log = logging.getLogger(__name__)
_FIND_SECONDS = 5.0
"""Maximum of the time that the log may take to say where a system is: its server may be frozen."""


def output_file(config: Config) -> Path:
    """Return where the processes of this store's system write what they print.

    It is their standard output, which children inherit: what is left of a system is found by it, even where titles
    and environments were overwritten. So its name is this store's alone, also in a log folder that others share.
    """
    url = parse_url(config.store.url)
    digest = hashlib.sha256(f"{url.host}:{url.port}/{url.database}".encode()).hexdigest()[:12]
    return Path(config.system.log_dir) / f"launch-{digest}.log"


def key_file(config: Config) -> str:
    """Return the file that the key to this store's system is in, unless the environment holds it."""
    return config.system.key_file or str(Path(config.system.log_dir) / "key")


def _last(config: Config) -> dict[str, Any] | None:
    """Return the admin of the system that last had this store; None where there was none, or it ended in order."""
    try:
        return within(_FIND_SECONDS, lambda: _admin_by_log(config))
    except LogUnavailable:
        admin = _noted(config)  # the database does not answer, but the system may
        if admin is None:
            raise
        return admin


def _admin_by_log(config: Config) -> dict[str, Any] | None:
    try:
        log = EventLog.open(config.store.url, read_only=True)
    except LogNotFound:
        return None
    try:
        lease = log.read_lease("coordinator")
    finally:
        log.close()
    return ((lease.owner or {}).get("admin") if lease is not None else None) or None


def _note_file(config: Config) -> Path:
    return output_file(config).with_suffix(".json")


def _noted(config: Config) -> dict[str, Any] | None:
    """Return the admin process that this machine started last for this store, as `_start` wrote it down."""
    try:
        noted = json.loads(_note_file(config).read_bytes())
        return noted if {"pid", "started", "port"} <= noted.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def find(config: Config) -> dict[str, Any] | None:
    """Return the running system of this store; None when there is none, or the process that it was started for has
    ended.

    `{port, pid, started, guardian}`: of its admin process, and the guardian's pid; `key_file`: where its key should be.
    """
    admin = _last(config)
    if not admin or not process_lives(admin["pid"], admin["started"]) or owner_gone(admin.get("owner")):
        return None
    return {**admin, "key_file": key_file(config)}


def require(config: Config) -> dict[str, Any]:
    """`find`, or NotRunning with the way out. Raises LogRewound where nothing can be started on this log."""
    admin = find(config)
    if admin is None:
        known.require(config)
        raise NotRunning(f"no actor system runs on {config.masked()['store']['url']}: start one with `trinity-es up`")
    return admin


def _plain(config: Config) -> dict[str, Any]:
    """Return the config as actors get it: plain JSON, with what they would have to look up in a higher room."""
    model = config.explorer.rollout_model
    return {
        **unmarked(config.to_dict()),
        "masked": config.masked(),
        "memory": known.folder(config),
        "engine_class": model.engine_class,
        "engine": {**asdict(model.engine_config()), "weight_transfer": config.synchronizer.sync_method == "nccl"},
        "rollout_args": model.rollout_args(),
        "auxiliary": {
            m.name: {
                "engine_type": m.engine_type,
                "engine_class": m.engine_class,
                "engine": asdict(m.engine_config()),
                "rollout_args": m.rollout_args(),
                "engine_num": m.engine_num,
            }
            for m in config.explorer.auxiliary_models
        },
        "code_path": [config.code_path, os.getcwd()],
        "workflows": _workflows(config),
    }


def _workflows(config: Config) -> list[str]:
    """Return the user's own workflows that the config names, which runners import before they are asked for."""
    tasksets = config.buffer.explorer_input
    named = (t.workflow for t in [*tasksets.tasksets, *tasksets.eval_tasksets])
    return sorted({name for name in named if ":" in name and not name.startswith("trinity_es.")})


def _reserve(config: Config) -> socket.socket:
    """Return a socket on the address and port that the system will listen on. Raises StartupError where it can't.

    While it is open nobody is given that port by chance, and the system can take it: both sockets allow reuse, and this
    one does not listen.
    """
    address, port = config.system.address, config.system.port
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((address, port))
    except OSError as e:
        reserved.close()
        raise StartupError(
            f"the actor system can't listen on {address}, port {port or '(any)'} ({e.strerror}): change "
            "system.address to an address of this machine, or system.port"
        ) from e
    return reserved


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
    from trinity_es import cleanup  # which finds systems by this module
    from trinity_es import keeper as keepers  # as above

    config.check()
    log_dir = Path(config.system.log_dir)
    detach = owner is None and (config.system.detach if detach is None else detach)
    owner = owner or {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    make_private_folder(log_dir)
    tighten(*log_dir.glob("*.log"), *log_dir.glob("*.lock"))  # an older release's
    with _start_lock(log_dir / "start.lock"):  # two systems on one store would fence each other for ever
        last = _last(config)
        if last is not None and owner_gone(last.get("owner")):
            keepers.stop(config)  # of a system that ends just now
        admin = _start(config, log_dir, create, None if detach else owner, claims)
    if config.system.keeper if keeper is None else keeper:
        try:
            keepers.start(config, admin)
        except StartupError:
            cleanup.end_system(config)  # nobody would start it again
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


def _start(
    config: Config, log_dir: Path, create: bool, owner: Mapping[str, Any] | None, claims: Sequence[Claim]
) -> dict[str, Any]:
    from trinity_es import cleanup  # which finds systems by this module

    known.require(config, claims)
    running = find(config)
    if running is not None:
        where = f"port {running['port']}, pid {running['pid']}"
        raise AlreadyRunning(f"an actor system runs on this store already ({where}): connect to it, or end it")
    cleanup.end_leftovers(config)
    make_key(key_file(config))
    read_key(key_file(config))  # so that a bad one is told here and not by the launcher's traceback
    log = EventLog.open(config.store.url, create=create, durability=config.store.durability, projectors=projectors())
    try:
        incarnation, end = last_incarnation(log.engine) + 1, log.head()
    finally:
        log.close()
    reserved = _reserve(config)
    setup = {
        "config": {**_plain(config), "owner": owner},
        "address": config.system.address,
        "port": reserved.getsockname()[1],
        "first_incarnation": incarnation,
        "known": [claim_to_dict(Claim(Mark(end.generation, end.position, end.hash), "who started the system"))],
        "deadline_seconds": _LAUNCH_SECONDS,
    }
    handle, setup_path = tempfile.mkstemp(prefix="setup-", suffix=".json", dir=log_dir)  # mode 600: holds the URL
    with os.fdopen(handle, "w") as f:
        json.dump(setup, f)
    create_private(log_dir / "thespian.log")  # Thespian's own, which it would open for others to read
    env = {
        **os.environ,
        FILE_VARIABLE: key_file(config),
        "THESPLOG_FILE": str(log_dir / "thespian.log"),
        "THESPLOG_FILE_MAXSIZE": str(1 << 20),
        # every start compiles every module anew where byte code is not kept: seconds each
        "PYTHONDONTWRITEBYTECODE": "",
    }
    output = output_file(config)
    try:
        with reserved, os.fdopen(open_private(output, os.O_WRONLY | os.O_APPEND), "ab") as out:
            launched = subprocess.run(
                [sys.executable, "-m", "trinity_es.actors.launch", setup_path],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
                timeout=_LAUNCH_SECONDS + 30, check=False,
            )
    except subprocess.TimeoutExpired:
        cleanup.end_all_leftovers(config)  # not its keeper, which may be who starts it
        raise StartupError(f"the actor system did not come up; see {output}") from None
    finally:
        os.unlink(setup_path)
    admin = find(config)
    if launched.returncode != 0 or admin is None:
        cleanup.end_all_leftovers(config)  # not its keeper, which may be who starts it
        what = "did not come up" if launched.returncode else "died while it started"
        raise StartupError(
            f"the actor system {what} (exit {launched.returncode}):\n{_tail(config)}\nLogs are in {log_dir}"
        )
    noted = {key: value for key, value in admin.items() if key != "key_file"}
    with contextlib.suppress(OSError):  # it is there for a database that does not answer, and not needed else
        handle = open_private(_note_file(config), os.O_WRONLY | os.O_TRUNC)
        with os.fdopen(handle, "w") as note:
            json.dump(noted, note)
    return admin


def _tail(config: Config, lines: int = 12) -> str:
    out: list[str] = []
    folder = Path(config.system.log_dir)
    for path in (output_file(config), folder / "guardian.log", folder / "coordinator.log"):
        if path.exists():
            out.extend(f"  {path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])
    return "\n".join(out)


def wait_ready(
    status: Callable[[], dict[str, Any]],
    timeout: float,
    *,
    progress: Callable[[dict[str, Any]], None] | None = None,
    runners: int,
) -> None:
    """Wait until all runners serve. Raises StartupError with the reason of the first one that failed.

    `status` asks the system; `progress` is told each answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        now = status()
        if progress is not None:
            progress(now)
        states = {r["runner"]: r for r in now["runners"]}
        children = now.get("system", {}).get("children", [])
        for child in children:
            if child["state"] == "quarantined":
                raise StartupError(
                    f"{child['name']} ended {child['deaths']} times and is quarantined ({child['reason']}); "
                    "its log tells more"
                )
        failed = [r for r in states.values() if r["state"] == "failed"]
        if failed:
            raise StartupError(f"{failed[0]['runner']} could not start its engine: {failed[0]['reason']}")
        if sum(r["state"] == "ready" for r in states.values()) >= runners:
            return
        if time.monotonic() > deadline:
            waiting = {name: r["state"] for name, r in states.items()}
            told = waiting or "none answered"
            raise StartupError(f"not all of {runners} runners were ready after {timeout} s: {told}")
        time.sleep(0.1)


def processes(admin: dict[str, Any]) -> list[psutil.Process]:
    """Return every process of a running system: its admin, actors, engines and workers."""
    try:
        root = psutil.Process(admin["pid"])
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def stop(admin: dict[str, Any], retire: Callable[[], Any], timeout: float = 20.0) -> int:
    """End a running system: engines first, then the actors; what is left after `timeout` seconds is killed.

    `retire` asks the guardian to bring everyone down; False: it can't be asked, so there is nothing to wait for.
    Returns how many processes had to be killed.
    """
    family = processes(admin)
    return end(wait_gone(family, 0.0 if retire() is False else timeout))


def end(processes: list[psutil.Process]) -> int:
    """Kill these processes and wait for their end; returns how many they are."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    wait_gone(processes, 5.0)
    return len(processes)


def wait_gone(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for processes to end; returns those that have not. A zombie has ended."""
    deadline = time.monotonic() + timeout
    while True:
        alive = [p for p in processes if _runs(p)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
