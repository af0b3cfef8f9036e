"""Output of `trinity-es status`."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.projections.event_texts import counted
from trinity_es.projections.host_states import host_of
from trinity_es.projections.why.answer import end_of_run, resume_command, span
from trinity_es.safe_text import clock, devices, does, plain

__all__ = ["print_status", "verdict"]

_NOT_READY = "nothing is wrong, and no engine is ready yet"


def _run_progress(status: dict[str, Any]) -> str:
    """Return the progress of the run of a system that is down, and how to resume it, as the end of a sentence."""
    run, last_batch = status.get("run"), status.get("last_batch")
    if run is None and last_batch is not None:
        ago = span(time.time() - last_batch["ended_at"])
        return f": batch {plain(last_batch['batch_id'])}, the last, was {last_batch['state']} {ago} ago"
    if run is None:
        return ": no batch has ended yet"
    if run["complete"]:
        return f": the run is complete, with step {run['step']}"
    of_total = "" if run["total_steps"] is None else f" of {run['total_steps']}"
    end = ", or says that it is complete" if run["complete"] is None else ""
    facts = ", ".join([f"the run's last step is {run['step']}{of_total}", *end_of_run(run)])
    pids = " ".join(str(pid) for pid in sorted(set(status.get("held", {}).values())))
    held = f"when its process {pids} has ended (`kill -9 {pids}` if it hangs), " if pids else ""
    return f": {facts}, and {held}`{resume_command(status['store'])}` goes on with it{end}"


def _idle_line(last_batch: dict[str, Any]) -> str:
    """Return the line for a running system without an open batch, with the last batch, as its trainer may have died."""
    is_untrained = (last_batch["batch_type"] == "train" and last_batch["state"] == "finalized"
                    and last_batch["trained_step"] is None)
    return (f"nothing is wrong here, and no batch is open: the last, {plain(last_batch['batch_id'])}, was "
            f"{last_batch['state']} {span(time.time() - last_batch['ended_at'])} ago"
            + (f", with {last_batch['short']}" if last_batch.get("short") else "")
            + (", and no trainer has acknowledged it" if is_untrained else ""))


def _runner_line(runner: dict[str, Any]) -> str:
    load = ""
    if "load" in runner and runner.get("places"):
        units, places = runner["load"], runner["places"]
        # A runner whose units are short gets more units than it can play at a time.
        ahead = f", {units - places} more units sent ahead" if units > places else ""
        load = f", {min(units, places)} of {places} places taken{ahead}"
    version = f", version {runner['model_version']}" if runner.get("model_version") is not None else ""
    model = runner.get("model", "rollout")
    version = version if model == "rollout" else f", auxiliary model {model}"
    endpoint = f", {runner['endpoint']}" if runner.get("endpoint") else ""
    return f"{runner['runner']:<12} {does(runner)}, pid {runner['pid']}{version}{load}{endpoint}"


def _host_line(host: dict[str, Any]) -> str:
    state = host["state"]
    since = f" since {clock(host['since'], date=True)}" if host.get("since") else ""
    silence = f", not heard of for {span(host['away_for'])}" if host.get("away_for") and state != "lost" else ""
    device_text = f", {devices(host['places'])}" if devices(host["places"]) else ""
    runners = counted(len(host["runners"]), "runner") + (f", {len(host['ready'])} ready" if "ready" in host else "")
    work = "" if state in ("lost", "left") else f", {runners}, {counted(host['units'], 'unit')}"
    finished = f", {counted(host['finished'], 'task')} finished" if "finished" in host else ""
    return (f"host {host['host']:<7} {state}{since}{silence}, epoch {host['epoch']}, {host['address']}{device_text}"
            f"{work}{finished}")


def print_status(out: Console, status: dict[str, Any]) -> None:
    """Print the system, its hosts and runners, open batches, and problems; without problems, a sentence says so."""
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
    for runner in sorted(status["runners"], key=lambda r: host_of(r["runner"])):  # on one host the order stays
        if (host := hosts.pop(host_of(runner["runner"]), None)) is not None:
            line(_host_line(host))
        line(_runner_line(runner))
    for host in hosts.values():  # those without a runner
        line(_host_line(host))
    line(f"open batches {len(status['batches'])}")
    for b in status["batches"]:
        running = f", {b['running_units']} units running, {b['pending_units']} waiting" if "running_units" in b else ""
        failed = f", {b['failed_attempts']} failed attempts" if b["failed_attempts"] else ""
        line(f"  {b['batch_id']}: {b['state']}, {b['settled']} of {b['tasks']} tasks{running}{failed}")
        if b.get("waiting_for"):
            line(f"    waits for: {b['waiting_for']}", "red" if b["stalled"] else "dim")
    for problem in status["problems"]:
        line(f"! {problem}", "red")
    if not status["problems"]:
        text = verdict(status)
        line(text, {"all is well": "green", _NOT_READY: "yellow"}.get(text, ""))


def verdict(status: dict[str, Any]) -> str:
    """Describe a system without problems in one sentence."""
    if not status["up"]:
        return f"nothing runs, and no batch is open{_run_progress(status)}"
    if not status["batches"] and status.get("last_batch"):
        return _idle_line(status["last_batch"])
    return "all is well" if any(r["state"] == "ready" for r in status["runners"]) else _NOT_READY
