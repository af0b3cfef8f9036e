"""Health of a system for `trinity-es status` and `why`, read from the running system or else from its log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from trinity_es.client.problems import problems
from trinity_es.config.config import Config
from trinity_es.events import errors
from trinity_es.events.store.database.retry import within
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.events.vocabulary import BatchTrained, HostJoined, TasksetAdvanced, WeightsPublished
from trinity_es.projections.host_states import host_of, last_lives
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.resume_point import sources_of
from trinity_es.projections.reading.short_steps import short_text
from trinity_es.projections.tables.runner_history import natural_key
from trinity_es.projections.why.answer import Why, why_without_log
from trinity_es.projections.why.system_state import SystemSnapshot, current_runners
from trinity_es.safe_text import does
from trinity_es.system import remembered_log_end

__all__ = ["explain", "facts", "read_health"]

READ_SECONDS = 10.0
"""Timeout of a read of the log, whose database server may hang."""


def facts(config: Config) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the arguments `live` and `system` of `Log.why`: status of the running system, and state of its processes.

    `live` is None if no system runs on this store or this machine can't reach it. Raises WrongKey, and LogRewound if
    the log lost events.
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
        raise  # the user has to act
    except errors.TrinityError:  # the system ended meanwhile: the log names its runners
        return None, {}


def explain(
    config: Config, batch: str | None = None, find_batch: Callable[[Log, str], BatchId] | None = None
) -> list[Why]:
    """Explain what a batch, or each open batch, waits for.

    `batch`: the batch as the user typed it; `find_batch` returns its id. If the log can't be read, the running system's
    status is used. Raises BatchNotFound, LogError, and LogRewound if the log lost acknowledged events.
    """
    with contextlib.suppress(errors.LogUnavailable):
        within(READ_SECONDS, lambda: remembered_log_end.require_remembered(config))
    live, processes = facts(config)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if batch is None or find_batch is None:
                return log.why_open(live=live, system=processes)
            try:
                batch_id = find_batch(log, batch)
            except errors.BatchNotFound as e:
                raise errors.BatchNotFound(e.message + _startup_note(live)) from None
            return [log.why(batch_id, live=live, system=processes)]

    try:
        return within(READ_SECONDS, read)
    except errors.LogUnavailable as e:
        whys = why_without_log(live or {}, e.message, now=time.time())
        chosen = [w for w in whys if batch is None or batch in (str(w.batch_id), f"'{w.batch_id}'")]
        if not chosen:
            raise
        return chosen


def _startup_note(live: dict[str, Any] | None) -> str:
    """Return text for BatchNotFound that says that the system is starting; "" if it is not."""
    if live is None:
        return ""
    if "weights_version" not in live:
        return "; the system is starting: its coordinator is not up yet"
    runners = live["runners"]
    if any(r["state"] == "ready" for r in runners):
        return ""
    activity = "; ".join(f"{r['runner']} {does(r)}" for r in runners) or "no engine is up yet"
    return f"; the system is starting: {activity}"


def read_health(config: Config) -> dict[str, Any]:
    """Return the health of this store's system as plain JSON. Unknown values are None, "", {} or [].

    `up`: whether the system runs; `batches`: the open batches; `problems`: a line per problem; `ends`: why the system
    is ending; `led_by`: the leader on another host, if no system runs here; `last_batch`: the batch that ended last;
    `run`: progress of the `trinity-es run` in the log; `killed`: pids of the explorer and trainer that were killed on
    this machine; `held`: pids of those that are alive.
    """
    from trinity_es.system import run_lock, running_system

    health: dict[str, Any] = {
        "store": config.masked()["store"]["url"], "up": False, "keeper": running_system.keeper(config),
        "keeper_ended": running_system.ended_keeper(config),
        "coordinator": None, "weights_version": None, "runners": [], "hosts": [], "batches": [], "problems": [],
        "ends": "", "led_by": "", "last_batch": None, "run": None, "killed": run_lock.killed(config),
        "held": run_lock.holders(config),
    }
    admin = running_system.find(config)
    try:
        live, processes = facts(config)
        lost_events = None
        with contextlib.suppress(errors.LogUnavailable):  # reported below
            lost_events = within(READ_SECONDS, lambda: remembered_log_end.rewind_message(config))
    except errors.LogRewound as e:
        live, processes, lost_events = None, {"up": True}, e.message
    except errors.LogError as e:
        health["problems"].append(f"the log can't be read: {e.message}")
        return health
    if lost_events is not None:
        health["problems"].append(lost_events)
    health |= {"up": admin is not None, "ends": processes.get("ends", "")}
    if admin is not None:
        health["admin"] = admin
    else:
        with contextlib.suppress(errors.LogError):  # reported below
            health["led_by"] = within(READ_SECONDS, lambda: running_system.led_elsewhere(config))
    if live is not None:
        _add_live(health, live)

    def read() -> list[Why]:
        with open_log(config.store.url) as log:
            if live is None or "weights_version" not in live:
                _add_from_log(log, health)
            whys = log.why_open(live=live, system=processes)
            health.update(last_batch=_last_batch(log), run=_run_progress(log))
            if log.streams(HostJoined.stream):
                listed_names = {h["host"] for h in health["hosts"]}
                health["hosts"] = [row.as_dict() for row in read_hosts(log, live, processes)
                                if row.host and (row.is_present or row.host in listed_names)]
            return whys

    try:
        whys = within(READ_SECONDS, read)
    except errors.LogUnavailable as e:
        whys = why_without_log(live or {}, e.message, now=time.time())
        if not (live or {}).get("trouble"):
            health["problems"].append(f"the log can't be read: {e.message}")
    except (errors.LogNotFound, errors.NotALog) as e:
        if lost_events is not None:
            return health
        health["problems"].append(f"no actor system runs on this store, and it holds no log: {e.message}")
        return health
    except errors.LogError as e:
        health["problems"].append(f"the log can't be read: {e.message}")
        return health
    health["runners"].sort(key=lambda row: natural_key(row["runner"]))
    whys = [w for w in whys if w.state not in (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)]
    has_units = live is not None and "weights_version" in live
    health["batches"] = _open_batches(health["batches"], whys, with_units=has_units)
    if lost_events is None:
        health["problems"] += problems(config, health, live, whys)
    return health


def _add_live(health: dict[str, Any], live: dict[str, Any]) -> None:
    children = live["system"].get("children", [])
    if "weights_version" in live:
        pid = next((c["pid"] for c in children if c["name"] == "coordinator"), None)
        health["coordinator"] = {"pid": pid, "epoch": live.get("epoch")}
        health["weights_version"] = live["weights_version"]
    row_by_runner = {row["runner"]: row for row in live["runners"]}
    pid_by_name = {c["name"]: c["pid"] for c in children}
    for name, life in current_runners(SystemSnapshot(), live, time.time()):
        row = {"pid": pid_by_name.get(name), **row_by_runner.get(name, {}), "runner": name, "state": life.state}
        row |= {"incarnation": life.incarnation, "reason": life.reason, "restart_in": life.restart_in,
                "model": life.model}
        health["runners"].append(row)
    health["batches"], health["hosts"] = live["batches"], live.get("hosts", [])


def _open_batches(rows: list[dict[str, Any]], whys: list[Why], *, with_units: bool) -> list[dict[str, Any]]:
    """Return a row for each batch in `whys`. It has the batch's values from `rows`, updated by the newer `whys`."""
    row_by_id = {row["batch_id"]: row for row in rows}
    return [
        row_by_id.get(why.batch_id, {}) | {
            "batch_id": why.batch_id, "state": why.state, "tasks": why.tasks, "settled": why.settled,
            "failed_attempts": why.failed_attempts, "cause": why.cause, "waiting_for": why.sentence,
            "stalled": why.stalled,
        } | ({"running_units": why.running_units, "pending_units": why.pending_units} if with_units else {})
        for why in whys
    ]


def _add_from_log(log: Log, health: dict[str, Any]) -> None:
    """Add open batches, and runners if `health` has none, from the log. For a system that gave no full status."""
    health["batches"] = [
        {"batch_id": b.batch_id, "state": b.state, "tasks": b.tasks, "settled": b.finished,
         "failed_attempts": b.failed_attempts}
        for b in log.batches() if b.ended_at is None
    ]
    if health["runners"]:
        return
    absent_hosts = {host for host, life in last_lives(log.hosts()).items() if not life.is_present}
    last_lives_of_runners = {life.runner: life for life in log.runner_lives()}.values()
    health["runners"] = [
        {"runner": life.runner, "incarnation": life.incarnation, "last_state": life.state,
         "state": life.state if health.get("led_by") else _state_of_runner(life.pid, is_system_up=health["up"]),
         "pid": life.pid, "model_version": life.model_version, "reason": life.reason}
        for life in last_lives_of_runners if host_of(life.runner) not in absent_hosts
    ]


def _state_of_runner(pid: int, *, is_system_up: bool) -> str:
    """Return "stopped" if SIGSTOP suspended the runner, "silent" if it is alive otherwise, and "down" if it is gone.

    If its system is not up, a process with this pid belongs to another program, and the runner is "down".
    """
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        if is_system_up and process.cmdline()[:1] and process.cmdline()[0].startswith("Runner"):
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "silent"
    return "down"


def _last_batch(log: Log) -> dict[str, Any] | None:
    """Return the batch that ended last; None if none has. Its `failed_whole` is True if all its runs failed."""
    for row in log.batches(sort="ended", descending=True, limit=1):
        if row.ended_at is not None:
            state = log.current(row.batch_id)
            return {"batch_id": row.batch_id, "batch_type": row.batch_type, "state": row.state,
                    "ended_at": row.ended_at, "trained_step": row.trained_step, "short": short_text(log, row),
                    "failed_whole": state is not None and state.failed_whole}
    return None


def _run_progress(log: Log) -> dict[str, Any] | None:
    """Return the progress of the `trinity-es run` of this log; None if another program submitted its batches.

    `step`: the last submitted step; `total_steps`: None if unknown; `complete`: None if the log does not show it;
    `trained`: the last trained step, None if there is none; `last_at`: unix seconds of the log's last event.
    A run with a trainer is complete when the weights of its last step are saved.
    """
    newest = log.batches(batch_type="train", descending=True, limit=1)
    if not newest or not log.streams("taskset/"):
        return None
    config, last_batch = log.config(serve=False)[1], newest[0]
    step = log.count_batches(batch_type="train")
    has_trainer = (config.get("trainer") or {}).get("class") is not None
    is_last_over = last_batch.state == BatchLifecycleState.ABORTED or last_batch.trained_step is not None or (
        last_batch.state == BatchLifecycleState.FINALIZED and not has_trainer)
    if has_trainer and is_last_over:
        published = log.last("weights", "WeightsPublished")
        is_last_over = published is not None and isinstance(published.event, WeightsPublished) and (
            published.event.method == "checkpoint" and published.event.version >= step)
    limits = (config.get("total_steps"), _last_step_of_tasksets(log, config, step))
    total_steps = min((limit for limit in limits if limit is not None), default=None)
    complete: bool | None = is_last_over
    if is_last_over:
        complete = None if total_steps is None else step >= total_steps
    trained = next((r.event.step for r in log.read_rare(["BatchTrained"], descending=True, limit=1)
                    if isinstance(r.event, BatchTrained)), None)
    last = log.at(log.head().position)
    return {"step": step, "total_steps": total_steps, "complete": complete, "trained": trained,
            "last_at": last and last.recorded_at}


def _last_step_of_tasksets(log: Log, config: Mapping[str, Any], step: int) -> int | None:
    """Return the step at which a run's tasksets are used up. `step`: the last submitted step.

    Returns None if there is no taskset, or if a taskset is endless or not in the log.
    """
    buffer = config.get("buffer") or {}
    inputs = buffer.get("explorer_input") or {}
    sources, rows_left = sources_of(log), 0
    if not inputs.get("tasksets"):
        return None
    for entry in inputs["tasksets"]:
        name, epochs = entry.get("name"), entry.get("epochs", 1)
        source = sources.get((name, False))
        if source is None or epochs is None:
            return None
        advance = log.last(f"taskset/{name}", "TasksetAdvanced")
        rows_left += epochs * source.rows
        if advance and isinstance(advance.event, TasksetAdvanced):
            rows_left -= advance.event.epoch * source.rows + advance.event.offset
    batch_size = buffer.get("batch_size") or 1
    steps_left = rows_left // batch_size if inputs.get("drop_last") else math.ceil(rows_left / batch_size)
    return step + max(0, steps_left)
