"""How a system is: asked of itself where it runs, else read from its log. Used by `trinity-es status` and `why`.

Each problem is one line that names the thing, what is wrong with it, and the way out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from trinity_es.client.unanswered import state_of_runner, stopped_processes
from trinity_es.config.config import Config
from trinity_es.events.errors import (
    BatchNotFound,
    LogError,
    LogNotFound,
    LogRewound,
    LogUnavailable,
    NotALog,
    TrinityError,
    WrongKey,
)
from trinity_es.events.store.database.retry import within
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.events.vocabulary import HostJoined, TasksetAdvanced
from trinity_es.projections.history.host_lives import last_lives
from trinity_es.projections.hosts import host_of
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.resume_point import sources_of
from trinity_es.projections.tables.runner_history import natural
from trinity_es.projections.why.answer import (
    ADD_SERVER,
    Why,
    another_life,
    counted,
    go_on,
    mend,
    mend_weights,
    mended,
    resume_command,
    span,
    start_server,
    unread,
)
from trinity_es.projections.why.explain import SILENT_SECONDS
from trinity_es.projections.why.situation import RunnerSnapshot, SystemSnapshot, with_live
from trinity_es.system import remembered_log_end
from trinity_es.text import clock, devices, does, plain

__all__ = ["explain", "facts", "look", "problems", "show"]

READ_SECONDS = 10.0
"""Maximum of the time that the log may take to be read: its server may be frozen."""
AWAITED_SECONDS = 10.0
"""How long an engine may wait for what somebody else has to do, its server say, before that is a problem."""
LOADING_SECONDS = 300.0
"""How long an engine may load weights before that is a problem: nothing else ends a server that hangs in it."""
_WHOLE = {"no_server", "unwritten", "no_system", "ending", "restarting", "no_answer", "fenced", "no_coordinator",
          "no_database"}
"""Causes that are told once for the system, not once a batch."""


def facts(config: Config) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """`live` and `system` for `Log.why`: asked of the system of this store, if one runs and this machine can ask it.

    Raises WrongKey, and LogRewound where the system stands still because of it.
    """
    try:
        from trinity_es.system import keeper_lock, running_system
    except ImportError:  # a log is read also where thespian is not installed
        return None, {}
    if running_system.find(config) is None:
        return None, keeper_lock.stopped(config)
    from trinity_es.client.rollout_client import connect  # all actors with it: only where there is somebody to ask

    try:
        with connect(config) as client:
            return client.facts()
    except (LogRewound, WrongKey):
        raise  # who asks may not, and has to know; or nothing goes on until somebody mends it
    except TrinityError:  # it ended meanwhile: the log knows who ran
        return None, {}


def explain(config: Config, batch: str | None = None, find: Callable[[Log, str], BatchId] | None = None) -> list[Why]:
    """Tell what this batch waits for, or every open one; `find` makes its id of what a person typed.

    While the log can't be read: what the running system says of those that are open. Raises BatchNotFound, LogError;
    LogRewound where the log lost what was acknowledged.
    """
    with contextlib.suppress(LogUnavailable):
        within(READ_SECONDS, lambda: remembered_log_end.require(config))
    live, running_system = facts(config)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if batch is None or find is None:
                return log.why_open(live=live, system=running_system)
            try:
                batch_id = find(log, batch)
            except BatchNotFound as e:
                raise BatchNotFound(e.message + _starting(live)) from None
            return [log.why(batch_id, live=live, system=running_system)]

    try:
        return within(READ_SECONDS, read)
    except LogUnavailable as e:
        found = unread(live or {}, e.message, now=time.time())
        chosen = [w for w in found if batch is None or batch in (str(w.batch_id), f"'{w.batch_id}'")]
        if not chosen:
            raise
        return chosen


def _starting(live: dict[str, Any] | None) -> str:
    """Return what a system still does before it serves: a batch that is not there yet may be about to come."""
    if live is None:
        return ""
    if "weights_version" not in live:
        return "; the system is starting: its coordinator is not up yet"
    runners = live["runners"]
    if any(r["state"] == "ready" for r in runners):
        return ""
    told = "; ".join(f"{r['runner']} {does(r)}" for r in runners) or "no engine is up yet"
    return f"; the system is starting: {told}"


def look(config: Config) -> dict[str, Any]:
    """Health as plain JSON: `up`, `coordinator`, `runners`, `batches` (open ones), `problems` ([]: none).

    `ends`: why what is left of a system ends; `led_by`: who leads the run now where this machine takes no part in it;
    `last_batch`: the one that ended last; `run`: the `trinity-es run` that the log holds; `killed`: the explorer and
    trainer that ended in the middle on this machine, by their pids. None, "" or {} where there is none.
    """
    from trinity_es.system import keeper_lock, run_lock, running_system

    out: dict[str, Any] = {
        "store": config.masked()["store"]["url"], "up": False, "keeper": keeper_lock.running(config),
        "keeper_ended": keeper_lock.ended(config),
        "coordinator": None, "weights_version": None, "runners": [], "hosts": [], "batches": [], "problems": [],
        "ends": "", "led_by": "", "last_batch": None, "run": None, "killed": run_lock.killed(config),
    }
    admin = running_system.find(config)
    try:
        live, processes = facts(config)
        lost = None
        with contextlib.suppress(LogUnavailable):  # told below
            lost = within(READ_SECONDS, lambda: remembered_log_end.look(config))
    except LogRewound as e:
        live, processes, lost = None, {"up": True}, e.message
    except LogError as e:
        out["problems"].append(f"the log can't be read: {e.message}")
        return out
    if lost is not None:
        out["problems"].append(lost)
    out["up"], out["ends"] = admin is not None, processes.get("ends", "")
    if admin is not None:
        out["admin"] = admin
    else:
        with contextlib.suppress(LogError):  # told below
            out["led_by"] = within(READ_SECONDS, lambda: running_system.led_elsewhere(config))
    if live is not None:
        _told(config, out, live)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if live is None or "weights_version" not in live:
                _read(config, log, out)
            found = log.why_open(live=live, system=processes)
            out.update(last_batch=_last_batch(log), run=_run(log))
            if log.streams(HostJoined.stream):
                shown = {h["host"] for h in out["hosts"]}
                out["hosts"] = [row.as_dict() for row in read_hosts(log, live, processes)
                                if row.host and (row.there or row.host in shown)]
            return found

    try:
        whys = within(READ_SECONDS, read)
    except LogUnavailable as e:
        whys = unread(live or {}, e.message, now=time.time())
        if not (live or {}).get("trouble"):
            out["problems"].append(f"the log can't be read: {e.message}")
    except (LogNotFound, NotALog) as e:
        if lost is not None:
            return out
        out["problems"].append(f"no actor system runs on this store, and it holds no log: {e.message}")
        return out
    except LogError as e:
        out["problems"].append(f"the log can't be read: {e.message}")
        return out
    out["runners"].sort(key=lambda row: natural(row["runner"]))
    whys = [w for w in whys if w.state not in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)]
    out["batches"] = _open_batches(out["batches"], whys, units=live is not None and "weights_version" in live)
    if lost is None:
        out["problems"] += problems(config, out, live, whys)
    return out


def _told(config: Config, out: dict[str, Any], live: dict[str, Any]) -> None:
    """Read what the running system says."""
    children = live["system"].get("children", [])
    if "weights_version" in live:
        pid = next((c["pid"] for c in children if c["name"] == "coordinator"), None)
        out["coordinator"] = {"pid": pid, "epoch": live.get("epoch")}
        out["weights_version"] = live["weights_version"]
    lives = dict(with_live(SystemSnapshot(), live, time.time()))
    rows = {row["runner"]: row for row in live["runners"]}
    pids = {c["name"]: c["pid"] for c in children}
    for name, life in lives.items():
        row = {"pid": pids.get(name), **rows.get(name, {}), "runner": name, "state": life.state}
        row |= {"incarnation": life.incarnation, "reason": life.reason, "restart_in": life.restart_in,
                "model": life.model}
        out["runners"].append(row)
    out["batches"], out["hosts"] = live["batches"], live.get("hosts", [])


def _open_batches(rows: list[dict[str, Any]], whys: list[Why], *, units: bool) -> list[dict[str, Any]]:
    """Return the open batches as `whys` has them: the log is read after the system answered, and is ahead of `rows`."""
    known = {row["batch_id"]: row for row in rows}
    return [
        known.get(w.batch_id, {}) | {
            "batch_id": w.batch_id, "state": w.state, "tasks": w.tasks, "settled": w.settled,
            "failed_attempts": w.failed_attempts, "cause": w.cause, "waiting_for": w.sentence, "stalled": w.stalled,
        } | ({"running_units": w.running_units, "pending_units": w.pending_units} if units else {})
        for w in whys
    ]


def _read(config: Config, log: Log, out: dict[str, Any]) -> None:
    """Add what the log knows, where nobody says it."""
    out["batches"] = [
        {"batch_id": b.batch_id, "state": b.state, "tasks": b.tasks, "settled": b.finished,
         "failed_attempts": b.failed_attempts}
        for b in log.batches() if b.ended_at is None
    ]
    if out["runners"]:
        return
    gone = {host for host, last in last_lives(log.hosts()).items() if not last.there}
    out["runners"] = [
        {"runner": life.runner, "incarnation": life.incarnation, "last_state": life.state,
         "state": life.state if out.get("led_by") else state_of_runner(life.pid, up=out["up"]),
         "pid": life.pid, "model_version": life.model_version, "reason": life.reason}
        for life in {life.runner: life for life in log.runner_lives()}.values()
        if host_of(life.runner) not in gone
    ]


def _last_batch(log: Log) -> dict[str, Any] | None:
    """Return the batch that ended last, of a log where one has."""
    for b in log.batches(sort="ended", descending=True, limit=1):
        if b.ended_at is not None:
            state = log.current(b.batch_id)
            return {"batch_id": b.batch_id, "batch_type": b.batch_type, "state": b.state, "ended_at": b.ended_at,
                    "trained_step": b.trained_step, "failed_whole": state is not None and state.failed_whole}
    return None


def _run(log: Log) -> dict[str, Any] | None:
    """Return how far the `trinity-es run` of this log is: `step` (the last that was begun), `total_steps` (None: until
    its tasksets end), `complete` (None: they alone know). None where its batches are somebody else's.
    """
    newest = log.batches(batch_type="train", descending=True, limit=1)
    if not newest or not log.streams("taskset/"):
        return None
    config, last = log.config(serve=False)[1], newest[0]
    step, total = log.count_batches(batch_type="train"), config.get("total_steps")
    trains = (config.get("trainer") or {}).get("class") is not None
    over = last.state == BatchLifecycleState.ABORTED or last.trained_step is not None or (
        last.state == BatchLifecycleState.FINALIZED and not trains)
    ends = _last_step(log, config, step)
    total = min((n for n in (total, ends) if n is not None), default=None)
    complete = over and step >= total if total is not None else None if over else False
    return {"step": step, "total_steps": total, "complete": complete}


def _last_step(log: Log, config: Mapping[str, Any], step: int) -> int | None:
    """Return the step with which the tasksets of a run end; None where one is read without end, or is not known."""
    buffer, sources, left = config.get("buffer") or {}, sources_of(log), 0
    inputs = buffer.get("explorer_input") or {}
    entries = inputs.get("tasksets")
    if not entries:
        return None
    for entry in entries:
        name, epochs = entry.get("name"), entry.get("epochs", 1)
        source = sources.get((name, False))
        if source is None or epochs is None:
            return None
        last = log.last(f"taskset/{name}", "TasksetAdvanced")
        read = (last.event.epoch, last.event.offset) if last and isinstance(last.event, TasksetAdvanced) else (0, 0)
        left += (epochs - read[0]) * source.rows - read[1]
    size = buffer.get("batch_size") or 1
    return step + max(0, left // size if inputs.get("drop_last") else -(-left // size))


def problems(config: Config, out: dict[str, Any], live: dict[str, Any] | None, whys: list[Why]) -> Iterator[str]:
    """Yield what is wrong, a line each. `out`: `look`'s; `live`: what the system says, None where it does not."""
    logs = config.system.log_dir
    last = out.get("last_batch") or {}
    resume = resume_command(out["store"]) if out.get("run") else ""
    if last.get("failed_whole") and not out["batches"]:
        way = f"{mended(resume)} generates it anew" if resume else "start its trainer again"
        yield (f"batch {plain(last['batch_id'])}, the last, gave nothing: each of its runs failed; "
               f"`trinity-es why {plain(last['batch_id'])}` tells how: mend that, then {way}")
    if out.get("led_by"):
        yield (f"the run is led by {out['led_by']}, and this machine takes no part in it: this is what the log tells; "
               "for more ask there, or on a host that does (`trinity-es join`)")
        return
    if not out["up"]:
        way = go_on(resume)
        if out.get("ends"):
            if whys or _unfinished(out):
                yield f"the actor system ends: {out['ends']}; {way}"
        elif out["keeper"] is not None:
            yield (f"the actor system is gone, and its keeper (pid {out['keeper']}) starts it again: if it does not "
                   f"come, keeper.log in {logs} tells why")
        elif whys:
            at = f"the run is at step {out['run']['step']} and " if out.get("run") else ""
            yield f"no actor system runs on this store, though {at}{_count(len(whys), 'batch', 'batches')} open: {way}"
        elif not (out.get("run") and out["run"]["complete"]):
            yield from _killed(out.get("killed") or {}, resume)
        return
    if live is None and (halted := stopped_processes(out["admin"]["pid"])):
        pids = " ".join(map(str, halted))
        yield (f"its processes are stopped (SIGSTOP) and answer nothing: `kill -CONT {pids}` lets them go on where "
               "they are, and nothing is lost")
        return
    if live is None:
        yield (f"the actor system (pid {out['admin']['pid']}) does not answer: guardian.log and coordinator.log in "
               f"{logs} tell why; `trinity-es down` and `trinity-es up` go on with what is open")
        return
    if out["keeper"] is None and out.get("keeper_ended") and config.system.keeper:
        yield (f"its keeper (pid {out['keeper_ended']}) has ended: batches go on, and nobody starts the guardian or "
               "the admin again should one die; `trinity-es down` and `trinity-es up` bring a keeper back")
    children = {c["name"]: c for c in live["system"].get("children", [])}
    fenced = live["system"].get("fenced")
    if fenced:
        yield (f"another system took this store ({fenced}), so this one stands still: end the one that is not wanted "
               "with `trinity-es down` on its host")
        return
    if out["coordinator"] is None and not live.get("refuses"):  # else one is there, and says below what it waits for
        child = children.get("coordinator", {})
        again = child.get("restart_in")
        soon = "it is being started" if again is None else f"it is started in {span(again)}"
        yield (f"there is no coordinator now ({child.get('reason') or 'it has not come up yet'}): {soon}; if it does "
               f"not come, coordinator.log in {logs} tells why")
    if live.get("trouble"):
        yield f"{live['trouble']} (coordinator.log in {logs} tells more)"
    for output in live.get("outputs", []):
        if output["error"] is not None:
            yield (f"output {output['output']} can't be written and is tried again: {output['error']}; batches go on, "
                   "and what it lacks is kept for it")
    failing = live.get("leases", {})
    for lease in failing.get("first_failing", []):
        yield (f"lease {lease['lease']} of {lease['provider']} could not be released in {lease['tries']} tries, and is "
               f"tried again: {lease['error']}; mend what it names; `trinity-es leases` lists all {failing['failing']}")
    for host in live.get("hosts", []):
        if wrong := _wrong_host(host):
            yield f"host {host['host']} {wrong}"
    if live.get("server_list"):
        yield f"{live['server_list']}; it changes nothing until that is mended (text logs: {logs})"
    if live.get("server_list") is not None and not any(s["wanted"] for s in live["servers"]):
        yield f"there is no server, so nothing is generated: {ADD_SERVER}"
    now = time.time()
    for name, life in with_live(SystemSnapshot(), live, now):
        wrong = _wrong(life, now)
        if wrong:
            yield f"{name} {wrong} ({name}.log in {logs} tells more)"
    for told in whys:
        if told.stalled and told.cause not in _WHOLE:
            first = told.waiting[0]
            more = f"; `trinity-es why {told.batch_id}` tells more" if len(told.waiting) > 1 or first.way_out else ""
            yield f"batch {told.batch_id} is stalled: {told.sentence}{more}"


def _killed(killed: dict[str, int], resume: str) -> Iterator[str]:
    """Yield a line where an explorer or a trainer was killed and nothing else tells of it."""
    if killed:
        if len(set(killed.values())) == 1:  # of a run in one process
            who = f"its {' and '.join(killed)} (pid {next(iter(killed.values()))})"
        else:
            who = " and ".join(f"its {role} (pid {pid})" for role, pid in killed.items())
        way = f"`{resume}` goes on with it" if resume else "start it again, and it goes on where the log ends"
        yield f"the run was not ended in order: {who} ended in the middle of it; {way}"


def _wrong_host(host: dict[str, Any]) -> str | None:
    """Return what is wrong with a host that joined, and the way out; None: nothing."""
    if host["state"] == "lost":
        return (f"was lost: {host['reason']}; what it had is attempted elsewhere. `trinity-es join` on it brings it "
                "back, where it does not come by itself")
    if not host["connected"]:
        why = host["why_away"] or "the coordinator was started"
        return (f"has not been heard of for {span(host['away_for'])} ({why}): after {span(host['lost_after'])} it is "
                "lost, and what it has is attempted elsewhere")
    return None


def _wrong(life: RunnerSnapshot, now: float) -> str | None:
    """Return what is wrong with a runner, and the way out; None: nothing."""
    match life.state:
        case "retired":  # it was let go: that it says nothing any more is as it should be
            return None
        case "failed" if life.refused is not None:
            return f"failed: {life.reason}; {mend_weights(life.server)}"
        case "ready" if life.refused is not None:
            version, why = life.refused
            return (f"goes on with weights version {life.model_version}: it can't load version {version}, the current "
                    f"one: {why}; {mend_weights(life.server)}")
        case "failed" if life.places:  # it has served: its process ends, and another follows
            return f"failed: {life.reason}; it is started again"
        case "failed":
            anew = "mend what it names, then `trinity-es down` and `trinity-es up`"
            return f"failed: {life.reason}; {mend(life.name, life.server) if life.server else anew}"
        case "quarantined":
            return f"is quarantined and not started again: {life.reason}; {mend(life.name, life.server)}"
        case "lost":
            again = "" if life.restart_in is None else f" in {span(life.restart_in)}"
            return f"was lost: {life.reason}; it is started again{again}"
        case "down":
            return f"is down: {life.reason or 'it was ended'}; `trinity-es down` and `trinity-es up` start it again"
        case "started" if life.waits_for and now - (life.progressed or 0.0) > AWAITED_SECONDS and not life.leaving:
            way = f"; {start_server(life.server)}" if life.server else ""
            return f"waits to start its engine: {life.waits_for}{way}"
    loads = now - (life.loading_since or now) if life.state == "ready" and life.loading is not None else 0.0
    if loads > LOADING_SECONDS:
        awaited = f" (it waits for {life.waits_for})" if life.waits_for else ""
        what = life.server or "its engine"
        return (f"has been loading weights version {life.loading} for {span(loads)}{awaited}, and gets no work "
                f"meanwhile: see whether {what} does something, else {another_life(life.name, life.server)}")
    if life.trouble:
        return f"can't store what it finished, keeps it and tries again: {life.trouble}"
    if (life.silent or 0.0) > SILENT_SECONDS:
        return (f"is hung: its engine's loop has not answered for {span(life.silent or 0.0)}; it is ended after "
                "system.hang_timeout and started again")
    if life.runs_wait and life.state == "ready":
        return f"is up, and {life.runs_wait}: see to that"
    return None


def _unfinished(found: dict[str, Any]) -> bool:
    """Return True if a `trinity-es run` is known to have something left."""
    return bool(found.get("run")) and found["run"]["complete"] is False


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one} is" if n == 1 else f"{n} {many} are"


def _of_run(run: dict[str, Any] | None, store: str, last: dict[str, Any] | None) -> str:
    """Return how far a run is of which nothing runs."""
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
    """Return since when nobody has asked the system for anything: a trainer that died can't say so."""
    untrained = last["batch_type"] == "train" and last["state"] == "finalized" and last["trained_step"] is None
    return (f"nothing is wrong here, and no batch is open: the last, {plain(last['batch_id'])}, was {last['state']} "
            f"{span(time.time() - last['ended_at'])} ago"
            + (", and no trainer has acknowledged it" if untrained else ""))


def _runner_line(r: dict[str, Any]) -> str:
    load = ""
    if "load" in r and r.get("places"):  # more units than places: they are short, and the next ones wait there
        ahead = f", {r['load'] - r['places']} more units sent ahead" if r["load"] > r["places"] else ""
        load = f", {min(r['load'], r['places'])} of {r['places']} places taken{ahead}"
    version = f", version {r['model_version']}" if r.get("model_version") is not None else ""
    of = r.get("model", "rollout")
    version = version if of == "rollout" else f", auxiliary model {of}"
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


def show(out: Console, found: dict[str, Any]) -> None:
    """Show the same to a person."""
    def line(text: str, style: str = "") -> None:
        out.print(Text(plain(text), style=style), soft_wrap=True)

    line(f"store        {found['store']}")
    ends = f"ends: {found['ends']}" if found.get("ends") else "down"
    ends = f"led by {found['led_by']}, not asked" if found.get("led_by") else ends
    line(f"system       {'up, pid ' + str(found['admin']['pid']) if found['up'] else ends}",
         "green" if found["up"] else "yellow")
    if found["coordinator"] is not None:
        coordinator = found["coordinator"]
        line(f"coordinator  pid {coordinator['pid']}, epoch {coordinator['epoch']}, "
             f"weights version {found['weights_version']}")
    hosts = {h["host"]: h for h in found.get("hosts", [])}
    for r in sorted(found["runners"], key=lambda r: host_of(r["runner"])):  # stays as it is on one host
        if (h := hosts.pop(host_of(r["runner"]), None)) is not None:
            line(_host_line(h))
        line(_runner_line(r))
    for h in hosts.values():
        line(_host_line(h))
    line(f"open batches {len(found['batches'])}")
    for b in found["batches"]:
        running = f", {b['running_units']} units running, {b['pending_units']} waiting" if "running_units" in b else ""
        failed = f", {b['failed_attempts']} failed attempts" if b["failed_attempts"] else ""
        line(f"  {b['batch_id']}: {b['state']}, {b['settled']} of {b['tasks']} tasks{running}{failed}")
        if b.get("waiting_for"):
            line(f"    waits for: {b['waiting_for']}", "red" if b["stalled"] else "dim")
    for problem in found["problems"]:
        line(f"! {problem}", "red")
    if found["problems"]:
        return
    if not found["up"]:
        line(f"nothing runs, and nothing is open{_of_run(found.get('run'), found['store'], found.get('last_batch'))}")
    elif not found["batches"] and found.get("last_batch"):
        line(_idle(found["last_batch"]))
    elif any(r["state"] == "ready" for r in found["runners"]):
        line("all is well", "green")
    else:
        line("nothing is wrong, and no engine is ready yet", "yellow")
