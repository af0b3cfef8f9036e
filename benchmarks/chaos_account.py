"""The result of `benchmarks.chaos`: a comparison of its log with the notes of its workflows."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trinity_es
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.store.records.log_values import Recorded

BAD = {
    "run_again": "finished tasks run again", "lost": "results lost", "duplicated": "results duplicated",
    "person": "needed a person", "damaged": "complaints of verify", "left": "processes left",
    "ended": "ended needlessly", "not_told": "acknowledged on a log that had lost something",
}
"""{list of an `Account` that must be empty: its label}."""


@dataclass
class Account:
    backend: str
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    commands: int = 0
    """Number of times that all processes were dead and the benchmark started the system."""
    batches: int = 0
    tasks: int = 0
    run_again: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    person: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    not_told: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Faults that this machine does not permit."""
    recoveries: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not any(getattr(self, name) for name in BAD)


@dataclass
class Evidence:
    """Observations of a chaos run that are independent of its log."""

    url: str
    tasks: int
    """Number of tasks of each batch."""
    submitted: set[int]
    """Batches whose submit was acknowledged."""
    finalized: dict[int, dict[str, Any]]
    """{batch: result that the trainer got}."""
    notes: Path
    """File in which each run noted its batch, its task and the monotonic time of its start."""
    seen: dict[int, float]
    """Monotonic time at which a reader first saw each position of the log."""
    faults: list[tuple[float, str]]
    """Monotonic time and name of each fault."""

    def add_to(self, account: Account) -> None:
        """Compare the log with these observations, and add the differences to the account."""
        finished: dict[tuple[int, int], float] = {}
        dispatched: Counter[tuple[int, int]] = Counter()
        recorded: Counter[tuple[Any, ...]] = Counter()
        moved: list[float] = []
        never = float("inf")
        with trinity_es.open_log(self.url) as log:
            account.damaged = log.verify()
            for item in log.events():
                event, at = item.event, self.seen.get(item.position, never)
                if isinstance(event, ev.RunsFinished):
                    batch = int(item.stream.removeprefix("batch/"))
                    moved.append(at)
                    recorded.update((batch, event.task, run.run) for run in event.runs)
                    if isinstance(event, ev.TaskFinished):
                        finished[batch, event.task] = at
                elif isinstance(event, ev.TasksDispatched) and item.stream.startswith("batch/"):
                    batch = int(item.stream.removeprefix("batch/"))
                    dispatched.update((batch, unit.task) for unit in event.units)
                    account.run_again += [f"task {unit.task} of batch {batch} dispatched after it was finished"
                                          for unit in event.units if (batch, unit.task) in finished]
            account.duplicated += [f"run {key} recorded {n} times" for key, n in recorded.items() if n > 1]
            account.batches, account.tasks = len(log.batches()), len(finished)
            for batch in sorted(self.submitted):
                state = log.replay(batch)
                if batch not in self.finalized:
                    account.lost.append(f"batch {batch} is {state.state}")
                    continue
                if state.final_result != self.finalized[batch]:
                    account.lost.append(f"batch {batch}: the trainer was told another result than the log has")
                bad = [t for t in range(self.tasks) if t not in state.statuses or not state.statuses[t].ok]
                account.lost.extend(f"task {t} of batch {batch}: {state.statuses.get(t)}" for t in bad)
                self.check_experiences(state, batch, account)
        began: Counter[tuple[int, int]] = Counter()
        for line in self.notes.read_text().splitlines():
            batch, task, at = line.split()
            key = int(batch), int(task)
            began[key] += 1
            if float(at) > finished.get(key, never):
                account.run_again.append(f"task {task} of batch {batch} began after it was finished")
        account.run_again += [
            f"task {key[1]} of batch {key[0]} began {n} times and was dispatched {dispatched[key]} times"
            for key, n in began.items() if n > dispatched[key]
        ]
        for at, name in self.faults:
            after = [t for t in moved if at < t < never]
            if after:
                account.recoveries.append((min(after) - at, name))

    def check_experiences(self, state: trinity_es.BatchState, batch: int, account: Account) -> None:
        """Read the delivered experiences of a batch, and add missing and duplicate ones to the account."""
        delivered = read_experiences(open_payloads(self.url), state.experiences)
        seen = Counter((e.eid.task, e.eid.run, e.eid.step) for e in delivered)
        account.duplicated += [f"experience {key} of batch {batch} delivered {n} times"
                                    for key, n in seen.items() if n > 1]
        missing = {(task, 0, 0) for task in range(self.tasks)} - seen.keys()
        account.lost += [f"experience {key} of batch {batch} was not delivered" for key in sorted(missing)]


class LogWatch:
    """Thread that reads new events of a log as they come."""

    def __init__(self, url: str) -> None:
        self.url, self.events, self.over = url, list[Recorded](), threading.Event()
        self.seen: dict[int, float] = {}
        """Monotonic time at which each position of the log was first seen."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.over.wait(0.2):
            with contextlib.suppress(TrinityError, OSError), trinity_es.open_log(self.url) as log:
                while not self.over.wait(0.05):
                    for item in log.events(after=self.events[-1].position if self.events else 0):
                        self.seen[item.position] = time.monotonic()
                        self.events.append(item)

    def close(self) -> None:
        self.over.set()
        self._thread.join(20)


def report(account: Account) -> str:
    lines = [f"{account.backend}: {account.batches} batches, {account.tasks} tasks finished in {account.seconds:.0f} s"]
    lines += [f"  {count:>6}  {name}" for name, count in sorted(account.faults.items())]
    lines += [
        f"  {account.kills:>6}  processes killed in all; {account.commands} times by then all were dead and a system "
        "was started by command",
    ]
    for name, label in BAD.items():
        found = getattr(account, name)
        lines.append(f"  {len(found):>6}  {label}")
        lines += [f"          {line}" for line in found[:10]]
    lines += [f"  left out: {what}" for what in account.left_out]
    if account.recoveries:
        slowest, cause = max(account.recoveries)
        median = statistics.median(t for t, _ in account.recoveries)
        lines.append(f"  recovery: median {median:.2f} s, slowest {slowest:.2f} s ({cause})")
    return "\n".join(lines)
