"""Explanation of what a batch waits for, on which runner or host and since when (promise 7). Pure.

`why` explains one batch from a `SystemSnapshot`, a fold of the log. A running system knows more than its log, such as
the last sign of life of each runner. The caller passes the system's answer to `status` as `live`, and facts on its
processes as `system`. Both are optional, and any of their fields may be missing.

A unit is slow if it takes much longer than other units and its runner lives. A unit is hung if it is past its time
limit or its runner is silent, so that it will not finish by itself.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.values import BatchId, BatchLifecycleState, local_time, sort_batch_id
from trinity_es.projections.batch import BatchState, Flight
from trinity_es.projections.event_texts import counted, kept_text, missing_text
from trinity_es.projections.host_states import host_of
from trinity_es.projections.why.answer import OF_TRAINER, Waiting, Why, resume_command, span
from trinity_es.projections.why.host_waits import current_hosts, hosts_without_units, with_host_state
from trinity_es.projections.why.runners import (
    SILENT_SECONDS,
    coordinator_absence,
    gets_units,
    has_no_server,
    refuses_weights,
    short,
    wait_for_idle_runner,
    wait_for_outdated_runner,
)
from trinity_es.projections.why.system_state import BatchTimes, RunnerSnapshot, SystemSnapshot, current_runners

__all__ = ["why"]

QUIET_SECONDS = 1.0
"""Seconds after which the text says that an engine's loop does not answer. It counts as hung later."""
LATE_SECONDS = 5.0
"""Seconds after a unit's time limit in which the report of its failure may still arrive."""
SLOW_TIMES = 3.0
"""A unit is slow if it takes this many times the median of the finished units."""

_RANK = {
    "unwritten": 0, "fenced": 0, "no_system": 0, "ending": 0, "restarting": 0, "no_answer": 0, "no_coordinator": 1,
    "finalizing": 2, "finalize_failed": 2, "groups_missing": 2, "grace": 2, "finalize": 2, "hung": 3, "away": 3,
    "unstored": 3, "lost": 4, "slow": 5, "running": 6, "elsewhere": 7, "paused": 7, "places": 7, "dispatch": 7,
    "interrupted": 8, "refused": 9, "unseen": 10,
}
_RANK_RUNNER, _RANK_OTHER_RUNNER = 4, 9
"""Ranks of a runner that gets no units: if no runner gets any, and if other runners do."""
_RANK_ASKED = 4.5
"""Rank of an auxiliary model's runner that does not answer while workflows may call it. It precedes slow units, which
are often many and would hide it."""
_STUCK = {"hung", "no_answer", "unstored"}
"""Causes that are a stall from the start."""
_UNKNOWN = Waiting(cause="nothing", what="", text="nothing that its log shows")


def why(
    snapshot: SystemSnapshot, batch_id: BatchId, *, now: float, live: Mapping[str, Any] | None = None,
    system: Mapping[str, Any] | None = None
) -> Why:
    """Explain what the batch waits for. Raises BatchNotFound.

    `live`: the running system's answer to `status`; None without an answer. `system`, facts on its processes:

    - `up`: True if they exist, None if unknown; `asked`: False if the caller requested no status, so `live` is None
    - `pid`, `host`: of the last coordinator; `released`: True if that system ended in order
    - `copied_from`: the original of this store, if the last coordinator belongs to the original
    - `kept`: pid of the keeper that restarts the system; `ends`: why its remaining processes end by themselves
    """
    batch = snapshot.batches.get(batch_id)
    if batch is None:
        raise BatchNotFound(f"no batch {batch_id!r} is in this log")
    state = batch.state
    if state.state.ended:
        ranked = [_wait_of_ended(snapshot, batch, up=live is not None or bool((system or {}).get("up")))]
    else:
        lives = dict(current_runners(snapshot, live, now))
        ranked = sorted(_waits_of_open(snapshot, batch, lives, now, live, system), key=lambda pair: pair[0])
    waiting = tuple(w for _, w in ranked) or (_UNKNOWN,)
    is_late = snapshot.stall_after is not None and now - batch.moved_at > snapshot.stall_after
    return Why(
        batch_id=batch_id, batch_type=state.batch_type, state=state.state.value, tasks=state.expected_task_count,
        settled=state.completed_task_count, running_units=len(state.flights), pending_units=len(state.pending),
        failed_attempts=state.failed_attempts, moved_at=batch.moved_at, now=now,
        stalled=waiting[0].cause not in OF_TRAINER and (is_late or any(w.person or w.cause in _STUCK for w in waiting)),
        waiting=waiting,
    )


Ranked = tuple[tuple[float, float], Waiting]
"""((rank, start in unix seconds), `Waiting`). The smallest comes first in an answer."""


def _wait_of_ended(snapshot: SystemSnapshot, batch: BatchTimes, *, up: bool) -> Ranked:
    """Return the `Waiting` of an ended batch: for its trainer, for a person if all its runs failed, or for nothing."""
    state = batch.state
    resume = resume_command(snapshot.store) if snapshot.of_run else ""
    cause, text = "nothing", "it waits for nothing"
    if state.state is BatchLifecycleState.ABORTED:
        text = f"it was aborted: {short(batch.error)}"
    elif state.trained_step is not None:
        text = f"it was trained in step {state.trained_step}: it waits for nothing"
    elif state.batch_type == "train":
        cause = "training"
        text = f"it was finalized at {local_time(batch.moved_at)}, and no trainer has acknowledged it"
    failed_tasks = [(task, status) for task, status in sorted(state.statuses.items()) if not status.ok]
    if failed_tasks and state.state is not BatchLifecycleState.ABORTED:
        task, status = failed_tasks[0]
        if cause == "training" and state.failed_whole:
            cause = "all_failed"
        tasks = counted(len(failed_tasks), "task")
        failures = f"{tasks} of {state.expected_task_count} failed at least in part, the first is"
        if state.failed_whole:
            failures = "each of its runs failed, the first of"
        text += f"; {failures} task {task}: {short(status.message or '')}"
    waiting = Waiting(cause=cause, what="the trainer", text=text, since=batch.moved_at)
    if cause == "all_failed":
        waiting = replace(waiting, resume=resume, system_up=up)
    return (0.0, 0.0), waiting


def _waits_of_open(
    snapshot: SystemSnapshot, batch: BatchTimes, lives: Mapping[str, RunnerSnapshot], now: float,
    live: Mapping[str, Any] | None, system: Mapping[str, Any] | None,
) -> Iterator[Ranked]:
    """Yield everything that an open batch waits for: system, trainer, units on runners, units without a runner."""
    def ranked(w: Waiting, rank: float | None = None) -> Ranked:
        return (_RANK[w.cause] if rank is None else rank, w.since or 0.0), w

    state = batch.state
    machine = _wait_for_system(snapshot, live, system)
    if machine is not None:
        yield ranked(machine)
    wait = _wait_for_trainer(batch, now, live)
    if wait is not None:
        yield ranked(wait)
        if wait.cause == "finalizing":
            return
    if machine is not None and machine.cause in ("no_system", "ending", "restarting", "fenced"):
        for flight in state.flights.values():
            yield ranked(_interrupted_unit(batch, flight))
        return
    facts = system or {}
    if machine is None and live is None and facts.get("up") is None and facts.get("host"):
        host, pid = facts["host"], facts.get("pid")
        text = f"its system last ran on {host} (coordinator pid {pid}); this machine can't see whether it still runs"
        yield ranked(Waiting(cause="unseen", what="the actor system", text=text))
    usual = statistics.median(batch.durations) if batch.durations else None
    hosts = current_hosts(snapshot, live, now)
    for flight in state.flights.values():
        w = _wait_on_runner(snapshot, batch, flight, lives, now, usual)
        yield ranked(with_host_state(w, hosts.get(host_of(flight.runner)), now, snapshot.host_timeout))
    lives = {name: r for name, r in lives.items() if (h := hosts.get(host_of(name))) is None or h.is_present}
    for r in lives.values():
        if r.state == "ready" and refuses_weights(snapshot, r):
            yield ranked(wait_for_outdated_runner(r))
    auxiliary = [r for r in lives.values() if r.model != "rollout"]
    lives = {name: r for name, r in lives.items() if r.model == "rollout"}
    removed = {name for name, r in lives.items() if r.leaving or (snapshot.of_servers and r.state == "retired")}
    lives = {name: r for name, r in lives.items() if name not in removed}  # no unit waits for a removed server
    for r in auxiliary if state.flights else ():
        if r.state != "ready":  # a workflow that calls it waits until its attempt times out
            w = wait_for_idle_runner(snapshot, r, now)
            yield ranked(replace(w, text=f"workflows that ask model {r.model}: {w.text}", person=False), _RANK_ASKED)
    if not state.pending:
        return
    units = _pending_text(batch)
    if state.paused:
        text = f"{units} without a runner: its scheduler was stopped"
        yield ranked(Waiting(cause="paused", what=units, text=text))
        return
    leaving = {name for name, h in hosts.items() if h.state == "draining"}
    of_hosts = [*hosts_without_units(hosts.values(), lives, now, bool([n for n in lives if host_of(n) not in leaving]))]
    lives = {name: r for name, r in lives.items() if host_of(name) not in leaving}
    serving = [r for r in lives.values() if gets_units(snapshot, r)]
    if serving:
        yield ranked(_wait_for_place(snapshot, batch, serving))
    elif not lives and has_no_server(snapshot, live, bool(removed)):
        text = f"{units} without a runner: there is no server{' any more' if removed else ' yet'}"
        if server_list := (live or {}).get("server_list"):
            text += f"; {server_list}"
        w = Waiting(cause="no_server", what=units, text=text, person=not state.flights)
        yield ranked(w, _RANK_RUNNER)
    elif not lives and not of_hosts:
        text = f"{units} without a runner: none has started yet"
        yield ranked(Waiting(cause="no_runner", what=units, text=text), _RANK_RUNNER)
    # The batch needs a person if every runner does and no unit runs.
    others = [*(wait_for_idle_runner(snapshot, r, now) for r in lives.values() if r not in serving), *of_hosts]
    stuck = not serving and not state.flights and all(w.person for w in others)
    for w in others:
        text = w.text if serving else f"{units} without a runner: {w.text}"
        yield ranked(replace(w, text=text, person=stuck), _RANK_OTHER_RUNNER if serving else _RANK_RUNNER)


def _wait_for_system(
    snapshot: SystemSnapshot, live: Mapping[str, Any] | None, system: Mapping[str, Any] | None
) -> Waiting | None:
    """Return a `Waiting` if the system is gone, ends, or can't work on the batch now, else None."""
    facts = system or {}
    resume = resume_command(snapshot.store) if snapshot.of_run else ""
    down = partial(Waiting, what="the actor system", since=snapshot.last_at, resume=resume)
    if facts.get("ends"):
        return down(cause="ending", text=f"the actor system ends: {facts['ends']}", person=True)
    if facts.get("up") is False:
        pid = f" (coordinator pid {facts['pid']} on {facts.get('host', 'this host')})" if facts.get("pid") else ""
        how = "it has ended (guardian.log says why)" if facts.get("released") else f"its processes are gone{pid}"
        if facts.get("copied_from"):
            how = f"it is a copy of {facts['copied_from']}, and the system in it belongs to the original"
        last = "" if snapshot.last_at is None else f"; the last event was at {local_time(snapshot.last_at)}"
        text = f"no actor system runs on this store: {how}{last}"
        if facts.get("kept"):
            text += f"; its keeper (pid {facts['kept']}) starts it again"
            return down(cause="restarting", text=text)
        return down(cause="no_system", text=text, person=True)
    if live is None:
        if not facts.get("up") or facts.get("asked") is False:
            return None
        return Waiting(cause="no_answer", what="the actor system", text="the actor system runs but does not answer")
    if live.get("system", {}).get("fenced"):
        text = f"another system took over this store, so this one does nothing: {short(live['system']['fenced'])}"
        return Waiting(cause="fenced", what="the actor system", text=text, person=True)
    if live.get("trouble"):
        return Waiting(cause="unwritten", what="the log", text=live["trouble"], person=bool(live.get("refuses")))
    if "weights_version" not in live:  # only the guardian answered
        children = live.get("system", {}).get("children", [])
        child: Mapping[str, Any] = next((c for c in children if c.get("name") == "coordinator"), {})
        text = f"{coordinator_absence(child)}; runners go on meanwhile and keep what they finish"
        return Waiting(cause="no_coordinator", what="the coordinator", text=text)
    return None


def _wait_for_trainer(batch: BatchTimes, now: float, live: Mapping[str, Any] | None) -> Waiting | None:
    """Return a `Waiting` if the batch has enough settled tasks or is being finalized, else None."""
    state = batch.state
    if state.state is BatchLifecycleState.FINALIZING:
        since = batch.finalizing_since
        ago = "" if since is None else f" for {span(now - since)}"
        text = f"it is finalizing: its pipeline has been running{ago}"
        return Waiting(cause="finalizing", what="the pipeline", text=text, since=since)
    settled_count, task_count = state.completed_task_count, state.expected_task_count
    is_ready = not state.open_task_count if state.batch_type == "collect" else state.has_enough
    if not is_ready:
        return None
    if batch.error:
        text = f"its pipeline failed, and it has not been finalized again: {short(batch.error)}"
        return Waiting(cause="finalize_failed", what="the trainer", text=text, since=batch.moved_at)
    have = "all its tasks are settled"
    if settled_count != task_count:
        have = f"{settled_count} of {task_count} tasks are settled, enough"
    rows = {row.get("batch_id"): row for row in (live or {}).get("batches", [])}
    row = rows.get(state.batch_id, {})
    if row.get("waited_for"):
        awaited = "a task that was cut as often as it may be (synchronizer.in_flight)" if row.get("must_end") else (
            "the rest, at most explorer.over_rollout.wait_after_min seconds")
        text = f"{have}; the trainer waits for {awaited}"
        return Waiting(cause="grace", what="the rest of its tasks", text=text, since=batch.moved_at)
    if state.missing is not None:
        text = f"{missing_text(state.missing)}, and its trainer has added none yet"
        return Waiting(cause="groups_missing", what="the trainer", text=text, since=batch.moved_at)
    call = "Scheduler.get_results" if state.batch_type == "collect" else f"finalize_{state.batch_type}_batch"
    text = f"{have}, but {call} has not been called"
    return Waiting(cause="finalize", what="the trainer", text=text, since=batch.moved_at)


# --- units ----------------------------------------------------------------------------------------------------------
def _unit_text(state: BatchState, unit: ev.Unit, strikes: int) -> str:
    """Describe a unit and its attempt. `strikes`: earlier failed attempts that count towards `max_attempts`."""
    last_run = unit.run_id_base + unit.runs - 1
    runs = f"run {last_run}" if unit.runs == 1 else f"runs {unit.run_id_base}-{last_run}"
    charged_attempt = strikes + 1
    maximum = f"of {state.max_attempts}"
    if charged_attempt != unit.attempt:  # attempts lost with a runner don't count
        ordinal = {1: "1st", 2: "2nd", 3: "3rd"}.get(charged_attempt, f"{charged_attempt}th")
        maximum = f"(the {ordinal} {maximum} that count)"
    return f"task {unit.task}, {runs}, attempt {unit.attempt} {maximum}"


def _pending_text(batch: BatchTimes) -> str:
    """Describe the first pending unit, and the number of other ones."""
    key, first_unit = next(iter(batch.state.pending.items()))
    other_count = len(batch.state.pending) - 1
    text = _unit_text(batch.state, first_unit, batch.state.strikes.get(key, 0))
    return text + (f" and {counted(other_count, 'more unit')}" if other_count else "")


def _unit_wait(batch: BatchTimes, flight: Flight, **fields: Any) -> Waiting:
    unit, state = flight.unit, batch.state
    return Waiting(
        what=_unit_text(state, unit, flight.strikes), task=unit.task, attempt=unit.attempt,
        charged_attempt=flight.strikes + 1, max_attempts=state.max_attempts, runner=flight.runner,
        incarnation=flight.incarnation, **fields,
    )


def _interrupted_unit(batch: BatchTimes, flight: Flight) -> Waiting:
    unit = flight.unit
    text = (f"{_unit_text(batch.state, unit, flight.strikes)} was on {flight.runner} #{flight.incarnation} when the "
            "system ended")
    since = batch.flying_since.get((unit.task, unit.run_id_base))
    return _unit_wait(batch, flight, cause="interrupted", text=text, since=since)


def _wait_on_runner(
    snapshot: SystemSnapshot, batch: BatchTimes, flight: Flight, lives: Mapping[str, RunnerSnapshot], now: float,
    usual: float | None,
) -> Waiting:
    """Return a `Waiting` for a unit on a runner: running, slow, hung etc. `usual`: median seconds of finished units."""
    unit, state = flight.unit, batch.state
    since = batch.flying_since.get((unit.task, unit.run_id_base), batch.moved_at)
    limit = flight.timeout or snapshot.limit
    if limit is not None and flight.kept is not None:
        limit = max(limit - flight.kept.seconds, 1.0)
    if limit is not None and snapshot.sequential:
        limit *= unit.runs
    age = max(0.0, now - since)
    life = lives.get(flight.runner)
    runner = life if life is not None and life.incarnation == flight.incarnation else None
    beat = None if runner is None or runner.seen is None else now - runner.seen
    cause, condition = "running", _signs_of_life(runner, since, now)
    runner_gone = life is not None and life.incarnation >= flight.incarnation and (
        runner is None or runner.state in ("lost", "quarantined", "down", "failed")
    )
    if life is not None and runner_gone:
        cause, condition = "lost", f"its runner is gone ({short(life.reason) or life.state}), so it is attempted again"
    elif beat is not None and beat > SILENT_SECONDS:
        cause, condition = "hung", f"hung: its runner has given no sign of life for {span(beat)}"
    elif runner is not None and (runner.silent or 0.0) > SILENT_SECONDS:
        silent = span(runner.silent or 0.0)
        cause, condition = "hung", f"hung: the engine's loop of its runner has not answered for {silent}"
    elif runner is not None and runner.trouble:
        cause, condition = "unstored", f"its runner can't store what it finished: {runner.trouble}"
    elif limit is not None and age > limit + LATE_SECONDS:
        cause, condition = "hung", f"hung: past its limit of {span(limit)}, and nothing has stopped it"
    elif usual is not None and age > SLOW_TIMES * max(usual, 0.1):
        signs = f"; {condition}" if condition else ""
        cause, condition = "slow", f"slow, not known to be hung: others took {span(usual)}{signs}"
    else:
        condition = "running" + (f": {condition}" if condition else "")
    maximum = "" if limit is None else f" of at most {span(limit)}"
    what = _unit_text(state, unit, flight.strikes)
    first = state.tasks[unit.task].first_error if unit.attempt > 1 else None
    when = "before it" if unit.attempt == 2 else "the task's first failure"
    failure = "" if first is None else f" ({when}: {short(first, 120)})"
    goes_on = "" if flight.kept is None else f"; it goes on from {kept_text(flight.kept)}"
    text = f"{what} on {flight.runner} #{flight.incarnation} for {span(age)}{maximum}: {condition}{failure}{goes_on}"
    return _unit_wait(batch, flight, cause=cause, text=text, since=since, limit=limit,
                    seen=None if runner is None else runner.seen)


def _signs_of_life(runner: RunnerSnapshot | None, since: float, now: float) -> str:
    """Describe a runner's signs of life since its unit began, and what the runner waits for."""
    if runner is None:
        return ""
    signs = []
    if runner.finished is not None and runner.finished > since:
        signs.append(f"finished another unit {span(now - runner.finished)} ago")
    if runner.seen is not None:
        signs.append(f"was heard of {span(now - runner.seen)} ago")
    loop = ""
    if runner.silent is not None:
        is_quiet = runner.silent > QUIET_SECONDS
        loop = ", and its engine's loop " + (f"has not answered for {span(runner.silent)}" if is_quiet else "answers")
    signs_text = f"its runner {', '.join(signs)}{loop}" if signs else ""
    wait = runner.runs_wait or (f"it waits for {runner.waits_for}" if runner.waits_for else "")
    return "; ".join(part for part in (signs_text, short(wait)) if part)


def _wait_for_place(snapshot: SystemSnapshot, batch: BatchTimes, serving: list[RunnerSnapshot]) -> Waiting:
    """Return a `Waiting` for pending units: no runner has room, only the avoided one has, or they are sent just now."""
    taken_places, units_by_batch = Counter[str](), Counter[BatchId]()
    for other_batch in snapshot.batches.values():
        for flight in other_batch.state.flights.values():
            taken_places[flight.runner] += 1
            units_by_batch[other_batch.state.batch_id] += 1
    units = _pending_text(batch)
    since = min((batch.pending_since.get(key, batch.moved_at) for key in batch.state.pending), default=None)
    free_runners = [r for r in serving if taken_places[r.name] < r.places]
    if not free_runners:
        holders = ", ".join(f"batch {b}: {units_by_batch[b]}" for b in sorted(units_by_batch, key=sort_batch_id))
        places = sum(r.places for r in serving)
        # A runner gets short units beyond its places.
        ahead_count = sum(taken_places[r.name] for r in serving) - places
        holders += f"; {counted(ahead_count, 'unit')} more than places, sent ahead" if ahead_count > 0 else ""
        runners = counted(len(serving), "runner")
        text = f"{units} without a place: all {places} places of {runners} are taken ({holders})"
        return Waiting(cause="places", what=units, text=text, since=since)
    avoided_runners = {batch.state.avoid.get(key) for key in batch.state.pending}
    if {r.name for r in free_runners} <= avoided_runners:
        text = f"{units} without another runner: the last attempt failed on {free_runners[0].name}"
        return Waiting(cause="elsewhere", what=units, text=text, since=since)
    return Waiting(cause="dispatch", what=units, text=f"{units} about to be given to {free_runners[0]}", since=since)
