"""Health of a system, from the running system or from its log, for `trinity-es status` and `why`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.client.problems import problems
from trinity_es.client.silent_system import state_of_runner
from trinity_es.config.config import Config
from trinity_es.events import errors
from trinity_es.events.store.database.retry import within
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.events.vocabulary import HostJoined, TasksetAdvanced
from trinity_es.projections.host_states import host_of, last_lives
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.resume_point import sources_of
from trinity_es.projections.tables.runner_history import natural
from trinity_es.projections.why.answer import Why, unread
from trinity_es.projections.why.system_state import SystemSnapshot, with_live
from trinity_es.safe_text import does
from trinity_es.system import remembered_log_end

__all__ = ["explain", "facts", "look"]

READ_SECONDS = 10.0
"""Timeout of reading the log: its server may be frozen."""


def facts(config: Config) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return `live` and `system` for `Log.why`, from the system of this store if one runs and this machine reaches it.

    Raises WrongKey, and LogRewound if a rewound log halted the system.
    """
    try:
        from trinity_es.system import running_system
    except ImportError:  # a log can be read without Thespian
        return None, {}
    if running_system.find(config) is None:
        return None, running_system.stopped(config)
    from trinity_es.client.rollout_client import connect  # imports all actors, so only if a system runs

    try:
        with connect(config) as client:
            return client.facts()
    except (errors.LogRewound, errors.WrongKey):
        raise  # a person has to act
    except errors.TrinityError:  # it ended meanwhile: the log says which runners it had
        return None, {}


def explain(config: Config, batch: str | None = None, find: Callable[[Log, str], BatchId] | None = None) -> list[Why]:
    """Explain what this batch, or every open one, waits for. `find` returns the id for the text that a person typed.

    While the log can't be read, the running system's answer on its open batches is used. Raises BatchNotFound,
    LogError, and LogRewound if the log lost acknowledged events.
    """
    with contextlib.suppress(errors.LogUnavailable):
        within(READ_SECONDS, lambda: remembered_log_end.require(config))
    live, running_system = facts(config)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if batch is None or find is None:
                return log.why_open(live=live, system=running_system)
            try:
                batch_id = find(log, batch)
            except errors.BatchNotFound as e:
                raise errors.BatchNotFound(e.message + _startup_note(live)) from None
            return [log.why(batch_id, live=live, system=running_system)]

    try:
        return within(READ_SECONDS, read)
    except errors.LogUnavailable as e:
        whys = unread(live or {}, e.message, now=time.time())
        chosen = [w for w in whys if batch is None or batch in (str(w.batch_id), f"'{w.batch_id}'")]
        if not chosen:
            raise
        return chosen


def _startup_note(live: dict[str, Any] | None) -> str:
    """Return the activity of a starting system, as its batch may not exist yet; "" if no system is starting."""
    if live is None:
        return ""
    if "weights_version" not in live:
        return "; the system is starting: its coordinator is not up yet"
    runners = live["runners"]
    if any(r["state"] == "ready" for r in runners):
        return ""
    activity = "; ".join(f"{r['runner']} {does(r)}" for r in runners) or "no engine is up yet"
    return f"; the system is starting: {activity}"


def look(config: Config) -> dict[str, Any]:
    """Return the health of this store's system as plain JSON. A value is None, "", {} or [] if there is nothing to say.

    `up`: whether the system runs; `batches`: the open ones; `problems`: a line each; `ends`: why the processes of a
    system are ending; `led_by`: the leader of a run in which this machine takes no part; `last_batch`: the batch that
    ended last; `run`: progress of the `trinity-es run` in the log; `killed`: pids of the explorer and trainer that were
    killed on this machine.
    """
    from trinity_es.system import run_lock, running_system

    out: dict[str, Any] = {
        "store": config.masked()["store"]["url"], "up": False, "keeper": running_system.keeper(config),
        "keeper_ended": running_system.ended_keeper(config),
        "coordinator": None, "weights_version": None, "runners": [], "hosts": [], "batches": [], "problems": [],
        "ends": "", "led_by": "", "last_batch": None, "run": None, "killed": run_lock.killed(config),
    }
    admin = running_system.find(config)
    try:
        live, processes = facts(config)
        lost = None
        with contextlib.suppress(errors.LogUnavailable):  # reported below
            lost = within(READ_SECONDS, lambda: remembered_log_end.rewind_message(config))
    except errors.LogRewound as e:
        live, processes, lost = None, {"up": True}, e.message
    except errors.LogError as e:
        out["problems"].append(f"the log can't be read: {e.message}")
        return out
    if lost is not None:
        out["problems"].append(lost)
    out["up"], out["ends"] = admin is not None, processes.get("ends", "")
    if admin is not None:
        out["admin"] = admin
    else:
        with contextlib.suppress(errors.LogError):  # reported below
            out["led_by"] = within(READ_SECONDS, lambda: running_system.led_elsewhere(config))
    if live is not None:
        _add_live(out, live)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if live is None or "weights_version" not in live:
                _add_from_log(log, out)
            whys = log.why_open(live=live, system=processes)
            out.update(last_batch=_last_batch(log), run=_run_progress(log))
            if log.streams(HostJoined.stream):
                listed = {h["host"] for h in out["hosts"]}
                out["hosts"] = [row.as_dict() for row in read_hosts(log, live, processes)
                                if row.host and (row.there or row.host in listed)]
            return whys

    try:
        whys = within(READ_SECONDS, read)
    except errors.LogUnavailable as e:
        whys = unread(live or {}, e.message, now=time.time())
        if not (live or {}).get("trouble"):
            out["problems"].append(f"the log can't be read: {e.message}")
    except (errors.LogNotFound, errors.NotALog) as e:
        if lost is not None:
            return out
        out["problems"].append(f"no actor system runs on this store, and it holds no log: {e.message}")
        return out
    except errors.LogError as e:
        out["problems"].append(f"the log can't be read: {e.message}")
        return out
    out["runners"].sort(key=lambda row: natural(row["runner"]))
    whys = [w for w in whys if w.state not in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)]
    out["batches"] = _open_batches(out["batches"], whys, units=live is not None and "weights_version" in live)
    if lost is None:
        out["problems"] += problems(config, out, live, whys)
    return out


def _add_live(out: dict[str, Any], live: dict[str, Any]) -> None:
    """Add coordinator, runners, open batches and hosts from the status of the running system."""
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
    """Return a row for each batch of `whys`. `rows` are older, so a batch may be open there and ended in `whys`."""
    by_id = {row["batch_id"]: row for row in rows}
    return [
        by_id.get(w.batch_id, {}) | {
            "batch_id": w.batch_id, "state": w.state, "tasks": w.tasks, "settled": w.settled,
            "failed_attempts": w.failed_attempts, "cause": w.cause, "waiting_for": w.sentence, "stalled": w.stalled,
        } | ({"running_units": w.running_units, "pending_units": w.pending_units} if units else {})
        for w in whys
    ]


def _add_from_log(log: Log, out: dict[str, Any]) -> None:
    """Add open batches and, unless they are known, runners from the log: the system gave no whole status."""
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
         "state": life.state if out.get("led_by") else state_of_runner(life.pid, system_up=out["up"]),
         "pid": life.pid, "model_version": life.model_version, "reason": life.reason}
        for life in {life.runner: life for life in log.runner_lives()}.values()
        if host_of(life.runner) not in gone
    ]


def _last_batch(log: Log) -> dict[str, Any] | None:
    for b in log.batches(sort="ended", descending=True, limit=1):
        if b.ended_at is not None:
            state = log.current(b.batch_id)
            return {"batch_id": b.batch_id, "batch_type": b.batch_type, "state": b.state, "ended_at": b.ended_at,
                    "trained_step": b.trained_step, "failed_whole": state is not None and state.failed_whole}
    return None


def _run_progress(log: Log) -> dict[str, Any] | None:
    """Return the progress of the `trinity-es run` of this log; None if another program submitted its batches.

    `step`: the last step that was submitted; `total_steps`: None if unknown; `complete`: None if the log can't tell.
    """
    newest = log.batches(batch_type="train", descending=True, limit=1)
    if not newest or not log.streams("taskset/"):
        return None
    config, last = log.config(serve=False)[1], newest[0]
    step, total = log.count_batches(batch_type="train"), config.get("total_steps")
    trains = (config.get("trainer") or {}).get("class") is not None
    last_is_over = last.state == BatchLifecycleState.ABORTED or last.trained_step is not None or (
        last.state == BatchLifecycleState.FINALIZED and not trains)
    last_step = _last_step(log, config, step)
    total = min((n for n in (total, last_step) if n is not None), default=None)
    complete: bool | None = last_is_over
    if last_is_over:
        complete = None if total is None else step >= total
    return {"step": step, "total_steps": total, "complete": complete}


def _last_step(log: Log, config: Mapping[str, Any], step: int) -> int | None:
    """Return the step at which a run's tasksets end; None if a taskset is endless or not in the log."""
    buffer, sources, rows_left = config.get("buffer") or {}, sources_of(log), 0
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
        rows_left += epochs * source.rows
        if last and isinstance(last.event, TasksetAdvanced):
            rows_left -= last.event.epoch * source.rows + last.event.offset
    size = buffer.get("batch_size") or 1
    return step + max(0, rows_left // size if inputs.get("drop_last") else math.ceil(rows_left / size))
