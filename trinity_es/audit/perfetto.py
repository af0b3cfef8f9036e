"""Trace of a run in the Chrome trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each runner is a process of the trace. An attempt is a slice in the runner's first free lane, and the loading of an
engine or weights is a slice in its lane `engine`. Two more processes show the batches, and the trainer's weights and
steps. Momentary events (weights published, a stall, a death, a dropped task) are instants. Times are microseconds since
the first event. The trace is streamed: only open slices are held in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.vocabulary import RUNNER_LIFE
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS
from trinity_es.safe_text import plain, summary

__all__ = ["OTHER_TYPES", "trace_events", "write_trace"]

OTHER_TYPES = (*RUNNER_LIFE, "WeightsPublished", "WeightsLoaded", "WeightsFailed", *ADAPTER_EVENTS)
"""Types of the events that a trace shows in addition to a batch's own events."""

BATCHES, TRAINER = 1, 2
"""Process ids in the trace of the two processes that are not runners."""
ENGINE = 0
"""Lane of a runner that shows its loading of the engine and of weights."""
_MAX_CHARACTERS = 500


@dataclass(slots=True)
class _Attempt:
    """Open attempt, whose slice is still to be written."""

    unit: ev.Unit
    dispatched_at: float
    pid: int
    lane: int
    args: dict[str, Any]
    open_runs: int
    rewards: list[float] = field(default_factory=list)
    tokens: int = 0
    outcome: str = "finished"


@dataclass(slots=True)
class _Lanes:
    """Allocator of a process's lanes: it takes the lowest free lane first."""

    count: int
    """Number of lanes, free lanes included."""
    free: list[int] = field(default_factory=list)
    """Heap of free lanes."""

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.count += 1
        return self.count - 1

    def give_back(self, lane: int) -> None:
        heapq.heappush(self.free, lane)


def write_trace(file: IO[bytes], recorded: Iterable[Recorded], progress: Callable[[int], None] | None = None) -> int:
    """Write the trace of these events and return the number of its entries. Calls `progress(position)` at times."""
    def with_progress() -> Iterator[Recorded]:
        for item in recorded:
            if progress is not None and item.position % 1000 == 0:
                progress(item.position)
            yield item

    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for entry in trace_events(with_progress()):
        file.write((b"," if count else b"") + b"\n" + orjson.dumps(entry))
        count += 1
    file.write(b"\n]}\n")
    return count


def trace_events(recorded: Iterable[Recorded]) -> Iterator[dict[str, Any]]:
    """Yield the entries of the trace. A slice follows when it ends; slices still open end with the last event."""
    trace = _Trace()
    yield trace.process(BATCHES, "batches")
    yield trace.process(TRAINER, "trainer and weights")
    for item in recorded:
        yield from trace.entries_of(item)
    yield from trace.close()


class _Trace:
    """Fold of a log's events into entries of a trace."""

    def __init__(self) -> None:
        self._start_at: float | None = None
        self._now = 0.0
        """Time of the newest event, in unix seconds."""
        self._pids: dict[str, int] = {}
        """Process ids of runners in the trace."""
        self._lanes: dict[int, _Lanes] = {BATCHES: _Lanes(0)}
        self._attempts: dict[str, dict[tuple[int, int], _Attempt]] = {}
        """Open attempts by batch stream, then by (task, first run)."""
        self._batches: dict[str, tuple[float, int, dict[str, Any]]] = {}
        """(begin, lane, args) of each open batch, by stream."""
        self._finalizing_at: dict[str, float] = {}
        self._loading: dict[str, tuple[float, int]] = {}
        """(begin, incarnation) of each runner that is loading its engine."""

    # --- entries ----------------------------------------------------------------------------------------------------
    def process(self, pid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": plain(name, 80)}}

    def _time(self, at: float) -> float:
        """Convert unix seconds to microseconds since the first event."""
        return round((at - (self._start_at or 0.0)) * 1e6, 1)

    def _slice(self, name: str, kind: str, pid: int, tid: int, start: float, end: float, **args: Any) -> dict[str, Any]:
        """Return the entry of a slice from `start` to `end` (unix seconds) in lane `tid` of a process."""
        # A load may begin before the trace, and Perfetto drops negative times.
        start = max(start, self._start_at or start)
        return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": self._time(start),
                "dur": round(max(0.0, end - start) * 1e6, 1), "args": args}

    def _instant(self, name: str, kind: str, pid: int, scope: str, item: Recorded) -> dict[str, Any]:
        return {"ph": "i", "name": name, "cat": kind, "pid": pid, "tid": 0, "ts": self._time(item.recorded_at),
                "s": scope, "args": {"position": item.position, "told": plain(summary(item.event), _MAX_CHARACTERS)}}

    def _new_runner(self, name: str) -> Iterator[dict[str, Any]]:
        """At a runner's first event, yield the entries that name its process and its lane `engine`."""
        if name not in self._pids:
            pid = self._pids[name] = TRAINER + 1 + len(self._pids)
            self._lanes[pid] = _Lanes(ENGINE + 1)
            yield self.process(pid, name)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": ENGINE, "args": {"name": "engine"}}

    # --- events -----------------------------------------------------------------------------------------------------
    def entries_of(self, item: Recorded) -> Iterator[dict[str, Any]]:
        """Yield the slices that end with this event, and the event's own instant."""
        if self._start_at is None:
            self._start_at = item.recorded_at
        self._now = at = item.recorded_at
        event = item.event
        if isinstance(runner := getattr(event, "runner", None), str):
            yield from self._new_runner(runner)
        if item.stream.startswith("batch/"):
            yield from self._batch_entries(item, event)
            return
        match event:
            case ev.RunnerStarted():
                yield from self._end_loading(event.runner, at, "loading, cut short")
                self._loading[event.runner] = at, event.incarnation
            case ev.RunnerReady():
                yield from self._end_loading(event.runner, at, "loading the engine")
            case ev.RunnerFailed() | ev.RunnerLost() | ev.RunnerRetired() | ev.RunnerQuarantined():
                yield from self._end_loading(event.runner, at, "loading, cut short")
                name = type(event).__name__.removeprefix("Runner").lower()
                yield self._instant(name, "runner", self._pids[event.runner], "p", item)
            case ev.WeightsLoaded() | ev.AdapterLoaded():
                adapter = {"adapter": event.adapter} if isinstance(event, ev.AdapterLoaded) else {}
                yield self._slice(_weights_text(event), "weights", self._pids[event.runner], ENGINE, at - event.seconds,
                                  at, **adapter, version=event.version)
            case ev.WeightsFailed() | ev.AdapterFailed():
                yield self._instant(f"{_weights_text(event)} failed", "weights", self._pids[event.runner], "p", item)
            case ev.WeightsPublished() | ev.AdapterPublished():
                yield self._instant(_weights_text(event), "weights", TRAINER, "g", item)
            case ev.AdapterRemoved():
                yield self._instant(f"adapter {event.adapter} removed", "weights", TRAINER, "g", item)

    def _end_loading(self, runner: str, at: float, name: str) -> Iterator[dict[str, Any]]:
        """If the runner was loading its engine, yield the slice of that under this name."""
        if (loading := self._loading.pop(runner, None)) is not None:
            begun_at, incarnation = loading
            yield self._slice(name, "runner", self._pids[runner], ENGINE, begun_at, at,
                              incarnation=incarnation)

    def _batch_entries(self, item: Recorded, event: ev.Event) -> Iterator[dict[str, Any]]:
        stream, at = item.stream, item.recorded_at
        match event:
            case ev.BatchSubmitted():
                yield from self._end_batch(stream, at, "submitted again")
                self._batches[stream] = at, self._lanes[BATCHES].take(), {
                    "type": event.batch_type, "tasks": len(event.repeat_times), "position": item.position}
            case ev.TasksDispatched():
                for unit in event.units:
                    yield from self._end_attempt(stream, (unit.task, unit.run_id_base), at, "lost")
                    pid = self._pids[event.runner]
                    args = {"attempt": unit.attempt, "runs": unit.runs, "version": event.model_version,
                            "incarnation": event.incarnation, "position": item.position}
                    attempt = _Attempt(unit, at, pid, self._lanes[pid].take(), args, unit.runs)
                    self._attempts.setdefault(stream, {})[unit.task, unit.run_id_base] = attempt
            case ev.RunsFinished() | ev.AttemptFailed():
                yield from self._add_outcome(stream, event, at)
            case ev.TaskDropped():
                tasks = set(event.tasks)
                for key in [k for k in self._attempts.get(stream, ()) if k[0] in tasks]:
                    yield from self._end_attempt(stream, key, at, "dropped")
                yield self._instant(f"{len(tasks)} tasks dropped", "batch", BATCHES, "t", item)
            case ev.AttemptKept():
                yield self._instant(f"task {event.task} goes on", "batch", self._pids[event.runner], "p", item)
            case ev.TaskReopened():
                yield self._instant(f"task {event.task} is run again", "batch", BATCHES, "t", item)
            case ev.StallDetected():
                yield self._instant(f"stall of {plain(stream, 60)}", "stall", BATCHES, "g", item)
            case ev.BatchFinalizing():
                self._finalizing_at[stream] = at
            case ev.FinalizeFailed():
                yield from self._end_finalizing(stream, at, "finalize, failed")
                yield self._instant("finalize failed", "batch", BATCHES, "p", item)
            case ev.GroupsMissing():
                yield from self._end_finalizing(stream, at, f"{event.missing} groups missing")
            case ev.BatchFinalized():
                yield from self._end_finalizing(stream, at, "finalize")
                yield from self._end_batch(stream, at, "finalized")
            case ev.BatchAborted():
                yield from self._end_batch(stream, at, f"aborted: {plain(event.reason, _MAX_CHARACTERS)}")
            case ev.BatchTrained():
                yield self._instant(f"step {event.step}", "trainer", TRAINER, "p", item)

    def _add_outcome(
        self, stream: str, event: ev.RunsFinished | ev.AttemptFailed, at: float
    ) -> Iterator[dict[str, Any]]:
        """Add finished or failed runs to their attempt, and yield its slice if no run is open."""
        attempt = self._attempts.get(stream, {}).get((event.task, event.run_id_base))
        if attempt is None:
            return
        if isinstance(event, ev.AttemptFailed):
            attempt.open_runs -= len(event.failed_runs)
            attempt.outcome, attempt.args["message"] = event.kind, plain(event.message, _MAX_CHARACTERS)
        else:
            attempt.open_runs -= len(event.runs)
            attempt.rewards += [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
            attempt.tokens += event.response_tokens
            attempt.args["version"] = event.model_version_end
        if attempt.open_runs <= 0:
            yield from self._end_attempt(stream, (event.task, event.run_id_base), at, attempt.outcome)

    def _end_attempt(self, stream: str, key: tuple[int, int], at: float, outcome: str) -> Iterator[dict[str, Any]]:
        """If the attempt is open, yield its slice and free its lane. `key`: its (task, first run)."""
        attempt = self._attempts.get(stream, {}).pop(key, None)
        if attempt is None:
            return
        self._lanes[attempt.pid].give_back(attempt.lane)
        args = attempt.args | {"outcome": outcome, "response_tokens": attempt.tokens}
        if attempt.rewards:
            args["reward"] = sum(attempt.rewards) / len(attempt.rewards)
        name = f"{plain(stream.removeprefix('batch/'), 60)} task {attempt.unit.task}"
        if attempt.unit.attempt > 1:
            name += f" attempt {attempt.unit.attempt}"
        yield self._slice(name, outcome, attempt.pid, attempt.lane, attempt.dispatched_at, at, **args)

    def _end_finalizing(self, stream: str, at: float, name: str) -> Iterator[dict[str, Any]]:
        begun_at = self._finalizing_at.pop(stream, None)
        if begun_at is not None and stream in self._batches:
            yield self._slice(name, "batch", BATCHES, self._batches[stream][1], begun_at, at)

    def _end_batch(self, stream: str, at: float, outcome: str) -> Iterator[dict[str, Any]]:
        """Yield the slices of a batch's open attempts and, if it is open, of the batch."""
        for key in list(self._attempts.get(stream, ())):
            yield from self._end_attempt(stream, key, at, "dropped" if outcome != "running" else outcome)
        self._attempts.pop(stream, None)
        self._finalizing_at.pop(stream, None)
        batch = self._batches.pop(stream, None)
        if batch is not None:
            begun_at, lane, args = batch
            self._lanes[BATCHES].give_back(lane)
            name = f"{args['type']} {plain(stream.removeprefix('batch/'), 60)}"
            yield self._slice(name, "batch", BATCHES, lane, begun_at, at, **args, outcome=outcome)

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the slices that are still open after the last event."""
        for stream in [*self._batches, *self._attempts]:
            yield from self._end_batch(stream, self._now, "running")
        for runner in list(self._loading):
            yield from self._end_loading(runner, self._now, "loading the engine")


def _weights_text(event: Any) -> str:
    """Return the name and version of an event's LoRA adapter, or the version of its weights, as text."""
    return f"adapter {event.adapter} {event.version}" if hasattr(event, "adapter") else f"weights {event.version}"
