"""How much is generated again after a kill, and which answers does a faulty cluster lose, with and without the journal?

An engine that counts plays scripted answers of 300 to 4,096 tokens. For each request it keeps a note of how many tokens
it has given in a file, which a kill -9 does not undo. Each figure comes from these notes and from the experiences that
the trainer gets, and none from the events of the log:

- generated again: the runner, or every process of the system, is killed when answers are about 10, 50, 90 and 99 %
  done. The tokens of all attempts at an answer, less its length, were generated again. An interval's tokens
  (`explorer.progress.seconds`) are the bar. An answer that had ended before the kill is not to be asked for again;
- goodput: the runner is killed at random moments under long answers. Tokens of delivered answers / all generated;
- bias: the same under answers of mixed lengths with few attempts. The lengths that were delivered are compared with
  those of an undisturbed run (two-sample Kolmogorov-Smirnov test) and drawn (`--svg`).

`--vllm` measures instead on a real vLLM engine with a tiny model: the runner is killed when a greedy answer is half
done. Its tokens must be the undisturbed ones, and its logprobs up to the splice those that the journal had, bit by bit.

`python -m benchmarks.chaos_progress [--quick] [--vllm] [--seed 0] [--svg FILE] [--json FILE]`. Exit code 1 if with the
journal an answer is lost or wrong, or more than the bar was generated again.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trinity_es
from benchmarks.chaos_progress_engine import NOTES, Notes, answer_to, length_of, prompt_of
from benchmarks.compared import Databases, Watch, about, beside_told, databases, options_of, write_json
from tests.helpers.systems import kill_all, pid_of, scripted
from trinity_es import Config, Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.client.teardown import end_system
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.journal import kept_runs
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.system import lifecycle, running_system

SHORT = 50
"""Tokens of a first answer, which has ended when the kill comes."""
MOST = 8192
"""`max_tokens` of each request; the engine ends every answer earlier."""
KILLED = ("runner", "everything")
BAR = 1.5
"""Maximum of intervals' tokens that may be generated again: one interval, and the time that a record takes."""


# --- systems ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class System:
    """A system without a keeper, so that nobody starts it again but this benchmark."""

    config: Config
    notes: Notes

    def client(self) -> RolloutClient:
        client = trinity_es.connect(self.config)
        client.wait_ready(600)
        return client

    def killing(self, killed: str) -> Callable[[], None]:
        """Return a function that kills at once: the runner, or every process, and then starts the system again."""
        with self.client() as client:
            pid, processes = pid_of(client, "runner-0"), running_system.processes(client._link.admin)

        def everything() -> None:
            kill_all(processes)
            running_system.wait_gone(processes, 15)
            lifecycle.start(self.config)

        return everything if killed == "everything" else lambda: os.kill(pid, signal.SIGKILL)

    def submitted(self, batch: int, tasks: Sequence[Task]) -> None:
        with self.client() as client:
            client.submit_batch(batch_id=batch, tasks=list(tasks), batch_type="train")

    def finalized(self, batch: int) -> None:
        with self.client() as client:
            client.finalize_train_batch(batch, timeout=300)

    def experiences(self, batch: int) -> list[Experience]:
        with trinity_es.open_log(self.config.store.url) as log:
            state = log.replay(batch)
        payloads = open_payloads(self.config.store.url)
        return list(read_experiences(payloads, state.experiences))


@contextmanager
def system(url: str, interval: float, retries: int, places: int = 16, **model: Any) -> Iterator[System]:
    """Run a system. `interval`: seconds between two records of the journal, 0 for none; `model`: its engine."""
    model = model or {"engine_type": "benchmarks.chaos_progress_engine:Counting"}
    with tempfile.TemporaryDirectory(prefix="chaos-progress-") as name:
        notes = Notes(Path(name) / "notes")
        notes.folder.mkdir()
        os.environ[NOTES] = str(notes.folder)
        config = scripted(
            Path(name), store={"url": url}, system={"restarts": 10_000, "restart_pause": 0.1},
            explorer={"max_concurrency": places, "max_retry_times": retries, "progress": {"seconds": interval},
                      "rollout_model": model},
        )
        lifecycle.start(config)
        try:
            yield System(config, notes)
        finally:
            end_system(config)


def delivered(system: System, batch: int) -> tuple[list[str], int]:
    """Return the prompts of a batch's delivered answers, and how many answers are not what the engine gave."""
    prompts, wrong = list[str](), 0
    for experience in system.experiences(batch):
        ids = experience.tokens.tolist()
        prompt = bytes(ids[: experience.prompt_length]).decode()
        logprobs = [] if experience.logprobs is None else experience.logprobs.tolist()
        wrong += (ids[experience.prompt_length :], logprobs) != answer_to(prompt)
        prompts.append(prompt)
    return prompts, wrong


def task(*prompts: str, **sampling: Any) -> Task:
    return Task(workflow="benchmarks.chaos_progress_engine:Answers", workflow_args={"prompts": prompts},
                rollout_args={"max_tokens": MOST, **sampling})


# --- tokens that are generated again ----------------------------------------------------------------------------------
@dataclass
class Cut:
    """One kill, and what it cost the answers that were in flight."""

    backend: str
    journal: bool
    killed: str
    share: float
    again: dict[int, int] = field(default_factory=dict)
    """Tokens generated again, by the length of the answer."""
    intervals: float = 0.0
    """The most of them, in intervals' tokens."""
    ended_again: int = 0
    """Tokens of answers that had ended before the kill."""
    lost: int = 0
    wrong: int = 0


def cut(on: System, batch: int, made: Cut, lengths: Sequence[int], seconds: float, interval: float) -> Cut:
    """Play a batch of one answer of each length, all given over `seconds`, and kill when they are `share` done."""
    on.notes.clear()
    longs = [prompt_of(batch * 100 + i, length, seconds) for i, length in enumerate(lengths)]
    firsts = [prompt_of(batch * 100 + 50 + i, SHORT, 0.1) for i in range(len(lengths))]
    kill = on.killing(made.killed)
    on.submitted(batch, [task(*both) for both in zip(firsts, longs, strict=True)])

    def done() -> bool:
        given = on.notes.generated()
        return all(given.get(prompt, 0) >= made.share * length_of(prompt) for prompt in longs)

    while not done():
        time.sleep(0.002)
    kill()
    on.finalized(batch)
    got, made.wrong = delivered(on, batch)
    generated = on.notes.generated()
    made.lost = len(set(longs) - set(got))
    made.again = {length_of(prompt): generated[prompt] - length_of(prompt) for prompt in longs}
    made.intervals = max(again / length * seconds / interval for length, again in made.again.items())
    made.ended_again = sum(generated[prompt] - SHORT for prompt in firsts)
    return made


def cuts(
    pool: Databases, shares: Sequence[float], lengths: Sequence[int], seconds: float, interval: float
) -> list[Cut]:
    made = []
    for backend in pool.kinds:
        for journal in (True, False):
            with system(pool.new(backend), interval if journal else 0.0, retries=100) as on:
                for number, (share, killed) in enumerate((s, k) for s in shares for k in KILLED):
                    told(f"{backend}, {'with' if journal else 'without'} the journal: {killed} at {share:.0%}")
                    one = Cut(backend, journal, killed, share)
                    made.append(cut(on, number + 1, one, lengths, seconds, interval))
    return made


def told(doing: str) -> None:
    print(f"\r  {doing:<70}", end="", file=sys.stderr, flush=True)


# --- goodput, and the lengths that are delivered ----------------------------------------------------------------------
@dataclass
class Under:
    """A batch that was played while its runner was killed at random moments."""

    way: str
    asked: int
    kills: int
    seconds: float
    lengths: list[int]
    """Of the delivered answers."""
    generated: int
    wrong: int

    @property
    def goodput(self) -> float:
        return sum(self.lengths) / self.generated


def under_kills(
    url: str, way: str, prompts: Sequence[str], interval: float, every: float, retries: int, seed: int
) -> Under:
    """Play answers, and kill the runner about `every` seconds (0: never)."""
    chance, kills = random.Random(seed), 0
    with system(url, interval, retries, places=32) as on, ThreadPoolExecutor(1) as thread:
        kill = on.killing("runner")
        on.submitted(1, [task(prompt) for prompt in prompts])
        began = time.monotonic()
        ended = thread.submit(on.finalized, 1)
        while every and not wait([ended], every * chance.uniform(0.5, 1.5)).done:
            kill()
            kills += 1
            told(f"{way}: {kills} kills")
            kill = on.killing("runner")
        ended.result()
        seconds = time.monotonic() - began
        got, wrong = delivered(on, 1)
        generated = sum(on.notes.generated().values())
    return Under(way, len(prompts), kills, seconds, sorted(map(length_of, got)), generated, wrong)


def mixed(count: int, least: int, most: int, pace: float) -> list[str]:
    """Return prompts of answers whose lengths are spread evenly on a logarithmic scale, in random order."""
    lengths = [round(least * (most / least) ** (i / (count - 1))) for i in range(count)]
    random.Random(count).shuffle(lengths)
    return [prompt_of(i, length, length * pace) for i, length in enumerate(lengths)]


def kolmogorov_smirnov(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """Return the greatest distance of two samples' distributions, and the p value (asymptotic)."""
    a, b = sorted(one), sorted(other)
    distance = max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in {*a, *b})
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * distance
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return distance, 1.0 if x < 0.2 else min(1.0, max(0.0, sum(terms)))


@dataclass(frozen=True)
class Bent:
    """How delivered lengths differ from the undisturbed ones."""

    way: str
    longest_lost: float
    """Lost share of the longest quarter."""
    distance: float
    p: float


def drawn(ways: Sequence[Under], file: str) -> None:
    """Draw the share of the answers that was delivered, by twelve ranges of lengths."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    whole = ways[0].lengths
    edges = [whole[len(whole) * i // 12] for i in range(12)] + [whole[-1] + 1]
    style = {"svg.fonttype": "none", "svg.hashsalt": "progress", "path.simplify_threshold": 1.0, "font.size": 11}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for way, (color, line) in zip(ways, (("0.6", "-"), ("tab:blue", "--"), ("tab:red", "-")), strict=True):
            counts = [Counter(bisect_right(edges, n) for n in lengths) for lengths in (way.lengths, ways[0].lengths)]
            shares = [counts[0][i] / counts[1][i] for i in range(1, len(edges))]
            axes.plot(edges, [*shares, shares[-1]], line, color=color, label=way.way, drawstyle="steps-post",
                      linewidth=5 if color == "0.6" else 2)
        axes.set(xscale="log", ylim=(0, 1.05), xlabel="tokens of an answer", ylabel="share of answers delivered")
        ticks = [64, 128, 256, 512, 1024, 2048, 4096]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.legend()
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


# --- a real engine ----------------------------------------------------------------------------------------------------
def on_vllm(length: int = 240, interval: float = 0.01) -> dict[str, Any]:
    """Kill the runner of a real vLLM engine in the middle of a greedy answer."""
    from examples.grpo.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="chaos-progress-") as name:
        settings = {"engine_type": "vllm", "model_path": str(make_tiny_model(Path(name) / "model", seed=0)),
                    "max_model_len": length + 8, "gpu_memory_utilization": 0.3}
        url = f"sqlite:///{name}/log.sqlite"
        with system(url, interval, retries=2, **settings) as on, closing(open_journals(url)) as journals:

            def half() -> bool:
                runs = [run for life in journals.lives() for run in kept_runs(journals.read(life)).values()]
                answers = [a for run in runs for of_call in run.calls.values() for a in of_call.values()]
                return any(len(a.tokens) >= length // 2 for a in answers)

            for batch in (1, 2):
                kill = on.killing("runner")
                on.submitted(batch, [task("c=", temperature=0.0, max_tokens=length, ignore_eos=True)])
                if batch == 2:
                    while not half():  # without a pause: the whole answer takes a second
                        pass
                    kill()
                on.finalized(batch)
            [expected], [answer] = on.experiences(1), on.experiences(2)
            with trinity_es.open_log(url) as log:
                [event] = [r.event for r in log.events() if isinstance(r.event, ev.AttemptKept)]
            [run] = kept_runs([open_payloads(url).get(event.payload)]).values()
            [[kept]] = [list(of_call.values()) for of_call in run.calls.values()]
    assert answer.logprobs is not None
    assert kept.logprobs is not None
    return {
        "tokens": length, "kept": len(kept.tokens), "splices": answer.info.get("splices"),
        "tokens that differ": int((answer.tokens != expected.tokens).sum()),
        "kept logprobs that differ": int((answer.logprobs[: len(kept.tokens)] != kept.logprobs).sum()),
    }


# --- all of it --------------------------------------------------------------------------------------------------------
@dataclass
class Figures:
    cuts: list[Cut]
    long: list[Under]
    """Goodput under answers that are all long."""
    mixed: list[Under]

    @property
    def bent(self) -> list[Bent]:
        undisturbed, *killed = [u.lengths for u in self.mixed]
        longest = undisturbed[len(undisturbed) * 3 // 4 :]
        return [
            Bent(u.way, 1 - sum(n >= longest[0] for n in got) / len(longest), *kolmogorov_smirnov(got, undisturbed))
            for u, got in zip(self.mixed[1:], killed, strict=True)
        ]

    @property
    def bad(self) -> list[str]:
        """What must not be with the journal, and wrong answers without it."""
        kept = [c for c in self.cuts if c.journal]
        over = [f"{c.killed} at {c.share:.0%} on {c.backend}: {c.intervals:.2f} intervals' tokens again"
                for c in kept if c.intervals > BAR]
        over += [f"{c.killed} at {c.share:.0%} on {c.backend}: an ended answer was asked for again"
                 for c in kept if c.ended_again]
        over += [f"{c.killed} at {c.share:.0%} on {c.backend}: {c.lost} answers lost, {c.wrong} wrong"
                 for c in self.cuts if c.lost or c.wrong]
        return over + [f"{u.way}: {u.wrong} answers wrong" for u in [*self.long, *self.mixed] if u.wrong]


def measured(*, quick: bool, seed: int) -> Figures:
    """Measure everything with the ScriptedEngine."""
    shares, lengths = (0.1, 0.5, 0.9, 0.99), (300, 600, 1024, 2048, 3072, 4096)
    long = [prompt_of(i, 4096, 4.0) for i in range(96)]
    every = mixed(600, 64, 4096, 0.001)
    if quick:
        shares, lengths, every = (0.5, 0.99), (300, 4096), mixed(64, 64, 2048, 0.001)
    with databases() as pool:
        if quick:
            pool.kinds = ["sqlite"]
        made = cuts(pool, shares, lengths, seconds=1.5 if quick else 2.0, interval=0.25)
        often = 1.5 if quick else 3.0
        ways = {"undisturbed": (0.25, 0.0), "killed, with the journal": (0.25, often), "killed, without": (0.0, often)}
        figures = Figures(made, [], [])
        for way, (interval, after) in ways.items():
            if after and not quick:
                figures.long.append(under_kills(pool.new("sqlite"), way, long, interval, 2 * after, 100, seed))
            figures.mixed.append(under_kills(pool.new("sqlite"), way, every, interval, after, 2, seed))
    told("")
    return figures


def report(figures: Figures) -> str:
    """Return the figures as a table."""
    lines = ["tokens generated again after a kill, in tokens of one interval: median (most) of the kills; in all"]
    groups = defaultdict(list)
    for c in figures.cuts:
        groups[c.backend, c.journal, c.killed].append(c)
    for (backend, journal, killed), of in groups.items():
        worst = [c.intervals for c in of]
        lines.append(
            f"  {backend:<11}{'with' if journal else 'without':<8} {killed:<11}"
            f"{statistics.median(worst):6.2f} ({max(worst):.2f}) of {len(of)} kills; "
            f"{sum(sum(c.again.values()) for c in of):,} tokens, of ended answers {sum(c.ended_again for c in of)}"
        )
    lines.append("goodput: tokens of delivered answers / all generated")
    for u in [*figures.long, *figures.mixed]:
        lines.append(
            f"  {u.way:<26}{u.goodput:6.3f}  {u.kills} kills in {u.seconds:.0f} s, {len(u.lengths)} of {u.asked} "
            f"answers delivered, mean length {statistics.mean(u.lengths or [0]):.0f}"
        )
    lines.append("the longest quarter of the answers that is lost, and all lengths against the undisturbed ones")
    lines += [f"  {b.way:<26}{b.longest_lost:6.1%}  KS distance {b.distance:.3f}, p {b.p:.3g}" for b in figures.bent]
    return "\n".join([*lines, *(f"  BAD: {line}" for line in figures.bad)])


def main() -> int:
    options = options_of(__doc__, [
        ("--vllm", {"action": "store_true", "help": "measure on a real vLLM engine instead"}),
        ("--seed", {"type": int, "default": 0}), ("--svg", {"help": "draw the lengths into this file"}),
    ])
    watch = Watch()
    if options.vllm:
        found = on_vllm()
        print("\n".join(f"  {name}: {value}" for name, value in found.items()))
        write_json(options.json, {**about(watch), "vllm": found})
        return int(bool(found["tokens that differ"] or found["kept logprobs that differ"] or not found["splices"]))
    figures = measured(quick=options.quick, seed=options.seed)
    context = about(watch)
    print(f"{report(figures)}\n  {beside_told(context['beside'])}")
    write_json(options.json, {**context, "bad": figures.bad, "bent": figures.bent, **vars(figures),
                              "goodput": [(u.way, u.goodput) for u in [*figures.long, *figures.mixed]]})
    if options.svg:
        drawn(figures.mixed, options.svg)
    return int(bool(figures.bad))


if __name__ == "__main__":
    sys.exit(main())
