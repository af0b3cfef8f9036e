"""How fast is the way from submit to finalize? Tasks that do nothing, experiences that are stored durably.

One runner with a number of places on the ScriptedEngine; each task returns one experience of 512 tokens and 256
logprobs. Measured as a trainer sees it, through `connect`:

- latency: submit_batch -> finalize_train_batch of 1, 8 and 64 tasks, one batch at a time (p50, p95);
- rate: tasks/s for batches of 256 and 1,024 no-op tasks;
- efficiency: 256 tasks of 0.1 s on 16 places against the ideal, ceil(256 / 16) * 0.1 s.

`python -m benchmarks.dispatch [--json FILE] [--quick] [--durability power|process]`. Absolute times are of this
machine: compare them with another system's only where both ran side by side.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import trinity_es
from trinity_es.system import lifecycle
from trinity_es.testing import SleepWorkflow

TOKENS = 512


def tasks(n: int, seconds: float, tokens: int = TOKENS) -> list[trinity_es.Task]:
    args = {"seconds": seconds, "tokens": tokens}
    return [trinity_es.Task(workflow=SleepWorkflow, workflow_args=args, raw_task={"i": i}) for i in range(n)]


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Bench:
    def __init__(self, places: int, durability: str, operators: list[dict[str, Any]]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="dispatch-")
        self.config = trinity_es.Config.from_dict(
            {
                "mode": "explore",
                "explorer": {"max_concurrency": places, "rollout_model": {"engine_type": "scripted"}},
                "buffer": {"pipeline": {"operators": operators}},
                "store": {"durability": durability},
            },
            folder=self.folder.name,
        )
        self.next_id = 0

    def __enter__(self) -> Bench:
        lifecycle.start(self.config)
        self.client = trinity_es.connect(self.config)
        self.client.wait_ready(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.shutdown()
        self.folder.cleanup()

    def one(self, n: int, seconds: float = 0.0, tokens: int = TOKENS) -> float:
        """Seconds from submit to the return of finalize; checks that every experience is stored."""
        self.next_id += 1
        batch = tasks(n, seconds, tokens)
        started = time.perf_counter()
        self.client.submit_batch(batch_id=self.next_id, tasks=batch, batch_type="train")
        result = self.client.finalize_train_batch(self.next_id, timeout=120)
        elapsed = time.perf_counter() - started
        assert result["finished_task_count"] == n, result
        return elapsed

    def check(self, n: int) -> None:
        found = sum(1 for _ in self.client.experiences(self.next_id))
        assert found == n, f"{found} of {n} experiences are stored"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches: does it run at all")
    parser.add_argument("--durability", choices=["power", "process"], default="power")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    operators = [{"name": "grpo"}]
    figures: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "durability": options.durability,
        "latency_s": {},
        "tasks_per_s": {},
    }
    with Bench(8, options.durability, operators) as bench:
        for _ in range(5):
            bench.one(8)
        for n, batches in ((1, 60), (8, 60), (64, 30)):
            times = [bench.one(n) for _ in range(max(3, batches // part))]
            bench.check(n)
            figures["latency_s"][n] = {
                "p50": statistics.median(times), "p95": percentile(times, 0.95), "batches": len(times)
            }
        for n, batches in ((256, 8), (1024, 5)):
            rates = [n / bench.one(n) for _ in range(max(2, batches // part))]
            bench.check(n)
            figures["tasks_per_s"][n] = {
                "median": statistics.median(rates), "min": min(rates), "max": max(rates), "batches": len(rates)
            }
    with Bench(16, options.durability, operators) as bench:
        bench.one(64)
        ideal = 256 / 16 * 0.1
        shares = [ideal / bench.one(256, 0.1) for _ in range(max(2, 6 // part))]
        figures["efficiency"] = {
            "ideal_s": ideal, "median": statistics.median(shares), "min": min(shares), "max": max(shares)
        }
    show(figures)
    if options.json:
        with open(options.json, "w") as f:
            json.dump(figures, f, indent=2)
    return 0


def show(figures: dict[str, Any]) -> None:
    print(f"dispatch, durability {figures['durability']}, 8 places, experiences of {TOKENS} tokens")
    for n, row in figures["latency_s"].items():
        p50, p95 = row["p50"] * 1e3, row["p95"] * 1e3
        print(f"  submit -> finalize, {n:>4} no-op tasks   p50 {p50:7.1f} ms   p95 {p95:7.1f} ms")
    for n, row in figures["tasks_per_s"].items():
        spread = f"({row['min']:.0f} - {row['max']:.0f})"
        print(f"  batches of {n:>5} no-op tasks          {row['median']:7.0f} tasks/s {spread}")
    row = figures["efficiency"]
    spread = f"({row['min']:.3f} - {row['max']:.3f})"
    print(f"  256 tasks of 0.1 s on 16 places       {row['median']:7.3f} of the ideal {spread}")


if __name__ == "__main__":
    sys.exit(main())
