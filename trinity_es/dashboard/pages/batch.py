"""One batch: what became of each task and when, where, on which weights; its events, and what it was as of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.dashboard.batch_cache import BatchCache, CachedBatch
from trinity_es.dashboard.gantt import Lane, Window, busy, cells, drawing, kind_of, lane, rewards_between
from trinity_es.dashboard.page import Page, PageRequest, Route
from trinity_es.dashboard.pages.overview import followed
from trinity_es.events.store.records.recorded import Recorded
from trinity_es.events.values import BatchLifecycleState, batch_stream
from trinity_es.projections.batch import BatchState
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline, known_first
from trinity_es.projections.host_states import host_of
from trinity_es.projections.tables.runner_history import natural
from trinity_es.text import summary

__all__ = ["ROUTES", "asof", "batch", "courses", "steps", "tasks_of"]

SIZE = 50
STEPS = 200
"""Events that are shown at first, and that come with each "more"."""
DRAWN = 1000
"""A batch of more attempts than this is not drawn by runner."""
GRID = 384
"""Tasks in the grid of a state in the past."""
SHOWN = 6000
SORTS = ("task", "state", "reward", "tokens", "attempts", "seconds")
STATES = ("pending", "running", "finished", "failed", "dropped")
SPREAD = ("mean", "min", "max", "std")
ENDED = (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    name: str
    attempts: int
    finished: int
    failed: int
    seconds: float
    versions: list[int]
    lane: Lane | None

    @property
    def host(self) -> str:
        return host_of(self.name)


def courses(ask: PageRequest) -> BatchCache:
    """Return the courses of batches that this server keeps."""
    kept: BatchCache = ask.kept.setdefault("courses", BatchCache())
    return kept


def batch(ask: PageRequest) -> Page:
    """Return the page. `at`: the position of the event whose state is shown."""
    batch_id = ask.batch()
    row = ask.log.batch_row(batch_id)
    why = None if row.ended_at is not None else ask.log.why(batch_id, ask.now, followed=followed(ask))
    dead = why is not None and why.cause in ("no_system", "unseen") and ask.now - why.moved_at > 60
    with courses(ask).of(ask.log, batch_id) as course:
        story = course.story
        assert story is not None
        values = _story_values(ask, story, dead) | _history_values(ask, course)
    neighbours = _neighbours(ask, row.first_position)
    return Page(
        template="batch.html", title=f"Batch {batch_id}", nav="batches", watch=(batch_stream(batch_id),),
        values=values | neighbours | {
            "row": row, "waits": [] if why is None else why.sentences()[1:], "stuck": why is not None and why.stalled,
            "losses": sorted(ask.log.losses(batch_id).items()), "config": _config(ask, row.first_position),
        },
    )


# --- its tasks ------------------------------------------------------------------------------------------------------
def tasks_of(story: BatchTimeline, state: str, sort: str, descending: bool) -> list[TaskTimeline]:
    chosen = [t for t in story.tasks if not state or t.state == state]
    keys: dict[str, Callable[[TaskTimeline], float | None]] = {
        "task": lambda t: t.task, "state": lambda t: STATES.index(t.state), "reward": lambda t: t.reward,
        "tokens": lambda t: t.response_tokens, "attempts": lambda t: len(t.attempts),
        "seconds": lambda t: None if t.ended_at is None else t.ended_at - story.submitted_at,
    }
    return known_first(chosen, keys[sort], descending)


def window_of(story: BatchTimeline, now: float, dead: bool) -> Window:
    """From its submission to its end; of an open one to now or, where nothing runs any more, to its last event."""
    last = story.ended_at if story.ended_at is not None else story.last_at if dead else now
    return Window(story.submitted_at, max(last, story.submitted_at + 1e-3))


def _story_values(ask: PageRequest, story: BatchTimeline, dead: bool) -> dict[str, Any]:
    state, window = story.state, window_of(story, ask.now, dead)
    sort, kind = ask.choice("sort", SORTS, "task"), ask.choice("state", STATES)
    descending = ask.choice("order", ("up", "down"), "up") == "down"
    chosen = tasks_of(story, kind, sort, descending)
    number, pages = ask.page_of(len(chosen), SIZE)
    shown = chosen[(number - 1) * SIZE : number * SIZE]
    by_runner = busy(story)
    drawn = sum(map(len, by_runner.values())) <= DRAWN
    return drawing(story, window, shown) | {
        "ended": state.state in ENDED,
        "sort": sort, "kind": kind, "descending": descending, "pages": pages, "number": number,
        "chosen": len(chosen), "states": STATES,
        "runners": [
            Work(
                name=name, attempts=len(did), finished=sum(kind_of(a) == "finished" for _, a in did),
                failed=sum(kind_of(a) == "failed" for _, a in did),
                seconds=sum((window.end if a.ended_at is None else a.ended_at) - a.dispatched_at for _, a in did),
                versions=sorted({a.model_version for _, a in did}),
                lane=lane(did, window, window.end) if drawn else None,
            )
            for name, did in sorted(by_runner.items(), key=lambda item: (natural(host_of(item[0])), natural(item[0])))
        ],
        "metrics": _grouped((state.final_result or {}).get("metrics", {})),
    }


def _grouped(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Metrics by what stands before the first slash; `x/mean`, `x/min`, ... are one line, with a value of each of
    `kinds`.
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for name in sorted(metrics):
        head, _, rest = name.partition("/")
        rest = rest or name
        base, _, kind = rest.rpartition("/")
        known = bool(base) and kind in SPREAD
        of_base = groups.setdefault(head, {}).setdefault(base if known else rest, {})
        of_base[kind if known else ""] = metrics[name]
    out = []
    for head, bases in sorted(groups.items(), key=lambda item: (item[0] == "experience_pipeline", item[0])):
        kinds = [k for k in SPREAD if any(k in v for v in bases.values())]
        spreads = [(base, [v.get(k) for k in kinds]) for base, v in bases.items() if v.keys() - {""}]
        single = [(base, v[""]) for base, v in bases.items() if "" in v]
        out.append({"name": head, "kinds": kinds, "spreads": spreads, "single": single})
    return out


def _neighbours(ask: PageRequest, position: int) -> dict[str, Any]:
    return {
        "before": _submitted(ask, before=position, descending=True),
        "after": _submitted(ask, after=position, descending=False),
    }


def _submitted(ask: PageRequest, **where: Any) -> Any:
    found = next(ask.log.rare(["BatchSubmitted"], limit=1, **where), None)
    return None if found is None else orjson.loads(found.data)["batch_id"]


def _config(ask: PageRequest, position: int) -> tuple[int, list[tuple[str, str]]] | None:
    """(its position, every key) of the config that the system ran with when the batch was submitted."""
    at, config = ask.log.config(position)
    return (at, list(_flat(config))) if config else None


def _flat(value: Any, path: str = "") -> Any:
    if isinstance(value, dict) and value:
        for key in value:
            yield from _flat(value[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else orjson.dumps(value).decode()


# --- its events -----------------------------------------------------------------------------------------------------
def _history_values(ask: PageRequest, course: CachedBatch) -> dict[str, Any]:
    total = len(course.positions)
    at = course.version_at(ask.number("at")) if "at" in ask.query else 0
    if at:
        first = max(1, at - STEPS // 2)
    else:
        assert course.story is not None
        first = 1 if course.story.ended_at is not None else max(1, total - STEPS + 1)
    found = course.page(ask.log, first, STEPS)
    return {
        "steps": [(r, summary(r.event)) for r in found], "total": total, "at": at,
        "earlier": max(0, first - 1), "later": total - (first + len(found) - 1),
        "moment": _moment(ask, course, at) if at else None, "submitted_at": course.story and course.story.submitted_at,
    }


def steps(ask: PageRequest) -> Page:
    """More of its events: rows from version `first` on, or those before version `before`."""
    batch_id = ask.batch()
    with courses(ask).of(ask.log, batch_id) as course:
        total = len(course.positions)
        before = ask.number("before")
        first = max(1, before - STEPS) if before else ask.number("first", 1, low=1)
        count = min(STEPS, before - first) if before else STEPS
        found = course.page(ask.log, first, count)
        later = 0 if before else max(0, total - (first + len(found) - 1))
        return Page(
            template="steps.html", title="", bare=True,
            values={"steps": [(r, summary(r.event)) for r in found], "total": total, "at": 0,
                    "earlier": first - 1 if before else 0, "later": later,
                    "submitted_at": course.story and course.story.submitted_at},
        )


def asof(ask: PageRequest) -> Page:
    batch_id = ask.batch()
    with courses(ask).of(ask.log, batch_id) as course:
        n = ask.number("n", 1, low=1, high=len(course.positions))
        return Page(template="asof.html", title="", bare=True, values={"moment": _moment(ask, course, n)})


def _moment(ask: PageRequest, course: CachedBatch, n: int) -> dict[str, Any]:
    """Return what is shown of the state as of one event; everything is copied out of the state, which goes on changing.
    """
    state, recorded = course.state_at(ask.log, n)
    touched = _touched(recorded)
    first = 0
    if len(state.tasks) > GRID and touched:
        first = min(touched) // GRID * GRID
    numbers = list(range(first, min(len(state.tasks), first + GRID)))
    assert course.story is not None
    return {
        "n": n, "total": len(course.positions), "recorded": recorded, "said": summary(recorded.event),
        "since": recorded.recorded_at - course.story.submitted_at,
        "data": _data(recorded), "figures": _figures(state), "touched": touched,
        "grid": cells(state, numbers, rewards_between(state)), "first": first, "tasks": len(state.tasks),
        "runs": max((state.tasks[t].total_runs for t in numbers), default=1),
        "errors": [(t, e) for t in sorted(touched)[:5] if t < len(state.tasks) and (e := state.tasks[t].first_error)],
    }


def _touched(recorded: Recorded) -> set[int]:
    event = recorded.event
    if (units := getattr(event, "units", None)) is not None:
        return {unit.task for unit in units}
    tasks = getattr(event, "tasks", None)
    if isinstance(tasks, list) and all(isinstance(t, int) for t in tasks):
        return set(tasks)
    task = getattr(event, "task", None)
    return {task} if isinstance(task, int) else set()


def _figures(state: BatchState) -> list[tuple[str, str]]:
    failed = sum(not s.ok for s in state.statuses.values())
    told = [
        ("state", state.state.value + (", paused" if state.paused else "")),
        ("tasks settled", f"{state.completed_task_count:,} of {state.expected_task_count:,}"),
        ("of them failed", f"{failed:,}"), ("tasks dropped", f"{len(state.dropped):,}"),
        ("units with runners", f"{len(state.flights):,}"), ("units waiting", f"{len(state.pending):,}"),
        ("failed attempts", f"{state.failed_attempts:,}"),
        ("oldest weights", "–" if state.oldest_version is None else str(state.oldest_version)),
    ]
    if state.trained_step is not None:
        told.append(("trained in step", str(state.trained_step)))
    return told


def _data(recorded: Recorded) -> str:
    """Return the event as it is stored, readable, at most `SHOWN` characters."""
    data = recorded.data if len(recorded.data) < 200_000 else None
    if data is None:
        return recorded.data[:SHOWN].decode(errors="replace") + f" … {len(recorded.data):,} bytes in all"
    text = orjson.dumps(orjson.loads(data), option=orjson.OPT_INDENT_2).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}\n… {len(text):,} characters in all"


ROUTES = [Route("/batch", batch), Route("/batch/steps", steps), Route("/batch/asof", asof)]
