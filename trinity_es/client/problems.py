"""Problems of a system for `trinity-es status`: each line names the faulty part, its fault and the remedy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from trinity_es.config.config import Config
from trinity_es.projections.why.answer import (
    ADD_SERVER,
    Why,
    end_of_run,
    resume_advice,
    resume_after_fix,
    resume_command,
    span,
)
from trinity_es.projections.why.runners import coordinator_absence, runner_problem
from trinity_es.projections.why.system_state import SystemSnapshot, current_runners
from trinity_es.safe_text import plain

__all__ = ["problems"]

_SYSTEM_CAUSES = {"no_server", "unwritten", "no_system", "ending", "restarting", "no_answer", "fenced",
                  "no_coordinator", "no_database"}
"""Causes of a batch's wait that are reported once for the system, not once per batch."""


def problems(config: Config, health: dict[str, Any], live: dict[str, Any] | None, whys: list[Why]) -> Iterator[str]:
    """Yield a line per problem. `health`: the result of `read_health` so far; `live`: the status, None if down."""
    logs = config.system.log_dir
    last_batch, run = health["last_batch"] or {}, health["run"] or {}
    resume = resume_command(health["store"]) if run else ""
    if last_batch.get("failed_whole") and not health["batches"]:
        remedy = f"{resume_after_fix(resume)} generates it again" if resume else "start its trainer again"
        yield (f"batch {plain(last_batch['batch_id'])}, the last, gave nothing: each of its runs failed; "
               f"`trinity-es why {plain(last_batch['batch_id'])}` says how: fix that, then {remedy}")
    if health["led_by"]:
        yield (f"the run is led by {health['led_by']}, and this machine takes no part in it: this is read from the "
               "log; for more ask there, or on a host that takes part (`trinity-es join`)")
        return
    if not health["up"]:
        remedy = resume_advice(resume)
        if health["ends"]:
            if whys or run.get("complete") is False:
                yield f"the actor system ends: {health['ends']}; {remedy}"
        elif health["keeper"] is not None:
            yield (f"the actor system is gone, and its keeper (pid {health['keeper']}) starts it again: if it does not "
                   f"come, keeper.log in {logs} says why")
        elif whys:
            progress = f"the run is at step {run['step']} and " if run else ""
            count = "1 batch is" if len(whys) == 1 else f"{len(whys)} batches are"
            yield f"no actor system runs on this store, though {progress}{count} open: {remedy}"
        elif not run.get("complete"):
            yield from _interrupted_run(health["killed"], resume, run)
        return
    if live is None and (stopped_pids := _stopped_processes(health["admin"]["pid"])):
        pids = " ".join(map(str, stopped_pids))
        yield (f"its processes are stopped (SIGSTOP) and answer nothing: `kill -CONT {pids}` lets them go on, and "
               "nothing is lost")
        return
    if live is None:
        yield (f"the actor system (pid {health['admin']['pid']}) does not answer: guardian.log and coordinator.log in "
               f"{logs} say why; `trinity-es down` and `trinity-es up` go on with what is open")
        return
    if health["keeper"] is None and health["keeper_ended"] and config.system.keeper:
        yield (f"its keeper (pid {health['keeper_ended']}) has ended: batches go on, but if the guardian or the admin "
               "dies, neither is started again; `trinity-es down` and `trinity-es up` bring a keeper back")
    fenced = live["system"].get("fenced")
    if fenced:
        yield (f"another system took this store ({fenced}), so this one has halted: end the wrong one with "
               "`trinity-es down` on its host")
        return
    if health["coordinator"] is None and not live.get("refuses"):  # a refusal is reported below
        children = {c["name"]: c for c in live["system"].get("children", [])}
        yield (f"{coordinator_absence(children.get('coordinator', {}))}; if it does not come, coordinator.log in "
               f"{logs} says why")
    if live.get("trouble"):
        yield f"{live['trouble']} (coordinator.log in {logs} says more)"
    for output in live.get("outputs", []):
        if output["error"] is not None:
            yield (f"output {output['output']} can't be written and is tried again: {output['error']}; batches go on, "
                   "and the experiences that it lacks are kept for it")
    leases = live.get("leases", {})
    for lease in leases.get("first_failing", []):
        yield (f"lease {lease['lease']} of {lease['provider']} could not be released in {lease['tries']} tries, and is "
               f"tried again: {lease['error']}; fix what it names; `trinity-es leases` lists all {leases['failing']}")
    for host in live.get("hosts", []):
        if fault := _host_fault(host):
            yield f"host {host['host']} {fault}"
    if live.get("server_list"):
        yield f"{live['server_list']}; the servers stay as they are until that is fixed (text logs: {logs})"
    if live.get("server_list") is not None and not any(s["wanted"] for s in live["servers"]):
        yield f"there is no server, so nothing is generated: {ADD_SERVER}"
    now = time.time()
    snapshot = SystemSnapshot(weights=live.get("weights_version", 0))
    for name, life in current_runners(snapshot, live, now):
        if fault := runner_problem(snapshot, life, now):
            yield f"{name} {fault} ({name}.log in {logs} says more)"
    for why in whys:
        if why.stalled and why.cause not in _SYSTEM_CAUSES:
            has_more = len(why.waiting) > 1 or why.waiting[0].way_out
            more = f"; `trinity-es why {why.batch_id}` says more" if has_more else ""
            yield f"batch {why.batch_id} is stalled: {why.sentence}{more}"


def _interrupted_run(killed: dict[str, int], resume: str, run: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if processes of the run were killed. `killed`: their pids by role (explorer, trainer)."""
    if not killed:
        return
    if len(set(killed.values())) == 1:  # of a run in one process
        processes = f"its {' and '.join(killed)} (pid {next(iter(killed.values()))})"
    else:
        processes = " and ".join(f"its {role} (pid {pid})" for role, pid in killed.items())
    remedy = f"`{resume}` goes on with it" if resume else "start it again, and it goes on where the log ends"
    facts = f" ({', '.join(end_of_run(run))})" if end_of_run(run) else ""
    yield f"the run did not end in order: {processes} died in the middle of it{facts}; {remedy}"


def _host_fault(host: dict[str, Any]) -> str | None:
    if host["state"] == "lost":
        return (f"was lost: {host['reason']}; its work is attempted elsewhere. If it does not come back by itself, run "
                "`trinity-es join` on it")
    if not host["connected"]:
        reason = host["why_away"] or "the coordinator was started"
        return (f"has not been heard of for {span(host['away_for'])} ({reason}): after {span(host['lost_after'])} it "
                "is lost, and its work is attempted elsewhere")
    return None


def _stopped_processes(admin_pid: int) -> list[int]:
    """Return the pids of those processes, among the admin and its descendants, that SIGSTOP suspended."""
    pids = list[int]()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(admin_pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    pids.append(process.pid)
    return pids
