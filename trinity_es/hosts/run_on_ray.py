"""A run on a Ray cluster: the head and each host are detached actors, which Ray restarts on nodes that have room.

An actor does the work of `trinity-es up` or `join`; the state of the run is in the log. Config, store and key are
arguments of the actors, because the variables of a runtime environment would be visible on command lines and in Ray's
text logs. Only functions import Ray.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trinity_es.actors.system_key import KEY_VARIABLE, read_key
from trinity_es.client.rollout_client import connect
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import AlreadyRunning, ConfigError, StartupError, TrinityError, WrongKey
from trinity_es.events.processes import process_lives
from trinity_es.events.store.database.leader_lock import is_led
from trinity_es.events.store.database.retry import Backoff
from trinity_es.events.store.database.urls import parse_url
from trinity_es.hosts.join import HostRun, host_name
from trinity_es.system import lifecycle, running_system

__all__ = ["Agent", "down", "head_config", "host_resources", "start"]

PORT = 7700
"""Port at which the head accepts hosts, if `hosts.address` has none."""
CHECK_SECONDS = 1.0
"""Interval of the checks of the system, and of the status calls to the actors."""
PAUSE_SECONDS = 1.0, 10.0
"""First and longest pause before an actor tries again after an error."""
CONNECT_SECONDS = 10.0
END_SECONDS = 40.0
"""How long the actors may take to end their processes. After that Ray kills the actors, and their processes end too."""
HEAD, GROUP = "head", "hosts"
"""Names of the head's actor and of the placement group, in the run's Ray namespace."""
_log = logging.getLogger(__name__)


def head_config(config: Config, address: str) -> Config:
    """Return the config of a head at this IP address, which runs no engines itself. Raises ConfigError."""
    if any(model.engine_type == "http" for model in config.models.values()):
        raise ConfigError("engine_type is http, so Ray has no engines to place. Start the run with `trinity-es up`, "
                          "without --on ray (docs/ENGINES.md)")
    if parse_url(config.store.url).get_backend_name() == "sqlite":
        raise ConfigError("the store is a SQLite file, which only one host can use, but a run on Ray has several. Set "
                          "store.url to a PostgreSQL database")
    data = config.to_dict()
    port = data["hosts"]["address"].rpartition(":")[2] or PORT
    data["hosts"] |= {"address": f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
                      "engines_on_head": False}
    return Config.from_dict(data, folder="/")


def host_resources(config: Config, *, gpus: bool) -> dict[str, float]:
    """Return the resources that a host needs on its node: a core per engine, and GPUs if the cluster has any."""
    models = config.models.values()
    resources = {"CPU": float(sum(m.engine_num for m in models))}
    gpu_count = sum(m.engine_num * m.tensor_parallel_size for m in models if m.engine_type != "scripted")
    if gpus and gpu_count:
        resources["GPU"] = float(gpu_count)
    return resources


class Agent:
    """Ray actor that is the head of a run or one of its hosts. The processes that it starts end with it."""

    def __init__(self, setup: Mapping[str, Any], number: int | None) -> None:
        """Start a thread that does the actor's work. `setup`: config, key, folder; `number`: None for the head.

        Never raises, because Ray does not restart an actor whose constructor raises.
        """
        os.environ[KEY_VARIABLE] = setup["key"]
        with suppress(OSError):
            os.chdir(setup["folder"])
        self._setup, self._host_number = setup, number
        self._ended = threading.Event()
        """Set when this actor must not start any process."""
        self._problem: dict[str, Any] = {"text": "", "for_good": False}
        self._config: Config | None = None
        self._run: HostRun | None = None
        self._thread = threading.Thread(target=self._work, name="agent", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        return {"node": socket.gethostname(), "pid": os.getpid(), "problem": dict(self._problem)}

    def status(self) -> dict[str, Any]:
        """Return the status of the run that this head leads; a status without runners until the system answers."""
        if self._config is not None:
            with suppress(TrinityError), connect(self._config) as client:
                return client.status()
        return {"runners": []}

    def leave(self, reason: str) -> None:
        """End all processes that this actor started, and start no more."""
        self._ended.set()
        if self._run is not None:
            self._run.leave(reason, 0.0)
        self._thread.join(END_SECONDS)
        if self._host_number is None and self._config is not None:
            end_system(self._config)

    def _work(self) -> None:
        """Run the head or the host. After an error, try again until `leave`."""
        pauses = Backoff(*PAUSE_SECONDS)
        while not self._ended.is_set():
            try:
                if self._host_number is None:
                    self._run_head()
                else:
                    self._run_host()
            except Exception as e:
                if not isinstance(e, TrinityError):
                    _log.exception("the %s failed", "head" if self._host_number is None else "host")
                self._problem = {"text": str(e), "for_good": isinstance(e, ConfigError | WrongKey)}
                _log.warning("%s; trying again soon", e)
                self._ended.wait(pauses.next(0.0))
            else:
                return

    def _run_host(self) -> None:
        config = Config.from_dict(self._setup["config"], folder="/")
        name = host_name(f"{socket.gethostname().partition('.')[0][:50]}-{self._host_number}")
        self._run = HostRun(config.store.url, name, [], Path(config.system.log_dir) / name, report=_log.warning)
        if not self._ended.is_set():
            self._run.run()

    def _run_head(self) -> None:
        """Run the head until `trinity-es down` on this node ends its system; then end all of the run on Ray."""
        import ray

        config = head_config(Config.from_dict(self._setup["config"], folder="/"), ray.util.get_node_ip_address())
        while not self._ended.is_set():
            admin = lifecycle.start(config, keeper=True, detach=False)  # AlreadyRunning while an earlier system ends
            self._config, self._problem = config, {"text": "", "for_good": False}
            _log.warning("the head is up (pid %s) and accepts hosts at %s", admin["pid"], config.hosts.address)
            while not self._ended.wait(CHECK_SECONDS):
                if process_lives(admin["pid"], admin["started"]):
                    continue
                with suppress(TrinityError):
                    new_admin = running_system.last_known(config)
                    if new_admin is None:  # the system ended in order
                        self._config = None
                        self._ended.set()
                        threading.Thread(target=_end_run, args=(ray, "its head was ended")).start()
                        return
                    if process_lives(new_admin["pid"], new_admin["started"]):
                        admin = new_admin  # the keeper started the system again
                    elif running_system.keeper(config) is None:
                        break


def _connect_to_ray(config: Config) -> Any:
    """Connect to the cluster in RAY_ADDRESS or to this node's, in this store's namespace. Returns the module ray."""
    try:
        import ray
    except ImportError as e:
        raise ConfigError(f"Ray can't be imported ({e}): pip install 'trinity-es[ray]'") from e
    address = os.environ.get("RAY_ADDRESS") or "auto"
    url = parse_url(config.store.url)
    database = f"{url.host or url.query.get('host')}:{url.port}/{url.database}"
    store_digest = hashlib.sha256(database.encode()).hexdigest()[:12]
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:  # fails fast, while Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, namespace=f"trinity-es-{store_digest}", log_to_driver=False,
                 logging_level=logging.ERROR)
    except OSError as e:
        raise ConfigError(f"there is no Ray cluster at {address!r} ({str(e).splitlines()[0]}): set RAY_ADDRESS to the "
                          "address of a cluster, or make this machine a node with `ray start`") from e
    return ray


def start(
    config: Config, hosts: int | None, *, wait: bool, tell: Callable[[str], None],
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Start a run on Ray: the head, and `hosts` hosts on a node each (None: on each node that has room now).

    With `wait`, returns when all engines serve. `tell` gets messages for the user. Raises ConfigError, WrongKey,
    AlreadyRunning and StartupError; then no actor is left.
    """
    head_config(config, "127.0.0.1")
    try:
        key = read_key(running_system.key_file(config)).decode()
    except WrongKey as e:
        raise WrongKey(f"{e.message}. A run on Ray needs a key before it starts: make one with `openssl rand -hex 32`, "
                       f"and export it as {KEY_VARIABLE} here and wherever commands and trainers run") from e
    ray = _connect_to_ray(config)
    if HEAD in ray.util.list_named_actors():
        raise AlreadyRunning("this run is already on Ray: end it with `trinity-es down --on ray`")
    with suppress(TrinityError):  # no log yet
        if is_led(config.store.url):
            raise AlreadyRunning("this run is already active outside of Ray: end it with `trinity-es down` first")
    _end_run(ray, "its start was interrupted")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resources = host_resources(config, gpus=any(node.get("GPU") for node in nodes))
    fit = sum(all(node.get(kind, 0) >= n for kind, n in resources.items()) for node in nodes)
    needs = " and ".join(f"{n:.0f} {kind}s" for kind, n in resources.items())
    if hosts is None and not fit:
        raise ConfigError(f"none of the {len(nodes)} nodes of the Ray cluster has the resources of a host ({needs}): "
                          "lower explorer.rollout_model.engine_num or its tensor_parallel_size, or wait for such nodes "
                          "with --hosts N")
    hosts = hosts or fit
    if fit < hosts:
        tell(f"{fit} of {len(nodes)} Ray nodes have the resources of a host ({needs}): waiting for {hosts - fit} more")
    group = ray.util.placement_group([resources] * hosts, strategy="STRICT_SPREAD", name=GROUP, lifetime="detached")
    setup = {"config": config.to_dict(), "key": key, "folder": os.getcwd()}
    actor, lasting = ray.remote(Agent), {"lifetime": "detached", "max_restarts": -1}
    strategies = ray.util.scheduling_strategies
    this_node = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    head = actor.options(name=HEAD, num_cpus=0, scheduling_strategy=this_node, **lasting).remote(setup, None)
    agents = [head, *(
        actor.options(
            name=f"host-{n}", num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), **lasting,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n),
        ).remote(setup, n)
        for n in range(hosts)
    )]
    try:
        if wait:
            reported: set[str] = set()
            lifecycle.wait_ready(
                lambda: _startup_status(ray, agents, reported, tell), config.system.startup_timeout, progress=progress,
                runners=hosts * config.explorer.engine_num, logs=config.system.log_dir,
            )
    except BaseException:
        _end_run(ray, "it did not start")
        raise
    return {"hosts": hosts, "takes": resources, "ready": wait}


def _startup_status(ray: Any, agents: Sequence[Any], reported: set[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the status of a starting run; `tell` the user each new problem. Raises StartupError for a lasting one."""
    time.sleep(CHECK_SECONDS)
    reports, _ = ray.wait([agent.report.remote() for agent in agents], num_returns=len(agents), timeout=CHECK_SECONDS)
    try:
        for answer in ray.get(reports):
            problem = answer["problem"]
            if problem["for_good"]:
                raise StartupError(f"a host can't start on node {answer['node']}: {problem['text']}")
            if problem["text"] and problem["text"] not in reported:
                reported.add(problem["text"])
                tell(f"{answer['node']}: {problem['text']}; trying again")
        return dict(ray.get(agents[0].status.remote(), timeout=CHECK_SECONDS * 10))
    except ray.exceptions.ActorDiedError as e:
        raise StartupError(f"a Ray node could not start the run's actors ({str(e).strip().splitlines()[-1]}): install "
                           "this version of trinity_es on each node") from e
    except ray.exceptions.RayError:
        return {"runners": []}  # the head is restarting, or slow


def down(config: Config) -> bool:
    """End the run of this store on Ray: hosts, head, placement group. Returns False if there was no such run."""
    return _end_run(_connect_to_ray(config), "the run was ended")


def _end_run(ray: Any, reason: str) -> bool:
    """End all actors in the run's Ray namespace, the head last, so that it can record how the hosts leave.

    Returns False if there were no actors.
    """
    names = sorted(ray.util.list_named_actors(), key=lambda name: name == HEAD)
    agents = []
    for name in names:
        with suppress(ValueError):  # the actor ended meanwhile
            agents.append(ray.get_actor(name))
    for group in (agents[:-1], agents[-1:]):
        if group:
            answers = [agent.leave.remote(reason) for agent in group]
            ray.wait(answers, num_returns=len(answers), timeout=END_SECONDS)
    with suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(GROUP))
    for agent in agents:
        ray.kill(agent, no_restart=True)
    return bool(agents)
