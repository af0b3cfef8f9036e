"""Start of a system's processes; the caller holds the lock of its log folder."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text as sql

from trinity_es.actors.config.config import HostIdentity, LaunchedConfig
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE, make_key, read_host_key, read_key
from trinity_es.config.config import Config
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import AlreadyRunning, ConfigError, StartupError
from trinity_es.events.private_files import create_private, make_private_folder, open_private
from trinity_es.events.processes import LEAST_FILES, process_start_time
from trinity_es.events.store.checks.log_end import Claim, Mark, claim_to_dict
from trinity_es.events.store.database.leader_lock import is_led
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import settle_place
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.tables.runner_history import last_incarnation
from trinity_es.system import leftovers, remembered_log_end, running_system

__all__ = ["connections_needed", "launch", "launch_host", "launched_config"]

_LAUNCH_SECONDS = 60.0
"""Maximum time until the launched processes run."""
_FORMER_HEAD_SECONDS = 3.0
"""Seconds in which the database notices that a coordinator of this host has ended."""


def launched_config(
    config: Config, owner: Mapping[str, Any] | None = None, host: HostIdentity | None = None,
    payloads_place: str | None = None,
) -> LaunchedConfig:
    """Return the config for the system's processes, with values that only this process knows, such as its folder."""
    return LaunchedConfig.model_validate({
        **dict(config), "memory": remembered_log_end.folder(config), "started_in": os.getcwd(), "owner": owner,
        "host": host, "payloads_place": payloads_place,
    })


def _reserve_port(config: Config) -> socket.socket:
    """Return a socket on the address and port that the system will listen on. Raises StartupError if it can't bind.

    While the socket is open, the kernel gives its port to no other process. The system can still take the port: both
    sockets allow reuse, and this one does not listen.
    """
    address, port = config.system.address, config.system.port
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((address, port))
    except OSError as e:
        reservation.close()
        raise StartupError(
            f"the actor system can't listen on {address}, port {port or '(any)'} ({e.strerror}): change "
            "system.address to an address of this machine, or system.port"
        ) from e
    return reservation


def launch_host(config: Config, host: HostIdentity) -> dict[str, Any]:
    """Start the actor system of a joining host, and return its admin, as `find_head` does. It ends with this process.

    Raises StartupError with the output of its processes; WrongKey, LogError.
    """
    log_dir = Path(config.system.log_dir)
    make_private_folder(log_dir)
    leftovers.end_leftovers(config)
    if config.hosts.key_file or not os.environ.get(KEY_VARIABLE):
        read_host_key(config.hosts.key_file or running_system.key_file(config))
    make_key(running_system.key_file(config))
    read_key(running_system.key_file(config))
    with EventLog.open(config.store.url, read_only=True) as log:
        incarnation, end = log.query(last_incarnation) + 1, log.head()
    owner = {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    admin_file = running_system.joined_file(config.store.url, host.name)  # clients on this host find the system by it
    make_private_folder(admin_file.parent)
    admin_file.unlink(missing_ok=True)
    code = _run_launcher(config, log_dir, {
        "config": launched_config(config, owner, host).plain(),
        "first_incarnation": incarnation,
        "known": [claim_to_dict(Claim(Mark(end.generation, end.position, end.hash), "the host that joined"))],
        "admin_file": str(admin_file), "told": {"key_file": running_system.key_file(config)},
    })
    if code != 0:
        leftovers.end_all_leftovers(config)
        raise StartupError(f"this host could not join (exit {code}):\n{_last_lines(config)}\nLogs are in {log_dir}")
    admin: dict[str, Any] = json.loads(admin_file.read_text())
    return admin


def launch(
    config: Config, log_dir: Path, create: bool, owner: Mapping[str, Any] | None, keeper: Mapping[str, Any] | None,
    claims: Sequence[Claim],
) -> dict[str, Any]:
    """Start the processes of this store's system, and return its admin. `start_here` explains the parameters."""
    remembered_log_end.require_remembered(config, claims)
    running = running_system.find_head(config)
    if running is not None:
        raise AlreadyRunning(
            f"an actor system runs on this store already (port {running['port']}, pid {running['pid']}): connect to "
            "it, or end it with `trinity-es down`"
        )
    running_system.stop_keeper(config)  # the keeper of an earlier system that is gone
    if config.hosts.address:
        _require_no_other_head(config)
        if config.hosts.key_file:
            read_host_key(config.hosts.key_file)
    leftovers.end_leftovers(config)
    make_key(running_system.key_file(config))
    read_key(running_system.key_file(config))  # raises for a bad key here, not in the launcher's traceback
    log = EventLog.open(config.store.url, create=create, durability=config.store.durability, projectors=projectors())
    try:
        if log.dialect == "postgresql":
            _require_connections(config, log.query(lambda c: c.execute(sql(_CONNECTION_LIMIT)).scalar_one()))
        incarnation, end = log.query(last_incarnation) + 1, log.head()
    finally:
        log.close()
    place = settle_place(config.store.url, config.store.payloads, durability=config.store.durability)
    code = _run_launcher(config, log_dir, {
        "config": launched_config(config, owner, payloads_place=place).plain(),
        "first_incarnation": incarnation,
        "known": [claim_to_dict(Claim(Mark(end.generation, end.position, end.hash), "the start of the system"))],
    })
    admin = running_system.find_head(config)
    if code != 0 or admin is None:
        leftovers.end_all_leftovers(config)  # but not its keeper, which may be this process
        outcome = "did not come up" if code else "died while it started"
        raise StartupError(
            f"the actor system {outcome} (exit {code}):\n{_last_lines(config)}\nLogs are in {log_dir}"
        )
    with contextlib.suppress(OSError), whole_file(running_system.system_file(config)) as file:
        file.write(json.dumps({**admin, "keeper": keeper}).encode())
    return admin


def connections_needed(config: Config) -> int:
    """Return the minimum number of PostgreSQL connections of a run, without those of a trainer and of commands."""
    return _BASE_CONNECTIONS + sum(model.engine_num for model in config.models.values())


def _require_connections(config: Config, limit: int) -> None:
    """Raise ConfigError if a run needs more than `limit` connections: its coordinator would wait forever for one."""
    needed = connections_needed(config)
    if limit < needed:
        raise ConfigError(
            f"{config.masked()['store']['url']} lets this user have {limit} connections, but a run holds {needed} or "
            "more: raise max_connections of its server, or the CONNECTION LIMIT of this user or database"
        )


_BASE_CONNECTIONS = 5
"""Connections of a run, besides one per engine."""
_CONNECTION_LIMIT = """
SELECT least(
  (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user AND NOT rolsuper),
  (SELECT nullif(datconnlimit, -1) FROM pg_database, pg_roles
   WHERE datname = current_database() AND rolname = current_user AND NOT rolsuper),
  current_setting('max_connections')::int)
"""


def _require_no_other_head(config: Config) -> None:
    """Raise AlreadyRunning if another head leads this store's run for 3 s; a dead head may briefly seem to lead."""
    deadline = time.monotonic() + _FORMER_HEAD_SECONDS
    while is_led(config.store.url):
        if time.monotonic() > deadline:
            head = running_system.leader(config)
            raise AlreadyRunning(
                f"the run of {config.masked()['store']['url']} is led by pid {head.get('pid')} on {head.get('host')}"
                ": take part with `trinity-es join`, or wait to take over with `trinity-es up --standby`"
            )
        time.sleep(0.2)


def _run_launcher(config: Config, log_dir: Path, setup: Mapping[str, Any]) -> int:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < LEAST_FILES:
        raise StartupError(
            f"a process may open {hard_limit} files here, but the processes of an actor system need {LEAST_FILES} or "
            "more: raise the hard limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
        )
    reservation = _reserve_port(config)
    setup = {**setup, "port": reservation.getsockname()[1], "deadline_seconds": _LAUNCH_SECONDS}
    handle, setup_path = tempfile.mkstemp(prefix="setup-", suffix=".json", dir=log_dir)  # mode 600: holds the URL
    with os.fdopen(handle, "w") as f:
        json.dump(setup, f)
    create_private(log_dir / "thespian.log")  # or Thespian would make it readable for others
    env = {
        **os.environ,
        FILE_VARIABLE: running_system.key_file(config),
        "THESPLOG_FILE": str(log_dir / "thespian.log"),
        "THESPLOG_FILE_MAXSIZE": str(1 << 20),
        # without stored byte code every start compiles every module: seconds each
        "PYTHONDONTWRITEBYTECODE": "",
    }
    output = running_system.output_file(config)
    try:
        with reservation, os.fdopen(open_private(output, os.O_WRONLY | os.O_APPEND), "ab") as out:
            process = subprocess.run(
                [sys.executable, "-m", "trinity_es.actors.launch", setup_path],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
                timeout=_LAUNCH_SECONDS + 30, check=False,
            )
    except subprocess.TimeoutExpired:
        leftovers.end_all_leftovers(config)  # but not its keeper, which may be this process
        raise StartupError(f"the actor system did not come up within {_LAUNCH_SECONDS + 30:.0f} s: {output} says "
                           "more") from None
    finally:
        os.unlink(setup_path)
    return process.returncode


def _last_lines(config: Config) -> str:
    log_lines: list[str] = []
    folder = Path(config.system.log_dir)
    names = ("guardian.log", "coordinator.log", "host.log")
    for path in (running_system.output_file(config), *(folder / name for name in names)):
        if path.exists():
            file_lines = path.read_text(errors="replace").splitlines()
            log_lines.extend(f"  {path.name}: {line}" for line in file_lines[-12:])
    return "\n".join(log_lines)
