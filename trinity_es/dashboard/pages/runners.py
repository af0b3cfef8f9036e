"""The pages of all runners, with their hosts, and of one runner."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import orjson

from trinity_es.dashboard.gantt import Window
from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route
from trinity_es.events.errors import RunnerNotFound
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import RUNNER_LIFE
from trinity_es.projections.history.runner_work import WORK, work_of
from trinity_es.projections.host_states import HostLife, host_of
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.tables.runner_history import RunnerIncarnation, by_runner, natural_key, visible_state
from trinity_es.safe_text import devices, summary

__all__ = ["NAV", "ROUTES", "Bar", "runner", "runners"]

BATCHES_PER_PAGE = 10
MAX_EVENTS = 40
MAX_LIVES = 200
WEIGHTS_EVENTS = ("RunnerReady", "WeightsLoaded", "WeightsFailed")
LIFE_EVENTS = (*RUNNER_LIFE, "WeightsFailed")
SORTS = ("runner", "lives", "deaths", "attempts_lost", "seconds_lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bar on a time line. `x` and `width` are in thousandths of the line's width."""

    x: float
    width: float
    kind: str
    title: str


def _log_period(request: PageRequest) -> Window:
    """Return the time from the log's first to its last event; 0 to 1 for an empty log."""
    first = next(request.log.read_rare(limit=1), None)
    last = next(request.log.events(after=max(0, request.position - 1)), first)
    if first is None or last is None:
        return Window(0.0, 1.0)
    return Window(first.recorded_at, last.recorded_at)


def _bar(window: Window, start: float, stop: float, kind: str, title: str) -> Bar:
    """Return a bar from `start` to `stop`, cut at the ends of the window and at least one thousandth wide."""
    x, x_stop = (round(10 * window.x(at), 2) for at in (start, stop))
    return Bar(x=x, width=max(1.0, x_stop - x), kind=kind, title=title)


def _death_bar(window: Window, at: float, title: str) -> Bar:
    """Return a short bar that ends just after this time, so that it covers the end of the process's bar."""
    return Bar(x=max(0.0, round(10 * window.x(at), 2) - 3), width=4.0, kind="death", title=title)


def _life_bars(life: RunnerIncarnation, window: Window) -> list[Bar]:
    name = f"life {life.incarnation}"
    started_at = life.started_at or life.ready_at or life.ended_at or window.start
    ended_at = life.ended_at if life.ended_at is not None else window.end
    ready_at = min(life.ready_at if life.ready_at is not None else ended_at, ended_at)
    bars = [_bar(window, started_at, ready_at, "loading", f"{name} loads its engine")]
    if life.ready_at is not None:
        bars.append(_bar(window, ready_at, ended_at, "serving", f"{name} serves"))
    if life.died and life.ended_at is not None:
        bars.append(_death_bar(window, ended_at, f"{name}: {life.how}"))
    return bars


def _without_overlaps(bars: list[Bar]) -> list[Bar]:
    """Drop bars that cover an earlier bar of the same kind."""
    bar_by_place = {(bar.kind, round(bar.x), round(bar.width)): bar for bar in reversed(bars)}
    return list(reversed(bar_by_place.values()))


def _host_bars(lives: list[HostLife], window: Window) -> list[Bar]:
    bars = list[Bar]()
    for life in lives:
        name = f"epoch {life.epoch}"
        ended_at = window.end if life.ended_at is None else life.ended_at
        draining_at = ended_at if life.draining_at is None else life.draining_at
        bars.append(_bar(window, life.joined_at, draining_at, "serving", f"{name}: joined"))
        if life.draining_at is not None:
            bars.append(_bar(window, draining_at, ended_at, "draining", f"{name} drains: {life.reason}"))
        if life.state == "lost":
            bars.append(_death_bar(window, ended_at, f"{name} is lost: {life.reason}"))
    return bars


def runners(request: PageRequest) -> Page:
    """Return the page `/runners`: a line per runner, by host, with its newest process and the cost of its deaths."""
    window = _log_period(request)
    sort = request.choice("sort", SORTS, "runner")
    descending = request.choice("order", ("up", "down"), "up") == "down"
    runners = by_runner(request.log.runner_lives(), request.log.processes()["up"])
    if sort != "runner":
        runners.sort(key=lambda runner: getattr(runner, sort), reverse=descending)
    elif descending:
        runners.reverse()
    host_lives = request.log.hosts()
    hosts = [
        (row, _without_overlaps(_host_bars([life for life in host_lives if life.host == row.host], window)))
        for row in (read_hosts(request.log, count_units=False) if host_lives else ())
    ]
    runners.sort(key=lambda runner: natural_key(host_of(runner.name)))  # a stable sort: each host keeps the order
    lines = [(runner, _without_overlaps([bar for life in runner.all for bar in _life_bars(life, window)]))
             for runner in runners]
    return Page(
        template="runners.html", title="Runners", nav="runners", watch=("runner/", "weights", "hosts"),
        values={
            "lines": lines, "hosts": hosts, "host_of": host_of, "devices": devices, "begin": window.start,
            "end": window.end, "sort": sort, "descending": descending,
        },
    )


def runner(request: PageRequest) -> Page:
    """Return the page `/runner?name=N&life=I`: a runner's processes, and the weights and work of one or all of them."""
    name = request.text("name")
    lives = [life for life in request.log.runner_lives() if life.runner == name]
    if not lives:
        raise RunnerNotFound(f"there is no runner {name!r} in {request.log.url}: the page /runners lists all runners")
    incarnation = request.number("life") if request.text("life") else None
    chosen = [life for life in lives if incarnation in (None, life.incarnation)]
    window = _log_period(request)
    number, pages = request.page_number(request.log.count_batches(), BATCHES_PER_PAGE)
    weights_events, life_events = _newest_events(request, name, incarnation)
    work_rows = []
    for row in request.log.batches(sort="position", descending=True, limit=BATCHES_PER_PAGE,
                                   offset=(number - 1) * BATCHES_PER_PAGE):
        recorded = request.log.read(stream=batch_stream(row.batch_id), types=WORK, after=row.first_position - 1)
        work = work_of(recorded, name, incarnation)
        if work.units or work.runs or work.failures:
            work_rows.append((row.batch_id, work))
    return Page(
        template="runner.html", title=f"Runner {name}", nav="runners",
        watch=(f"runner/{name}", "batch/") if number == 1 else (f"runner/{name}",),
        values={
            "name": name, "up": request.log.processes()["up"], "visible_state": visible_state,
            "lives": lives[: -MAX_LIVES - 1 : -1], "lives_left": max(0, len(lives) - MAX_LIVES), "life": incarnation,
            "begin": window.start, "end": window.end,
            "bars": _without_overlaps([bar for life in chosen for bar in _life_bars(life, window)]),
            "versions": weights_events, "events": [(r, summary(r.event)) for r in life_events], "most": MAX_EVENTS,
            "work_rows": work_rows, "page_number": number, "pages": pages, "per_page": BATCHES_PER_PAGE,
        },
    )


def _newest_events(request: PageRequest, name: str, incarnation: int | None) -> list[list[Recorded]]:
    """Return the runner's last WEIGHTS_EVENTS and its last LIFE_EVENTS, the newest first.

    `incarnation`: only events of this process; None for all. The end of the log is searched first, and the runner's
    whole stream only if that has too few.
    """
    stream, type_groups = f"runner/{name}", (WEIGHTS_EVENTS, LIFE_EVENTS)
    if incarnation is None:
        log_ends = [islice(request.log.read_rare(types, descending=True), 50 * MAX_EVENTS) for types in type_groups]
        event_lists = [[r for r in log_end if r.stream == stream][:MAX_EVENTS] for log_end in log_ends]
        if all(len(events) == MAX_EVENTS for events in event_lists):
            return event_lists
    own_events = [r for r in request.log.read(stream=stream, types=sorted({*WEIGHTS_EVENTS, *LIFE_EVENTS}))
                  if incarnation is None or orjson.loads(r.data)["incarnation"] == incarnation]
    return [[r for r in reversed(own_events) if r.type in types][:MAX_EVENTS] for types in type_groups]


NAV = [Nav(name="runners", title="Runners", path="/runners", key="n")]
ROUTES = [Route("/runners", runners), Route("/runner", runner)]
