"""What does the journal of unfinished runs cost? The same batches with it and without it, in turn.

On a real vLLM engine with a tiny model, one system plays both, since two engines differ by more than the journal costs.
"Without" is a workflow that removes the journal from its model. It measures tokens/s of a single turn and of a
conversation (`benchmarks.overhead`). No-op tasks on the ScriptedEngine (E1 and E2 of `benchmarks.dispatch`) record
nothing. Two systems play them, one with `explorer.progress.seconds: 0`, and the system that is not measured is
suspended. CPU time is that of all processes of a system except vLLM's own, which busy-wait. The interval holds 95 % of
the medians of resampled pairs.

`python -m benchmarks.journal_cost [--pairs 24] [--quick] [--json FILE]`: 24 pairs take about ten minutes on two cores.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil

from benchmarks.compared import Row, Spread, Watch, alternate, coordinator_of, family_of, options_of, pairs, report
from benchmarks.dispatch import Bench
from benchmarks.overhead import CASES, LOWER_AIM, Conversation, pin, prompts, spread, through_system
from benchmarks.systems import TINY
from examples.grpo.tiny_model import make_tiny_model
from trinity_es import Experience
from trinity_es.workflows import SingleTurnWorkflow

SECONDS = {"with": 1.0, "without": 0.0}
"""{system for no-op tasks: its `explorer.progress.seconds`}."""
AIM = 0.98
TASKS, RUNS, TOKENS = 48, 8, 96
"""Size of a batch on vLLM: tasks, runs of each, tokens of each run."""
Work = Callable[[str], tuple[float, int]]
"""Function that plays batches "with" or "without" the journal, and returns a figure and a count of tokens or tasks."""


class Single(SingleTurnWorkflow):
    """Workflow `single_turn` that does not use the journal."""

    async def run_async(self) -> list[Experience]:
        self.model.journal = None
        return await super().run_async()


class Turns(Single, Conversation):
    """The same of `Conversation`."""


UNRECORDED = {"single": "benchmarks.journal_cost:Single", "conversation": "benchmarks.journal_cost:Turns"}


def cpu_seconds(bench: Bench) -> float:
    """Return the CPU time so far of all processes of a system except vLLM's."""
    total = 0.0
    for process in family_of(coordinator_of(bench.client)):
        with suppress(psutil.NoSuchProcess):
            if not process.name().startswith("VLLM"):
                total += sum(process.cpu_times()[:2])
    return total


def compare(
    what: str, unit: str, each: str, benches: dict[str, Bench], work: Work, repeats: int, id: str
) -> list[Row]:
    """Return the rows that compare one kind of work with and without the journal, and the CPU time of `each` unit.

    `benches`: {"with" or "without": system}; both may be the same system.
    """
    cpu: dict[str, list[float]] = {name: [] for name in benches}

    def turn(name: str) -> float:
        before = cpu_seconds(benches[name])
        figure, count = work(name)
        cpu[name].append(1e6 * (cpu_seconds(benches[name]) - before) / count)
        print(f"\r  {what}: {len(cpu[name])} of {repeats + 1} pairs ", end="", file=sys.stderr, flush=True)
        return figure

    figures = alternate({name: partial(turn, name) for name in benches}, repeats + 1, benches)  # the first warms up
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


def vllm_work(bench: Bench, case: str, numbers: Iterator[int]) -> Work:
    """Return a function that plays one batch on vLLM. `numbers` yields batch numbers."""
    def work(name: str) -> tuple[float, int]:
        batch, workflow = next(numbers), "" if name == "with" else UNRECORDED[case]
        texts = prompts(TASKS, batch)
        return through_system(bench.client, case, batch, texts, TOKENS, RUNS, workflow), TASKS * RUNS * TOKENS

    return work


def measure_vllm(model: str, repeats: int) -> list[Row]:
    with Bench(TASKS, "power", [{"name": "grpo"}], rollout={"model_path": model, **TINY}) as bench:
        pin(*family_of(coordinator_of(bench.client)))
        numbers, rows = itertools.count(1), list[Row]()
        for case in UNRECORDED:
            work = vllm_work(bench, case, numbers)
            rows += compare(CASES[case], "tokens/s", "a token", dict.fromkeys(SECONDS, bench), work, repeats, "K5")
        bench.check_all()
    return rows


def measure_no_ops(repeats: int) -> list[Row]:
    with ExitStack() as systems:
        benches = {name: systems.enter_context(Bench(8, "power", [{"name": "grpo"}], journal=seconds))
                   for name, seconds in SECONDS.items()}

        def latency(name: str) -> tuple[float, int]:
            return statistics.median(1e3 * benches[name].one(1) for _ in range(20)), 20

        def rate(name: str) -> tuple[float, int]:
            return 256 / benches[name].one(256), 256

        rows = [*compare("submit -> finalize, 1 no-op task", "ms", "a task", benches, latency, repeats, "E1"),
                *compare("batches of 256 tasks", "tasks/s", "a task", benches, rate, repeats, "E2")]
        for bench in benches.values():
            bench.check_all()
    return rows


def main() -> int:
    options = options_of(__doc__, pairs=24)
    watch, repeats = Watch(), 2 if options.quick else options.pairs
    with tempfile.TemporaryDirectory(prefix="journal-cost-") as folder:
        model = str(make_tiny_model(Path(folder) / "model", seed=0))
        rows = [*measure_no_ops(repeats), *measure_vllm(model, repeats)]
    print(file=sys.stderr)
    return report(f"with the journal, {TASKS} tasks of {RUNS} runs of {TOKENS} tokens on vLLM", rows, watch, [],
                  options.json, {"pairs": repeats})


if __name__ == "__main__":
    sys.exit(main())
