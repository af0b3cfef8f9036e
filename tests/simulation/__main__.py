"""`python -m tests.simulation [--schedules N] [--seed S] [--stress] [--bug NAME]`: run schedules.

Exit status 1 at the first violation, which is printed with its history.

The iteration order of sets of text depends on PYTHONHASHSEED, and messages depend on that order. So the process starts
itself again with PYTHONHASHSEED=0.
"""

# ruff: noqa: T201  # printing is its job
from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter


def main() -> int:
    from tests.simulation import bugs, doubles, schedule

    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--stress", action="store_true", help="3 to 8 faults in a schedule instead of 0 to 4")
    parser.add_argument("--bug", choices=sorted(bugs.BUGS), help="put this bug in")
    parser.add_argument("--no-shrink", action="store_true", help="show the failing schedule as it is")
    parser.add_argument("--trace", action="store_true", help="show the history of the first schedule, and end")
    args = parser.parse_args()
    struck: Counter[str] = Counter()
    began, steps, virtual = time.perf_counter(), 0, 0.0
    with doubles.installed(), bugs.BUGS[args.bug]() if args.bug else contextlib.nullcontext():
        if args.trace:
            print(schedule.told(schedule.run(schedule.make(args.seed, stress=args.stress), tracing=True), lines=10**6))
            return 0
        for number in range(args.schedules):
            result = schedule.run(schedule.make(args.seed + number, stress=args.stress))
            struck.update(result.struck)
            steps, virtual = steps + result.steps, virtual + result.seconds
            if result.violation is not None:
                print(f"schedule {number + 1} (seed {args.seed + number}): {result.violation[:500]}", flush=True)
                if not args.no_shrink:
                    result = schedule.shrink(result.schedule)
                else:
                    result = schedule.run(result.schedule, tracing=True)
                print(schedule.told(result))
                return 1
    took = time.perf_counter() - began
    print(f"{args.schedules} schedules without a violation in {took:.1f} s: {60 * args.schedules / took:.0f} a minute")
    print(f"{steps} steps, {virtual / 3600:.1f} hours of virtual time")
    for kind, count in sorted(struck.items()):
        print(f"  {kind:20} {count}")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
