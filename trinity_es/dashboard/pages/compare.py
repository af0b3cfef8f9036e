"""Two replays side by side: two batches, or one batch at two moments, of one log or of two, as `diff` tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_es.dashboard.page import Nav, Page, PageRequest, Route, batch_of, batch_ref
from trinity_es.events.errors import BatchNotFound, DataError, TrinityError
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline, tell
from trinity_es.projections.reading.diff import changes, is_clock, picture
from trinity_es.projections.reading.log_reader import Log

__all__ = ["NAV", "ROUTES", "Side", "comparison", "differences", "side"]

TASKS = 200
"""Tasks that a page shows of each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    log: str
    """Its URL, without a password."""
    batch_id: BatchId
    at: int | None
    """Up to this position; None: all that there is."""
    story: BatchTimeline
    said: dict[str, Any]
    """What `diff` says of it, and `task N` for each task as values."""


def comparison(ask: PageRequest) -> Page:
    """`/compare?id=A&at=P&id2=B&at2=Q`; without a second batch the first. `in=other`: the second is of the other log.
    """
    sides: list[Side] = []
    trouble = ""
    elsewhere = ask.other is not None and ask.choice("in", ("this", "other"), "other") == "other"
    if ask.text("id"):
        try:
            log = ask.other() if elsewhere and ask.other is not None else ask.log
            sides = [_asked(ask.log, ask.text("id"), ask.text("at")),
                     _asked(log, ask.text("id2") or ask.text("id"), ask.text("at2"))]
        except TrinityError as e:
            trouble = e.message
    only = ask.choice("show", ("differing", "all"), "differing")
    found = differences(*sides) if sides else {}
    of_tasks = [{t.task: t for t in s.story.tasks} for s in sides]
    numbers = sorted({number for tasks in of_tasks for number in tasks})
    tasks = [(n, of_tasks[0].get(n), of_tasks[1].get(n), found.get(f"task {n}", [])) for n in numbers
             if only == "all" or f"task {n}" in found]
    names = list(dict.fromkeys(name for s in sides for name in s.said if not name.startswith("task ")))
    facts = [(name, sides[0].said.get(name), sides[1].said.get(name)) for name in names]
    return Page(
        template="compare.html", title="Compare", nav="compare", watch=(),
        values={
            "sides": sides, "trouble": trouble, "tasks": tasks[:TASKS], "tasks_left": max(0, len(tasks) - TASKS),
            "facts": [f for f in facts if not f[0].startswith("result ")],
            "metrics": [(name.removeprefix("result "), a, b, b - a if isinstance(a, float) and isinstance(b, float)
                         else None) for name, a, b in facts if name.startswith("result ")],
            "differing": [name for name in found if not name.startswith("task ")],
            "tasks_differing": [n for n in numbers if f"task {n}" in found], "tasks_in_all": len(numbers),
            "show": only, "two": ask.other is not None, "elsewhere": elsewhere,
            "ids": (ask.text("id"), ask.text("id2")), "ats": (ask.text("at"), ask.text("at2")),
            "known": [batch_ref(row.batch_id) for row in
                      ask.log.batches(sort="position", descending=True, limit=200)],
        },
    )


def _asked(log: Log, ref: str, at: str) -> Side:
    batch_id = batch_of(log, ref.strip())
    if not at.strip():
        return side(log, batch_id)
    if not (at.strip().isdecimal() and at.isascii() and len(at.strip()) < 20):
        raise DataError(f"{at[:40]!r} is no position of the log: a number, as in the list of events")
    return side(log, batch_id, int(at))


def side(log: Log, batch_id: BatchId, at: int | None = None) -> Side:
    """Return a batch as it is, or was at a position. Raises BatchNotFound, also where it was not there yet."""
    events = log.events(batch_id)  # tells if there is no such batch at all
    try:
        story = tell(recorded for recorded in events if at is None or recorded.position <= at)
    except BatchNotFound:
        raise BatchNotFound(f"batch {batch_id!r} was not submitted yet at {at}") from None
    state, told = story.state, picture(story.state)
    said = {
        "type": state.batch_type, "tasks wanted at least": state.min_wait_num,
        "attempts a unit gets": state.max_attempts, **{f"tasks {name}": n for name, n in story.counts.items()},
        "response tokens": sum(t.response_tokens for t in story.tasks),
        "weights versions": ", ".join(str(v) for v in sorted(story.versions)),
        "seconds": (story.ended_at or story.last_at) - story.submitted_at, **told,
        **{f"task {t.task}": _task(t, told[f"task {t.task}"]) for t in story.tasks},
    }
    return Side(log=log.url, batch_id=batch_id, at=at, story=story, said=said)


def _task(task: TaskTimeline, told: str) -> dict[str, Any]:
    last = task.attempts[-1] if task.attempts else None
    return {
        "state": task.state, "runs": task.runs, "reward": sorted(task.rewards), "tokens": task.response_tokens,
        "attempts": [a.outcome for a in task.attempts], "runner": last and last.runner,
        "version": last and last.model_version, "outcome": told,
    }


def differences(a: Side, b: Side) -> dict[str, list[str]]:
    """Return the names of what differs, but for times; for a task with what of it."""
    found: dict[str, list[str]] = {}
    for change in changes(a.said, b.said):
        name, _, part = change.path.partition(".") if change.path.startswith("task ") else (change.path, "", "")
        if not is_clock(name):
            found.setdefault(name, []).append(part or "only on one side")
    return found


NAV = [Nav(name="compare", title="Compare", path="/compare", key="c")]
ROUTES = [Route("/compare", comparison)]
