"""Prometheus metrics of a log: `prometheus_text(log)`, which the dashboard serves under `/metrics`.

Every number comes from the read models and the head of the log. So the cost of a scrape does not grow with the log, and
the log of a dead run has metrics too. Labels take values from fixed lists, except `host`. If hosts have joined the run,
there are series for each host by name, and for the head's host as `(head)`; otherwise these series are left out.
Counters count the last submission of each batch, so they decrease, as after a restart, when a batch id is used again.

`python -m trinity_es.telemetry.prometheus` prints docs/METRICS.md.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trinity_es.events.values import BatchLifecycleState, BatchType, FailureKind
from trinity_es.projections.host_states import host_of, last_lives
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.runner_history import RunnerIncarnation

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "prometheus_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RUNNER_STATES = ("starting", "running", "lost", "failed", "quarantined", "retired")
"""States of a runner's newest process. `starting`: the process runs, and its engine is not ready yet."""
LEASE_STATES = ("taken", "held", "orphaned")
HEAD = "(head)"
"""Value of the label `host` for the head's own host. A joined host can't have this name."""
HOST_STATES = ("joined", "draining", "lost", "left")


class _Facts:
    """Input of the metrics of one scrape, read from the log. Package prometheus_client calls `collect`."""

    def __init__(self, log: Log, now: float) -> None:
        head = log.head()
        last_event = next(log.events(after=head.position - 1), None) if head.position else None
        trains = log.batches(state="finalized", batch_type="train", sort="ended", descending=True, limit=1)
        trained = log.batches(sort="step", descending=True, limit=1)
        self.now, self.position = now, head.position
        self.last_at = None if last_event is None else last_event.recorded_at
        self.totals, self.model_version = log.totals(), log.model_version()
        self.leases, self.hosts, self.lives = log.leases(), log.hosts(), log.runner_lives()
        self.last_train = trains[0] if trains else None
        """The train batch that was finalized last."""
        self.trained_step = trained[0].trained_step if trained else None
        self.losses = log.losses()
        self.stalls, self.coordinators = (
            sum(1 for _ in log.read_rare([name])) for name in ("StallDetected", "CoordinatorStarted"))
        self.finished_by_host = log.finished_elsewhere()
        """Number of finished tasks by joined host."""

    def sum_of(self, column: str) -> int:
        return sum(getattr(row, column) for row in self.totals)

    def last_lives(self) -> list[RunnerIncarnation]:
        return list({life.runner: life for life in self.lives}.values())

    def host_names(self) -> list[str]:
        """Return "" for the head's host and the name of each host that ever joined; [] if no host joined."""
        return ["", *sorted({life.host for life in self.hosts})] if self.hosts else []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in METRICS:
            family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = family_class(metric.name, metric.help, labels=list(metric.labels))
            for labels, value in metric.read(self):
                family.add_metric(labels, value)
            # Metrics of hosts are left out if no host has joined; others without samples still show their help.
            if family.samples or not metric.name.startswith("trinity_es_host"):
                yield family


Samples = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[_Facts], Samples] = field(repr=False)
    """Function that yields (label values, value) for each series."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Possible values of each label."""


def _column_counter(name: str, help: str, column: str) -> Metric:
    return _single("counter", name, help, lambda facts: facts.sum_of(column))


def _single(kind: Literal["counter", "gauge"], name: str, help: str, value: Callable[[_Facts], float | None]) -> Metric:
    """Return a metric without labels. It is left out while its value is None."""

    def read(facts: _Facts) -> Samples:
        number = value(facts)
        if number is not None:
            yield (), float(number)

    return Metric(name=name, kind=kind, help=help, read=read)


def _batch_counts(facts: _Facts) -> Samples:
    counts = {(row.batch_type, row.state): row.batches for row in facts.totals}
    for batch_type in get_args(BatchType):
        for state in BatchLifecycleState:
            yield (batch_type, state.value), float(counts.get((batch_type, state.value), 0))


def _label_counts(labels: Sequence[str], read_labels: Callable[[_Facts], Iterable[str]]) -> Callable[[_Facts], Samples]:
    """Return a reader of samples that counts how often `read_labels` yields each of `labels`."""

    def read(facts: _Facts) -> Samples:
        counts = Counter(read_labels(facts))
        return (((label,), float(counts[label])) for label in labels)

    return read


def _host_states(facts: _Facts) -> Samples:
    read_states = _label_counts(HOST_STATES, lambda f: (life.state for life in last_lives(f.hosts).values()))
    return read_states(facts) if facts.hosts else iter(())


def _by_host(value: Callable[[_Facts, str], float]) -> Callable[[_Facts], Samples]:
    """Return a reader of samples that calls `value` for the head's host and for each host that ever joined."""
    return lambda facts: (((host or HEAD,), value(facts, host)) for host in facts.host_names())


def _host_runners(facts: _Facts) -> Samples:
    counts = Counter((host_of(life.runner), _runner_state(life)) for life in facts.last_lives())
    for host in facts.host_names():
        for state in RUNNER_STATES:
            yield (host or HEAD, state), float(counts[host, state])


def _finished_tasks_on(facts: _Facts, host: str) -> float:
    """Return the number of tasks that a host finished. "" is the head: all tasks that no joined host finished."""
    if host:
        return float(facts.finished_by_host.get(host, 0))
    return float(facts.sum_of("finished") - sum(facts.finished_by_host.values()))


def _deaths_on(facts: _Facts, host: str) -> float:
    """Return how many runner processes of a host died, not counting those that ended with the whole host."""
    lives = [life for life in facts.lives if host_of(life.runner) == host]
    return float(sum(life.died and not life.went_with_host for life in lives))


def _runner_state(life: RunnerIncarnation) -> str:
    return "starting" if life.how == "running" and life.ready_at is None else life.how


def _last_train_value(column: str) -> Callable[[_Facts], float | None]:
    return lambda facts: None if facts.last_train is None else getattr(facts.last_train, column)


def _last_train_seconds(facts: _Facts) -> float | None:
    batch = facts.last_train
    return None if batch is None or batch.ended_at is None else batch.ended_at - batch.submitted_at


_HOST = {"host": ("its name", f"`{HEAD}`")}
METRICS: tuple[Metric, ...] = (
    Metric(name="trinity_es_batches", kind="gauge", read=_batch_counts, help="Batches by type and state.",
           labels={"type": get_args(BatchType), "state": tuple(BatchLifecycleState)}),
    _column_counter("trinity_es_tasks_submitted_total", "Tasks submitted.", "tasks"),
    _column_counter("trinity_es_tasks_finished_total", "Tasks whose runs all completed.", "finished"),
    _column_counter("trinity_es_tasks_failed_total", "Tasks with a run that failed for good.", "failed"),
    _column_counter("trinity_es_tasks_dropped_total",
             "Tasks dropped before they finished, because their batch had enough or was aborted.", "dropped"),
    Metric(name="trinity_es_attempts_failed_total", kind="counter", labels={"kind": get_args(FailureKind)},
           read=lambda f: (((kind,), float(f.losses.get(("attempt", kind), 0))) for kind in get_args(FailureKind)),
           help="Failed attempts by kind of failure. An attempt whose runs failed in two ways counts under both."),
    _column_counter("trinity_es_experiences_total", "Experiences from completed runs.", "experiences"),
    _single("counter", "trinity_es_experiences_dropped_total", "Experiences that the pipeline's filters dropped.",
         lambda f: sum(count for (kind, _), count in f.losses.items() if kind == "experience")),
    _column_counter("trinity_es_prompt_tokens_total", "Prompt tokens of completed runs.", "prompt_tokens"),
    _column_counter("trinity_es_response_tokens_total", "Response tokens of completed runs.", "response_tokens"),
    _single("gauge", "trinity_es_batch_reward", "Mean reward of the last finalized train batch.",
         _last_train_value("reward")),
    _single("gauge", "trinity_es_batch_staleness_versions", "Mean number of versions that the weights of the last "
         "finalized train batch were behind.", _last_train_value("staleness")),
    _single("gauge", "trinity_es_batch_duration_seconds", "Seconds from submission to end of the last finalized train "
         "batch.", _last_train_seconds),
    _single("gauge", "trinity_es_trained_step", "Highest step that a trainer acknowledged.", lambda f: f.trained_step),
    _single("gauge", "trinity_es_weights_version", "Current version of the weights; 0: none was published.",
         lambda f: f.model_version),
    Metric(name="trinity_es_runners", kind="gauge", labels={"state": RUNNER_STATES},
           read=_label_counts(RUNNER_STATES, lambda f: map(_runner_state, f.last_lives())),
           help="Runners by the state of their newest process."),
    _single("counter", "trinity_es_runner_deaths_total", "Runner processes that ended unintentionally.",
         lambda f: sum(life.died for life in f.lives)),
    Metric(name="trinity_es_hosts", kind="gauge", labels={"state": HOST_STATES}, read=_host_states,
           help="Hosts that ever joined the run, by their newest state."),
    _single("counter", "trinity_es_hosts_lost_total", "Number of times that a host was lost.",
         lambda f: sum(life.state == "lost" for life in f.hosts) if f.hosts else None),
    Metric(name="trinity_es_host_runners", kind="gauge", labels={**_HOST, "state": RUNNER_STATES},
           read=_host_runners, help="Runners of a host by the state of their newest process."),
    Metric(name="trinity_es_host_tasks_finished_total", kind="counter", labels=_HOST,
           read=_by_host(_finished_tasks_on), help="Tasks whose runs all completed, by the host that completed them."),
    Metric(name="trinity_es_host_runner_deaths_total", kind="counter", labels=_HOST, read=_by_host(_deaths_on),
           help="Runner processes of a host that ended unintentionally, but not together with the whole host."),
    _single("counter", "trinity_es_coordinator_starts_total", "Starts of coordinators.",
         lambda f: f.coordinators),
    _single("counter", "trinity_es_stalls_total", "Number of times that a batch stalled.",
         lambda f: f.stalls),
    Metric(name="trinity_es_leases", kind="gauge", labels={"state": LEASE_STATES},
           read=_label_counts(LEASE_STATES, lambda f: (lease.state for lease in f.leases)),
           help="Unreleased leases of sandboxes and sessions. `orphaned`: the run that took the lease is over."),
    _single("gauge", "trinity_es_leases_failing", "Leases whose release failed and is tried again.",
         lambda f: sum(bool(e.error) for e in f.leases)),
    _single("gauge", "trinity_es_log_head_position", "Position of the last event, the number of events in the log.",
         lambda f: f.position),
    _single("gauge", "trinity_es_last_event_timestamp_seconds", "Time of the last event, in unix seconds.",
         lambda f: f.last_at),
    _single("gauge", "trinity_es_last_event_age_seconds", "Seconds since the last event.",
         lambda f: None if f.last_at is None else max(0.0, f.now - f.last_at)),
)


def prometheus_text(log: Log, now: float | None = None) -> bytes:
    """Return the log's metrics in Prometheus's text format. `now`: unix seconds. Raises LogError."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Facts(log, time.time() if now is None else now))
    return generate_latest(registry)


def main() -> None:
    """Print docs/METRICS.md."""
    lines = [
        "# Metrics", "",
        "The dashboard serves these metrics under `/metrics` for Prometheus. This page is printed by",
        "`python -m trinity_es.telemetry.prometheus`. Metrics without a value are left out, as are those of hosts if",
        "no host has joined.", "",
        "| metric | type | labels | meaning |", "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = "; ".join(f"`{label}`: {', '.join(values)}" for label, values in metric.labels.items())
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
