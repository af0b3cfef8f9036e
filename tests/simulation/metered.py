"""Meter and account of a simulation of many hosts, and a database that stores no events, to save memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.simulation.store import Store
from tests.simulation.world import Process, Violation
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConcurrencyError, Fenced
from trinity_es.events.store.log import Committed, Lease, Recorded, Write


class Meter:
    """CPU seconds of the coordinator's turns, by phase of its work."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        """Phase -> seconds of its longest call, including nested phases."""
        self._stack: list[tuple[str, float]] = []
        self._mark = 0.0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        begun = self.clock()
        if self._stack:
            self.seconds[self._stack[-1][0]] += begun - self._mark
        self._stack.append((phase, begun))
        self._mark = begun
        try:
            yield
        finally:
            now = self.clock()
            self._stack.pop()
            self.seconds[phase] += now - self._mark
            self.calls[phase] += 1
            self.longest[phase] = max(self.longest.get(phase, 0.0), now - begun)
            self._mark = now

    @contextlib.contextmanager
    def collector(self) -> Iterator[None]:
        """Count the garbage collector's time as the phase `collector`, and subtract it from the interrupted phase."""
        begun = 0.0

        def collected(step: str, _: Any) -> None:
            nonlocal begun
            if step == "start":
                begun = self.clock()
            elif self._stack:
                took = self.clock() - begun
                self.seconds["collector"] += took
                self.seconds[self._stack[-1][0]] -= took
                self.longest["collector"] = max(self.longest.get("collector", 0.0), took)

        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes this call and counts its time for the phase."""
        def metered(*args: Any, **options: Any) -> Any:
            with self.during(phase):
                return call(*args, **options)

        return metered


class Account:
    """Account of every task by the log's events. Checks that each task is dispatched and finished properly, once."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        """Messages to the coordinator, by class."""
        self.told: Counter[str] = Counter()
        """Messages from the coordinator, by class."""
        self.flying: dict[tuple[str, int], tuple[str, int, int]] = {}
        """(stream, task) -> (runner, incarnation, attempt) that has it."""
        self.done: set[tuple[str, int]] = set()
        self.lost: set[tuple[str, int]] = set()
        """(runner, incarnation) of lost runners."""
        self.finalized: dict[str, int] = {}
        self.most_flying = 0
        self.failure: Violation | None = None

    def require(self, holds: bool, what: str) -> None:
        if not holds and self.failure is None:
            self.failure = Violation(what)

    def committed(self, row: Recorded) -> None:
        event, stream = row.event, row.stream
        self.events[row.type] += 1
        match event:
            case ev.TasksDispatched():
                life = event.runner, event.incarnation
                self.require(life not in self.lost, f"{life} is lost, and was given units of {stream}")
                for unit in event.units:
                    key = stream, unit.task
                    self.require(key not in self.done, f"{key} is finished, and was dispatched")
                    self.require(key not in self.flying, f"{key} was given to {life}; {self.flying.get(key)} has it")
                    self.flying[key] = (*life, unit.attempt)
                self.most_flying = max(self.most_flying, len(self.flying))
            case ev.RunsFinished():
                key = stream, event.task
                self.require(key not in self.done, f"{key} is finished twice")
                self._lands(key, (event.runner, event.incarnation, event.attempt))
                self.done.add(key)
            case ev.AttemptFailed():
                self._lands((stream, event.task), (event.runner, event.incarnation, event.attempt))
                self.require(event.retry, f"{stream} {event.task} was given up: {event.message}")
            case ev.RunnerLost():
                self.lost.add((event.runner, event.incarnation))
            case ev.BatchFinalized():
                self.finalized[stream] = event.result["finished_task_count"]
            case ev.TaskDropped() | ev.BatchAborted():
                self.require(False, f"{row.type} in {stream}")

    def _lands(self, key: tuple[str, int], by: tuple[str, int, int]) -> None:
        self.require(self.flying.pop(key, None) == by, f"{key} came back from {by}, which does not have it")

    def after_step(self, process: Process | None) -> None:
        if self.failure is not None:
            raise self.failure

    def raised(self, process: Process, error: BaseException) -> None:
        self.failure = Violation(f"{process.label} raised {type(error).__name__}: {error}")


class CountedStore(Store):
    """Database that keeps only the versions of streams."""

    def __init__(self, now: Callable[[], float], listener: Callable[[Recorded], None]) -> None:
        super().__init__(now, listener)
        self.position = 0
        self.versions: dict[str, int] = {}

    def _append(
        self, writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None
    ) -> Committed:
        if lease is not None and lease.epoch != self.epoch:
            raise Fenced(f"lease is at epoch {self.epoch}, this writer holds {lease.epoch}")
        first = self.position + 1
        for write in writes:
            version = self.versions.get(write.stream, 0)
            if version != write.expected_version:
                raise ConcurrencyError(f"stream {write.stream} is at version {version}, not {write.expected_version}")
            for data, event in write.checked or [codec.check(e) for e in write.events]:
                self.position, version = self.position + 1, version + 1
                self.listener(Recorded(
                    position=self.position, stream=write.stream, version=version, type=type(event).__name__,
                    schema_version=event.schema_version, data=data, metadata={}, recorded_at=self.now(),
                    commit_id=commit_id, hash=b"", _event=event,
                ))
            self.versions[write.stream] = version
        return Committed(first_position=first, last_position=self.position, recorded=[], duplicate=False)
