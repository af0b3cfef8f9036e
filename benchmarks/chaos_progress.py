"""How many tokens are generated again after a kill, and which answers are lost, with and without the journal?

A scripted engine plays answers of 300 to 4,096 tokens. For each request it writes into a file how many tokens it has
generated, so the count survives a kill -9. All figures come from these notes and from the experiences that the trainer
gets, and none from the events of the log:

- generated again: the runner, or every process of the system, is killed when answers are about 10, 50, 90 and 99 %
  done. Tokens of all attempts at an answer beyond its length were generated again. At most the tokens of 1.5 intervals
  (`explorer.progress.seconds`) may be, and an answer that had ended before the kill may not be requested again;
- goodput: the runner is killed at random moments under long answers. Tokens of delivered answers / all generated;
- bias: the same under answers of mixed lengths with few attempts. The delivered lengths are compared with those of an
  undisturbed run (two-sample Kolmogorov-Smirnov test) and drawn (`--svg`);
- agents of 20 turns, and steps (`chaos_progress_agents`);
- a real vLLM engine: one kill, and distributions under many deaths (`chaos_progress_vllm`; `--no-vllm` leaves it out).

`python -m benchmarks.chaos_progress [--quick] [--no-vllm] [--seed 0] [--svg FILE] [--json FILE]`. The exit code is 1 if
with the journal an answer is lost or wrong, or too many tokens were generated again.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field

import trinity_es
from benchmarks.chaos_progress_agents import Agents, play_agents
from benchmarks.chaos_progress_engine import System, answer_to, length_of, prompt_of, show_progress, system, task
from benchmarks.chaos_progress_vllm import OnVLLM, kolmogorov_smirnov, measure_vllm
from benchmarks.compared import Databases, Watch, about, databases, load_text, options_of, write_json
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.payloads.payloads import open_payloads

SHORT = 50
"""Tokens of a task's first answer, which has ended before the kill."""
KILLED = ("runner", "everything")
JOURNALED = "killed, with the journal"
BAR = 1.5
"""Maximum number of intervals whose tokens may be generated again: one interval, and the time that a record takes."""


# --- tokens that are generated again ----------------------------------------------------------------------------------
def delivered_prompts(system: System, batch: int) -> tuple[list[str], int]:
    """Return the prompts of a batch's delivered answers, and how many answers differ from the engine's."""
    prompts, wrong = list[str](), 0
    for experience in system.experiences(batch):
        ids = experience.tokens.tolist()
        prompt = bytes(ids[: experience.prompt_length]).decode()
        logprobs = [] if experience.logprobs is None else experience.logprobs.tolist()
        wrong += (ids[experience.prompt_length :], logprobs) != answer_to(prompt)
        prompts.append(prompt)
    return prompts, wrong


@dataclass
class Cut:
    """One kill, and its cost for the answers in flight."""

    backend: str
    journal: bool
    killed: str
    share: float
    again: dict[int, int] = field(default_factory=dict)
    """{length of an answer: tokens generated again}."""
    intervals: float = 0.0
    """Maximum of `again`, in units of the tokens of one interval."""
    ended_again: int = 0
    """Tokens generated again of answers that had ended before the kill."""
    waited: float = 0.0
    """Seconds from the kill to the next token; NaN if all answers had ended."""
    journal_bytes: float = 0.0
    """Bytes of the journal per token generated before the kill."""
    left_bytes: int = 0
    """Bytes of the journal after the batch was settled."""
    kept_bytes: float = 0.0
    """Bytes of lost attempts' payloads per token in them."""
    lost: int = 0
    wrong: int = 0


def play_and_kill(on: System, batch: int, made: Cut, lengths: Sequence[int], seconds: float, interval: float) -> Cut:
    """Play an answer of each length in `seconds`, kill when `made.share` of it is done, and return filled `made`."""
    on.notes.clear()
    longs = [prompt_of(batch * 100 + i, length, seconds) for i, length in enumerate(lengths)]
    firsts = [prompt_of(batch * 100 + 50 + i, SHORT, 0.1) for i in range(len(lengths))]
    kill = on.killer(made.killed)
    on.submit(batch, [task(*both) for both in zip(firsts, longs, strict=True)])

    def done() -> bool:
        given = on.notes.generated()
        return all(given.get(prompt, 0) >= made.share * length_of(prompt) for prompt in longs)

    while not done():
        time.sleep(0.002)
    if made.journal and made.share <= 0.5:  # reading takes a while, in which later answers would end
        made.journal_bytes = on.journal_bytes() / sum(on.notes.generated().values())
    killed = time.monotonic()
    kill()
    on.finalize(batch)
    after = [r.began for of_prompt in on.notes.requests().values() for r in of_prompt if r.began > killed]
    made.waited = min(after, default=math.nan) - killed + seconds / max(lengths)
    if made.journal:
        until = time.monotonic() + 5.0
        while (left := on.journal_bytes()) and time.monotonic() < until:
            time.sleep(0.05)
        made.left_bytes = left
        made.kept_bytes = kept_bytes(on.config.store.url, batch)
    got, made.wrong = delivered_prompts(on, batch)
    generated = on.notes.generated()
    made.lost = len(set(longs) - set(got))
    made.again = {length_of(prompt): generated[prompt] - length_of(prompt) for prompt in longs}
    made.intervals = max(again / length * seconds / interval for length, again in made.again.items())
    made.ended_again = sum(generated[prompt] - SHORT for prompt in firsts)
    return made


def kept_bytes(url: str, batch: int) -> float:
    """Return the bytes of a batch's payloads of lost attempts, per token in them."""
    with trinity_es.open_log(url) as log, closing(open_payloads(url)) as payloads:
        kept = [r.event for r in log.events(batch) if isinstance(r.event, ev.AttemptKept)]
        return sum(payloads.size(e.payload) or 0 for e in kept) / max(1, sum(e.tokens for e in kept))


def measure_kills(
    pool: Databases, shares: Sequence[float], lengths: Sequence[int], seconds: float, interval: float, rounds: int
) -> list[Cut]:
    """Return the results of a kill at each of `shares`, once without the journal and `rounds` times with it."""
    made = []
    for backend in pool.kinds:
        for journal in (True, False):
            moments = [(s, k) for s in shares for k in KILLED] * (rounds if journal else 1)
            with system(pool.new(backend), interval if journal else 0.0, retries=100) as on:
                for number, (share, killed) in enumerate(moments):
                    show_progress(f"{backend}, {'with' if journal else 'without'} the journal: {killed} at "
                                  f"{share:.0%}, {number + 1} of {len(moments)}")
                    one = Cut(backend, journal, killed, share)
                    made.append(play_and_kill(on, number + 1, one, lengths, seconds, interval))
    return made


# --- goodput, and the lengths that are delivered ----------------------------------------------------------------------
@dataclass
class Under:
    """Result of a batch whose runner was killed at random moments."""

    way: str
    asked: int
    kills: int
    seconds: float
    lengths: list[int]
    generated: int
    wrong: int

    @property
    def goodput(self) -> float:
        return sum(self.lengths) / self.generated


def under_kills(
    url: str, way: str, prompts: Sequence[str], interval: float, every: float, retries: int, seed: int
) -> Under:
    """Play answers to these prompts, and kill the runner about `every` seconds after it is ready (0: never)."""
    chance, kills = random.Random(seed), 0
    show_progress(way)
    with system(url, interval, retries, places=64) as on, ThreadPoolExecutor(1) as thread:
        kill = on.killer("runner")
        on.submit(1, [task(prompt) for prompt in prompts])
        began = time.monotonic()
        ended = thread.submit(on.finalize, 1)
        while every and not wait([ended], every * chance.uniform(0.5, 1.5)).done:
            kill()
            kills += 1
            show_progress(f"{way}: {kills} kills")
            kill = on.killer("runner")
        ended.result()
        seconds = time.monotonic() - began
        got, wrong = delivered_prompts(on, 1)
        generated = sum(on.notes.generated().values())
    return Under(way, len(prompts), kills, seconds, sorted(map(length_of, got)), generated, wrong)


def mixed_prompts(count: int, most: int) -> list[str]:
    """Return prompts for answers of 64 to `most` tokens, evenly on a logarithmic scale, in random order."""
    lengths = [round(64 * (most / 64) ** (i / (count - 1))) for i in range(count)]
    random.Random(count).shuffle(lengths)
    return [prompt_of(i, length, length * 0.001) for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class Bent:
    """Difference between delivered lengths and those of the undisturbed run."""

    way: str
    longest_lost: float
    """Share of the longest quarter of answers that was lost."""
    distance: float
    p: float


def draw_lengths(ways: Sequence[Under], file: str) -> None:
    """Draw the delivered share of the answers, in twelve ranges of lengths, into an SVG file."""
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


# --- all of it --------------------------------------------------------------------------------------------------------
@dataclass
class Figures:
    cuts: list[Cut]
    long: list[Under]
    """Results for answers that are all long, for the goodput."""
    mixed: list[Under]
    agents: Agents
    vllm: OnVLLM | None = None

    @property
    def kills(self) -> int:
        """Number of kills with the journal."""
        under = [u.kills for u in [*self.long, *self.mixed] if u.way == JOURNALED]
        return sum(c.journal for c in self.cuts) + sum(under) + self.agents.all_kills

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
        """Violations: losses and repetitions with the journal, and wrong answers with or without it."""
        found = [*self.agents.bad, *([] if self.vllm is None else self.vllm.bad)]
        found += [f"{u.way}: {u.wrong} answers wrong" for u in [*self.long, *self.mixed] if u.wrong]
        for c in self.cuts:
            where = f"{c.killed} at {c.share:.0%} on {c.backend}"
            if c.lost or c.wrong:
                found.append(f"{where}: {c.lost} answers lost, {c.wrong} wrong")
            if c.journal and c.intervals > BAR:
                found.append(f"{where}: {c.intervals:.2f} intervals' tokens again")
            if c.journal and c.ended_again:
                found.append(f"{where}: an ended answer was asked for again")
            if c.left_bytes:
                found.append(f"{where}: {c.left_bytes} bytes of the journal are left")
        return found


def measure(*, quick: bool, seed: int) -> Figures:
    """Measure everything that needs no vLLM."""
    shares, lengths = (0.1, 0.5, 0.9, 0.99), (300, 600, 1024, 2048, 3072, 4096)
    long, every, often = [prompt_of(i, 4096, 4.0) for i in range(96)], mixed_prompts(2_000, 4096), 3.0
    if quick:
        shares, lengths, every, often = (0.5, 0.99), (300, 4096), mixed_prompts(128, 2048), 1.5
    with databases() as pool:
        if quick:
            pool.kinds = ["sqlite"]
        made = measure_kills(pool, shares, lengths, 1.5 if quick else 2.0, 0.25, rounds=1 if quick else 6)
        ways = {"undisturbed": (0.25, 0.0), JOURNALED: (0.25, often), "killed, without": (0.0, often)}
        kills, width = (5, 4) if quick else (100, 8)
        figures = Figures(made, [], [], play_agents(pool.new(pool.kinds[-1]), kills, seed, width))
        for way, (interval, after) in ways.items():
            if after and not quick:
                figures.long.append(under_kills(pool.new("sqlite"), way, long, interval, 2 * after, 100, seed))
            figures.mixed.append(under_kills(pool.new("sqlite"), way, every, interval, after, 2, seed))
    show_progress("")
    return figures


def report(figures: Figures) -> str:
    lines = [f"{figures.kills} kills with the journal",
             "tokens generated again after a kill, in tokens of one interval: median (most) of the kills; in all"]
    groups = defaultdict(list)
    for c in figures.cuts:
        groups[c.backend, c.journal, c.killed].append(c)
    for (backend, journal, killed), of in groups.items():
        worst, waited = [c.intervals for c in of], [c.waited for c in of if not math.isnan(c.waited)]
        lines.append(
            f"  {backend:<11}{'with' if journal else 'without':<8} {killed:<11}"
            f"{statistics.median(worst):6.2f} ({max(worst):.2f}) of {len(of)} kills; "
            f"{sum(sum(c.again.values()) for c in of):,} tokens, of ended answers {sum(c.ended_again for c in of)}; "
            f"next token after {statistics.median(waited):.1f} s ({max(waited):.1f})"
        )
    with_journal = [c for c in figures.cuts if c.journal]
    lines.append("bytes a token on disk: " + ", ".join(
        f"{what} {statistics.median(of):.1f} ({max(of):.1f})" for what, of in {
            "journal before settlement": [c.journal_bytes for c in with_journal if c.share <= 0.5],
            "after it": [c.left_bytes for c in with_journal],
            "payloads of what was kept": [c.kept_bytes for c in with_journal],
        }.items()))
    lines.append("goodput: tokens of delivered answers / all generated")
    for u in [*figures.long, *figures.mixed]:
        lines.append(
            f"  {u.way:<26}{u.goodput:6.3f}  {u.kills} kills in {u.seconds:.0f} s, {len(u.lengths)} of {u.asked} "
            f"answers delivered, mean length {statistics.mean(u.lengths or [0]):.0f}"
        )
    lines.append("the longest quarter of the answers that is lost, and all lengths against the undisturbed ones")
    lines += [f"  {b.way:<26}{b.longest_lost:6.1%}  KS distance {b.distance:.3f}, p {b.p:.3g}" for b in figures.bent]
    lines += [*figures.agents.report(), *([] if figures.vllm is None else figures.vllm.report())]
    return "\n".join([*lines, *(f"  BAD: {line}" for line in figures.bad)])


def main() -> int:
    options = options_of(__doc__, [
        ("--vllm", {"action": argparse.BooleanOptionalAction, "default": True, "help": "measure on vLLM, too"}),
        ("--seed", {"type": int, "default": 0}), ("--svg", {"help": "draw the lengths into this file"}),
    ])
    watch = Watch()
    figures = measure(quick=options.quick, seed=options.seed)
    if options.vllm:
        figures.vllm = measure_vllm(quick=options.quick, seed=options.seed)
    context = about(watch)
    print(f"{report(figures)}\n  {load_text(context['beside'])}")
    write_json(options.json, {**context, "bad": figures.bad, "bent": figures.bent, **vars(figures),
                              "kills": figures.kills,
                              "goodput": [(u.way, u.goodput) for u in [*figures.long, *figures.mixed]]})
    if options.svg:
        draw_lengths(figures.mixed, options.svg)
    return int(bool(figures.bad))


if __name__ == "__main__":
    sys.exit(main())
