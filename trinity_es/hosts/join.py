"""A host takes part in a run that is led elsewhere: its engines start here, and work for the head's batches.

`join` stays for as long as the host does. It looks for the head in the log, starts an actor system that ends with this
process, and starts it again when it ended for any reason but that it was to. The config is the run's own, as the log
has it; what differs on this host is given as overrides.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from trinity_es.actors.engines.devices import lacking, visible
from trinity_es.actors.messages import HostLeaves
from trinity_es.actors.settings import HostSettings
from trinity_es.client.connection import Connection
from trinity_es.config.config import Config
from trinity_es.config.interpolation import escaped
from trinity_es.config.yaml_file import apply_overrides
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogError, NotRunning, TrinityError, WrongKey
from trinity_es.events.processes import process_lives
from trinity_es.events.secrets import masked_keys
from trinity_es.events.store.database import masked, parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads import open_payloads
from trinity_es.events.store.retry import Backoff
from trinity_es.projections.hosts import HostEvent, Hosts, evolve_hosts
from trinity_es.system import running_system
from trinity_es.system.launch import launch_host

__all__ = ["HostRun", "config_of", "find_head", "host_name", "require_gpus"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
PAUSE_SECONDS = 1.0, 30.0
"""Pause before the system is started again, or the head looked for again: the first, and the longest."""
LOOK_SECONDS = 0.5
"""Interval between two looks at the system and at what is wanted."""
STEADY_SECONDS = 60.0
"""How long a system must live until the pause is the first again."""
END_SECONDS = 20.0
"""How long the system may take to end in order, after its drain."""


def host_name(given: str | None) -> str:
    """Return the name of this host: `given`, or that of the machine. Raises ConfigError for what can't be one."""
    name = given or socket.gethostname().partition(".")[0]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} can't be a host's name: letters, digits, '.', '_' and '-', 63 at most; give --name"
        )
    return name


def find_head(url: str) -> str:
    """Return where the head of this store takes hosts in.

    Raises ConfigError where none can be: a store of one host, a head that takes none. NotRunning while nobody leads;
    LogNotFound, LogUnavailable.
    """
    if parse_url(url).get_backend_name() == "sqlite":
        raise ConfigError(
            f"{masked(url)} is a SQLite file, which is one host's: its locks and its write-ahead log do not reach over "
            "a network. A run of several hosts has its store in PostgreSQL: set store.url in the head's config"
        )
    with EventLog.open(url, read_only=True) as log:
        lease = log.read_lease("coordinator")
    owner = (lease.owner or {}) if lease is not None else {}
    if not owner:
        raise NotRunning(f"nobody leads the run of {masked(url)} now: start its head with `trinity-es up` or `run`")
    if not owner.get("hosts"):
        raise ConfigError(
            f"the head of {masked(url)} (pid {owner.get('pid')} on {owner.get('host')}) takes no hosts: set "
            "hosts.address in its config to an address of its own and a port, as in 10.0.0.1:7700, and start it anew"
        )
    return str(owner["hosts"])


def config_of(url: str, name: str, overrides: Sequence[str], log_dir: Path, key_file: str = "") -> Config:
    """Return the config of the run of this store as this host runs it. Raises ConfigError, LogError."""
    with EventLog.open(url, read_only=True) as log:
        last = log.last(ev.SystemConfigured.stream, "SystemConfigured")
    if last is None:
        raise NotRunning(f"nobody has led the run of {masked(url)} yet: start its head with `trinity-es up` or `run`")
    given: dict[str, Any] = escaped(cast(ev.SystemConfigured, last.event).config)
    given["store"] = {**given["store"], "url": url}
    given["hosts"] = {**given.get("hosts", {}), "address": "", "engines_on_head": True}
    system = {**given["system"], "log_dir": str(log_dir), "port": 0, "address": "127.0.0.1"}
    given["system"] = {**system, "key_file": key_file or system.get("key_file", "")}
    apply_overrides(given, list(overrides))
    if hidden := masked_keys({key: value for key, value in given.items() if key != "store"}):
        raise ConfigError(
            f"the config in {masked(url)} has no secrets in it ({', '.join(hidden)}): give each to this host with --set"
        )
    return Config.from_dict(given, source=f"the run's config, for host {name}")


def require_gpus(config: Config, name: str) -> None:
    """Require that each engine of this config can be on this host. Raises ConfigError."""
    explorer = config.explorer
    models = {"explorer.rollout_model": explorer.rollout_model}
    models |= {f"explorer.auxiliary_models {m.name}": m for m in explorer.auxiliary_models}
    sizes = [(key, m.tensor_parallel_size) for key, m in models.items() if m.engine_type not in ("scripted", "http")]
    gpus = visible()
    if key := lacking(sizes, len(gpus)):
        raise ConfigError(
            f"host {name} may use {len(gpus)} GPUs ({', '.join(gpus)}), and each engine of {key} spans "
            f"{models[key].tensor_parallel_size}: join from a host with as many, give it more by CUDA_VISIBLE_DEVICES, "
            "or say otherwise for this host with --set (tensor_parallel_size)"
        )


class HostRun:
    """A host's part in a run, from its start to its end."""

    def __init__(self, url: str, name: str, overrides: Sequence[str], log_dir: Path, *, key_file: str = "",
                 tell: Callable[[str], None]) -> None:
        self._url, self._name, self._overrides, self._log_dir = url, name, overrides, log_dir
        self._key_file, self._tell = key_file, tell
        self._ends = self._life = ""
        self._until = 0.0

    def leave(self, reason: str, within: float) -> None:
        """Have the host drained and ended; what its runners have after `within` s is attempted elsewhere."""
        if not self._ends:
            self._ends, self._until = reason, time.monotonic() + within

    def is_leaving(self) -> bool:
        """Return True if `leave` was called."""
        return bool(self._ends)

    def run(self) -> None:
        """Take part until `leave` is called. Raises ConfigError, WrongKey: what waiting does not mend."""
        pauses = Backoff(*PAUSE_SECONDS)
        while not self.is_leaving():
            born = time.monotonic()
            try:
                where = find_head(self._url)
                config = config_of(self._url, self._name, self._overrides, self._log_dir, self._key_file)
                require_gpus(config, self._name)
                config.check()
                self._tell(f"the head takes hosts in at {where}: joining as {self._name}")
                why = self._one_life(config)
            except (ConfigError, WrongKey):
                raise
            except TrinityError as e:  # nobody leads yet, the database is away, the system did not come up
                why = e.message
            if not self.is_leaving() and (left := self._has_left()):  # a system that ends may be asked in vain before
                self._tell(f"host {self._name} left: {left}")
                return
            if self.is_leaving():
                return
            if time.monotonic() - born > STEADY_SECONDS:
                pauses.reset()
            pause = pauses.next(0.0)
            self._tell(f"{why}; once more in {pause:.0f} s")
            self._sleep(pause)

    def _has_left(self) -> str:
        """Return why the last life of the host left in order; empty where it did not, or nobody can say."""
        hosts: Hosts = {}
        try:
            with EventLog.open(self._url, read_only=True) as log:
                for recorded in log.read(stream=ev.HostJoined.stream):
                    evolve_hosts(hosts, cast(HostEvent, recorded.event))
        except LogError:
            return ""
        known = hosts.get(self._name)
        gone = known is not None and known.life == self._life and known.state in ("draining", "left")
        return known.reason if known is not None and gone else ""

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_leaving() and time.monotonic() < until:
            time.sleep(min(LOOK_SECONDS, seconds))

    def _one_life(self, config: Config) -> str:
        """Start the system and wait for its end; returns why it ended."""
        self._life = uuid.uuid4().hex
        admin = launch_host(config, HostSettings(self._name, self._life))
        self._tell(f"joined: the actor system of host {self._name} is up (pid {admin['pid']}), its engines are "
                   f"loading; text logs are in {config.system.log_dir}")
        drained = False
        try:
            payloads = open_payloads(self._url)
            link = Connection(admin, payloads, lambda: None)
            try:
                with os.fdopen(os.pidfd_open(admin["pid"])) as handle:
                    while not select.select([handle], [], [], LOOK_SECONDS)[0]:
                        told = link.where(LOOK_SECONDS).status
                        if told.get("fenced"):
                            return str(told["fenced"])
                        if self._ends and not drained:
                            drained = link.tell_guardian(HostLeaves(self._ends))
                        if self._ends and time.monotonic() > self._until:
                            link.retire(END_SECONDS)
                            return self._ends
                return "its actor system ended"
            finally:
                link.close()
                payloads.close()
        finally:
            if process_lives(admin["pid"], admin["started"]):
                running_system.end(running_system.wait_gone(running_system.processes(admin), 0.0))
