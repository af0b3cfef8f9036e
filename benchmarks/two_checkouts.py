"""Is one checkout as fast as another? Runs the same batches on both in turn, so a slow machine is slow for both.

    python -m benchmarks.two_checkouts OLD_CHECKOUT NEW_CHECKOUT [--durability power|process]

Each checkout has its own `.venv` and its own system of `benchmarks.dispatch`. Prints the milliseconds from submit to
finalize, and the median ratio of the pairs, which is above 1 if the second checkout is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from benchmarks.child_processes import LineProcess, environment_without

ROUNDS = {1: 180, 8: 180, 64: 120, 256: 90, 1024: 50}
"""{number of tasks in a batch: number of pairs}."""
CHILD = """
import sys
from benchmarks.dispatch import Bench
with Bench(8, sys.argv[1], [{"name": "grpo"}]) as bench:
    for _ in range(20):
        bench.one(8)
    print("ready", flush=True)
    for line in sys.stdin:
        print(bench.one(int(line)), flush=True)
"""


def start_checkout(folder: str, durability: str) -> LineProcess:
    """Start a process that plays batches on request with the code of a checkout."""
    process = LineProcess(
        [f"{folder}/.venv/bin/python", "-c", CHILD, durability], cwd=folder,
        env=environment_without("PYTHONDONTWRITEBYTECODE") | {"PYTHONPATH": folder})
    assert process.answer() == "ready"
    return process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--durability", choices=["power", "process"], default="power")
    options = parser.parse_args()
    both = [start_checkout(os.path.abspath(folder), options.durability) for folder in (options.old, options.new)]
    for n, rounds in ROUNDS.items():
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(1e3 * float(both[which].ask(str(n))))
        old, new = (statistics.median(some) for some in times)
        ratios = sorted(a / b for a, b in zip(*times, strict=True))
        quarter = len(ratios) // 4
        print(f"{n:>5} tasks: {old:8.1f} -> {new:8.1f} ms, {statistics.median(ratios):.3f} times as fast "
              f"(quartiles {ratios[quarter]:.2f} - {ratios[-quarter - 1]:.2f})", flush=True)
    for one in both:
        one.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
