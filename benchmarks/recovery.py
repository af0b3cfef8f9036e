"""How long does a recovery take, after a coordinator's death under load, and at a start on a long log?

- `coordinator`: 8 runners play tasks of 5 s, and the coordinator is killed with SIGKILL repeatedly. Measures the time
  from a death to the successor's next TasksDispatched, by the log's clock, and how many running tasks were run again.
- `history`: starts on a log with a thousand and one with a million old events, in turn, `rounds` times each. Measures
  the time from the start to the first dispatch, as a ratio of medians, since recovery reads only open batches.

`python -m benchmarks.recovery [coordinator] [history] [--kills 20] [--events 1000000] [--rounds 5] [--json FILE]`
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import trinity_es
from benchmarks.compared import Watch, about, coordinator_of, load_text, options_of, sound, write_json
from benchmarks.systems import explore_config, running
from trinity_es import Task
from trinity_es.client.teardown import end_system
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import task_to_dict
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.tables.read_models import projectors
from trinity_es.system import lifecycle
from trinity_es.testing import wait_until

SLEEP = "trinity_es.testing:SleepWorkflow"


def config_in(folder: Path, runners: int, places: int) -> trinity_es.Config:
    rollout = {"engine_type": "scripted", "engine_num": runners}
    return explore_config(folder, places, rollout, explorer={"max_timeout": 120.0})


def kill_coordinators(kills: int) -> dict[str, Any]:
    """Kill the coordinator `kills` times, and return the seconds from each death to the next dispatch."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        config = config_in(Path(name), runners=8, places=4)
        notes = Path(name) / "ran"
        with running(config) as client:
            tasks = [
                Task(workflow=SLEEP, workflow_args={"seconds": 5.0 * (i + 1) / 32 if i < 32 else 5.0,
                                                    "count_file": str(notes)})
                for i in range(32 * (kills * 2 + 4))  # ends are spread over time, from the first tasks on
            ]
            client.submit_batch(batch_id=1, tasks=tasks, batch_type="train", min_wait_num=0)
            deaths: list[float] = []
            time.sleep(6.0)
            for _ in range(kills):
                pid = coordinator_of(client)
                os.kill(pid, signal.SIGKILL)
                deaths.append(time.time())
                wait_until(lambda pid=pid: coordinator_of(client) not in (0, pid), "the next coordinator")
                time.sleep(6.0)
            client.abort_batch(1, reason="measured")
            dispatched = [r.recorded_at for r in client.log.events(1) if isinstance(r.event, ev.TasksDispatched)]
        sound(config.store.url)
        times = [min(t for t in dispatched if t > death) - death for death in deaths]
        again = [line for line, n in Counter(notes.read_text().splitlines()).items() if n > 1]
        return {"seconds": times, "median": statistics.median(times), "max": max(times), "run_again": len(again)}


def make_history(config: trinity_es.Config, events: int) -> None:
    """Make a log of old events: batches of 50 tasks, submitted, dispatched, finished, finalized and trained."""
    url = config.store.url
    data = [task_to_dict(Task(workflow=SLEEP))] * 50
    result: dict[str, Any] = {}
    with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", {})
        batch = written = 0
        while written < events:
            writes = []
            for _ in range(20):
                batch += 1
                units = [ev.Unit(task=t, run_id_base=0, runs=1, attempt=1) for t in range(50)]
                runner = {"runner": "runner-0", "incarnation": 1}
                history: list[ev.Event] = [
                    ev.BatchSubmitted(batch_id=batch, batch_type="train", repeat_times=[1] * 50, tasks=data),
                    ev.TasksDispatched(**runner, units=units, model_version=0),
                    *(
                        ev.TaskFinished(
                            task=t, run_id_base=0, attempt=1, **runner, payload=None, model_version=0,
                            runs=[ev.RunResult(run=0, metrics={"reward": 1.0})], model_version_end=0, seconds=0.1,
                        )
                        for t in range(50)
                    ),
                    ev.BatchFinalizing(),
                ]
                if not result and (state := fold(history)) is not None:  # all batches have the same result, but for ids
                    result = batch_result(state)
                history += [ev.BatchFinalized(result=result | {"batch_id": batch}), ev.BatchTrained(step=batch)]
                writes.append(Write(stream=f"batch/{batch}", expected_version=0, events=history))
                written += len(history)
            log.append(writes, commit_id=f"history-{batch}", lease=lease)
            print(f"\r  {written:,} events ", end="", file=sys.stderr, flush=True)
        log.release_lease(lease)
    print(file=sys.stderr)


def measure_starts(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Start `rounds` times on a log of each size, and return the seconds from a start to the first dispatch."""
    with tempfile.TemporaryDirectory(prefix="history-") as name:
        configs = {}
        for size in sizes:
            configs[size] = config_in(Path(name) / str(size), runners=1, places=8)
            Path(configs[size].store.url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            make_history(configs[size], size)
        seconds_by_size: dict[int, list[float]] = {size: [] for size in sizes}
        batch = 10_000_000
        tasks = [Task(workflow=SLEEP, workflow_args={"seconds": 600.0})] * 64
        for config in configs.values():
            with running(config) as client:  # this batch is open at each start
                client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
                wait_until(lambda c=client: c.batch(batch).flights, "a dispatch")
        for _ in range(rounds):
            for size in sizes:
                seconds_by_size[size].append(start_to_dispatch(configs[size], batch))
        medians = {size: statistics.median(times) for size, times in seconds_by_size.items()}
        ratios = [b / a for a, b in zip(seconds_by_size[sizes[0]], seconds_by_size[sizes[-1]], strict=True)]
        for config in configs.values():
            sound(config.store.url)
        return {"seconds": seconds_by_size, "medians": medians, "ratios": ratios,
                "ratio": medians[sizes[-1]] / medians[sizes[0]]}


def start_to_dispatch(config: trinity_es.Config, batch: int) -> float:
    with trinity_es.open_log(config.store.url) as log:
        head = log.head().position
        began = time.time()
        lifecycle.start(config)
        try:
            def first() -> float:
                for recorded in log.events(after=head):
                    if isinstance(recorded.event, ev.TasksDispatched):
                        return recorded.recorded_at
                return 0.0

            return float(wait_until(first, f"a dispatch of batch {batch}", timeout=120)) - began
        finally:
            end_system(config)


def main() -> int:
    options = options_of(__doc__, [
        ("what", {"nargs": "*", "choices": ["coordinator", "history", []], "help": "default: both"}),
    ], quick=False, kills=20, events=1_000_000, rounds=5)
    what = options.what or ["coordinator", "history"]
    watch, figures = Watch(), dict[str, Any]()
    if "coordinator" in what:
        figures["coordinator"] = one = kill_coordinators(options.kills)
        print(f"coordinator killed {options.kills} times under 32 running tasks of 5 s on 8 runners:")
        print(f"  death to next dispatch: median {one['median']:.2f} s, slowest {one['max']:.2f} s; "
              f"tasks run again: {one['run_again']}")
    if "history" in what:
        figures["history"] = many = measure_starts([1000, options.events], options.rounds)
        print("start to first dispatch:")
        for size, median in many["medians"].items():
            print(f"  {size:>9,} old events: median {median:.2f} s of {options.rounds}")
        print(f"  ratio {many['ratio']:.3f} ({min(many['ratios']):.3f} - {max(many['ratios']):.3f})")
    figures |= about(watch)
    print(f"  checked: the logs are sound. {load_text(figures['beside'])}")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
