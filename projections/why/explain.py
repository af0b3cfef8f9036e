"""What a batch waits for, since when and where: the answer of `why` (promise 7). Pure: the time comes in as `now`.

`why` explains one batch from a `SystemSnapshot`, which is a fold of the log. A running system knows more than its log:
who was heard of when, whose engine's loop is silent, who is started again. Its answer to `status` comes in as `live`,
and whether it has processes at all as `system`; each is optional, and any field of them may be missing.

Slow and hung are two things. Slow is a unit that takes longer than the others did while its runner lives. Hung is one
past its limit, or whose runner is silent: it will not come by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.values import BatchId, BatchLifecycleState, local_time, sort_batch_id
from trinity_es.projections.batch import BatchState, Flight
from trinity_es.projections.host_states import host_of
from trinity_es.projections.why.answer import OF_TRAINER, Waiting, Why, counted, resume_command, span
from trinity_es.projections.why.hosts import hosts_now, idle_hosts, on_its_host
from trinity_es.projections.why.runners import (
    SILENT_SECONDS,
    behind,
    coordinator_away,
    has_no_server,
    idle,
    refuses,
    serves,
    short,
)
from trinity_es.projections.why.situation import BatchTimes, RunnerSnapshot, SystemSnapshot, with_live

__all__ = ["why"]

QUIET_SECONDS = 1.0
"""How long a loop may not answer before that is told, though it is no sign of hanging yet."""
LATE_SECONDS = 5.0
"""How long after its limit a unit's failure may still be on its way."""
SLOW_TIMES = 3.0
"""A unit that takes so many times what the others took is slow."""

_RANK = {
    "unwritten": 0, "fenced": 0, "no_system": 0, "ending": 0, "restarting": 0, "no_answer": 0, "no_coordinator": 1,
    "finalizing": 2, "finalize_failed": 2, "grace": 2, "finalize": 2, "hung": 3, "away": 3, "unstored": 3, "lost": 4,
    "slow": 5, "running": 6, "elsewhere": 7, "paused": 7, "places": 7, "dispatch": 7, "interrupted": 8, "refused": 9,
    "unseen": 10,
}
_RANK_RUNNER, _RANK_OTHER_RUNNER = 4, 9
"""A runner that takes no units, where none does and where others do."""
_RANK_ASKED = 4.5
"""A runner of an auxiliary model that does not answer now, while units run that may ask it: told before units that are
slow, or that many units would hide it."""
_STUCK = {"hung", "no_answer", "unstored"}
"""Causes that are a stall however short they last."""
_UNKNOWN = Waiting(cause="nothing", what="", text="nothing that its log tells of")


def why(
    situation: SystemSnapshot, batch_id: BatchId, *, now: float, live: Mapping[str, Any] | None = None,
    system: Mapping[str, Any] | None = None
) -> Why:
    """Return what the batch waits for. Raises BatchNotFound.

    `live`: what a running system answers to `status` (`system`, `runners`, `batches`); None: it was not asked, or gave
    no answer. `system`: `up` (whether its processes exist; None: not known), `pid` and `host` of its last coordinator,
    `released` (it was ended in order), `copied_from` (what this store is a copy of, if its last coordinator was
    that one's), `kept` (pid of the keeper that starts it again), `ends` (why what is left of it
    ends by itself), `asked` (False: nobody asked it, so that it gave no answer means nothing).
    """
    course = situation.courses.get(batch_id)
    if course is None:
        raise BatchNotFound(f"no batch {batch_id!r} is in this log")
    state = course.state
    if state.state.ended:
        found = [_ended(situation, course, up=live is not None or bool((system or {}).get("up")))]
    else:
        lives = dict(with_live(situation, live, now))
        found = sorted(_open(situation, course, lives, now, live, system), key=lambda pair: pair[0])
    waiting = tuple(w for _, w in found) or (_UNKNOWN,)
    late = situation.stall_after is not None and now - course.moved_at > situation.stall_after
    return Why(
        batch_id=batch_id, batch_type=state.batch_type, state=state.state.value, tasks=state.expected_task_count,
        settled=state.completed_task_count, running_units=len(state.flights), pending_units=len(state.pending),
        failed_attempts=state.failed_attempts, moved_at=course.moved_at, now=now,
        stalled=waiting[0].cause not in OF_TRAINER and (late or any(w.person or w.cause in _STUCK for w in waiting)),
        waiting=waiting,
    )


Ranked = tuple[tuple[float, float], Waiting]
"""Its rank, then when it began."""


def _ended(situation: SystemSnapshot, course: BatchTimes, *, up: bool) -> Ranked:
    state = course.state
    resume = resume_command(situation.store) if situation.of_run else ""
    cause, text = "nothing", "it waits for nothing"
    if state.state is BatchLifecycleState.ABORTED:
        text = f"it was aborted: {short(course.error)}"
    elif state.trained_step is not None:
        text = f"it was trained in step {state.trained_step}: it waits for nothing"
    elif state.batch_type == "train":
        cause = "training"
        text = f"it is finalized since {local_time(course.moved_at)}, and no trainer has acknowledged it"
    failed = [(i, status) for i, status in sorted(state.statuses.items()) if status.completed_runs < status.total_runs]
    if failed and state.state is not BatchLifecycleState.ABORTED:
        task, status = failed[0]
        if cause == "training" and state.failed_whole:
            cause = "all_failed"
        what = f"{counted(len(failed), 'task')} of {state.expected_task_count} failed at least in part, the first is"
        if state.failed_whole:
            what = "each of its runs failed, the first of"
        text += f"; {what} task {task}: {short(status.message or '')}"
    w = Waiting(cause=cause, what="the trainer", text=text, since=course.moved_at)
    return (0.0, 0.0), replace(w, resume=resume, system_up=up) if cause == "all_failed" else w


def _open(
    situation: SystemSnapshot, course: BatchTimes, lives: Mapping[str, RunnerSnapshot], now: float,
    live: Mapping[str, Any] | None, system: Mapping[str, Any] | None,
) -> Iterator[Ranked]:
    def ranked(w: Waiting, rank: float | None = None) -> Ranked:
        return (_RANK[w.cause] if rank is None else rank, w.since or 0.0), w

    state = course.state
    machine = _machine(situation, now, live, system)
    if machine is not None:
        yield ranked(machine)
    wait = _trainers_turn(course, now, live)
    if wait is not None:
        yield ranked(wait)
        if wait.cause == "finalizing":
            return
    if machine is not None and machine.cause in ("no_system", "ending", "restarting", "fenced"):
        for flight in state.flights.values():
            yield ranked(_interrupted(course, flight))
        return
    facts = system or {}
    if machine is None and live is None and facts.get("up") is None and facts.get("host"):
        host, pid = facts["host"], facts.get("pid")
        text = f"its system was last on {host} (coordinator pid {pid}); whether it still is can't be seen from here"
        yield ranked(Waiting(cause="unseen", what="the actor system", text=text))
    usual = statistics.median(course.took) if course.took else None
    hosts = hosts_now(situation, live, now)
    for flight in state.flights.values():
        w = _flying(situation, course, flight, lives, now, usual)
        yield ranked(on_its_host(w, hosts.get(host_of(flight.runner)), now, situation.host_timeout))
    lives = {name: r for name, r in lives.items() if (h := hosts.get(host_of(name))) is None or h.there}
    for r in lives.values():
        if r.state == "ready" and refuses(situation, r):
            yield ranked(behind(r))
    asked = [r for r in lives.values() if r.model != "rollout"]
    lives = {name: r for name, r in lives.items() if r.model == "rollout"}
    gone = {name for name, r in lives.items() if r.leaving or (situation.of_servers and r.state == "retired")}
    lives = {name: r for name, r in lives.items() if name not in gone}  # nobody waits for what was taken away
    for r in asked if state.flights else ():
        if r.state != "ready":  # who asks it waits, until its attempt's timeout at most
            w = idle(situation, r, now)
            yield ranked(replace(w, text=f"workflows that ask model {r.model}: {w.text}", person=False), _RANK_ASKED)
    if not state.pending:
        return
    if state.paused:
        text = f"{_units(course)} without a runner: its scheduler was stopped"
        yield ranked(Waiting(cause="paused", what=_units(course), text=text))
        return
    leaving = {name for name, h in hosts.items() if h.state == "draining"}
    of_hosts = [*idle_hosts(hosts.values(), lives, now, bool([n for n in lives if host_of(n) not in leaving]))]
    lives = {name: r for name, r in lives.items() if host_of(name) not in leaving}
    serving = [r for r in lives.values() if serves(situation, r)]
    if serving:
        yield ranked(_without_place(situation, course, serving, now))
    elif not lives and has_no_server(situation, live, bool(gone)):
        text = f"{_units(course)} without a runner: there is no server{' any more' if gone else ' yet'}"
        if (live or {}).get("server_list"):
            text += f"; {(live or {})['server_list']}"
        w = Waiting(cause="no_server", what=_units(course), text=text, person=not state.flights)
        yield ranked(w, _RANK_RUNNER)
    elif not lives and not of_hosts:
        text = f"{_units(course)} without a runner: none has come up yet"
        yield ranked(Waiting(cause="no_runner", what=_units(course), text=text), _RANK_RUNNER)
    # Where every runner needs a person, so does the batch, but for what is still in the air.
    others = [*(idle(situation, r, now) for r in lives.values() if r not in serving), *of_hosts]
    stuck = not serving and not state.flights and all(w.person for w in others)
    for w in others:
        text = w.text if serving else f"{_units(course)} without a runner: {w.text}"
        yield ranked(replace(w, text=text, person=stuck), _RANK_OTHER_RUNNER if serving else _RANK_RUNNER)


def _machine(
    situation: SystemSnapshot, now: float, live: Mapping[str, Any] | None, system: Mapping[str, Any] | None
) -> Waiting | None:
    facts = system or {}
    resume = resume_command(situation.store) if situation.of_run else ""
    gone = partial(Waiting, what="the actor system", since=situation.last_at, resume=resume)
    if facts.get("ends"):
        return gone(cause="ending", text=f"the actor system ends: {facts['ends']}", person=True)
    if facts.get("up") is False:
        pid = f" (coordinator pid {facts['pid']} on {facts.get('host', 'this host')})" if facts.get("pid") else ""
        ended = "it has ended (guardian.log says why)"
        how = ended if facts.get("released") else f"its processes are gone{pid}"
        if facts.get("copied_from"):
            how = f"it is a copy of {facts['copied_from']}, and the system that it names is that one's"
        last = "" if situation.last_at is None else f"; the last event was at {local_time(situation.last_at)}"
        text = f"no actor system runs on this store: {how}{last}"
        if facts.get("kept"):
            text += f"; its keeper (pid {facts['kept']}) starts it again"
            return gone(cause="restarting", text=text)
        return gone(cause="no_system", text=text, person=True)
    if live is None:
        if not facts.get("up") or facts.get("asked") is False:
            return None
        return Waiting(cause="no_answer", what="the actor system", text="the actor system runs but does not answer")
    if live.get("system", {}).get("fenced"):
        text = f"another system took this store, so this one stands still: {short(live['system']['fenced'])}"
        return Waiting(cause="fenced", what="the actor system", text=text, person=True)
    if live.get("trouble"):
        return Waiting(cause="unwritten", what="the log", text=live["trouble"], person=bool(live.get("refuses")))
    if "weights_version" not in live:  # only the guardian answered
        children = live.get("system", {}).get("children", [])
        child: Mapping[str, Any] = next((c for c in children if c.get("name") == "coordinator"), {})
        text = f"{coordinator_away(child)}; runners go on meanwhile and keep what they finish"
        return Waiting(cause="no_coordinator", what="the coordinator", text=text)
    return None


def _trainers_turn(course: BatchTimes, now: float, live: Mapping[str, Any] | None) -> Waiting | None:
    """Say that the batch has what it needs, or is being finalized; None where neither is so."""
    state = course.state
    if state.state is BatchLifecycleState.FINALIZING:
        since = course.finalizing_since
        ago = "" if since is None else f" for {span(now - since)}"
        text = f"it is finalizing: its pipeline has been running{ago}"
        return Waiting(cause="finalizing", what="the pipeline", text=text, since=since)
    settled, tasks = state.completed_task_count, state.expected_task_count
    needed = tasks if state.min_wait_num is None else min(state.min_wait_num, tasks)
    if state.open_task_count if state.batch_type == "collect" else settled < needed:
        return None
    if course.error:
        text = f"its pipeline failed, and nobody has finalized it again: {short(course.error)}"
        return Waiting(cause="finalize_failed", what="the trainer", text=text, since=course.moved_at)
    rows = {row.get("batch_id"): row for row in (live or {}).get("batches", [])}
    have = "all its tasks are settled" if settled == tasks else f"{settled} of {tasks} tasks are settled, enough"
    if rows.get(state.batch_id, {}).get("waited_for"):
        text = f"{have}; the trainer waits, and the rest has explorer.over_rollout.wait_after_min seconds to come"
        return Waiting(cause="grace", what="the rest of its tasks", text=text, since=course.moved_at)
    call = "Scheduler.get_results" if state.batch_type == "collect" else f"finalize_{state.batch_type}_batch"
    text = f"{have}, and nobody has called {call}"
    return Waiting(cause="finalize", what="the trainer", text=text, since=course.moved_at)


# --- units ----------------------------------------------------------------------------------------------------------
def _unit(state: BatchState, unit: ev.Unit, strikes: int) -> str:
    """Return a unit in words. `strikes`: failed attempts before this one that count."""
    last = unit.run_id_base + unit.runs - 1
    runs = f"run {last}" if unit.runs == 1 else f"runs {unit.run_id_base}-{last}"
    counts = strikes + 1
    of = f"of {state.max_attempts}"
    if counts != unit.attempt:  # it was not blamed for some: its runner was lost
        nth = {1: "1st", 2: "2nd", 3: "3rd"}.get(counts, f"{counts}th")
        of = f"(the {nth} {of} that count)"
    return f"task {unit.task}, {runs}, attempt {unit.attempt} {of}"


def _units(course: BatchTimes) -> str:
    key, first = next(iter(course.state.pending.items()))
    more = len(course.state.pending) - 1
    told = _unit(course.state, first, course.state.strikes.get(key, 0))
    return told + (f" and {counted(more, 'more unit')}" if more else "")


def _interrupted(course: BatchTimes, flight: Flight) -> Waiting:
    unit, state = flight.unit, course.state
    what = _unit(state, unit, flight.strikes)
    text = f"{what} was on {flight.runner} #{flight.incarnation} when the system ended"
    return Waiting(
        cause="interrupted", what=what, text=text, task=unit.task, attempt=unit.attempt,
        charged_attempt=flight.strikes + 1, max_attempts=state.max_attempts, runner=flight.runner,
        incarnation=flight.incarnation, since=course.flying_since.get((unit.task, unit.run_id_base)),
    )


def _flying(
    situation: SystemSnapshot, course: BatchTimes, flight: Flight, lives: Mapping[str, RunnerSnapshot], now: float,
    usual: float | None,
) -> Waiting:
    """Return a unit that a runner has: running, slow or hung. `usual`: seconds that others took."""
    unit, state = flight.unit, course.state
    since = course.flying_since.get((unit.task, unit.run_id_base), course.moved_at)
    limit = flight.timeout or situation.limit
    if limit is not None and situation.sequential:
        limit *= unit.runs
    age = max(0.0, now - since)
    life = lives.get(flight.runner)
    runner = life if life is not None and life.incarnation == flight.incarnation else None
    beat = None if runner is None or runner.seen is None else now - runner.seen
    cause, told = "running", _signs(runner, since, now)
    gone = life is not None and life.incarnation >= flight.incarnation and (
        runner is None or runner.state in ("lost", "quarantined", "down", "failed")
    )
    if life is not None and gone:
        cause, told = "lost", f"its runner is gone ({short(life.reason) or life.state}), so it is attempted again"
    elif beat is not None and beat > SILENT_SECONDS:
        cause, told = "hung", f"hung: its runner has given no sign of life for {span(beat)}"
    elif runner is not None and (runner.silent or 0.0) > SILENT_SECONDS:
        cause, told = "hung", f"hung: the engine's loop of its runner has not answered for {span(runner.silent or 0.0)}"
    elif runner is not None and runner.trouble:
        cause, told = "unstored", f"its runner can't store what it finished: {runner.trouble}"
    elif limit is not None and age > limit + LATE_SECONDS:
        cause, told = "hung", f"hung: past its limit of {span(limit)}, and nothing has stopped it"
    elif usual is not None and age > SLOW_TIMES * max(usual, 0.1):
        cause, told = "slow", f"slow, not known to be hung: others took {span(usual)}" + (f"; {told}" if told else "")
    else:
        told = "running" + (f": {told}" if told else "")
    of = "" if limit is None else f" of at most {span(limit)}"
    what = _unit(state, unit, flight.strikes)
    first = state.tasks[unit.task].first_error if unit.attempt > 1 else None
    again = "" if first is None else f" (before it: {short(first, 120)})"
    text = f"{what} on {flight.runner} #{flight.incarnation} for {span(age)}{of}: {told}{again}"
    return Waiting(
        cause=cause, what=what, text=text,
        task=unit.task, attempt=unit.attempt, charged_attempt=flight.strikes + 1, max_attempts=state.max_attempts,
        runner=flight.runner, incarnation=flight.incarnation, since=since,
        seen=None if runner is None else runner.seen, limit=limit,
    )


def _signs(runner: RunnerSnapshot | None, since: float, now: float) -> str:
    if runner is None:
        return ""
    signs = []
    if runner.finished is not None and runner.finished > since:
        signs.append(f"finished another unit {span(now - runner.finished)} ago")
    if runner.seen is not None:
        signs.append(f"was heard of {span(now - runner.seen)} ago")
    loop = ""
    if runner.silent is not None:
        quiet = runner.silent > QUIET_SECONDS
        loop = ", and its engine's loop " + (f"has not answered for {span(runner.silent)}" if quiet else "answers")
    told = f"its runner {', '.join(signs)}{loop}" if signs else ""
    waits = runner.runs_wait or (f"it waits for {runner.waits_for}" if runner.waits_for else "")
    return "; ".join(part for part in (told, short(waits)) if part)


def _without_place(situation: SystemSnapshot, course: BatchTimes, serving: list[RunnerSnapshot], now: float) -> Waiting:
    """Return why units wait although runners serve."""
    taken: dict[str, int] = {}
    by_batch: dict[BatchId, int] = {}
    for other in situation.courses.values():
        for flight in other.state.flights.values():
            taken[flight.runner] = taken.get(flight.runner, 0) + 1
            by_batch[other.state.batch_id] = by_batch.get(other.state.batch_id, 0) + 1
    units = _units(course)
    since = min((course.pending_since.get(key, course.moved_at) for key in course.state.pending), default=None)
    free = [r for r in serving if taken.get(r.name, 0) < r.places]
    if not free:
        whose = ", ".join(f"batch {b}: {by_batch[b]}" for b in sorted(by_batch, key=sort_batch_id))
        places = sum(r.places for r in serving)
        ahead = sum(taken.get(r.name, 0) for r in serving) - places  # of short units some wait in the runner
        whose += f"; {counted(ahead, 'unit')} more than places, sent ahead" if ahead > 0 else ""
        runners = counted(len(serving), "runner")
        text = f"{units} without a place: all {places} places of {runners} are taken ({whose})"
        return Waiting(cause="places", what=units, text=text, since=since)
    avoided = {course.state.avoid.get(key) for key in course.state.pending}
    if {r.name for r in free} <= avoided:
        text = f"{units} without another runner: the last attempt failed on {free[0].name}"
        return Waiting(cause="elsewhere", what=units, text=text, since=since)
    return Waiting(cause="dispatch", what=units, text=f"{units} about to be given to {free[0]}", since=since)
