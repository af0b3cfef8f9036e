"""How much time and memory does a batch of 100,000 tasks take, and how much an idle system?

- A batch of 100,000 no-op tasks on one runner of 64 places, each time in a new system: seconds of submit, seconds from
  submit to the end of finalize, and the coordinator's peak resident memory and its growth. Once as an eval, which keeps
  no experiences, and once with an experience of 8 tokens per task, which the pipeline holds in memory all at once. It
  checks that every task finished with its result in the log, that every experience is stored, and that `verify` finds
  no problem.
- 8 idle runners: memory of all processes (PSS, so shared memory is counted once), CPU over 30 s.

`python -m benchmarks.large_batch [--json FILE] [--quick] [--tasks N] [--repeats N] [--only batch|idle]`
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from benchmarks.compared import Row, Spread, Watch, coordinator_of, family_of, options_of, pids_of, report, sound
from benchmarks.systems import explore_config, running
from trinity_es.testing import SleepWorkflow

TASKS, QUICK, REPEATS = 100_000, 2_000, 5
PLACES, RUNNERS = 64, 8
"""Number of places of the batch's runner, and of runners of the idle system."""
FINALIZE_AIM, MEMORY_AIM = 25.0, 400.0
"""Maximum seconds of finalize, and maximum MB of the coordinator."""
IDLE_SECONDS, IDLE_MEMORY_AIM, IDLE_CPU_AIM = 30.0, 0.2, 1.0
"""Seconds of the measurement, aim in GB, aim in percent of a core."""


@contextmanager
def system(runners: int) -> Iterator[trinity_es.RolloutClient]:
    with tempfile.TemporaryDirectory(prefix="large-") as folder:
        config = explore_config(folder, PLACES, {"engine_type": "scripted", "engine_num": runners})
        with running(config) as client:
            yield client


def play_large_batch(tasks: int, evals: bool) -> dict[str, float]:
    """Play one batch in a new system, check its result, and return seconds and memory."""
    with system(1) as client:
        coordinator = coordinator_of(client)
        before = resident_megabytes(coordinator)
        batch = [trinity_es.Task(workflow=SleepWorkflow, raw_task={"i": i}) for i in range(tasks)]
        started = time.perf_counter()
        batch_id: int | str = "1/large" if evals else 1
        client.submit_batch(batch_id=batch_id, tasks=batch, batch_type="eval" if evals else "train")
        submitted = time.perf_counter()
        finalize = client.finalize_eval_batch if evals else client.finalize_train_batch
        result = finalize(batch_id, timeout=1200)
        ended = time.perf_counter()
        if coordinator_of(client) != coordinator:
            raise SystemExit("the coordinator died and was replaced during the batch: there is no figure")
        peak = resident_megabytes(coordinator, "VmHWM")
        if result["finished_task_count"] != tasks:
            raise SystemExit(f"{result['finished_task_count']} of {tasks} tasks are finished")
        state = client.batch(batch_id)
        if (good := sum(s.ok for s in state.statuses.values())) != tasks:
            raise SystemExit(f"{good} of {tasks} tasks have their result")
        if (stored := sum(ref.count for ref in state.experiences)) != (0 if evals else tasks):
            raise SystemExit(f"{stored} experiences of {tasks} tasks are stored")
        client.shutdown()
        sound(client.config.store.url)
    return {"submit_s": submitted - started, "finalize_s": ended - submitted, "peak_mb": peak, "grew_mb": peak - before}


def resident_megabytes(pid: int, what: str = "VmRSS") -> float:
    """Return the resident memory of a process in MB; `VmHWM`: its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) * 1024 / 1e6


def members_of(client: trinity_es.RolloutClient) -> list[psutil.Process]:
    return [member for pid in pids_of(client) for member in family_of(pid)]


def measure_idle(seconds: float) -> dict[str, Any]:
    with system(RUNNERS) as client:
        time.sleep(min(10.0, seconds))  # until the start's own work is over
        members = members_of(client)
        memory = {m.pid: (" ".join(m.cmdline())[:60], round(m.memory_full_info().pss / 1e6, 1)) for m in members}
        before = {m.pid: sum(m.cpu_times()[:2]) for m in members}
        time.sleep(seconds)
        used = {m.pid: 100 * (sum(m.cpu_times()[:2]) - before[m.pid]) / seconds for m in members}
        if {m.pid for m in members_of(client)} != set(used):
            raise SystemExit("processes of an idle system came or went")
        return {"gb": sum(pss for _, pss in memory.values()) / 1e3, "cpu_percent": sum(used.values()),
                "processes": [(*memory[pid], round(used[pid], 2)) for pid in memory]}


def rows_of(name: str, results: list[dict[str, float]]) -> list[Row]:
    spread = {key: Spread.of([one[key] for one in results]) for key in results[0]}
    return [
        Row(f"{name}: submit", "s", spread["submit_s"]),
        Row(f"{name}: finalize", "s", spread["finalize_s"], aim=FINALIZE_AIM, most=True),
        Row(f"{name}: the coordinator's memory", "MB resident", spread["peak_mb"], aim=MEMORY_AIM, most=True),
        Row(f"{name}: of it since it was idle", "MB resident", spread["grew_mb"]),
    ]


def main() -> int:
    options = options_of(__doc__, [
        ("--tasks", {"type": int, "help": f"of the batch (default: {TASKS:,}, with --quick {QUICK:,})"}),
        ("--only", {"choices": ["batch", "idle"]}),
    ], repeats=REPEATS)
    watch, rows, details = Watch(), list[Row](), dict[str, Any]()
    tasks, repeats = options.tasks or (QUICK if options.quick else TASKS), 1 if options.quick else options.repeats
    if options.only != "idle":
        turns: dict[str, list[dict[str, float]]] = {"evals": [], "tasks": []}
        for _ in range(repeats):
            for kind, figures in turns.items():
                figures.append(play_large_batch(tasks, evals=kind == "evals"))
        for kind, found in turns.items():
            rows += rows_of(f"a batch of {tasks:,} {kind}", found)
    if options.only != "batch":
        looks = [measure_idle(5.0 if options.quick else IDLE_SECONDS) for _ in range(repeats)]
        details["processes"] = looks[-1]["processes"]
        rows += [
            Row(f"{RUNNERS} idle runners: memory of the system", "GB PSS", Spread.of([one["gb"] for one in looks]),
                aim=IDLE_MEMORY_AIM, most=True),
            Row(f"{RUNNERS} idle runners: CPU of the system", "% of a core",
                Spread.of([one["cpu_percent"] for one in looks]), aim=IDLE_CPU_AIM, most=True),
        ]
    return report("A batch of many tasks, and a system that is idle", rows, watch, [], options.json, details)


if __name__ == "__main__":
    sys.exit(main())
