"""How long does a batch of no-op tasks take from submit to finalize, with experiences stored durably?

There is one runner on the ScriptedEngine; each run returns one experience of 512 tokens and 256 logprobs. Times are
measured in a trainer that uses `connect`, in turn with the known system if it is installed (`benchmarks.known_system`,
which stores nothing durably):

- latency: submit_batch -> finalize_train_batch of 1, 8 and 64 tasks, one batch at a time: p50 and p95 of each turn;
- rate: tasks/s for batches of 256 and 1,024 no-op tasks, runs/s for 128 tasks of 16 runs, of 512 and 8,192 tokens;
- efficiency: 256 tasks of 0.1 s on 16 places against the ideal, ceil(256 / 16) * 0.1 s.

It checks that all tasks of every batch finished with all experiences, compares the experiences of the last batch of
each kind with those that the workflow made, and requires that `verify` finds no problem in the logs.

`python -m benchmarks.dispatch [--json FILE] [--quick] [--durability power|process]`. Absolute times depend on the
machine: compare them with another system's only if both ran side by side.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import trinity_es
from benchmarks.compared import Row, Spread, Watch, alternate, options_of, pairs, pids_of, report, sound
from benchmarks.known_system import KnownSystem, known_system
from benchmarks.systems import explore_config, play_batch, running
from trinity_es.events.experience import Experience
from trinity_es.testing import SleepWorkflow, sampled

TOKENS, PLACES = 512, 8
LATENCY = {1: (24, 8, 1 / 12), 8: (24, 8, 1 / 8), 64: (16, 4, 1 / 12)}
"""{number of tasks: (batches per turn, batches per turn of the known system, aim of p50)}."""
RATES = {(256, 1, 512): ("256 tasks", 14, 20), (1024, 1, 512): ("1,024 tasks", 14, 20),
         (128, 16, 512): ("128 tasks of 16 runs", 3, 8),
         (128, 16, 8192): ("128 tasks of 16 runs of 8,192 tokens", 2.5, 8)}
"""{(tasks, runs, tokens): (name of the batch, its aims against the known system's lean and default pipeline)}."""
P95_AIM, IDEAL_AIM = 2.0, 0.95
REPEATS = 5
FIRST = 10**9
"""Number before the first batch's number."""
KNOWN = "the known system"
DEFAULT = f"{KNOWN}, which keeps a copy"


def full_reward(_: int) -> float:
    return 1.0


def tasks(
    n: int, seconds: float, tokens: int = TOKENS, runs: int = 1, reward: Callable[[int], float] = full_reward
) -> list[trinity_es.Task]:
    """Return `n` tasks whose experiences have different tokens and logprobs, as if sampled by a model."""
    args = {"seconds": seconds, "tokens": tokens, "sampled": True}
    return [
        trinity_es.Task(
            workflow=SleepWorkflow, workflow_args={**args, "reward": reward(i)}, raw_task={"i": i}, repeat_times=runs
        )
        for i in range(n)
    ]


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def check_experiences(
    experiences: Sequence[Experience], count: int, tokens: int, reward: Callable[[int], float] = full_reward
) -> None:
    """Check that `count` experiences were delivered, with their workflow's values and the pipeline's advantages."""
    if len(experiences) != count or len({(e.eid.task, e.eid.run, e.eid.step) for e in experiences}) != count:
        raise SystemExit(f"{len(experiences)} experiences were delivered where {count} were made")
    for e in experiences:
        ids, logprobs = sampled(int(e.eid.task), tokens)
        right = (
            np.array_equal(e.tokens, ids) and e.prompt_length == tokens // 2 and e.reward == reward(int(e.eid.task))
            and e.logprobs is not None and np.array_equal(e.logprobs, logprobs)
            and e.advantages is not None and len(e.advantages) == len(logprobs)
            and e.tokens.flags.writeable and e.advantages.flags.writeable
        )
        if not right:
            raise SystemExit(f"experience {e.eid} has other values than were made")


class Bench:
    """A system with one runner that plays batches of tasks on request."""

    def __init__(
        self, places: int, durability: str, operators: list[dict[str, Any]], *, url: str | None = None,
        rollout: dict[str, Any] | None = None, journal: float = 1.0, payloads: str = "",
    ) -> None:
        """Prepare a system. `url`: its log, which may hold batches with numbers below `FIRST`; `rollout`: section
        `explorer.rollout_model`; `journal`: seconds between two records of the journal, 0: none; `payloads`: key
        `store.payloads`."""
        self.stack = ExitStack()
        self.config = explore_config(
            self.stack.enter_context(tempfile.TemporaryDirectory(prefix="dispatch-")), places,
            rollout or {"engine_type": "scripted"}, explorer={"progress": {"seconds": journal}},
            buffer={"pipeline": {"operators": operators}},
            store={"durability": durability, "payloads": payloads} | ({} if url is None else {"url": url}),
        )
        self.places = places
        self.next_id = FIRST
        self.made: dict[int, int] = {}
        """{batch: number of its experiences}."""

    def __enter__(self) -> Bench:
        self.client = self.stack.enter_context(running(self.config))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def pids(self) -> list[int]:
        """Current pids for `resting`; processes may have been replaced."""
        return pids_of(self.client)

    def one(
        self, n: int, seconds: float = 0.0, tokens: int = TOKENS, runs: int = 1,
        reward: Callable[[int], float] = full_reward,
    ) -> float:
        """Play a batch of `n` tasks, check that all finished, and return the seconds from submit to finalize."""
        self.next_id += 1
        elapsed, result = play_batch(self.client, self.next_id, tasks(n, seconds, tokens, runs, reward), timeout=120)
        if result["finished_task_count"] != n:
            raise SystemExit(f"batch {self.next_id}: {result['finished_task_count']} of {n} tasks are finished")
        self.made[self.next_id] = n * runs
        return elapsed

    def check(self, tokens: int = TOKENS) -> None:
        check_experiences(list(self.client.experiences(self.next_id)), self.made[self.next_id], tokens)

    def check_named(self) -> None:
        """Check that the log names every experience of every batch."""
        with trinity_es.open_log(self.config.store.url) as log:
            for batch, count in self.made.items():
                if (found := sum(ref.count for ref in log.replay(batch).experiences)) != count:
                    raise SystemExit(f"batch {batch}: {found} of {count} experiences are stored")

    def check_all(self) -> None:
        """Check that the log names every experience and is sound with all its payloads."""
        self.check_named()
        sound(self.config.store.url)


@contextmanager
def both(places: int, durability: str, pipeline: str = "lean") -> Iterator[tuple[Bench, KnownSystem | None]]:
    """Yield trinity_es and the known system (None if it is not installed), warmed up. Check our log at the end."""
    with known_system(places, pipeline) as known, Bench(places, durability, [{"name": "grpo"}]) as bench:
        for _ in range(5):
            bench.one(8)
            if known is not None:
                known.one(8, 0.0, TOKENS, 1)
        yield bench, known
        bench.check_all()


def in_turn(
    bench: Bench, ours: Callable[[], float], theirs: Callable[[KnownSystem], float], known: KnownSystem | None
) -> tuple[list[float], list[float] | None]:
    """Return the figures of trinity_es and of the known system, if installed, each while the other is suspended."""
    if known is None:
        return alternate({"ours": ours}, REPEATS)["ours"], None

    def ours_warmed_up() -> float:
        bench.one(8)
        return ours()

    def theirs_warmed_up() -> float:
        known.one(8, 0.0, TOKENS, 1)
        return theirs(known)

    figures = alternate({"ours": ours_warmed_up, "known": theirs_warmed_up}, REPEATS, {"ours": bench, "known": known})
    return figures["ours"], figures["known"]


def latency(bench: Bench, known: KnownSystem | None, n: int, part: int) -> list[Row]:
    batches, few, aim = LATENCY[n]
    turns: list[list[float]] = []

    def ours() -> float:
        turns.append([1e3 * bench.one(n) for _ in range(max(4, batches // part))])
        return statistics.median(turns[-1])

    def theirs(system: KnownSystem) -> float:
        return statistics.median(1e3 * system.one(n, 0.0, TOKENS, 1) for _ in range(max(2, few // part)))

    p50, other = in_turn(bench, ours, theirs, known)
    bench.check()
    name = f"submit -> finalize, {n} no-op task{'s' * (n > 1)}"
    p95 = [percentile(turn, 0.95) for turn in turns]
    return [
        pairs(f"{name}, p50", "ms", p50, KNOWN, other, aim=aim, most=True, id="E1"),
        pairs(f"{name}, p95", "ms", p95, "its p50", p50, aim=P95_AIM, most=True, id="E1"),
    ]


def rate(
    bench: Bench, known: KnownSystem | None, n: int, runs: int, tokens: int, other: str, aim: float
) -> Row:
    """Return the row with tasks per second, or runs per second if a task has several runs."""
    ours_rates, their_rates = in_turn(bench, lambda: n * runs / bench.one(n, tokens=tokens, runs=runs),
                                      lambda system: n * runs / system.one(n, 0.0, tokens, runs), known)
    bench.check(tokens)
    unit = "tasks/s" if runs == 1 else "runs/s"
    return pairs(f"batches of {RATES[n, runs, tokens][0]}", unit, ours_rates, other, their_rates, aim=aim, id="E2")


def efficiency(bench: Bench, known: KnownSystem | None) -> list[Row]:
    ideal = 256 / 16 * 0.1
    ours_shares, other = in_turn(bench, lambda: ideal / bench.one(256, 0.1),
                           lambda system: ideal / system.one(256, 0.1, TOKENS, 1), known)
    bench.check()
    what, unit = "256 tasks of 0.1 s on 16 places", "of the ideal"
    rows = [Row(what, unit, Spread.of(ours_shares), aim=IDEAL_AIM, id="E3")]
    return rows if other is None else [*rows, pairs(what, unit, ours_shares, KNOWN, other, id="E3")]


def main() -> int:
    options = options_of(__doc__, [("--durability", {"choices": ["power", "process"], "default": "power"})])
    watch, rows, part = Watch(), list[Row](), 6 if options.quick else 1
    with both(PLACES, options.durability) as (bench, known):
        for n in LATENCY:
            rows += latency(bench, known, n, part)
        rows += [rate(bench, known, *batch, KNOWN, aim) for batch, (_, aim, _) in RATES.items()]
    with both(PLACES, options.durability, "default") as (bench, known):
        rows += [rate(bench, known, *batch, DEFAULT, aim) for batch, (_, _, aim) in RATES.items()]
    with both(16, options.durability) as (bench, known):
        rows += efficiency(bench, known)
    left_out = [] if known is not None else ["the known system: it is not installed (KNOWN_SYSTEM names its folder)"]
    title = f"dispatch, durability {options.durability}, {PLACES} places, experiences of {TOKENS} tokens"
    return report(title, rows, watch, left_out, options.json)


if __name__ == "__main__":
    sys.exit(main())
