"""How a system is: asked of itself where it runs, else read from its log. Used by `trinity-es status`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from sqlalchemy import select

from events.errors import LogNotFound, NotALog, TrinityError
from events.log import EventLog
from projections import readmodels
from projections.audit import open_log
from trinity_es import system
from trinity_es.config import Config
from trinity_es.views import plain

__all__ = ["look", "show"]


def look(config: Config) -> dict[str, Any]:
    """Health as plain JSON: `up`, `coordinator`, `runners`, `batches` (open ones), `problems` ([]: all is well).

    Raises LogNotFound where there is neither a system nor a log.
    """
    out: dict[str, Any] = {
        "store": config.masked()["store"]["url"], "up": False, "coordinator": None, "weights_version": None,
        "runners": [], "batches": [], "problems": [],
    }
    admin = system.find(config)
    if admin is not None:
        out["up"], out["admin"] = True, admin
        _ask(config, out)
    else:
        out["problems"].append("no actor system runs on this store: `trinity-es up` goes on with what is open")
        _read(config, out)
    return out


def _ask(config: Config, out: dict[str, Any]) -> None:
    from trinity_es.client import connect

    try:
        with connect(config) as client:
            said = client.status()
    except (TrinityError, TimeoutError) as e:
        out["problems"].append(f"the actor system does not answer: {e}")
        _read(config, out)
        return
    children = said["system"].get("children", [])
    for child in children:
        if child["state"] == "down":
            out["problems"].append(f"{child['name']} is down after {child['deaths']} deaths; see its text log in "
                                   f"{config.system.log_dir}")
    if "weights_version" in said:
        with EventLog.open(config.store.url, read_only=True) as events:
            lease = events.read_lease("coordinator")
        pid = next((c["pid"] for c in children if c["name"] == "coordinator"), None)
        out["coordinator"] = {"pid": pid, "epoch": lease.epoch if lease is not None else None}
        out["weights_version"] = said["weights_version"]
    else:
        out["problems"].append("there is no coordinator now")
    out["runners"], out["batches"] = said["runners"], said["batches"]
    known = {r["runner"] for r in said["runners"]}
    for child in children:
        if child["name"] not in known | {"coordinator"}:
            out["runners"].append({"runner": child["name"], "state": child["state"], "pid": child["pid"]})
    for runner in said["runners"]:
        if runner["state"] in ("failed", "lost"):
            out["problems"].append(f"{runner['runner']} {runner['state']}: {runner.get('reason', '')}")


def _read(config: Config, out: dict[str, Any]) -> None:
    try:
        log = open_log(config.store.url)
    except (LogNotFound, NotALog) as e:
        out["problems"].append(str(e))
        return
    with log:
        out["batches"] = [
            {"batch_id": b.batch_id, "state": b.state, "tasks": b.tasks, "settled": b.finished,
             "failed_attempts": b.failed_attempts}
            for b in log.batches() if b.ended_at is None
        ]
    with EventLog.open(config.store.url, read_only=True) as events, events.engine.connect() as connection:
        rows = connection.execute(select(readmodels.runners)).mappings()
        out["runners"] = [
            {"runner": r["runner"], "incarnation": r["incarnation"], "last_state": r["state"], "state": "down",
             "pid": r["pid"], "model_version": r["model_version"], "reason": r["reason"]}
            for r in rows
        ]


def show(out: Console, found: dict[str, Any]) -> None:
    """The same for a person."""
    def line(text: str, style: str = "") -> None:
        out.print(Text(plain(text), style=style), soft_wrap=True)

    line(f"store        {found['store']}")
    line(f"system       {'up, pid ' + str(found['admin']['pid']) if found['up'] else 'down'}",
         "green" if found["up"] else "yellow")
    if found["coordinator"] is not None:
        coordinator = found["coordinator"]
        line(f"coordinator  pid {coordinator['pid']}, epoch {coordinator['epoch']}, "
             f"weights version {found['weights_version']}")
    for r in found["runners"]:
        load = f", {r['load']} of {r['places']} places taken" if "load" in r and r.get("places") else ""
        version = f", version {r['model_version']}" if r.get("model_version") is not None else ""
        state = "loading engine…" if r["state"] == "started" else r["state"]
        line(f"{r['runner']:<12} {state}, pid {r['pid']}{version}{load}")
    line(f"open batches {len(found['batches'])}")
    for b in found["batches"]:
        running = f", {b['running_units']} units running, {b['pending_units']} waiting" if "running_units" in b else ""
        failed = f", {b['failed_attempts']} failed attempts" if b["failed_attempts"] else ""
        line(f"  {b['batch_id']}: {b['state']}, {b['settled']} of {b['tasks']} tasks{running}{failed}")
    for problem in found["problems"]:
        line(f"! {problem}", "red")
    if not found["problems"]:
        line("all is well", "green")
