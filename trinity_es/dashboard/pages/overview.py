"""The overview page of a run: its state and problems, figures, curves, open batches and runners."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any, TypeVar

from trinity_es.dashboard.page_urls import Nav, Page, PageRequest, Route
from trinity_es.dashboard.pages.events import subject_url
from trinity_es.projections.host_states import host_of, last_lives
from trinity_es.projections.reading.overview import Point
from trinity_es.projections.tables.runner_history import RunnerIncarnation, by_runner
from trinity_es.projections.why.answer import Why
from trinity_es.projections.why.system_state import Followed
from trinity_es.safe_text import summary

__all__ = ["NAV", "ROUTES", "Bin", "curve", "histogram", "kept_folds", "overview"]

CURVE_POINTS = 600
"""Maximum number of points of a curve. If there are more, neighbours are averaged."""
BINS = 24
DISTRIBUTION_BATCHES = 10
OPEN_BATCHES_SHOWN = 8
EVENTS_SHOWN = 12
LOSSES_SHOWN = 6

T = TypeVar("T")


class _LastValue:
    """Cache of one value, for the last key. If several threads need a new value, one computes it for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._value: Any = None

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the cached value if it is for this key; otherwise compute and cache it."""
        with self._lock:
            if key != self._key:
                self._value = compute()
                self._key = key
            value: T = self._value
            return value


def overview(request: PageRequest) -> Page:
    """Return the page `/`. Values are cached until the next event, or if they change with time, for a second."""
    last_log_values: _LastValue = request.server_values.setdefault("overview", _LastValue())
    last_wait_values: _LastValue = request.server_values.setdefault("waits", _LastValue())
    head_hash = request.log.head().hash
    log_values = last_log_values.get(head_hash, lambda: _log_values(request))
    values = log_values | last_wait_values.get((head_hash, int(request.now)), lambda: _wait_values(request))
    hosts_that_left = {host.host for host in values["hosts"] if host.state == "left"}
    lives = [life for life in values["lives"] if host_of(life.runner) not in hosts_that_left]
    runners = by_runner(values["lives"], values["up"])
    last_at = values["run"].last_at
    values |= {
        "verdict": _verdict(values["up"], values["released"], values["waits"], values["stalled"], lives),
        "runners": sorted(runners, key=lambda runner: not runner.last.died),
        "seconds_since_event": None if last_at is None else request.now - last_at,
    }
    return Page(template="overview.html", title=values["name"] or "Overview", nav="overview", values=values)


def kept_folds(request: PageRequest) -> Followed:
    """Return the folds of open batches that the server keeps for `Log.why`, which then folds only new events."""
    folds: Followed = request.server_values.setdefault("followed", Followed())
    return folds


def _wait_values(request: PageRequest) -> dict[str, Any]:
    """Return the values that change with time: why open batches wait, and whether the run's processes are alive."""
    waits = request.log.why_open(request.now, followed=kept_folds(request))
    processes = request.log.processes()
    return {"up": processes["up"], "released": processes.get("released", False), "waits": waits[:OPEN_BATCHES_SHOWN],
            "more_open": max(0, len(waits) - OPEN_BATCHES_SHOWN), "stalled": sum(wait.stalled for wait in waits)}


def _log_values(request: PageRequest) -> dict[str, Any]:
    """Return the values that only new events change."""
    run = request.log.overview(EVENTS_SHOWN)
    distributions = request.log.distributions(last=DISTRIBUTION_BATCHES)
    config = run.config
    busy_points = [p for p in run.throughput if p.tokens > 0]
    evals: dict[str, list[Point]] = {}
    for point in run.evals:
        evals.setdefault(point.name, []).append(point)
    zone = datetime.now().astimezone().utcoffset() or timedelta()  # as the page's head shows it
    losses = (("attempt", run.attempts_failed), ("task", run.tasks_dropped),
              ("experience", {why or "by a filter": n for why, n in run.experiences_dropped.items()}))
    return {
        "run": run, "name": "/".join(str(config[k]) for k in ("project", "name") if config.get(k)),
        "mode": config.get("mode"), "batches": sum(run.states.values()),
        "tokens_now": busy_points[-1].tokens if busy_points else None,
        "reward": curve({"reward": run.rewards}), "evals": curve(evals),
        "staleness": curve({"versions behind": run.staleness}),
        "throughput": {
            "x": "time", "time": True, "zone": zone.total_seconds(), "zero": True, "series": ["tokens a second"],
            "means_of": 1, "data": [[p.at for p in run.throughput], [p.tokens for p in run.throughput]],
        },
        "latencies": histogram(distributions.attempt_seconds), "run_rewards": histogram(distributions.rewards),
        "lengths": histogram(distributions.response_tokens), "distribution_batches": len(distributions.batch_ids),
        "hosts": list(last_lives(request.log.hosts()).values()),
        "lives": request.log.runner_lives(),
        "recent": [(r, subject_url(r.stream), summary(r.event)) for r in run.recent],
        "losses": [(what, why, n) for what, counts in losses for why, n in Counter(counts).most_common(LOSSES_SHOWN)],
        "subject_url": subject_url,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """State of the run in one word, and its problems."""

    word: str
    """`running`, `idle` (no batch is open), `stalled`, `ended` (in order), `gone` (its processes died) or `unseen` (on
    another machine)."""
    problems: list[str]


def _verdict(
    up: bool | None, released: bool, waits: Sequence[Why], stalled: int, lives: Sequence[RunnerIncarnation]
) -> Verdict:
    """Return the state of the run and its problems.

    `up`: whether its processes are alive, None if they are on another machine. `released`: whether the run ended in
    order. `waits`: why open batches wait. `stalled`: number of stalled batches. `lives`: all processes of runners.
    """
    problems = []
    if up is False:
        if waits:
            problems = [line.strip() for line in (waits[0].sentence, waits[0].sentences()[-1])]
        elif not released:
            problems = ["its processes are gone without `trinity-es down`, but no batch is open"]
        return Verdict(word="ended" if released else "gone", problems=problems)
    last_life_by_runner = {life.runner: life for life in lives}
    dead = [life for life in last_life_by_runner.values() if life.died]
    if dead:
        names = ", ".join(f"{x.runner} {x.how}" + (f" ({x.reason})" if x.reason else "") for x in dead[:3])
        more = " …" if len(dead) > 3 else ""
        problems.append(f"{len(dead)} of {len(last_life_by_runner)} runners do not serve: {names}{more}")
    problems += [wait.line for wait in waits if wait.stalled][:3]
    word = "stalled" if stalled else "unseen" if up is None else "running" if waits else "idle"
    return Verdict(word=word, problems=problems)


# --- curves ---------------------------------------------------------------------------------------------------------
def curve(series: dict[str, list[Point]]) -> dict[str, Any]:
    """Return data for charts.js: values by step, or by their order if a point has no step.

    If there are more than CURVE_POINTS values of x, groups of `means_of` neighbours are averaged.
    """
    by_step = all(p.step is not None for points in series.values() for p in points)
    values: dict[float, dict[str, list[float]]] = {}
    for name, points in series.items():
        for i, point in enumerate(points):
            x = point.step if by_step and point.step is not None else i + 1
            values.setdefault(x, {}).setdefault(name, []).append(point.value)  # several batches may have one step
    names = [name for name, points in series.items() if points]
    xs = sorted(values)
    group_size = max(1, -(-len(xs) // CURVE_POINTS))
    groups = [xs[i : i + group_size] for i in range(0, len(xs), group_size)]
    rows = [[_mean([value for x in group for value in values[x].get(name, ())]) for group in groups] for name in names]
    return {"x": "step" if by_step else "batch", "series": names, "data": [[group[-1] for group in groups], *rows],
            "means_of": group_size}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Bin:
    """Bar of a histogram."""

    height: float
    """Percent of the highest bar."""
    count: int
    low: float
    high: float


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Return a histogram with bars of equal width; None without values.

    The last bar ends at the 99th percentile, and also counts all values above it.
    """
    if not values:
        return None
    ordered = sorted(values)

    def quantile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    low, high = ordered[0], quantile(0.99)
    width = (high - low) / BINS or 1.0
    counts = [0] * BINS
    for value in ordered:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    largest_count = max(counts)
    return {
        "bins": [Bin(100 * n / largest_count, n, low + i * width, low + (i + 1) * width) for i, n in enumerate(counts)],
        "low": low, "high": high, "median": median(ordered), "p95": quantile(0.95), "most": ordered[-1],
        "count": len(ordered),
    }


NAV = [Nav(name="overview", title="Overview", path="/", key="o")]
ROUTES = [Route("/", overview)]
