"""What do many hosts and runners cost the coordinator? A real coordinator in virtual time, with all others simulated.

Hosts join; batches are submitted, dispatched, collected and finalized. With `--churn SECONDS` a host breaks its
connection, is lost or drains at that virtual interval, and comes back. The coordinator's work is measured in CPU time
of this process. docs/SCALE.md says what is simulated and how the figures compare with real processes.

`python -m benchmarks.scale [--hosts 1,10,100] [--runners 1000] [--units 100000] [--tasks N] [--batch N] [--churn S]
[--repeats N] [--json FILE]`. Every number of hosts is combined with every number of runners that it divides; `--units`
are in flight at once, by default 100 for each runner. Times depend on the machine.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.compared import Watch, about, load_text, options_of, write_json
from tests.simulation.many import ManyWorld, Plan, play

A_TASK = ("submit", "dispatch", "collect", "finalize", "rest", "collector")
"""Phases whose cost depends on the number of tasks. `rest`: turns, sending, waking up, work after a commit;
`collector`: Python's garbage collector, including objects of simulated processes."""
STANDING = ("beats", "timers")
"""Phases that cost time even without tasks: runners' heartbeats and statuses; checks of hosts, batches and stalls."""


def live_state_bytes(live: Any) -> int:
    seen: set[int] = set()
    total, todo = 0, [live.batches, live._tasks, live.in_flight, live.lives, live.hosts, live.ended_batches]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        todo.extend(_parts(value))
    return total


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif not isinstance(value, str | bytes | int | float):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        for cls in type(value).__mro__:
            yield from (getattr(value, n) for n in getattr(cls, "__slots__", ()) if hasattr(value, n))


def play_plan(plan: Plan) -> dict[str, Any]:
    size = 0

    def full(world: ManyWorld) -> bool:
        nonlocal size
        if len(world.account.flying) < 0.9 * plan.units:
            return False
        size = live_state_bytes(world.coordinator.live)
        return True

    gc.collect()
    begun = time.process_time()
    result = play(plan, at=full)
    meter, account = result.world.meter, result.world.account
    by_task = {name: 1e6 * meter.seconds[name] / result.tasks for name in A_TASK}
    messages = sum(n for kind, n in account.heard.items() if kind not in ("_Woken", "WakeupMessage"))
    standing = sum(account.heard[kind] for kind in ("Heartbeat", "RunnerStatus"))
    longest = max(meter.longest, key=lambda name: 0.0 if name in ("rest", "collector") else meter.longest[name])
    return {
        "hosts": plan.hosts, "runners": plan.runners, "units": plan.units, "tasks": result.tasks, "batch": plan.batch,
        "churn_s": plan.churn, "most_in_flight": account.most_flying, "virtual_s": result.seconds,
        "us_per_task": by_task, "us_per_task_all": sum(by_task.values()),
        "standing_ms_per_s": 1e3 * sum(meter.seconds[name] for name in STANDING) / result.seconds,
        "events_per_task": sum(account.events.values()) / result.tasks,
        "messages_per_task": (messages - standing + sum(account.told.values())) / result.tasks,
        "standing_messages_per_s": standing / result.seconds,
        "bytes_per_unit": size / plan.units,
        "longest_ms": {name: 1e3 * seconds for name, seconds in sorted(meter.longest.items())},
        "longest": longest, "struck": dict(result.struck),
        "join_ms": 1e3 * meter.seconds["join"] / max(1, meter.calls["join"]),
        "loss_ms": 1e3 * meter.seconds["loss"] / max(1, account.events["HostLost"]),
        "cpu_s": time.process_time() - begun,
    }


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of several results of one plan, figure by figure."""
    def of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: of([v.get(key, 0.0) for v in values]) for key in values[0]}
        return statistics.median(values) if isinstance(values[0], int | float) else values[0]

    return {key: of([row[key] for row in rows]) for key in rows[0]}


def print_row(row: dict[str, Any]) -> None:
    parts = "  ".join(f"{name} {row['us_per_task'][name]:4.0f}" for name in A_TASK)
    stretch = f"{row['longest_ms'][row['longest']]:.0f} ms ({row['longest']})"
    print(
        f"{row['hosts']:>5.0f} {row['runners']:>7.0f} {row['units']:>7.0f} {row['us_per_task_all']:>8.0f}   ({parts})"
        f" {row['standing_ms_per_s']:>9.1f} {row['events_per_task']:>7.2f} {row['messages_per_task']:>9.2f}"
        f" {row['bytes_per_unit'] / 1024:>8.1f}   {stretch}", flush=True,
    )
    if row["churn_s"]:
        strikes = ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(row["struck"].items()))
        print(f"      hosts: {strikes}; a join {row['join_ms']:.1f} ms, a loss {row['loss_ms']:.1f} ms in the mean, "
              f"{row['longest_ms'].get('loss', 0.0):.0f} ms at most", flush=True)


def int_list(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> int:
    options = options_of(__doc__, [
        ("--hosts", {"type": int_list, "default": [1, 10, 100]}), ("--runners", {"type": int_list, "default": [100]}),
        ("--units", {"type": int, "help": "in flight at once (100 for each runner)"}),
        ("--tasks", {"type": int, "help": "of the whole play (twice the units)"}),
        ("--batch", {"type": int, "help": "tasks of a batch (a tenth of the units)"}),
        ("--seconds", {"type": float, "default": 60.0, "help": "how long a unit takes, in the mean"}),
        ("--churn", {"type": float, "default": 0.0, "help": "virtual seconds between what happens to hosts"}),
        ("--repeats", {"type": int, "default": 1, "help": "medians over so many"}),
    ], quick=False, seed=0)
    watch = Watch()
    print("hosts runners   units  us/task   " + "".ljust(70) + "standing  events  messages   KB of   longest stretch")
    print("                        of CPU   " + "".ljust(70) + "ms/s     a task    a task   a unit")
    rows = []
    for runners in options.runners:
        for hosts in [h for h in options.hosts if runners % h == 0]:
            units = options.units or 100 * runners
            units -= units % runners
            plan = Plan(
                hosts, runners, units, options.tasks or 2 * units, options.batch or max(1, units // 10),
                seconds=options.seconds, churn=options.churn, seed=options.seed,
            )
            rows.append(medians([play_plan(plan) for _ in range(options.repeats)]))
            print_row(rows[-1])
    context = about(watch)
    print(f"checked: every task ended once, on a runner that had it. {load_text(context['beside'])}")
    write_json(options.json, {**context, "simulated": rows})
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # a seed is a history, as in tests/simulation
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]])
    sys.exit(main())
