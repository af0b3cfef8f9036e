"""The overview of a run: verdict, figures, curves, open batches and runners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any, TypeVar

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.events import where
from trinity_es.projections.host_states import host_of, last_lives
from trinity_es.projections.reading.overview import Overview, Point
from trinity_es.projections.tables.runner_history import RunnerIncarnation, by_runner
from trinity_es.projections.why.answer import Why
from trinity_es.projections.why.system_state import Followed
from trinity_es.safe_text import summary

__all__ = ["NAV", "ROUTES", "Bin", "curve", "followed", "histogram", "overview"]

POINTS = 600
"""Maximum number of points of a curve; more are drawn as means of neighbours."""
BINS = 24
LAST = 10
"""Number of batches whose distributions are shown."""
OPEN = 8
EVENTS = 12

T = TypeVar("T")


class _LastValue:
    """Value computed once for the last key, which threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._value: Any = None

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key != self._key:
                self._value = make()
                self._key = key
            value: T = self._value
            return value


def overview(request: PageRequest) -> Page:
    run: _LastValue = request.kept.setdefault("overview", _LastValue())
    waits: _LastValue = request.kept.setdefault("waits", _LastValue())
    head = request.log.head().hash
    values = run.get(head, lambda: _values(request)) | waits.get((head, int(request.now)), lambda: _waits(request))
    left = {host.host for host in values["hosts"] if host.state == "left"}
    lives = [life for life in values["lives"] if host_of(life.runner) not in left]
    verdict = _verdict(values["up"], values["released"], values["opened"], values["stalled"], lives)
    runners = by_runner(values["lives"], values["up"])
    values |= {"verdict": verdict, "runners": sorted(runners, key=lambda runner: not runner.last.died)}
    return Page(
        template="overview.html", title=values["name"] or "Overview", nav="overview",
        values=values | {"quiet": None if values["run"].last_at is None else request.now - values["run"].last_at},
    )


def followed(request: PageRequest) -> Followed:
    """Return the folds of open batches that this server keeps for `Log.why`."""
    folds: Followed = request.kept.setdefault("followed", Followed())
    return folds


def _waits(request: PageRequest) -> dict[str, Any]:
    """Return values that change with time: the reasons why open batches wait."""
    opened, facts = request.log.why_open(request.now, followed=followed(request)), request.log.processes()
    return {"up": facts["up"], "released": facts.get("released", False),
            "opened": opened[:OPEN],
            "more_open": max(0, len(opened) - OPEN), "stalled": sum(w.stalled for w in opened)}


def _values(request: PageRequest) -> dict[str, Any]:
    """Return values that change only with the log."""
    run = request.log.overview(EVENTS)
    spread = request.log.distributions(last=LAST)
    lives = request.log.runner_lives()
    config = run.config
    fast = [p for p in run.throughput if p.tokens > 0]
    return {
        "run": run, "name": "/".join(str(config[k]) for k in ("project", "name") if config.get(k)),
        "mode": config.get("mode"), "batches": sum(run.states.values()),
        "tokens_now": fast[-1].tokens if fast else None,
        "reward": curve("step", {"reward": run.rewards}), "evals": curve("step", _by_name(run.evals)),
        "staleness": curve("step", {"versions behind": run.staleness}),
        "throughput": _throughput(run),
        "latency": histogram(spread.attempt_seconds), "failed_latency": len(spread.failed_seconds),
        "spread": histogram(spread.rewards), "lengths": histogram(spread.response_tokens),
        "of_batches": len(spread.batch_ids),
        "hosts": list(last_lives(request.log.hosts()).values()),
        "lives": lives, "recent": [(r, where(r.stream), summary(r.event)) for r in run.recent],
        "losses": [*(("attempt", why, n) for why, n in _largest(run.attempts_failed)),
                   *(("task", why, n) for why, n in _largest(run.tasks_dropped)),
                   *(("experience", why or "by a filter", n) for why, n in _largest(run.experiences_dropped))],
        "where": where,
    }


def _largest(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:6]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """State of the run in a word, and its problems."""

    word: str
    """`running`, `idle` (it runs, and no batch is open), `stalled`, `ended` (in order), `gone` (its processes are gone)
    or `unseen` (it is on another machine)."""
    problems: list[str]


def _verdict(
    up: bool | None, released: bool, opened: Sequence[Why], stalled: int, lives: Sequence[RunnerIncarnation]
) -> Verdict:
    problems = []
    if up is False:
        word = "ended" if released else "gone"
        if opened:
            problems = [w.strip() for w in (opened[0].sentence, opened[0].sentences()[-1])]
        elif not released:
            problems = ["its processes are gone without `trinity-es down`, but no batch is open"]
        return Verdict(word=word, problems=problems)
    last = {life.runner: life for life in lives}
    down = [life for life in last.values() if life.died]
    if down:
        names = ", ".join(f"{x.runner} {x.how}" + (f" ({x.reason})" if x.reason else "") for x in down[:3])
        problems.append(f"{len(down)} of {len(last)} runners do not serve: {names}" + (" …" if len(down) > 3 else ""))
    problems += [w.line for w in opened if w.stalled][:3]
    word = "stalled" if stalled else "unseen" if up is None else "running" if opened else "idle"
    return Verdict(word=word, problems=problems)


# --- curves ---------------------------------------------------------------------------------------------------------
def _by_name(points: Iterable[Point]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(point.name, []).append(point)
    return series


def curve(x: str, series: dict[str, list[Point]]) -> dict[str, Any]:
    """Return data for charts.js: values by step, or, if a point lacks a step, in the order of their ends."""
    stepped = all(p.step is not None for points in series.values() for p in points)
    values: dict[float, dict[str, list[float]]] = {}
    for name, points in series.items():
        for i, point in enumerate(points):
            at = point.step if stepped and point.step is not None else i + 1
            values.setdefault(at, {}).setdefault(name, []).append(point.value)  # a step may be of several batches
    names = [name for name, points in series.items() if points]
    order = sorted(values)
    size = max(1, -(-len(order) // POINTS))
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    rows = [[_mean([value for at in group for value in values[at].get(name, ())]) for group in groups]
            for name in names]
    return {"x": x if stepped else "batch", "series": names, "data": [[group[-1] for group in groups], *rows],
            "means_of": size}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _throughput(run: Overview) -> dict[str, Any]:
    zone = datetime.now().astimezone().utcoffset() or timedelta()  # as the page's head shows it
    return {"x": "time", "time": True, "zone": zone.total_seconds(), "zero": True, "series": ["tokens a second"],
            "means_of": 1,
            "data": [[p.at for p in run.throughput], [p.tokens for p in run.throughput]]}


@dataclass(frozen=True, slots=True)
class Bin:
    """Bar of a histogram."""

    height: float
    """Percent of the highest bar."""
    count: int
    low: float
    high: float


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, Any] | None:
    """Return bars of equal width up to the 99th percentile, the last with all values beyond; None without values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    low, high = ordered[0], at(0.99)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in ordered:
        counts[min(bins - 1, int((value - low) / width))] += 1
    most = max(counts)
    return {
        "bins": [Bin(100 * n / most, n, low + i * width, low + (i + 1) * width) for i, n in enumerate(counts)],
        "low": low, "high": high, "median": median(ordered), "p95": at(0.95), "most": ordered[-1],
        "count": len(ordered),
    }


NAV = [Nav(name="overview", title="Overview", path="/", key="o")]
ROUTES = [Route("/", overview)]
