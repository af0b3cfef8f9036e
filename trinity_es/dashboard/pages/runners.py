"""Runners: their lives and deaths, what each cost, which weights they had when, and what they ran."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import orjson

from trinity_es.dashboard.page import Nav, Page, PageRequest, Route
from trinity_es.events.errors import RunnerNotFound
from trinity_es.events.store.records.recorded import Recorded
from trinity_es.events.values import batch_stream
from trinity_es.events.vocabulary import RUNNER_LIFE
from trinity_es.projections.history.host_lives import HostLife
from trinity_es.projections.history.runner_work import WORK, work_of
from trinity_es.projections.host_states import host_of
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.tables.runner_history import RunnerIncarnation, by_runner, natural, seen
from trinity_es.text import devices, summary

__all__ = ["NAV", "ROUTES", "Bar", "runner", "runners"]

BATCHES = 10
"""Batches whose events one page about a runner reads."""
EVENTS = 40
LIVES = 200
ABOUT_WEIGHTS = ("RunnerReady", "WeightsLoaded", "WeightsFailed")
ABOUT_LIFE = (*RUNNER_LIFE, "WeightsFailed")
SORTS = ("runner", "lives", "deaths", "attempts_lost", "seconds_lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of a line of time, in thousandths of its width."""

    x: float
    width: float
    kind: str
    title: str


def _span(ask: PageRequest) -> tuple[float, float]:
    """When the log begins and ends, in unix seconds."""
    first = next(ask.log.rare(limit=1), None)
    last = next(ask.log.events(after=max(0, ask.position - 1)), first)
    return (first.recorded_at, last.recorded_at) if first is not None and last is not None else (0.0, 1.0)


class _Line:
    """A line of time from `begin` to `end`."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._whole = begin, max(end - begin, 1e-9)

    def bar(self, start: float, stop: float, kind: str, title: str) -> Bar:
        x, until = (round(1000 * min(1.0, max(0.0, (at - self._begin) / self._whole)), 2) for at in (start, stop))
        return Bar(x=x, width=max(1.0, until - x), kind=kind, title=title)

    def death(self, at: float, title: str) -> Bar:
        return replace(bar := self.bar(at, at, "death", title), x=max(0.0, bar.x - 3), width=4.0)


def _bars(life: RunnerIncarnation, begin: float, end: float) -> list[Bar]:
    """Draw a life: loading, then serving, then how it ended."""
    line, who = _Line(begin, end), f"life {life.incarnation}"
    started = life.started_at or life.ready_at or life.ended_at or begin
    ended = life.ended_at if life.ended_at is not None else end
    ready = min(life.ready_at if life.ready_at is not None else ended, ended)
    bars = [line.bar(started, ready, "loading", f"{who} loads its engine")]
    if life.ready_at is not None:
        bars.append(line.bar(ready, ended, "serving", f"{who} serves"))
    if life.died and life.ended_at is not None:
        bars.append(line.death(ended, f"{who}: {life.how}"))
    return bars


def _apart(bars: list[Bar]) -> list[Bar]:
    """Without those that would lie on another of their kind: of a thousand lives a screen shows fewer."""
    places = {(bar.kind, round(bar.x), round(bar.width)): bar for bar in reversed(bars)}
    return list(reversed(places.values()))


def _host_bars(lives: list[HostLife], begin: float, end: float) -> list[Bar]:
    """Draw the lives of a host: joined, then draining, then how each ended."""
    line, bars = _Line(begin, end), list[Bar]()
    for life in lives:
        who, ended = f"epoch {life.epoch}", end if life.ended_at is None else life.ended_at
        drains = ended if life.draining_at is None else life.draining_at
        bars.append(line.bar(life.joined_at, drains, "serving", f"{who}: joined"))
        if life.draining_at is not None:
            bars.append(line.bar(drains, ended, "draining", f"{who} drains: {life.reason}"))
        if life.state == "lost":
            bars.append(line.death(ended, f"{who} is lost: {life.reason}"))
    return bars


def runners(ask: PageRequest) -> Page:
    """`/runners`: one line a runner, its last life and what its deaths cost; by host, where several take part."""
    begin, end = _span(ask)
    sort, descending = ask.choice("sort", SORTS, "runner"), ask.choice("order", ("up", "down"), "up") == "down"
    found = by_runner(ask.log.runner_lives(), ask.log.processes()["up"])
    if sort != "runner":
        found.sort(key=lambda runner: getattr(runner, sort), reverse=descending)
    elif descending:
        found.reverse()
    host_lives = ask.log.hosts()
    hosts = [
        (row, _apart(_host_bars([life for life in host_lives if life.host == row.host], begin, end)))
        for row in (read_hosts(ask.log, count_units=False) if host_lives else ())
    ]
    found.sort(key=lambda runner: natural(host_of(runner.name)))  # in each host's the order that was asked for
    lines = [(runner, _apart([bar for life in runner.all for bar in _bars(life, begin, end)])) for runner in found]
    return Page(
        template="runners.html", title="Runners", nav="runners", watch=("runner/", "weights", "hosts"),
        values={
            "lines": lines, "hosts": hosts, "host_of": host_of, "devices": devices, "begin": begin, "end": end,
            "sort": sort, "descending": descending,
        },
    )


def runner(ask: PageRequest) -> Page:
    """`/runner?name=N&life=I`: its lives; of one or of all, the weights that it had and what it ran."""
    name = ask.text("name")
    lives = [life for life in ask.log.runner_lives() if life.runner == name]
    if not lives:
        raise RunnerNotFound(f"no runner {name!r} in {ask.log.url}")
    one = ask.number("life") if ask.text("life") else None
    chosen = [life for life in lives if one in (None, life.incarnation)]
    begin, end = _span(ask)
    number, pages = ask.page_of(ask.log.count_batches(), BATCHES)
    versions, events = _newest(ask, name, one)
    worked = []
    for row in ask.log.batches(sort="position", descending=True, limit=BATCHES, offset=(number - 1) * BATCHES):
        found = ask.log.read(stream=batch_stream(row.batch_id), types=WORK, after=row.first_position - 1)
        work = work_of(found, name, one)
        if work.units or work.runs or work.failures:
            worked.append((row.batch_id, work))
    return Page(
        template="runner.html", title=f"Runner {name}", nav="runners",
        watch=(f"runner/{name}", "batch/") if number == 1 else (f"runner/{name}",),
        values={
            "name": name, "up": ask.log.processes()["up"], "seen": seen,
            "lives": lives[: -LIVES - 1 : -1], "lives_left": max(0, len(lives) - LIVES), "life": one,
            "begin": begin, "end": end, "bars": _apart([bar for life in chosen for bar in _bars(life, begin, end)]),
            "versions": versions, "events": [(r, summary(r.event)) for r in events], "most": EVENTS,
            "worked": worked, "page_number": number, "pages": pages, "looked": BATCHES,
        },
    )


def _newest(ask: PageRequest, name: str, life: int | None) -> list[list[Recorded]]:
    """Return the runner's last events ABOUT_WEIGHTS and its last ABOUT_LIFE, the newest first, of one life or of all.

    Its stream is as long as the run; the end of the log tells enough of a busy runner, and a quiet one's is short.
    """
    stream, kinds = f"runner/{name}", (ABOUT_WEIGHTS, ABOUT_LIFE)
    if life is None:
        last = [[r for r in islice(ask.log.rare(types, descending=True), 50 * EVENTS) if r.stream == stream][:EVENTS]
                for types in kinds]
        if all(len(some) == EVENTS for some in last):
            return last
    own = [r for r in ask.log.read(stream=stream, types=sorted({*ABOUT_WEIGHTS, *ABOUT_LIFE}))
           if life is None or orjson.loads(r.data)["incarnation"] == life]
    return [[r for r in reversed(own) if r.type in types][:EVENTS] for types in kinds]


NAV = [Nav(name="runners", title="Runners", path="/runners", key="n")]
ROUTES = [Route("/runners", runners), Route("/runner", runner)]
