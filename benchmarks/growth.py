"""Does speed stay the same with a long log, open batches, and many places, engines and hosts? Runs no-op tasks.

Two systems that differ in one respect get batches in turn, while the other one is suspended:

- log: a log of 10 million events (`benchmarks.long_log`; SQLite), against one of a thousand;
- open batches: 10 and 100 batches whose tasks have finished but that are not finalized, against 1;
- places: tasks of 50 ms, 16 for each place, on 4, 16 and 64 places, against 1, in tasks/s per place;
- engines: 10 and 100 servers that speak vLLM's API (stand-ins in one process) behind as many runners, against 1;
- hosts: CPU time of the coordinator's process per task with 3 joined hosts, against 1 (`benchmarks.scale_real`; it
  needs the PostgreSQL of the tests).

It measures p50 of batches of one task, and tasks/s of batches of 256. Every batch is checked as in
`benchmarks.dispatch`, and all logs are verified, but the long log only with `--verify`, which takes ten minutes.

`python -m benchmarks.growth [log] [open] [places] [engines] [hosts] [--events N] [--verify] [--json FILE] [--quick]`
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compared import Row, Watch, alternate, options_of, pairs, report, sound
from benchmarks.dispatch import Bench, tasks
from benchmarks.long_log import lengthen
from benchmarks.recovery import config_in, make_history

EVENTS, QUICK_EVENTS, SHORT = 10_000_000, 100_000, 1_000
OPEN, PLACES, ENGINES, HOSTS = (1, 10, 100), (1, 4, 16, 64), (1, 10, 100), (1, 3)
REPEATS, BATCHES = 5, 24
"""Number of turns, and of one-task batches in each turn."""
RATE_TASKS = 256
FLAT, SLOWER, A_PLACE, ENGINES_SLOWER = 1.15, 0.87, 0.85, 0.7
"""Maximum ratio of times; minimum ratios of rates, of tasks per second and place, of rates with many engines."""
SECONDS = 0.05
OPERATORS = [{"name": "grpo"}]


def system(stack: ExitStack, places: int = 8, **more: Any) -> Bench:
    """Start a system that ends with `stack`, and warm it up."""
    bench = stack.enter_context(Bench(places, "power", OPERATORS, **more))
    for _ in range(5):
        bench.one(8)
    return bench


def compare(what: str, more: Bench, other: str, less: Bench, part: int, slower: float = SLOWER) -> list[Row]:
    """Return the rows that compare the system `more`, which has more of something, with `less`, measured in turn."""
    def p50(bench: Bench) -> float:
        return statistics.median(1e3 * bench.one(1) for _ in range(max(4, BATCHES // part)))

    def rate(bench: Bench) -> float:
        return RATE_TASKS / bench.one(RATE_TASKS)

    short, many = (measure_in_turn({"ours": more, "less": less}, way) for way in (p50, rate))
    return [
        pairs(f"1 no-op task, p50, {what}", "ms", short["ours"], other, short["less"], aim=FLAT, most=True),
        pairs(f"batches of {RATE_TASKS}, {what}", "tasks/s", many["ours"], other, many["less"], aim=slower),
    ]


def measure_in_turn(systems: Mapping[str, Bench], way: Callable[[Bench], float]) -> dict[str, list[float]]:
    """Return {system: figures of `way`}, each measured while the other systems are suspended."""
    def warmed_up(bench: Bench) -> float:
        bench.one(8)
        return way(bench)

    return alternate({name: partial(warmed_up, bench) for name, bench in systems.items()}, REPEATS, systems)


@contextmanager
def log_of(events: int) -> Iterator[str]:
    """Make a log with this many old events for this block. Yields its URL."""
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        config = config_in(Path(folder), runners=1, places=8)
        Path(config.store.url.removeprefix("sqlite:///")).parent.mkdir(parents=True)
        make_history(config, SHORT)
        lengthen(config.store.url, events)
        yield config.store.url


def measure_long_log(part: int, events: int, verify: bool) -> list[Row]:
    with ExitStack() as stack:
        urls = [stack.enter_context(log_of(n)) for n in (events, SHORT)]
        with ExitStack() as systems:
            more, less = (system(systems, url=url) for url in urls)
            rows = compare(f"a log of {events:,} events", more, f"a log of {SHORT:,}", less, part)
            for bench in (more, less):
                bench.check()
                bench.check_named()
        for url in urls if verify else urls[1:]:
            sound(url)
    return rows


def measure_open_batches(part: int, counts: Sequence[int]) -> list[Row]:
    rows = []
    for count in counts[1:]:
        with ExitStack() as stack:
            more, less = system(stack), system(stack)
            for bench, n in ((more, count), (less, counts[0])):
                for number in range(1, n + 1):
                    bench.client.submit_batch(batch_id=number, tasks=tasks(8, 0.0), batch_type="train")
            rows += compare(f"{count} open batches", more, f"{counts[0]} open", less, part)
            for bench, n in ((more, count), (less, counts[0])):
                for number in range(1, n + 1):
                    if (done := bench.client.finalize_train_batch(number, timeout=60))["finished_task_count"] != 8:
                        raise SystemExit(f"open batch {number} ended with {done}")
                bench.check_all()
    return rows


def measure_places(counts: Sequence[int]) -> list[Row]:
    with ExitStack() as stack:
        systems = {str(n): system(stack, n) for n in counts}
        rates = measure_in_turn(systems, lambda bench: 16 / bench.one(16 * bench.places, SECONDS))
        for bench in systems.values():
            bench.check_all()
    return [
        pairs(f"tasks of {SECONDS:g} s, {n} places", "tasks/s a place", rates[str(n)], "1 place", rates["1"],
              aim=A_PLACE)
        for n in counts[1:]
    ]


def measure_engines(part: int, counts: Sequence[int]) -> list[Row]:
    from benchmarks.stand_ins import stand_ins
    from examples.grpo.tiny_model import make_tiny_model

    rows = []
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory(prefix="growth-")))
        model = str(make_tiny_model(folder / "model", seed=0))
        urls = servers.enter_context(stand_ins(folder, model, max(counts) + 1))
        for count in counts[1:]:
            with ExitStack() as stack:
                kinds = [{"engine_type": "http", "model_path": model, "servers": {"urls": some}}
                         for some in (urls[:count], urls[-1:])]
                more, less = (system(stack, rollout=kind) for kind in kinds)
                rows += compare(f"{count} engines", more, "1 engine", less, part, ENGINES_SLOWER)
                for bench in (more, less):
                    bench.check_all()
    return rows


def measure_hosts(quick: bool) -> list[Row]:
    from benchmarks.scale_real import measure_real
    from tests.helpers.hosts import KEY

    os.environ["TRINITY_ES_KEY"] = KEY
    costs: dict[int, list[float]] = {n: [] for n in HOSTS}
    for _ in range(2 if quick else REPEATS):
        for n in HOSTS:
            costs[n].append(measure_real(n, 100 if quick else 600, 32, 1.0, 1)["us_per_task"])
    return [pairs(f"CPU of the coordinator for a task, {n} hosts", "us", costs[n], "1 host", costs[HOSTS[0]],
                  aim=FLAT, most=True) for n in HOSTS[1:]]


def main() -> int:
    parts = ["log", "open", "places", "engines", "hosts"]
    options = options_of(__doc__, [
        ("what", {"nargs": "*", "choices": [*parts, []], "help": "default: all"}),
        ("--events", {"type": int, "help": f"of the long log (default: {EVENTS:,}, with --quick {QUICK_EVENTS:,})"}),
        ("--verify", {"action": "store_true", "help": "verify the long log, too"}),
        ("--engines", {"type": int, "nargs": "+", "default": ENGINES, "help": "how many"}),
    ])
    watch, rows, left_out, part = Watch(), list[Row](), list[str](), 6 if options.quick else 1
    some = 2 if options.quick else None
    events = options.events or (QUICK_EVENTS if options.quick else EVENTS)
    ways: dict[str, Callable[[], list[Row]]] = {
        "log": lambda: measure_long_log(part, events, options.verify or options.quick),
        "open": lambda: measure_open_batches(part, OPEN[:some]),
        "places": lambda: measure_places(PLACES[:some]),
        "engines": lambda: measure_engines(part, options.engines[:some]),
        "hosts": lambda: measure_hosts(options.quick),
    }
    for name in options.what or parts:
        try:
            rows += ways[name]()
        except ModuleNotFoundError as e:
            left_out.append(f"{name}: {e}")
    if "log" in (options.what or parts) and not (options.verify or options.quick):
        left_out.append("verify of the long log (--verify)")
    return report("The same where there is more of everything", rows, watch, left_out, options.json)


if __name__ == "__main__":
    sys.exit(main())
