"""The page that compares two batches, or one batch at two times, of one log or of two logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route, batch_id_of, batch_ref
from trinity_es.events.errors import BatchNotFound, DataError, TrinityError
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline, fold_timeline
from trinity_es.projections.reading.diff import changes, is_time_metric, readable_state
from trinity_es.projections.reading.log_reader import Log

__all__ = ["NAV", "ROUTES", "Side", "comparison", "differences", "read_side"]

MAX_TASKS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two batches that are compared."""

    log: str
    """The log's URL, without a password."""
    batch_id: BatchId
    at: int | None
    """Log position up to which the batch was replayed; None for all events."""
    timeline: BatchTimeline
    facts: dict[str, Any]
    """Compared values by name. The values of a task are under `task N`."""


def comparison(request: PageRequest) -> Page:
    """Return the page `/compare?id=A&at=P&id2=B&at2=Q`, which compares batch A at position P with batch B at Q.

    `id2` defaults to `id`. With `in=other`, the default if there is a second log, `id2` is a batch of that log.
    """
    sides: list[Side] = []
    trouble = ""
    open_other_log = request.open_other_log
    in_other_log = open_other_log is not None and request.choice("in", ("this", "other"), "other") == "other"
    if request.text("id"):
        try:
            second_log = open_other_log() if in_other_log and open_other_log is not None else request.log
            sides = [_requested_side(request.log, request.text("id"), request.text("at")),
                     _requested_side(second_log, request.text("id2") or request.text("id"), request.text("at2"))]
        except TrinityError as e:
            trouble = e.message
    show = request.choice("show", ("differing", "all"), "differing")
    differing = differences(*sides) if sides else {}
    tasks_of_sides = [{t.task: t for t in s.timeline.tasks} for s in sides]
    numbers = sorted({number for tasks_of_side in tasks_of_sides for number in tasks_of_side})
    tasks = [(n, tasks_of_sides[0].get(n), tasks_of_sides[1].get(n), differing.get(f"task {n}", [])) for n in numbers
             if show == "all" or f"task {n}" in differing]
    names = list(dict.fromkeys(name for s in sides for name in s.facts if not name.startswith("task ")))
    facts = [(name, sides[0].facts.get(name), sides[1].facts.get(name)) for name in names]
    return Page(
        template="compare.html", title="Compare", nav="compare", watch=(),
        values={
            "sides": sides, "trouble": trouble, "tasks": tasks[:MAX_TASKS],
            "tasks_left": max(0, len(tasks) - MAX_TASKS),
            "facts": [f for f in facts if not f[0].startswith("result ")],
            "metrics": [(name.removeprefix("result "), a, b, b - a if isinstance(a, float) and isinstance(b, float)
                         else None) for name, a, b in facts if name.startswith("result ")],
            "differing": [name for name in differing if not name.startswith("task ")],
            "tasks_differing": [n for n in numbers if f"task {n}" in differing], "tasks_in_all": len(numbers),
            "show": show, "two": open_other_log is not None, "elsewhere": in_other_log,
            "ids": (request.text("id"), request.text("id2")), "ats": (request.text("at"), request.text("at2")),
            "newest": [batch_ref(row.batch_id) for row in
                      request.log.batches(sort="position", descending=True, limit=200)],
        },
    )


def _requested_side(log: Log, ref: str, position: str) -> Side:
    """Read the batch with this name, as of this position ("": now). Raises BatchNotFound, DataError."""
    batch_id, position = batch_id_of(log, ref.strip()), position.strip()
    if not position:
        return read_side(log, batch_id)
    if not (position.isdecimal() and position.isascii() and len(position) < 20):
        raise DataError(f"{position[:40]!r} is not a position of the log: use a number, as in the list of events")
    return read_side(log, batch_id, int(position))


def read_side(log: Log, batch_id: BatchId, at: int | None = None) -> Side:
    """Read a batch as of a log position (None: now). Raises BatchNotFound, also if it was submitted later."""
    events = log.events(batch_id)  # raises BatchNotFound
    try:
        timeline = fold_timeline(recorded for recorded in events if at is None or recorded.position <= at)
    except BatchNotFound:
        raise BatchNotFound(f"batch {batch_id!r} was not submitted yet at position {at}: choose a later one") from None
    state, state_facts = timeline.state, readable_state(timeline.state)
    facts = {
        "type": state.batch_type, "minimum of tasks": state.min_wait_num,
        "attempts per unit": state.max_attempts, **{f"tasks {name}": n for name, n in timeline.counts.items()},
        "response tokens": sum(t.response_tokens for t in timeline.tasks),
        "weights versions": ", ".join(str(v) for v in sorted(timeline.versions)),
        "seconds": (timeline.ended_at or timeline.last_at) - timeline.submitted_at, **state_facts,
        **{f"task {t.task}": _task_facts(t, state_facts[f"task {t.task}"]) for t in timeline.tasks},
    }
    return Side(log=log.url, batch_id=batch_id, at=at, timeline=timeline, facts=facts)


def _task_facts(task: TaskTimeline, outcome: str) -> dict[str, Any]:
    """Return the values of one task that are compared. Runner and weights version are those of its last attempt."""
    last = task.attempts[-1] if task.attempts else None
    return {
        "state": task.state, "runs": task.runs, "reward": sorted(task.rewards), "tokens": task.response_tokens,
        "attempts": [a.outcome for a in task.attempts], "runner": last and last.runner,
        "version": last and last.model_version, "outcome": outcome,
    }


def differences(a: Side, b: Side) -> dict[str, list[str]]:
    """Return the names of values that differ, except times. For `task N`, lists the task's values that differ."""
    differing: dict[str, list[str]] = {}
    for change in changes(a.facts, b.facts):
        name, _, part = change.path.partition(".") if change.path.startswith("task ") else (change.path, "", "")
        if not is_time_metric(name):
            differing.setdefault(name, []).append(part or "only on one side")
    return differing


NAV = [Nav(name="compare", title="Compare", path="/compare", key="c")]
ROUTES = [Route("/compare", comparison)]
