"""Output of `trinity-es status`."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.projections.host_states import host_of
from trinity_es.projections.why.answer import counted, resume_command, span
from trinity_es.safe_text import clock, devices, does, plain

__all__ = ["show"]


def _run_progress(run: dict[str, Any] | None, store: str, last: dict[str, Any] | None) -> str:
    if run is None and last is not None:
        ago = span(time.time() - last["ended_at"])
        return f": batch {plain(last['batch_id'])}, the last, was {last['state']} {ago} ago"
    if run is None:
        return ": no batch has ended yet"
    if run["complete"]:
        return f": the run is complete, with step {run['step']}"
    of = "" if run["total_steps"] is None else f" of {run['total_steps']}"
    end = ", or says that it is complete" if run["complete"] is None else ""
    return f": the run's last step is {run['step']}{of}, and `{resume_command(store)}` goes on with it{end}"


def _idle(last: dict[str, Any]) -> str:
    """Return when the last batch ended: its trainer may have died without a word."""
    untrained = last["batch_type"] == "train" and last["state"] == "finalized" and last["trained_step"] is None
    return (f"nothing is wrong here, and no batch is open: the last, {plain(last['batch_id'])}, was {last['state']} "
            f"{span(time.time() - last['ended_at'])} ago"
            + (f", with {last['short']}" if last.get("short") else "")
            + (", and no trainer has acknowledged it" if untrained else ""))


def _runner_line(r: dict[str, Any]) -> str:
    load = ""
    if "load" in r and r.get("places"):  # a runner of short units has more of them than places
        ahead = f", {r['load'] - r['places']} more units sent ahead" if r["load"] > r["places"] else ""
        load = f", {min(r['load'], r['places'])} of {r['places']} places taken{ahead}"
    version = f", version {r['model_version']}" if r.get("model_version") is not None else ""
    model = r.get("model", "rollout")
    version = version if model == "rollout" else f", auxiliary model {model}"
    endpoint = f", {r['endpoint']}" if r.get("endpoint") else ""
    return f"{r['runner']:<12} {does(r)}, pid {r['pid']}{version}{load}{endpoint}"


def _host_line(h: dict[str, Any]) -> str:
    since = f" since {clock(h['since'], date=True)}" if h.get("since") else ""
    away = f", not heard of for {span(h['away_for'])}" if h.get("away_for") and h["state"] != "lost" else ""
    has = f", {devices(h['places'])}" if devices(h["places"]) else ""
    runners = counted(len(h["runners"]), "runner") + (f", {len(h['ready'])} ready" if "ready" in h else "")
    work = "" if h["state"] in ("lost", "left") else f", {runners}, {counted(h['units'], 'unit')}"
    finished = f", {counted(h['finished'], 'task')} finished" if "finished" in h else ""
    return f"host {h['host']:<7} {h['state']}{since}{away}, epoch {h['epoch']}, {h['address']}{has}{work}{finished}"


def show(out: Console, status: dict[str, Any]) -> None:
    def line(text: str, style: str = "") -> None:
        out.print(Text(plain(text), style=style), soft_wrap=True)

    line(f"store        {status['store']}")
    down = f"ends: {status['ends']}" if status.get("ends") else "down"
    down = f"led by {status['led_by']}, which was not asked" if status.get("led_by") else down
    line(f"system       {'up, pid ' + str(status['admin']['pid']) if status['up'] else down}",
         "green" if status["up"] else "yellow")
    if status["coordinator"] is not None:
        coordinator = status["coordinator"]
        line(f"coordinator  pid {coordinator['pid']}, epoch {coordinator['epoch']}, "
             f"weights version {status['weights_version']}")
    hosts = {h["host"]: h for h in status.get("hosts", [])}
    for r in sorted(status["runners"], key=lambda r: host_of(r["runner"])):  # on one host the order stays
        if (h := hosts.pop(host_of(r["runner"]), None)) is not None:
            line(_host_line(h))
        line(_runner_line(r))
    for h in hosts.values():
        line(_host_line(h))
    line(f"open batches {len(status['batches'])}")
    for b in status["batches"]:
        running = f", {b['running_units']} units running, {b['pending_units']} waiting" if "running_units" in b else ""
        failed = f", {b['failed_attempts']} failed attempts" if b["failed_attempts"] else ""
        line(f"  {b['batch_id']}: {b['state']}, {b['settled']} of {b['tasks']} tasks{running}{failed}")
        if b.get("waiting_for"):
            line(f"    waits for: {b['waiting_for']}", "red" if b["stalled"] else "dim")
    for problem in status["problems"]:
        line(f"! {problem}", "red")
    if status["problems"]:
        return
    if not status["up"]:
        progress = _run_progress(status.get("run"), status["store"], status.get("last_batch"))
        line(f"nothing runs, and no batch is open{progress}")
    elif not status["batches"] and status.get("last_batch"):
        line(_idle(status["last_batch"]))
    elif any(r["state"] == "ready" for r in status["runners"]):
        line("all is well", "green")
    else:
        line("nothing is wrong, and no engine is ready yet", "yellow")
