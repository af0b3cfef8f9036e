"""Base of the model in `sample_log`: simulated time, runners, a trainer, and a log with simulated times."""

from __future__ import annotations

import heapq
import math
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database.statements import LockedHead
from trinity_es.events.store.log import EventLog, Lease, Write
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.store.records.log_values import Draft
from trinity_es.events.values import BatchId, batch_stream

START = 1_772_352_000.0
"""2026-03-01T08:00:00Z, the time at which a finished or dead run began."""
EVAL_EVERY = 10
COMMIT = 2_000
"""Maximum number of events in a commit."""
RUNNERS, PLACES = 4, 8
WORDS = ["river", "stone", "candle", "window", "forest", "silver", "garden", "planet", "mirror", "ladder", "ocean"]

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</textarea></pre></template><h1 onmouseover=alert(1)>big</h1>",
    "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x9b32m",
    "[red]no markup[/red] [link=file:///etc/passwd]here[/link]",
    "\x00\x01\x7f\x80\u202eright to left\u2066\ufeff\ufffd\u2028line\u2029paragraph",
    "line one\r\nline two\rback\x08\x08\tend\n",
    "=cmd|' /C calc'!A0,\"quoted\",'; DROP TABLE es_event; --",
    "\U0001f9ea\u0301\u0301\u0301 \ud7ff\ue000 e\u0301",
    "{{7*7}} ${7*7} {% raw %} <!-- ]]> -->",
)
"""Texts that are harmless only if they are shown as text. The tokens beside them are not UTF-8. None has a lone
surrogate, which events and experiences refuse."""


class TimedLog(EventLog):
    """Log whose events have simulated times."""

    times: list[float]

    def append(self, *args: Any, **more: Any) -> Any:
        """Append without a boot id, so that equal arguments give two logs that are equal byte for byte."""
        return super().append(*args, **{**more, "metadata": {"mono": 0.0, "boot": "", **(more.get("metadata") or {})}})

    def _clock_row(self, *_: Any) -> None:
        """Return no row about the clock, since the simulated clock is never set."""

    def _assign_positions(self, head: LockedHead, drafts: Sequence[Draft]) -> None:
        (made,) = drafts
        times = accumulate((round(at, 6) for at in self.times), max, initial=head.recorded_at)
        made.place(head.last_position, head.last_hash, islice(times, 1, None))


@dataclass(slots=True)
class Entry:
    at: float
    stream: str
    event: ev.Event


@dataclass(slots=True)
class RunnerModel:
    name: str
    incarnation: int = 0
    up: bool = False
    version: int = 0
    free: int = PLACES
    speed: float = 1.0


def writes_of(entries: Sequence[tuple[str, ev.Event]], versions: dict[str, int]) -> list[Write]:
    """Return (stream, event) entries as writes. Neighbouring events of a stream are one write.

    `versions`: current versions of the streams, which are updated.
    """
    writes = []
    for stream, group in groupby(entries, key=lambda entry: entry[0]):
        events, version = [event for _, event in group], versions.get(stream, 0)
        writes.append(Write(stream=stream, expected_version=version, events=events))
        versions[stream] = version + len(events)
    return writes


class SimulatedRun:
    """Simulated run: a heap of future actions, the state of runners and trainer, and the log entries that they make."""

    def __init__(
        self, log: TimedLog, lease: Lease, store: PayloadStore | None, seed: int, batches: int, tasks: int, runs: int,
        hostile: bool, alive: bool, progress: Callable[[int], None] | None,
    ) -> None:
        self.log, self.lease, self.store, self.alive = log, lease, store, alive
        self.chance, self.ink = random.Random(seed), random.Random(seed + 1)  # for events, and for payloads
        self.batches, self.tasks, self.runs, self.hostile, self.progress = batches, tasks, runs, hostile, progress
        self.now = START
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.entries: list[Entry] = []
        self.versions: dict[str, int] = {}
        self.written = self.commits = self.per_batch = 0
        self.runners = [RunnerModel(f"runner-{i}", speed=1.0 + 0.05 * i) for i in range(RUNNERS)]
        self.incarnations = 0
        self.published = self.trained = 0
        self.read_tasks = 0
        self.keeping = True
        self.free: list[BatchId] = []
        self.training: BatchId | None = None

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.now + seconds, self.order, what))

    def run_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.now, _, what = heapq.heappop(self.heap)
            what()

    @property
    def made(self) -> int:
        """Number of events so far, including those that are not written yet."""
        return self.written + len(self.entries)

    def tell(self, stream: str, event: ev.Event) -> Entry:
        self.now += 1e-4
        entry = Entry(self.now, stream, event)
        self.entries.append(entry)
        return entry

    def tell_runner(self, runner: RunnerModel, kind: type[ev.Event], **fields: Any) -> None:
        self.tell(f"runner/{runner.name}", kind(runner=runner.name, incarnation=runner.incarnation, **fields))

    def tell_lease(self) -> None:
        self.tell("system", ev.SystemConfigured(config=self._config()))
        self.tell("system", ev.CoordinatorStarted(
            epoch=self.lease.epoch, pid=self.lease.owner["pid"], host=socket.gethostname(), version="0.5.0"))

    def hostile_or(self, otherwise: str) -> str:
        return self.chance.choice(HOSTILE) if self.hostile else otherwise

    def begin(self) -> None:
        self.tell_lease()
        for runner in self.runners:
            self.start(runner)
        self.run_until(lambda: all(r.up for r in self.runners))

    def change_coordinator(self) -> None:
        """Let another coordinator take the lease, between two batches."""
        self.flush()
        self.lease = self.log.acquire_lease("coordinator", self.lease.owner)
        self.tell_lease()

    def _config(self) -> dict[str, Any]:
        return {
            "project": "letters", "name": "sample", "mode": "both",
            "explorer": {"runner_per_model": RUNNERS, "max_concurrency": PLACES, "max_timeout": 60.0,
                         "stall_after": 30.0, "concurrent_mode": "parallel", "rollout_model": {"engine_type": "vllm"},
                         "max_retry_times": 2, "max_repeat_times_per_runner": None,
                         "over_rollout": {"ratio": 0.0, "wait_after_min": 30.0, "return_partial_tasks": False},
                         "dynamic_timeout": {"enable": False, "ratio": 3.0, "warmup_min_steps": 3}},
            "buffer": {"batch_size": self.tasks, "total_steps": self.batches},
            "algorithm": {"repeat_times": self.runs, "algorithm_type": "grpo"},
            "model": {"model_path": self.hostile_or("models/tiny")},
            "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1, "sync_offset": 1},
        }

    def start(self, runner: RunnerModel) -> None:
        self.incarnations += 1
        runner.incarnation, runner.up, runner.free, runner.version = self.incarnations, False, PLACES, self.published
        self.tell_runner(runner, ev.RunnerStarted, pid=2**22 - 100 - runner.incarnation,
                         host=self.hostile_or("node-1"), engine="vllm")
        seconds = round(self.chance.uniform(4.0, 9.0), 3)

        def ready() -> None:
            runner.up = True
            self.tell_runner(runner, ev.RunnerReady, places=PLACES, model_version=runner.version, load_seconds=seconds)
            self.dispatch()

        self.at(seconds, ready)

    def train(self, number: int) -> None:
        """Schedule the trainer's step and the publication of its weights, while the next batch runs."""
        self.training = number

        def trained() -> None:
            self.trained, self.training = number, None
            loss = 2.0 * math.exp(-number / 300) + self.chance.gauss(0, 0.02)
            self.tell(batch_stream(number), ev.BatchTrained(
                step=number, metrics={"actor/pg_loss": round(loss, 6), "actor/grad_norm": 0.5}))
            self.published = number
            self.tell("weights", ev.WeightsPublished(
                version=number, path=f"checkpoints/global_step_{number}" if not self.hostile else HOSTILE[1]))
            for runner in self.runners:
                if runner.up:
                    self._load(runner, number)
            if len(self.free) >= 20:
                self.tell("experiences", ev.PayloadsFreed(batches=self.free, payloads=2 * len(self.free),
                                                          bytes=40_000 * len(self.free)))
                self.free = []

        self.at(self.chance.uniform(1.5, 3.0), trained)

    def _load(self, runner: RunnerModel, version: int) -> None:
        seconds, life = round(self.chance.uniform(0.2, 0.6), 4), runner.incarnation

        def loaded() -> None:
            if not runner.up or runner.incarnation != life:
                return
            if self.chance.random() < 0.003:
                self.tell_runner(runner, ev.WeightsFailed, version=version,
                                 error=self.hostile_or("SyncError: model.safetensors is cut off"))
                return
            runner.version = version
            self.tell_runner(runner, ev.WeightsLoaded, version=version, seconds=seconds)

        self.at(seconds, loaded)

    def end(self, alive: bool, dead: bool) -> None:
        if not (alive or dead):
            self.run_until(lambda: self.training is None)
            self.run_until(lambda: not self.heap)
            for runner in self.runners:
                if runner.up:
                    self.tell_runner(runner, ev.RunnerRetired)
        if self.free:
            self.tell("experiences", ev.PayloadsFreed(batches=self.free, payloads=2 * len(self.free), bytes=0))
        self.flush()

    def flush(self) -> None:
        if self.alive:  # shift the entries, so that the run goes on at the present time
            later = time.time() - self.now
            for entry in self.entries:
                entry.at += later
                if isinstance(entry.event, ev.StallDetected):
                    entry.event = replace(entry.event, since=entry.event.since + later)
        for first in range(0, len(self.entries), COMMIT):
            self._append(self.entries[first : first + COMMIT])
        self.entries = []

    def _append(self, entries: list[Entry]) -> None:
        writes = writes_of([(entry.stream, entry.event) for entry in entries], self.versions)
        self.log.times = [entry.at for entry in entries]
        self.commits += 1
        self.log.append(writes, commit_id=f"sample-{self.commits}", lease=self.lease)
        self.written += len(entries)
        if self.progress:
            self.progress(self.written)

    def dispatch(self) -> None:
        """Assign waiting units to free places."""
        raise NotImplementedError
