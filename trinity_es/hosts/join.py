"""`trinity-es join`: run engines on this host for a run whose coordinator is on another host, the head.

`HostRun` starts an actor system that ends with this process, and restarts it when it dies. The config is the run's own,
read from the log; overrides change values for this host.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from trinity_es.actors.config.config import HostIdentity
from trinity_es.actors.engines.devices import engine_beyond_gpus, visible_gpus
from trinity_es.actors.hosts.folder_files import FolderName
from trinity_es.actors.hosts.folder_puller import FolderPuller, pulled_dir
from trinity_es.actors.hosts.head_client import HeadDialer, HeadPlace
from trinity_es.actors.messages import HostLeaves
from trinity_es.actors.system_key import KEY_VARIABLE, read_host_key
from trinity_es.client.connection import Connection, system_gone
from trinity_es.config.config import Config
from trinity_es.config.interpolation import escape_texts
from trinity_es.config.yaml_file import apply_overrides
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogError, NotRunning, SyncError, TrinityError, WrongKey
from trinity_es.events.processes import process_lives
from trinity_es.events.secrets import masked_keys
from trinity_es.events.store.database.retry import Backoff
from trinity_es.events.store.database.urls import masked, parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads
from trinity_es.projections.host_states import HostEvent, Hosts, evolve_hosts
from trinity_es.system import leftovers, running_system
from trinity_es.system.launch import launch_host
from trinity_es.system.running_system import key_file

__all__ = ["HostRun", "find_head", "host_config", "host_name", "require_gpus"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
PAUSE_SECONDS = 1.0, 30.0
"""First and longest pause before the system is started again, or the head is looked up again."""
CHECK_SECONDS = 0.5
"""Interval of the checks of the system and of requests to leave."""
STEADY_SECONDS = 60.0
"""After a system has run for this long, the next pause is the shortest again."""
END_SECONDS = 20.0
"""How long the system may take to end in order after its drain."""


def host_name(name: str | None) -> str:
    """Return this host's name in the run: `name`, or else the machine's. Raises ConfigError for an invalid name."""
    name = name or socket.gethostname().partition(".")[0]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} can't be a host's name: use at most 63 letters, digits, '.', '_' and '-', and give the name "
            "with --name"
        )
    return name


def find_head(url: str) -> HeadPlace:
    """Return the address at which the head of this store accepts hosts. Raises NotRunning while there is no head.

    Raises ConfigError if the store is a SQLite file or the head accepts no hosts; also LogNotFound, LogUnavailable.
    """
    if parse_url(url).get_backend_name() == "sqlite":
        raise ConfigError(
            f"{masked(url)} is a SQLite file, which only one host can use, since its locks and write-ahead log do not "
            "work over a network. Set store.url in the head's config to a PostgreSQL database"
        )
    with EventLog.open(url, read_only=True) as log:
        lease = log.read_lease("coordinator")
    owner = (lease.owner or {}) if lease is not None else {}
    if not owner:
        raise NotRunning(f"the run of {masked(url)} has no head now: start one with `trinity-es up` or `run`")
    place = HeadPlace.of(owner)
    if place is None:
        raise ConfigError(
            f"the head of {masked(url)} (pid {owner.get('pid')} on {owner.get('host')}) accepts no other hosts: set "
            "hosts.address in its config to its own address and a port, such as 10.0.0.1:7700, and restart it"
        )
    return place


def host_config(
    url: str, name: str, overrides: Sequence[str], log_dir: Path, key_file: str = "",
    model_folders: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """Return the run's config, read from the log and adapted to this host. Raises ConfigError, LogError.

    `model_folders` maps model paths that don't exist on this host to folders here.
    """
    with EventLog.open(url, read_only=True) as log:
        last = log.last(ev.SystemConfigured.stream, "SystemConfigured")
    if last is None:
        raise NotRunning(f"the run of {masked(url)} has had no head yet: start one with `trinity-es up` or `run`")
    data: dict[str, Any] = escape_texts(cast(ev.SystemConfigured, last.event).config)
    data["store"] = {**data["store"], "url": url}
    hosts = data.get("hosts", {})
    if not key_file and not os.environ.get(KEY_VARIABLE):  # the key file is at the same path as on the head
        key_file = hosts.get("key_file") or data["system"].get("key_file", "")
    data["hosts"] = {**hosts, "address": "", "key_file": key_file, "engines_on_head": True}
    data["system"] = {**data["system"], "log_dir": str(log_dir), "port": 0, "address": "127.0.0.1", "key_file": ""}
    auxiliary_names = {m["name"] for m in data["explorer"].get("auxiliary_models") or []}
    apply_overrides(data, list(overrides))
    models = [data["model"], data["explorer"]["rollout_model"], *(data["explorer"].get("auxiliary_models") or [])]
    missing_names = auxiliary_names - {m.get("name") for m in models if m.get("engine_num", 1)}
    if missing_names:
        raise ConfigError(
            f"this host would have no engine of {', '.join(sorted(missing_names))}, but tasks may call the auxiliary "
            f"models {', '.join(sorted(auxiliary_names))}, and reach only engines of their own host. Keep these models "
            "in this host's config, or give them engine_type http (servers that every host reaches) in the head's "
            "config"
        )
    for model in models:
        model["model_path"] = model_folders.get(model.get("model_path", ""), model.get("model_path", ""))
    # The log has the config with masked secrets. The store's URL is an argument of this host.
    secret_keys = masked_keys({key: value for key, value in data.items() if key != "store"})
    if secret_keys:
        raise ConfigError(
            f"the config in {masked(url)} has its secrets masked ({', '.join(secret_keys)}): give each to this host "
            "with --set"
        )
    return Config.from_dict(data, source=f"the run's config, for host {name}")


def require_gpus(config: Config, name: str) -> None:
    """Raise ConfigError if this host has too few GPUs for an engine of the config."""
    explorer = config.explorer
    models = {"explorer.rollout_model": explorer.rollout_model}
    models |= {f"explorer.auxiliary_models {m.name}": m for m in explorer.auxiliary_models}
    gpu_counts = [(key, m.tensor_parallel_size) for key, m in models.items()
                  if m.engine_type not in ("scripted", "http")]
    gpus = visible_gpus()
    if key := engine_beyond_gpus(gpu_counts, len(gpus)):
        raise ConfigError(
            f"host {name} may use {len(gpus)} GPUs ({', '.join(gpus)}), but each engine of {key} needs "
            f"{models[key].tensor_parallel_size}: join from a larger host, make more GPUs visible with "
            "CUDA_VISIBLE_DEVICES, or set tensor_parallel_size for this host with --set"
        )


class HostRun:
    """Runs a joined host's actor system, and restarts it when it ends. `report` gets messages for the user."""

    def __init__(self, url: str, name: str, overrides: Sequence[str], log_dir: Path, *, key_file: str = "",
                 report: Callable[[str], None]) -> None:
        self._url, self._name, self._overrides, self._log_dir = url, name, overrides, log_dir
        self._key_file, self._report = key_file, report
        self._reason = ""
        """Reason passed to `leave`; empty until then."""
        self._life_id = ""
        """Id of the host's current or last system in the log's events."""
        self._pulled_folder: Path | None = None
        """Folder of files that the host's system copied from the head, deleted at the end of `run`."""
        self._leave_deadline = 0.0
        """Monotonic time at which a leaving host ends, even if it still has units (runs that it has been given)."""

    def leave(self, reason: str, within: float) -> None:
        """Drain the host and end it. Tasks that are unfinished after `within` s run elsewhere."""
        if not self._reason:
            self._reason, self._leave_deadline = reason, time.monotonic() + within

    def is_leaving(self) -> bool:
        return bool(self._reason)

    def run(self) -> None:
        """Work for the run until `leave` is called or the host is drained. Raises ConfigError, WrongKey."""
        try:
            self._run()
        finally:
            if self._pulled_folder is not None:
                shutil.rmtree(self._pulled_folder, ignore_errors=True)

    def _run(self) -> None:
        pauses = Backoff(*PAUSE_SECONDS)
        while not self.is_leaving():
            started_at = time.monotonic()
            try:
                head = find_head(self._url)
                config = self._with_model_folders(head, self._read_config())
                require_gpus(config, self._name)
                config.check()
                self._report(f"the head accepts hosts at {head}: joining as {self._name}")
                with closing(open_payloads(self._url)) as payloads:  # first, as it raises if this database is unusable
                    reason = self._run_system(config, payloads)
            except (ConfigError, WrongKey):
                raise
            except TrinityError as e:  # for instance no head yet, no database, or a failed start: try again
                reason = e.message
            # Read from the log, because a drained system may have ended without an answer.
            if not self.is_leaving() and (drain_reason := self._drain_reason()):
                self._report(f"host {self._name} left: {drain_reason}")
                return
            if self.is_leaving():
                return
            if time.monotonic() - started_at > STEADY_SECONDS:
                pauses.reset()
            pause = pauses.next(0.0)
            self._report(f"{reason}; trying again in {pause:.0f} s")
            self._sleep(pause)

    def _read_config(self, model_folders: Mapping[str, str] = MappingProxyType({})) -> Config:
        return host_config(self._url, self._name, self._overrides, self._log_dir, self._key_file, model_folders)

    def _with_model_folders(self, head: HeadPlace, config: Config) -> Config:
        """Copy models whose paths don't exist here from the head, and return the config with their local folders.

        A model that the head does not have keeps its path, and its engine will report the error.
        """
        model_folders: dict[str, str] = {}
        for name, model in config.models.items():
            path = model.model_path
            if path in model_folders or not path.startswith("/") or Path(path).exists():
                continue
            self._report(f"{path} is not on this host: copying the model from the head")
            try:
                model_folders[path] = str(self._pull_folder(head, config, FolderName("model", name)))
            except SyncError as e:
                if not e.details.get("refused") or self.is_leaving():
                    raise
                self._report(e.message)
        return self._read_config(model_folders) if model_folders else config

    def _pull_folder(self, head: HeadPlace, config: Config, name: FolderName) -> Path:
        """Copy a folder from the head and return its local path. Raises SyncError, also when `leave` is called."""
        folder = self._log_dir / "models"
        if config.hosts.weights_dir:  # other hosts may use this folder too
            folder = Path(config.hosts.weights_dir) / f"models-{socket.gethostname()}-{self._name}"
        key_path = config.hosts.key_file or ("" if os.environ.get(KEY_VARIABLE) else key_file(config))
        key = partial(read_host_key, key_path)
        puller = FolderPuller(folder, HeadDialer(self._name, key, lambda: head, config.hosts.timeout))
        return asyncio.run(self._await_unless_leaving(puller.pull(name, None, lambda text: None)))

    async def _await_unless_leaving(self, pull: Coroutine[Any, Any, Path]) -> Path:
        """Await a copy from the head and return its path. Raises SyncError if `leave` is called meanwhile."""
        task = asyncio.ensure_future(pull)
        try:
            while not (await asyncio.wait([task], timeout=CHECK_SECONDS))[0]:
                if self.is_leaving():
                    raise SyncError("the pull of the model was stopped because this host is leaving")
            return task.result()
        finally:
            task.cancel()

    def _drain_reason(self) -> str:
        """Return why the host's last system was drained, from the log; "" if it was not or the log is unreadable."""
        hosts: Hosts = {}
        try:
            with EventLog.open(self._url, read_only=True) as log:
                for recorded in log.read(stream=ev.HostJoined.stream):
                    evolve_hosts(hosts, cast(HostEvent, recorded.event))
        except LogError:
            return ""
        host = hosts.get(self._name)
        if host is None or host.life != self._life_id or host.state not in ("draining", "left"):
            return ""
        return host.reason

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_leaving() and time.monotonic() < deadline:
            time.sleep(min(CHECK_SECONDS, seconds))

    def _run_system(self, config: Config, payloads: PayloadStore) -> str:
        """Start the host's system, wait until it ends or has to, kill its last processes, and return the reason."""
        self._life_id = uuid.uuid4().hex
        self._pulled_folder = pulled_dir(config.hosts.weights_dir, config.store.url, config.system.log_dir)
        admin = launch_host(config, HostIdentity(name=self._name, life=self._life_id))
        self._report(f"the actor system of host {self._name} is up (pid {admin['pid']}), its engines are loading; "
                     f"host.log in {config.system.log_dir} says when the head accepts the host, or why not")
        try:
            def require_alive(_: dict[str, Any] | None) -> dict[str, Any]:
                if not process_lives(admin["pid"], admin["started"]):
                    raise system_gone(admin)
                return admin

            connection = Connection(payloads, require_alive)
            try:
                with os.fdopen(os.pidfd_open(admin["pid"])) as handle:
                    while not select.select([handle], [], [], CHECK_SECONDS)[0]:
                        status = connection.where(CHECK_SECONDS).status
                        if status.get("fenced"):
                            return str(status["fenced"])
                        if self._reason:  # repeated, because each process on the way may be away or restarted
                            connection.tell_guardian(HostLeaves(self._reason))
                        if self._reason and time.monotonic() > self._leave_deadline:
                            connection.retire(END_SECONDS)
                            return self._reason
                return "its actor system ended"
            finally:
                connection.close()
        finally:
            if process_lives(admin["pid"], admin["started"]):
                running_system.end(running_system.wait_gone(running_system.processes(admin), 0.0))
            # Other processes may outlive the admin and still use the GPU.
            running_system.end(running_system.wait_gone(leftovers.leftovers(config), 2.0))
