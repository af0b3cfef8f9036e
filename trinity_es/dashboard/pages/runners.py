"""The pages of all runners, with their hosts, and of one runner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import orjson

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
"""Number of batches whose events one page of a runner reads."""
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


def _log_period(request: PageRequest) -> tuple[float, float]:
    """Return the times of the log's first and last event, in unix seconds; (0, 1) for an empty log."""
    first = next(request.log.rare(limit=1), None)
    last = next(request.log.events(after=max(0, request.position - 1)), first)
    return (first.recorded_at, last.recorded_at) if first is not None and last is not None else (0.0, 1.0)


class _TimeLine:
    """Time line from `begin` to `end` (unix seconds), on which bars are placed."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._seconds = begin, max(end - begin, 1e-9)

    def bar(self, start: float, stop: float, kind: str, title: str) -> Bar:
        """Return a bar from `start` to `stop`, cut at the ends of the line and at least one thousandth wide."""
        x, x_stop = (round(1000 * min(1.0, max(0.0, (at - self._begin) / self._seconds)), 2) for at in (start, stop))
        return Bar(x=x, width=max(1.0, x_stop - x), kind=kind, title=title)

    def death(self, at: float, title: str) -> Bar:
        """Return a short bar that ends just after this time, so that it covers the end of the process's bar."""
        moment = self.bar(at, at, "death", title)
        return replace(moment, x=max(0.0, moment.x - 3), width=4.0)


def _life_bars(life: RunnerIncarnation, begin: float, end: float) -> list[Bar]:
    """Return the bars of one process of a runner: loading, serving, death."""
    line, name = _TimeLine(begin, end), f"life {life.incarnation}"
    started_at = life.started_at or life.ready_at or life.ended_at or begin
    ended_at = life.ended_at if life.ended_at is not None else end
    ready_at = min(life.ready_at if life.ready_at is not None else ended_at, ended_at)
    bars = [line.bar(started_at, ready_at, "loading", f"{name} loads its engine")]
    if life.ready_at is not None:
        bars.append(line.bar(ready_at, ended_at, "serving", f"{name} serves"))
    if life.died and life.ended_at is not None:
        bars.append(line.death(ended_at, f"{name}: {life.how}"))
    return bars


def _without_overlaps(bars: list[Bar]) -> list[Bar]:
    """Drop bars that cover an earlier bar of the same kind."""
    bar_by_place = {(bar.kind, round(bar.x), round(bar.width)): bar for bar in reversed(bars)}
    return list(reversed(bar_by_place.values()))


def _host_bars(lives: list[HostLife], begin: float, end: float) -> list[Bar]:
    """Return the bars of a host: joined, draining, lost."""
    line, bars = _TimeLine(begin, end), list[Bar]()
    for life in lives:
        name = f"epoch {life.epoch}"
        ended_at = end if life.ended_at is None else life.ended_at
        draining_at = ended_at if life.draining_at is None else life.draining_at
        bars.append(line.bar(life.joined_at, draining_at, "serving", f"{name}: joined"))
        if life.draining_at is not None:
            bars.append(line.bar(draining_at, ended_at, "draining", f"{name} drains: {life.reason}"))
        if life.state == "lost":
            bars.append(line.death(ended_at, f"{name} is lost: {life.reason}"))
    return bars


def runners(request: PageRequest) -> Page:
    """Return the page `/runners`: a line per runner, by host, with its newest process and the cost of its deaths."""
    begin, end = _log_period(request)
    sort = request.choice("sort", SORTS, "runner")
    descending = request.choice("order", ("up", "down"), "up") == "down"
    runners = by_runner(request.log.runner_lives(), request.log.processes()["up"])
    if sort != "runner":
        runners.sort(key=lambda runner: getattr(runner, sort), reverse=descending)
    elif descending:
        runners.reverse()
    host_lives = request.log.hosts()
    hosts = [
        (row, _without_overlaps(_host_bars([life for life in host_lives if life.host == row.host], begin, end)))
        for row in (read_hosts(request.log, count_units=False) if host_lives else ())
    ]
    runners.sort(key=lambda runner: natural_key(host_of(runner.name)))  # a stable sort: each host keeps the order
    lines = [(runner, _without_overlaps([bar for life in runner.all for bar in _life_bars(life, begin, end)]))
             for runner in runners]
    return Page(
        template="runners.html", title="Runners", nav="runners", watch=("runner/", "weights", "hosts"),
        values={
            "lines": lines, "hosts": hosts, "host_of": host_of, "devices": devices, "begin": begin, "end": end,
            "sort": sort, "descending": descending,
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
    begin, end = _log_period(request)
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
            "begin": begin, "end": end,
            "bars": _without_overlaps([bar for life in chosen for bar in _life_bars(life, begin, end)]),
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
        log_ends = [islice(request.log.rare(types, descending=True), 50 * MAX_EVENTS) for types in type_groups]
        event_lists = [[r for r in log_end if r.stream == stream][:MAX_EVENTS] for log_end in log_ends]
        if all(len(events) == MAX_EVENTS for events in event_lists):
            return event_lists
    own_events = [r for r in request.log.read(stream=stream, types=sorted({*WEIGHTS_EVENTS, *LIFE_EVENTS}))
                  if incarnation is None or orjson.loads(r.data)["incarnation"] == incarnation]
    return [[r for r in reversed(own_events) if r.type in types][:MAX_EVENTS] for types in type_groups]


NAV = [Nav(name="runners", title="Runners", path="/runners", key="n")]
ROUTES = [Route("/runners", runners), Route("/runner", runner)]
