"""How much CPU time does a task cost a real coordinator, with 1, 2 and 4 hosts on this machine? And in the simulation?

A head and hosts that joined it, each an actor system with a runner on the scripted engine, PostgreSQL, TCP between
them. It measures CPU time of the coordinator's process from submit to the end of finalize, less the idle process's CPU
time, and the part of its main thread, which corresponds to the figures of `benchmarks.scale`.

`python -m benchmarks.scale_real [--hosts 1,2,4] [--tasks 600] [--places 32] [--repeats 3] [--json FILE]`. It needs
the PostgreSQL that the tests use.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from benchmarks.compared import options_of, write_json
from benchmarks.scale import A_TASK, int_list
from benchmarks.systems import running
from tests.helpers.faults import server
from tests.helpers.hosts import KEY, host_joins, ready
from tests.helpers.servers import free_port
from tests.helpers.systems import pid_of, play_batch, scripted, sleepers
from tests.simulation.many import Plan, play

IDLE_SECONDS = 5.0


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds so far of a process, and of its main thread."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    [main] = [t for t in process.threads() if t.id == pid]
    return times.user + times.system, main.user_time + main.system_time


def measure_real(hosts: int, tasks: int, places: int, seconds: float, repeats: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        database = stack.enter_context(server())
        url, port = database.url(database.new_database()), free_port()
        here = {"address": f"127.0.0.1:{port}", "timeout": 20.0}
        config = scripted(folder / "head", store={"url": url}, hosts=here, explorer={"max_concurrency": places})
        client = stack.enter_context(running(config))
        for number in range(hosts):
            stack.enter_context(host_joins(url, f"h{number}", folder))
        for number in range(hosts):
            ready(client, f"h{number}")
        pid = pid_of(client, "coordinator")

        play_batch(client, 1, sleepers(4 * places, seconds=seconds), timeout=300)
        before = cpu_seconds(pid)
        time.sleep(IDLE_SECONDS)
        idle = [(now - then) / IDLE_SECONDS for now, then in zip(cpu_seconds(pid), before, strict=True)]
        found: list[tuple[float, float]] = []
        for number in range(2, 2 + repeats):
            before, begun = cpu_seconds(pid), time.monotonic()
            play_batch(client, number, sleepers(tasks, seconds=seconds), timeout=300)
            took = time.monotonic() - begun
            whole, main = ((now - then - rest * took) / tasks * 1e6
                           for now, then, rest in zip(cpu_seconds(pid), before, idle, strict=True))
            found.append((whole, main))
        with trinity_es.open_log(url) as log:
            last = list(log.read(stream=f"batch/{1 + repeats}"))
        return {
            "hosts": hosts, "tasks": tasks, "us_per_task": statistics.median(whole for whole, _ in found),
            "us_per_task_main_thread": statistics.median(main for _, main in found), "idle_ms_per_s": 1e3 * idle[0],
            "events_per_task": len(last) / tasks, "commits_per_task": len({r.commit_id for r in last}) / tasks,
        }


def measure_simulated(hosts: int, tasks: int, places: int, seconds: float, repeats: int) -> float:
    """Return the simulation's microseconds per task for the same number of runners."""
    plan = Plan(hosts + 1, hosts + 1, (hosts + 1) * places, tasks, tasks, seconds=seconds, failures=0.0)
    runs = [play(plan) for _ in range(repeats)]
    return statistics.median(1e6 * sum(r.world.meter.seconds[p] for p in A_TASK) / r.tasks for r in runs)


def main() -> int:
    options = options_of(__doc__, [
        ("--hosts", {"type": int_list, "default": [1, 2, 4]}),
        ("--places", {"type": int, "default": 32, "help": "of each runner"}),
        ("--seconds", {"type": float, "default": 1.0, "help": "how long a task takes"}),
    ], quick=False, tasks=600, repeats=3)
    os.environ["TRINITY_ES_KEY"] = KEY
    print("hosts besides   CPU us/task of the   of its main   simulated   idle   events   commits")
    print("the head        coordinator          thread                    ms/s   a task   a task")
    rows = []
    for hosts in options.hosts:
        row = measure_real(hosts, options.tasks, options.places, options.seconds, options.repeats)
        row["simulated_us_per_task"] = measure_simulated(
            hosts, options.tasks, options.places, options.seconds, options.repeats)
        rows.append(row)
        print(f"{hosts:>13} {row['us_per_task']:>20.0f} {row['us_per_task_main_thread']:>13.0f} "
              f"{row['simulated_us_per_task']:>11.0f} {row['idle_ms_per_s']:>6.1f} {row['events_per_task']:>8.2f} "
              f"{row['commits_per_task']:>9.2f}", flush=True)
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
