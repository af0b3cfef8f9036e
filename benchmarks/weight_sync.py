"""How long does a change of weights stop a busy engine, compared with vLLM's reload alone?

It starts a system with a real vLLM engine of a tiny model, and then one with a more realistic model of 134 million
weights. Two cases alternate: `sync_weights` of a checkpoint during 64 requests, timed from the end of the last step
before the change until the requests go on; and the same on an idle engine, timed as vLLM's own `reload_weights` only.
The first step after the change is reported, too: the KV cache belongs to the old weights, so vLLM prefills as many
requests as fit into one step.

It checks that each request has all its tokens, the first from the old version and the others from the new version, so
that all were in flight (a batch for which the machine was too slow or too fast is repeated and counted), and that no
step ends while the weights change. It also prints the duration of each call.

`python -m benchmarks.weight_sync [--json FILE] [--quick] [--repeats N]`.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import trinity_es
from benchmarks.compared import Row, Spread, Watch, alternate, options_of, pairs, report
from benchmarks.systems import TINY, explore_config, running
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.actors.engines.vllm.engine import VLLMEngine

REQUESTS = 64
BEFORE = 20
"""Number of steps with all requests in flight before the weights change."""
PATIENCE = 30.0
"""Time limit for these steps; if not all requests are in flight by then, the batch is repeated."""
TRIES = 10
AIM = 1.2


@dataclass(frozen=True)
class Size:
    """Size of a model, and the number of its measurements."""

    name: str
    enlarged: tuple[int, int] | None
    """Hidden size and layers; None: the tiny model as it is."""
    tokens: int
    """Tokens of each answer; with the prompt at most 256."""
    repeats: int


SIZES = (
    Size("0.4 million weights", None, tokens=200, repeats=15),
    Size("134 million", (1024, 8), tokens=60, repeats=5),
)
WATCHED = ("pause_generation", "reload_weights", "trinity_pack_again", "trinity_weights_finite", "resume_generation")
"""vLLM's calls during a change of weights, in order."""


class WatchedEngine(VLLMEngine):
    """Engine that records the end of each step, and begin and end of each call that changes weights."""

    async def start(self) -> None:
        self.notes = open(Path(self.config.model_path).parent / "notes", "a", buffering=1)  # noqa: SIM115  # for its life
        self.on_load = lambda load: self.notes.write(f"step {time.monotonic()} {load.running}\n")
        await super().start()
        for name in ("pause_generation", "collective_rpc", "resume_generation"):
            setattr(self._llm, name, self.with_notes(name, getattr(self._llm, name)))

    def with_notes(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)  # for callers that inspect the signature
        async def watch(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await call(*args, **kwargs)
            finally:
                self.notes.write(f"{args[0] if name == 'collective_rpc' else name} {began} {time.monotonic()}\n")

        return watch


@dataclass(frozen=True)
class Change:
    """Durations of one change of weights in the engine, in seconds."""

    silent: float
    """From the end of the last step before the change until the requests go on."""
    first: float
    """First step after the change, which prefills as many requests as fit into it."""
    calls: dict[str, float]
    """{call of vLLM: its duration}."""
    step: float
    """Median of the steps before the change."""

    @classmethod
    def of(cls, notes: list[list[str]]) -> Change:
        calls = {name: (float(began), float(ended)) for name, began, ended in notes if name in WATCHED}
        steps = [(float(at), int(running)) for name, at, running in notes if name == "step"]
        assert list(calls) == list(WATCHED), calls
        began, ended = calls["pause_generation"][1], calls["resume_generation"][0]
        assert not [at for at, _ in steps if began < at < ended], "it made tokens while its weights changed"
        seconds = {name: b - a for name, (a, b) in calls.items()}
        busy = [at for at, running in steps if running == REQUESTS]
        before, after = [at for at in busy if at <= began], [at for at, _ in steps if at >= ended]
        if not before:
            return cls(0.0, 0.0, seconds, 0.0)
        goes_on = calls["resume_generation"][1]
        step = statistics.median(b - a for a, b in pairwise(before))
        return cls(goes_on - before[-1], after[0] - goes_on, seconds, step)


def enlarge(model: Path, hidden: int, layers: int) -> None:
    """Replace the model in this folder by a larger one with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(model)
    config.update({"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers})
    config.layer_types = ["full_attention"] * layers
    Qwen2ForCausalLM(config).save_pretrained(model)


class Bench:
    def __init__(self, folder: Path, stack: ExitStack, size: Size) -> None:
        self.models = [make_tiny_model(folder / f"model-{seed}", seed) for seed in (0, 1)]
        if size.enlarged is not None:
            for model in self.models:
                enlarge(model, *size.enlarged)
        self.tokens = size.tokens
        self.notes, self.seen = folder / "notes", 0
        engine = {**TINY, "engine_type": "benchmarks.weight_sync:WatchedEngine"}
        config = explore_config(folder, REQUESTS, engine, model={"model_path": str(self.models[0])})
        self.client = stack.enter_context(running(config))
        self.version = self.batch = 0
        self.changes: list[Change] = []
        self.missed = 0
        """Number of batches in which a request ended too soon."""

    def new_notes(self) -> list[list[str]]:
        """Return the lines of the engine's notes after the first `seen`, split into words."""
        return [line.split() for line in self.notes.read_text().splitlines()[self.seen :]]

    def sync(self) -> None:
        self.version += 1
        self.client.sync_weights(self.version, self.models[self.version % 2])

    def read_notes(self) -> list[list[str]]:
        """Return the new notes, which are seen from now on."""
        notes = self.new_notes()
        self.seen += len(notes)
        return notes

    def change_idle(self) -> float:
        """Change the weights of the idle engine, and return the seconds of vLLM's reload."""
        self.read_notes()
        self.sync()
        return Change.of(self.read_notes()).calls["reload_weights"]

    def change_busy(self) -> float:
        """Change the weights while all requests are in flight, and return the seconds without a token."""
        for _ in range(TRIES):
            if self.change_in_flight():
                self.changes.append(Change.of(self.read_notes()))
                return self.changes[-1].silent
            self.missed += 1
        raise AssertionError("the requests were over each time before the weights had changed")

    def change_in_flight(self) -> bool:
        """Change the weights during a batch. Return whether all of its requests were in flight at the change."""
        self.batch += 1
        self.read_notes()
        tasks = [
            trinity_es.Task(
                workflow="single_turn", raw_task={"prompt": f"{self.batch}:{i}="},
                reward_fn="benchmarks.adaptive:no_reward", rollout_args={"max_tokens": self.tokens, "ignore_eos": True},
            )
            for i in range(REQUESTS)
        ]
        self.client.submit_batch(batch_id=self.batch, tasks=tasks, batch_type="train")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if sum(line[0] == "step" and line[2] == str(REQUESTS) for line in self.new_notes()) >= BEFORE:
                break
            time.sleep(0.005)
        self.sync()
        self.client.finalize_train_batch(self.batch, timeout=300)
        experiences = list(self.client.experiences(self.batch))
        assert len(experiences) == REQUESTS
        spans = [experience.version_spans for experience in experiences]
        assert all(sum(end - start for _, start, end in some) == self.tokens for some in spans), spans
        versions = [[version for version, _, _ in some] for some in spans]
        both = [self.version - 1, self.version]
        assert all(some in (both, both[:1], both[1:]) for some in versions), spans
        return all(some == both for some in versions)


def measure(size: Size, repeats: int) -> tuple[list[Row], str]:
    """Measure a model, and return its rows and a note on repeated batches."""
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack, size)
        bench.change_idle()
        bench.change_busy()
        bench.changes.clear()  # the first of each warms up
        figures = alternate({"busy": bench.change_busy, "alone": bench.change_idle}, repeats)
        changes = bench.changes
    busy, alone = ([1e3 * s for s in figures[name]] for name in ("busy", "alone"))
    what = f"{size.name}, {REQUESTS} requests in flight: no token for"
    rows = [pairs(what, "ms", busy, "vLLM's reload alone", alone, aim=AIM, most=True)]
    for name in WATCHED:
        rows.append(Row(f"  of it {name}", "ms", Spread.of([1e3 * c.calls[name] for c in changes])))
    rows.append(Row("  the first step after it", "ms", Spread.of([1e3 * c.first for c in changes])))
    rows.append(Row("  a step before it", "ms", Spread.of([1e3 * c.step for c in changes])))
    return rows, f"{size.name}: {bench.missed} batches in which a request ended too soon" if bench.missed else ""


def main() -> int:
    options = options_of(__doc__, [
        ("--repeats", {"type": int, "help": f"default {', '.join(str(s.repeats) for s in SIZES)} of each model"}),
    ])
    watch = Watch()
    results = [measure(size, 2 if options.quick else options.repeats or size.repeats) for size in SIZES]
    rows, left_out = [row for some, _ in results for row in some], [what for _, what in results if what]
    return report("weights that change under load", rows, watch, left_out, options.json)


if __name__ == "__main__":
    sys.exit(main())
