"""Is a delivered token ever older than `explorer.max_staleness`?

A trainer that takes no time publishes weights after each step, while steps are generated ahead (`fully_async`) and
their unfinished tasks go on in later steps (`in_flight: cut`). Answers are scripted, of 10 to 400 tokens. The age of a
delivered token is the newest weights version when its batch was finalized, less the token's version in
`version_spans`.

`python -m benchmarks.staleness [--answers 10000] [--bound 4]`. The exit code is 1 if a token is older than the bound,
or if no token is older than 0, so that the benchmark shows nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import trinity_es
from tests.helpers.runs import explored
from trinity_es import Config, Explorer
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.payloads.experiences import read_experiences

TASKS, RUNS = 50, 8


def config_of(folder: Path, answers: int, bound: int) -> Config:
    (folder / "train.jsonl").write_text("\n".join(
        json.dumps({"prompt": f"{'long' if i % 10 == 0 else 'short'} {i}", "answer": "x"}) for i in range(500)))
    return Config.from_dict({
        "mode": "both", "total_steps": -(-answers // (TASKS * RUNS)) + 3,
        "explorer": {
            "max_staleness": bound, "over_rollout": {"ratio": 0.1, "wait_after_min": 0.0},
            "progress": {"seconds": 0.1}, "rollout_model": {"engine_type": "scripted", "script": {
                "rules": [{"prompt": "long", "tokens": 400, "token_seconds": 0.01},
                          {"prompt": "short", "tokens": 10, "latency_seconds": [0.1, 1.0]}]}},
        },
        "buffer": {"batch_size": TASKS, "explorer_input": {"tasksets": [{
            "name": "t", "path": "train.jsonl", "repeat_times": RUNS, "epochs": None,
            "reward_fn": "tests.helpers.runs:early_letters", "rollout_args": {"max_tokens": 400},
        }]}},
        "synchronizer": {"in_flight": "cut", "sync_style": "fully_async", "max_inflight_batches": 2},
        "trainer": {"class": "tests.helpers.runs:SteadyTrainer"}, "system": {"keeper": False},
    }, folder=folder)


def count(config: Config) -> tuple[Counter[str], Counter[int]]:
    """Return counts of answers by kind, and {age in versions: number of delivered tokens}."""
    numbers, ages, version = Counter[str](), Counter[int](), 0
    finalizing: dict[str, int] = {}
    with trinity_es.open_log(config.store.url) as log:
        for recorded in log.events():
            match recorded.event:
                case ev.WeightsPublished() as event:
                    version = event.version
                case ev.BatchFinalizing():
                    finalizing[recorded.stream] = version
                case ev.BatchSubmitted() as event:
                    numbers["tasks that went on"] += len(event.continues)
                case ev.BatchFinalized() as event:
                    numbers["dropped as stale"] += event.dropped
                    for e in read_experiences(log.payloads(), event.experiences):
                        numbers["delivered"] += 1
                        numbers["of several versions"] += len(e.version_spans) > 1
                        for made_by, start, end in e.version_spans:
                            ages[finalizing[recorded.stream] - made_by] += end - start
        assert log.verify() == []
    return numbers, ages


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--bound", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), options.answers, options.bound)
        explored(Explorer(config))
        numbers, ages = count(config)
    print(", ".join(f"{name}: {n:,}" for name, n in numbers.items()))
    print("delivered tokens by age in versions:", dict(sorted(ages.items())), f"(the bound is {options.bound})")
    return int(not 0 < max(ages) <= options.bound)


if __name__ == "__main__":
    sys.exit(main())
