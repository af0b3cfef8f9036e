"""What does the journal of unfinished runs cost? The same batches on a system with it and on one without, in turn.

Both systems run side by side, and the one that is not measured is stopped. Measured are tokens/s on a real vLLM engine
with a tiny model, for a single turn and for a conversation (`benchmarks.overhead`), and no-op tasks on the
ScriptedEngine (E1 and E2 of `benchmarks.dispatch`), which have nothing to record. CPU time is that of all processes of
the system but vLLM's own, which wait busily. The interval holds 95 % of the medians of resampled pairs.

`python -m benchmarks.journal_cost [--pairs 24] [--quick] [--json FILE]`: 24 pairs take about ten minutes on two cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compared import (
    Row,
    Spread,
    Watch,
    alternate,
    coordinator_of,
    family_of,
    options_of,
    pairs,
    report,
    resting,
)
from benchmarks.dispatch import Bench
from benchmarks.overhead import AIM, CASES, LOWER_AIM, pin, prompts, spread, through_system
from examples.grpo.tiny_model import make_tiny_model

SECONDS = {"with": 1.0, "without": 0.0}
"""`explorer.progress.seconds` of the two systems."""
TASKS, RUNS, TOKENS = 48, 8, 96
"""Of a batch on vLLM."""
Work = Callable[[Bench], tuple[float, int]]
"""Plays batches on a system, and returns the figure and the number of tokens or tasks."""


def cpu_seconds(bench: Bench) -> float:
    """Return the CPU time of all processes of a system so far, but of vLLM's."""
    total = 0.0
    for process in family_of(coordinator_of(bench.client)):
        with suppress(psutil.NoSuchProcess):
            if not process.name().startswith("VLLM"):
                total += sum(process.cpu_times()[:2])
    return total


def compared(
    what: str, unit: str, each: str, benches: dict[str, Bench], work: Work, repeats: int, id: str
) -> list[Row]:
    """Return the rows of one kind of work on both systems, with the CPU time of `each` token or task."""
    cpu: dict[str, list[float]] = {name: [] for name in benches}

    def turn(name: str) -> float:
        [other] = [bench for key, bench in benches.items() if key != name]
        with resting(*other.pids):
            before = cpu_seconds(benches[name])
            figure, count = work(benches[name])
            cpu[name].append(1e6 * (cpu_seconds(benches[name]) - before) / count)
            print(f"\r  {what}: {len(cpu[name])} of {repeats + 1} pairs ", end="", file=sys.stderr, flush=True)
            return figure

    figures = alternate({name: lambda name=name: turn(name) for name in benches}, repeats + 1)  # the first warms up
    ours, theirs = figures["with"][1:], figures["without"][1:]
    slower = unit == "ms"
    ratio = spread([b / a if slower else a / b for a, b in zip(ours, theirs, strict=True)])
    return [
        pairs(what, unit, ours, "without the journal", theirs, id=id),
        Row(f"  as fast as without, {ratio['median_from']:.3f} - {ratio['median_to']:.3f}", "of it",
            Spread.of([ratio["median"]]), aim=AIM, id=id),
        Row("  lower end", "of it", Spread.of([ratio["median_from"]]), aim=LOWER_AIM, id=id),
        pairs(f"  CPU time of our processes, {each}", "us", cpu["with"][1:], "without", cpu["without"][1:], id=id),
    ]


def on_vllm(case: str, numbers: dict[int, int]) -> Work:
    """Return the work of one batch on vLLM; `numbers` counts the batches of each system."""
    def work(bench: Bench) -> tuple[float, int]:
        batch = numbers[id(bench)] = numbers.get(id(bench), 0) + 1
        return through_system(bench.client, case, batch, prompts(TASKS, batch), TOKENS, RUNS), TASKS * RUNS * TOKENS

    return work


def latency(bench: Bench) -> tuple[float, int]:
    return statistics.median(1e3 * bench.one(1) for _ in range(20)), 20


def rate(bench: Bench) -> tuple[float, int]:
    return 256 / bench.one(256), 256


def measure(rollout: dict[str, Any] | None, repeats: int) -> list[Row]:
    """Measure two systems with these engines, or on the ScriptedEngine."""
    with ExitStack() as systems:
        benches = {
            name: systems.enter_context(
                Bench(TASKS if rollout else 8, "power", [{"name": "grpo"}], rollout=rollout, journal=seconds))
            for name, seconds in SECONDS.items()
        }
        if rollout is None:
            rows = [*compared("submit -> finalize, 1 no-op task", "ms", "a task", benches, latency, repeats, "E1"),
                    *compared("batches of 256 tasks", "tasks/s", "a task", benches, rate, repeats, "E2")]
        else:
            pin(*(p for bench in benches.values() for p in family_of(coordinator_of(bench.client))))
            rows, numbers = list[Row](), dict[int, int]()
            for case in ("single", "conversation"):
                work = on_vllm(case, numbers)
                rows += compared(CASES[case], "tokens/s", "a token", benches, work, repeats, "K5")
        for bench in benches.values():
            bench.check_all()
    return rows


def main() -> int:
    options = options_of(__doc__, [("--pairs", {"type": int, "default": 24})])
    watch, repeats = Watch(), 2 if options.quick else options.pairs
    with tempfile.TemporaryDirectory(prefix="journal-cost-") as folder:
        model = str(make_tiny_model(Path(folder) / "model", seed=0))
        vllm: dict[str, Any] = {"model_path": model, "max_model_len": 256, "gpu_memory_utilization": 0.3}
        rows = [*measure(None, repeats), *measure(vllm, repeats)]
    print(file=sys.stderr)
    return report(f"with the journal, {TASKS} tasks of {RUNS} runs of {TOKENS} tokens on vLLM", rows, watch, [],
                  options.json, {"pairs": repeats})


if __name__ == "__main__":
    sys.exit(main())
