"""How fast do experiences reach the trainer, and how much disk do they take?

A whole system (scripted engine, GRPO pipeline, SQLite, `durability: power`) plays batches of experiences of 512 random
tokens with 256 logprobs, and of 8,192 tokens with 4,096, each with a reward. Then it measures in turn, on the same
files (the delivered payloads and the raw payloads that they refer to):

- columns: `client.columns(batch)` reads the files, compares their digests and joins their arrays, and all values that a
  trainer needs are computed: tokens, logprobs, masks, advantages, returns, rewards, versions, groups, runs, truncation;
- delivered: `client.experiences(batch)` also makes an object of each experience;
- floor: the same files are read, and nothing is done with their bytes (in the page cache for both);
- the floor with the SHA-256 of each file, which a content-addressed store must compute.

It also measures the bytes of the payload store, raw and delivered copies together, per delivered token and logprob,
against 4 bytes for each.

It checks that every experience has the right tokens, logprobs, reward and advantage, that each file's digest is its
name, that the store holds exactly the payloads that the log names, and that `verify` finds no problem.

Last, two systems play batches of 128 tasks of 16 runs in turn, one with its payloads in S3 and one with them in
files; the other system is suspended. The S3 server (moto, in memory) is a process on the same cores, so batches/s
include its work, but the CPU figures of our processes (this client is one) do not.

`python -m benchmarks.payloads [--json FILE] [--quick]`
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.child_processes import piped
from benchmarks.compared import Row, Spread, Watch, alternate, coordinator_of, family_of, options_of, pairs, report
from benchmarks.dispatch import Bench, check_experiences
from benchmarks.replay import measured_rate
from tests.helpers.s3_server import BUCKET, S3Server, s3_environment
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.payloads.payload_store import is_inline
from trinity_es.projections.verify.log import verify_log

SIZES = {512: 1024, 8192: 192}
"""{tokens of an experience: experiences of one batch}."""
REPEATS, ROUNDS = 11, 3
"""Number of measurements, and of reads in each measurement."""
AIMS = {512: 0.5, 8192: 0.8}
"""{tokens of an experience: aim of columns / reading the files with their SHA-256}."""
STORED_AIM = 1.3
BYTES = 4
"""Minimum bytes of a token and of a logprob."""
TASKS, RUNS, BATCHES = 128, 16, 3
"""For S3: tasks of a batch, runs of a task, and batches of a turn."""
S3_AIM, S3_CPU_AIM = 0.8, 1.1
"""Aims of the ratios of S3 to files: batches/s, and the coordinator's CPU."""


class Store:
    def __init__(self, url: str) -> None:
        self.root = Path(f"{Path(parse_url(url).database or '').absolute()}.payloads")

    def path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest

    def files(self) -> dict[str, int]:
        return {p.name: p.stat().st_size for p in self.root.rglob("*") if p.is_file()}

    def read(self, digests: Sequence[str], *, checked: bool) -> int:
        """Read these files, if `checked` compare each with the digest in its name, and return their size in bytes."""
        size = 0
        for digest in digests:
            data = self.path(digest).read_bytes()
            if checked and hashlib.sha256(data).hexdigest() != digest:
                raise SystemExit(f"payload {digest} has another digest")
            size += len(data)
        return size


def reward_of(task: int) -> float:
    return task % 97 / 97


def check_advantages(found: Sequence[Experience]) -> None:
    """Check that each experience has the advantage that the pipeline computes for a task of one run."""
    for e in found:
        assert e.advantages is not None  # `check_experiences` checked it
        if not np.array_equal(e.advantages, np.full(len(e.advantages), e.reward / (1 + 1e-6), np.float32)):
            raise SystemExit(f"experience {e.eid} has another advantage than its reward gives")


def compute_values(columns: ExperienceColumns) -> int:
    """Compute all values of columns that a trainer needs, and return their number."""
    vectors = columns.tokens, columns.logprobs, columns.action_mask, columns.advantages, columns.returns
    values = [columns.prompt_lengths, columns.rewards, columns.versions]
    values += [columns.groups, columns.runs, columns.truncated]
    return sum(len(vector.values) for vector in vectors) + sum(value.size for value in values) + len(columns.tasks)


def measure(bench: Bench, tokens: int, count: int, repeats: int) -> list[Row]:
    store = Store(bench.config.store.url)
    before = store.files()
    bench.one(count, tokens=tokens, reward=reward_of)
    client, batch_id = bench.client, bench.next_id
    made = {name: size for name, size in store.files().items() if name not in before}
    names = [ref.digest for ref in client.batch(batch_id).experiences]
    delivered_size = sum(len(name) if is_inline(name) else made[name] for name in names)
    delivered_now = list(client.experiences(batch_id))
    if client.columns(batch_id).experiences() != delivered_now:
        raise SystemExit("columns have other experiences than are delivered one by one")
    check_experiences(delivered_now, count, tokens, reward_of)
    check_advantages(delivered_now)
    digests = list(made)
    size = store.read(digests, checked=True)

    def rate(count_of: Callable[[], int], values: int) -> float:
        """Return the MB/s at which `count_of` reads all. It must return `values` each time."""
        per_second = measured_rate(lambda: sum(count_of() for _ in range(ROUNDS)), ROUNDS * values)
        return per_second() / values * size / 1e6

    values = count * (tokens + 4 * (tokens - tokens // 2) + 8)
    found = alternate({
        "columns": lambda: rate(lambda: compute_values(client.columns(batch_id)), values),
        "ours": lambda: rate(lambda: sum(1 for _ in client.experiences(batch_id)), count),
        "floor": lambda: rate(lambda: store.read(digests, checked=False), size),
        "checked": lambda: rate(lambda: store.read(digests, checked=True), size),
    }, repeats)
    of, as_columns = f"delivered, {tokens:,} tokens", f"columns, {tokens:,} tokens"
    numbers = count * (tokens + tokens - tokens // 2)  # tokens and logprobs
    each = size / count / 1e6
    per_second = Spread.of([figure / each for figure in found["ours"]])
    own, stored, least = delivered_size / numbers, size / numbers, float(BYTES)
    return [
        pairs(as_columns, "MB/s", found["columns"], "reading and their SHA-256", found["checked"], aim=AIMS[tokens]),
        Row(of, "experiences/s", per_second),
        pairs(of, "MB/s", found["ours"], "reading the files", found["floor"]),
        pairs(of, "MB/s", found["ours"], "reading and their SHA-256", found["checked"]),
        Row(f"stored, raw and delivered, {tokens:,} tokens", "bytes a token and logprob", Spread.of([stored]),
            f"{BYTES} bytes each", Spread.of([least]), Spread.of([stored / least]), STORED_AIM, most=True),
        Row(f"  of it what was delivered, {tokens:,} tokens", "bytes a token and logprob", Spread.of([own]),
            f"{BYTES} bytes each", Spread.of([least]), Spread.of([own / least])),
    ]


def _serve(pipe: Connection) -> None:
    """Run an S3 server with a bucket in this process until the pipe closes. Send environment variables for clients."""
    server = S3Server()
    server.make_bucket()
    pipe.send(s3_environment(server))
    try:
        pipe.recv()
    except EOFError:
        server.stop()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def play_batches(bench: Bench, batches: int) -> tuple[float, float, float]:
    """Play batches. Return batches/s, and the CPU milliseconds per batch of the coordinator and of all processes."""
    coordinator = psutil.Process(coordinator_of(bench.client))
    processes = [psutil.Process(), *family_of(coordinator.pid)]
    before = cpu_seconds([coordinator]), cpu_seconds(processes)
    seconds = sum(bench.one(TASKS, runs=RUNS) for _ in range(batches))
    coordinator_cpu, cpu = cpu_seconds([coordinator]) - before[0], cpu_seconds(processes) - before[1]
    return batches / seconds, 1e3 * coordinator_cpu / batches, 1e3 * cpu / batches


def measure_s3(repeats: int, batches: int) -> list[Row]:
    """Return the rows that compare a system with payloads in S3 with a system with payloads in files."""
    found: dict[str, list[tuple[float, float, float]]] = {"s3": [], "files": []}

    def turn(name: str) -> float:
        systems[name].one(8)
        found[name].append(play_batches(systems[name], batches))
        return 0.0

    operators = [{"name": "grpo"}]
    with piped(_serve) as (pipe, _):
        os.environ |= pipe.recv()  # the server's credentials
        kept = f"s3://{BUCKET}/bench"
        with Bench(8, "power", operators, payloads=kept) as s3, Bench(8, "power", operators) as files:
            systems = {"s3": s3, "files": files}
            alternate({name: partial(turn, name) for name in systems}, repeats, systems)
            for bench in systems.values():
                bench.one(TASKS, runs=RUNS)
                bench.check()
                bench.check_all()
    what = f"payloads in S3: batches of {TASKS} tasks of {RUNS} runs"
    ours, theirs = (list(zip(*figures, strict=True)) for figures in found.values())
    other = "files on the same disk"
    return [
        pairs(what, "batches/s", ours[0], other, theirs[0], aim=S3_AIM, id="S3"),
        pairs("  the coordinator's CPU", "ms a batch", ours[1], other, theirs[1], aim=S3_CPU_AIM, most=True, id="S3"),
        pairs("  CPU of all our processes", "ms a batch", ours[2], other, theirs[2], id="S3"),
    ]


def main() -> int:
    options = options_of(__doc__)
    watch, rows = Watch(), list[Row]()
    with Bench(8, "power", [{"name": "grpo"}]) as bench:
        url = bench.config.store.url
        for tokens, count in SIZES.items():
            rows += measure(bench, tokens, count // (8 if options.quick else 1), 5 if options.quick else REPEATS)
        found = verify_log(url)
        if found.problems or found.notes:  # a note: a payload that no event names
            raise SystemExit(f"{found.url} is not sound: {[*found.problems, *found.notes][0]}")
        if found.payloads != len(Store(url).files()):
            raise SystemExit(f"{found.payloads} payloads are verified, {len(Store(url).files())} files are there")
    rows += measure_s3(*((2, 1) if options.quick else (REPEATS, BATCHES)))
    return report("Experiences as they reach the trainer, and what they take", rows, watch, [], options.json)


if __name__ == "__main__":
    sys.exit(main())
