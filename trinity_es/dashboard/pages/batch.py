"""The page of one batch: its tasks, runners, result and events, and its state after each event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.dashboard.batch_cache import BatchCache, CachedBatch
from trinity_es.dashboard.gantt import Lane, Window, attempts_by_runner, bar_kind, cells, drawing, lane, reward_range_of
from trinity_es.dashboard.page_urls import Page, PageRequest, Route
from trinity_es.dashboard.pages.overview import kept_folds
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.values import BatchLifecycleState, batch_stream
from trinity_es.projections.batch import BatchState
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline, sort_known_first
from trinity_es.projections.host_states import host_of
from trinity_es.projections.tables.runner_history import natural_key
from trinity_es.safe_text import summary

__all__ = ["ROUTES", "asof", "batch", "batch_cache", "select_tasks", "steps"]

TASKS_PER_PAGE = 50
EVENTS_PER_PART = 200
"""Number of events that are shown first, and that each click on "earlier" or "later" adds."""
MAX_DRAWN = 1000
"""Maximum number of attempts of a batch for which bars by runner are drawn."""
GRID_TASKS = 384
EVENT_CHARACTERS = 6000
EVENT_BYTES = 200_000
"""Stored events of this size and more are shown without indentation."""
SORTS = ("task", "state", "reward", "tokens", "attempts", "seconds")
STATES = ("pending", "running", "finished", "failed", "dropped")
STATISTICS = ("mean", "min", "max", "std")
ENDED = (BatchLifecycleState.FINALIZED, BatchLifecycleState.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerWork:
    """Attempts of one runner in the batch."""

    name: str
    attempts: int
    failed: int
    seconds: float
    lane: Lane | None

    @property
    def host(self) -> str:
        return host_of(self.name)


def batch_cache(request: PageRequest) -> BatchCache:
    cache: BatchCache = request.server_values.setdefault("batch_cache", BatchCache())
    return cache


def batch(request: PageRequest) -> Page:
    """Return the page `/batch?id=BATCH&at=POSITION`. With `at` it also shows the state as of that log position."""
    batch_id = request.batch_id()
    row = request.log.batch_row(batch_id)
    why = None if row.ended_at is not None else request.log.why(batch_id, request.now, followed=kept_folds(request))
    # Nothing happens in a run without processes, so its time axis ends with the last event.
    is_dead = why is not None and why.cause in ("no_system", "unseen") and request.now - why.moved_at > 60
    with batch_cache(request).of(request.log, batch_id) as cached:
        timeline = cached.timeline
        assert timeline is not None
        values = _timeline_values(request, timeline, is_dead=is_dead) | _history_values(request, cached)
    config_position, config = request.log.config(row.first_position)
    return Page(
        template="batch.html", title=f"Batch {batch_id}", nav="batches", watch=(batch_stream(batch_id),),
        values=values | {
            "row": row, "waits": [] if why is None else why.sentences()[1:], "stuck": why is not None and why.stalled,
            "losses": sorted(request.log.losses(batch_id).items()),
            "before": _first_submission(request, before=row.first_position, descending=True),
            "after": _first_submission(request, after=row.first_position),
            "config": (config_position, list(_flatten_config(config))) if config else None,
        },
    )


# --- its tasks ------------------------------------------------------------------------------------------------------
def select_tasks(timeline: BatchTimeline, state: str, sort: str, descending: bool) -> list[TaskTimeline]:
    """Return the tasks in this state ("": all), sorted by one of SORTS. Tasks without a value come last."""
    chosen = [t for t in timeline.tasks if not state or t.state == state]
    values: dict[str, Callable[[TaskTimeline], float | None]] = {
        "task": lambda t: t.task, "state": lambda t: STATES.index(t.state), "reward": lambda t: t.reward,
        "tokens": lambda t: t.response_tokens, "attempts": lambda t: len(t.attempts),
        "seconds": lambda t: None if t.ended_at is None else t.ended_at - timeline.submitted_at,
    }
    return sort_known_first(chosen, values[sort], descending)


def _timeline_values(request: PageRequest, timeline: BatchTimeline, *, is_dead: bool) -> dict[str, Any]:
    """Return the values for the template from the batch's timeline: a page of tasks, the runners and the metrics."""
    state = timeline.state
    last = timeline.ended_at if timeline.ended_at is not None else timeline.last_at if is_dead else request.now
    window = Window(timeline.submitted_at, max(last, timeline.submitted_at + 1e-3))
    sort, task_state = request.choice("sort", SORTS, "task"), request.choice("state", STATES)
    descending = request.choice("order", ("up", "down"), "up") == "down"
    selected_tasks = select_tasks(timeline, task_state, sort, descending)
    page_number, pages = request.page_number(len(selected_tasks), TASKS_PER_PAGE)
    shown = selected_tasks[(page_number - 1) * TASKS_PER_PAGE : page_number * TASKS_PER_PAGE]
    by_runner = attempts_by_runner(timeline)
    with_lanes = sum(map(len, by_runner.values())) <= MAX_DRAWN
    return drawing(timeline, window, shown) | {
        "ended": state.state in ENDED,
        "sort": sort, "kind": task_state, "descending": descending, "pages": pages, "number": page_number,
        "chosen": len(selected_tasks), "states": STATES,
        "runners": [
            RunnerWork(
                name=name, attempts=len(pairs), failed=sum(bar_kind(a) == "failed" for _, a in pairs),
                seconds=sum((window.end if a.ended_at is None else a.ended_at) - a.dispatched_at for _, a in pairs),
                lane=lane(pairs, window) if with_lanes else None,
            )
            for name, pairs in sorted(
                by_runner.items(), key=lambda item: (natural_key(host_of(item[0])), natural_key(item[0]))
            )
        ],
        "metrics": _group_metrics((state.final_result or {}).get("metrics", {})),
    }


def _group_metrics(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Group metrics by the part of the name before the first slash. `x/mean`, `x/min`, ... share a line."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for name in sorted(metrics):
        group_name, _, rest = name.partition("/")
        rest = rest or name
        base, _, last_part = rest.rpartition("/")
        is_statistic = bool(base) and last_part in STATISTICS
        line = groups.setdefault(group_name, {}).setdefault(base if is_statistic else rest, {})
        line[last_part if is_statistic else ""] = metrics[name]
    out = []
    for group_name, lines in sorted(groups.items(), key=lambda item: (item[0] == "experience_pipeline", item[0])):
        statistics = [s for s in STATISTICS if any(s in line for line in lines.values())]
        spreads = [(base, [line.get(s) for s in statistics]) for base, line in lines.items() if line.keys() - {""}]
        single = [(base, line[""]) for base, line in lines.items() if "" in line]
        out.append({"name": group_name, "kinds": statistics, "spreads": spreads, "single": single})
    return out


def _first_submission(request: PageRequest, **range_options: Any) -> Any:
    """Return the id of the first batch that was submitted in a range of positions; None if there is none."""
    submission = next(request.log.read_rare(["BatchSubmitted"], limit=1, **range_options), None)
    return None if submission is None else orjson.loads(submission.data)["batch_id"]


def _flatten_config(value: Any, path: str = "") -> Any:
    """Yield (key path, value as text) for every value in a part of a config. `path`: the key path of that part."""
    if isinstance(value, dict) and value:
        for key in value:
            yield from _flatten_config(value[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else orjson.dumps(value).decode()


# --- its events -----------------------------------------------------------------------------------------------------
def _history_values(request: PageRequest, cached: CachedBatch) -> dict[str, Any]:
    """Return a part of the batch's events as values for the template.

    With the URL parameter `at`, a log position, it is the events around `at`, with the batch's state there. Otherwise
    it is the first events of an ended batch, or the last events of an open one.
    """
    total = len(cached.positions)
    version = cached.version_at(request.number("at")) if "at" in request.query else 0
    if version:
        first = max(1, version - EVENTS_PER_PART // 2)
    else:
        assert cached.timeline is not None
        first = 1 if cached.timeline.ended_at is not None else max(1, total - EVENTS_PER_PART + 1)
    events = cached.page(request.log, first, EVENTS_PER_PART)
    return {
        "steps": [(r, summary(r.event)) for r in events], "total": total, "at": version,
        "earlier": max(0, first - 1), "later": total - (first + len(events) - 1),
        "moment": _past_state_values(request, cached, version) if version else None,
        "submitted_at": cached.timeline and cached.timeline.submitted_at,
    }


def steps(request: PageRequest) -> Page:
    """Return `/batch/steps`: more rows for the table of events, from stream version `first` on or before `before`."""
    batch_id = request.batch_id()
    with batch_cache(request).of(request.log, batch_id) as cached:
        total = len(cached.positions)
        before = request.number("before")
        first = max(1, before - EVENTS_PER_PART) if before else request.number("first", 1, low=1)
        count = min(EVENTS_PER_PART, before - first) if before else EVENTS_PER_PART
        events = cached.page(request.log, first, count)
        later = 0 if before else max(0, total - (first + len(events) - 1))
        return Page(
            template="steps.html", title="",
            values={"steps": [(r, summary(r.event)) for r in events], "total": total, "at": 0,
                    "earlier": first - 1 if before else 0, "later": later,
                    "submitted_at": cached.timeline and cached.timeline.submitted_at},
        )


def asof(request: PageRequest) -> Page:
    """Return `/batch/asof`: the part of the page with the batch's state after its event of stream version `n`."""
    batch_id = request.batch_id()
    with batch_cache(request).of(request.log, batch_id) as cached:
        version = request.number("n", 1, low=1, high=len(cached.positions))
        return Page(template="asof.html", title="", values={"moment": _past_state_values(request, cached, version)})


def _past_state_values(request: PageRequest, cached: CachedBatch, version: int) -> dict[str, Any]:
    """Return the batch's state after the event of this stream version, as values for the template.

    The values are copies, because later requests change the state. The grid has at most GRID_TASKS tasks: the first
    ones, or those around the first task that the event is about.
    """
    state, recorded = cached.state_at(request.log, version)
    touched = _touched_tasks(recorded)
    first = min(touched) // GRID_TASKS * GRID_TASKS if len(state.tasks) > GRID_TASKS and touched else 0
    numbers = list(range(first, min(len(state.tasks), first + GRID_TASKS)))
    assert cached.timeline is not None
    return {
        "n": version, "total": len(cached.positions), "recorded": recorded, "said": summary(recorded.event),
        "since": recorded.recorded_at - cached.timeline.submitted_at,
        "data": _stored_text(recorded), "figures": _figures(state), "touched": touched,
        "grid": cells(state, numbers, reward_range_of(state)), "first": first, "tasks": len(state.tasks),
        "runs": max((state.tasks[t].total_runs for t in numbers), default=1),
        "errors": [(t, e) for t in sorted(touched)[:5] if t < len(state.tasks) and (e := state.tasks[t].first_error)],
    }


def _touched_tasks(recorded: Recorded) -> set[int]:
    """Return the numbers of the tasks that an event is about, from its fields `units`, `tasks` or `task`."""
    event = recorded.event
    if (units := getattr(event, "units", None)) is not None:
        return {unit.task for unit in units}
    tasks = getattr(event, "tasks", None)
    if isinstance(tasks, list) and all(isinstance(t, int) for t in tasks):
        return set(tasks)
    task = getattr(event, "task", None)
    return {task} if isinstance(task, int) else set()


def _figures(state: BatchState) -> list[tuple[str, str]]:
    failed_count = sum(not s.ok for s in state.statuses.values())
    figures = [
        ("state", state.state.value + (", paused" if state.paused else "")),
        ("tasks settled", f"{state.completed_task_count:,} of {state.expected_task_count:,}"),
        ("tasks failed", f"{failed_count:,}"), ("tasks dropped", f"{len(state.dropped):,}"),
        ("units with runners", f"{len(state.flights):,}"), ("units waiting", f"{len(state.pending):,}"),
        ("failed attempts", f"{state.failed_attempts:,}"),
        ("oldest weights", "–" if state.oldest_version is None else str(state.oldest_version)),
    ]
    if state.trained_step is not None:
        figures.append(("trained in step", str(state.trained_step)))
    return figures


def _stored_text(recorded: Recorded) -> str:
    """Return at most EVENT_CHARACTERS of a stored event; the JSON is indented if it has less than EVENT_BYTES."""
    if len(recorded.data) >= EVENT_BYTES:
        return recorded.data[:EVENT_CHARACTERS].decode(errors="replace") + f" … {len(recorded.data):,} bytes in all"
    text = orjson.dumps(orjson.loads(recorded.data), option=orjson.OPT_INDENT_2).decode()
    return text if len(text) <= EVENT_CHARACTERS else f"{text[:EVENT_CHARACTERS]}\n… {len(text):,} characters in all"


ROUTES = [Route("/batch", batch), Route("/batch/steps", steps), Route("/batch/asof", asof)]
