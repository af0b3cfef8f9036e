"""Is anything lost when processes are killed at random? Real processes, seeded faults, then a check of the log.

A trainer keeps four batches of fifty tasks in flight (`batches` and `tasks` change that) on three runners of the
ScriptedEngine, while seeded faults are injected one after the other (see `chaos_faults.py`): kill -9 of any process or
of all, suspended processes, database crashes. These come once each, spread over the run: a hanging guardian and admin,
a stepped clock, a full disk, and a freeze of everything for half a minute. On PostgreSQL the server fails over to an
older copy of itself at the end, which the system must notice and report. Every workflow run also notes its start in a
file, independent of the log. At the end the log is compared with these notes:

- run again: a task was dispatched or began after its end was in the log, or began more often than it was dispatched;
- lost: a task of an acknowledged batch that did not end with all its runs, or whose experiences can't be read;
- duplicated: an experience id that was delivered, or a run that was recorded, more than once;
- needed a person: batches that did not finalize by themselves, or a process that hung and was not replaced;
- ended needlessly: a process that was ended because everything had been frozen;
- not told: a client got no error although the log had lost acknowledged data.

A recovery is the time from a fault to the next finished task, as a reader of the log sees it. `python -m
benchmarks.chaos [--backend sqlite|postgresql|both] [--kills 100] [--seconds 420] [--seed 0] [--payloads URL|s3]
[--json FILE]`. The exit code is 1 if any of the lists has an entry. As root the benchmark runs itself in its own mount
namespace; otherwise it leaves out the full disk and the stepped boot time, and says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import trinity_es
from benchmarks.chaos_account import Account, Evidence, LogWatch, report
from benchmarks.chaos_faults import KILLED, Faults, by_kind, kill
from benchmarks.chaos_hosts_trainer import Nap, note_start, one_experience, repeat_until_answered
from benchmarks.chaos_machine import Disk, SteppedClock, in_namespace
from benchmarks.compared import options_of, write_json
from benchmarks.systems import explore_config
from tests.helpers.faults import Server
from tests.helpers.s3_server import BUCKET, s3_server
from trinity_es import Task, Workflow
from trinity_es.client.teardown import end_system
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AlreadyRunning, LogRewound, StartupError, TrinityError
from trinity_es.events.experience import Experience
from trinity_es.system import lifecycle, running_system
from trinity_es.system.leftovers import leftovers

SETTLE_SECONDS = 60.0
"""Time limit for open batches to finalize after the faults end."""
TOLD_SECONDS = 30.0
"""Time limit for a client to get LogRewound for a log that lost acknowledged data."""


class BlockingNap(Workflow):
    """Workflow that sleeps in a worker process."""

    def run(self) -> list[Experience]:
        note_start(self.task)
        time.sleep(self.task.workflow_args["seconds"])
        return one_experience()


class Chaos:
    def __init__(
        self, url: str | None, folder: Path, notes_folder: Path, seed: int, database: Server | None = None,
        disk: Disk | None = None, clock: SteppedClock | None = None, *, batches: int = 4, tasks: int = 50,
        payloads: str = "",
    ) -> None:
        self.random, self.database, self.notes = random.Random(seed), database, notes_folder
        self.account = Account("postgresql" if database is not None else "sqlite")
        self.in_flight, self.tasks = batches, tasks
        self.config = explore_config(
            folder, 16, {"engine_type": "scripted", "engine_num": 3},
            explorer={"max_retry_times": 60, "max_timeout": 60.0},  # kills of runners must not use up a task's attempts
            store={"payloads": payloads, **({} if url is None else {"url": url})},
            system={"restarts": 10_000, "restart_pause": 0.1, "heartbeat_timeout": 8.0, "hang_timeout": 10.0},
        )
        self.faults = Faults(self.config, self.random, database, disk, clock)
        self.starting = threading.Lock()
        self.over, self.watch = threading.Event(), LogWatch(self.config.store.url)
        self.injected: list[tuple[float, str]] = []
        self.finalized: dict[int, dict[str, Any]] = {}
        self.submitted: set[int] = set()

    # --- the trainer ------------------------------------------------------------------------------------------------
    def start_if_dead(self) -> None:
        """Start the system if it and its keeper are dead. A start that fails because of a further fault is ignored."""
        with self.starting, contextlib.suppress(AlreadyRunning, StartupError):
            if running_system.find(self.config) is None and running_system.keeper(self.config) is None:
                lifecycle.start(self.config)
                self.account.commands += 1

    def request(self, ask: Callable[[trinity_es.RolloutClient], Any], seconds: float = 240) -> Any:
        return repeat_until_answered(self.config, ask, seconds, self.start_if_dead)

    def round_trip(self, batch: int, timeout: float) -> None:
        tasks = self.tasks_of(batch)
        self.request(lambda c: c.submit_batch(batch_id=batch, tasks=tasks, batch_type="train"))
        self.submitted.add(batch)
        self.finalized[batch] = self.request(lambda c: c.finalize_train_batch(batch, timeout=timeout))

    def tasks_of(self, batch: int) -> list[Task]:
        chance = random.Random(batch)
        return [
            Task(
                workflow="benchmarks.chaos:BlockingNap" if chance.random() < 0.1 else Nap,  # not of __main__
                workflow_args={"notes": str(self.notes), "seconds": chance.uniform(0.1, 2.0)},
            )
            for _ in range(self.tasks)
        ]

    def train(self, lane: int) -> None:
        """Submit and finalize batches, one after the other, until the faults end."""
        number = lane
        while not self.over.is_set():
            number += self.in_flight
            try:
                self.round_trip(number, 120)
            except Exception as e:
                self.account.person.append(f"batch {number}: {type(e).__name__}: {e}")

    # --- the faults -------------------------------------------------------------------------------------------------
    def run(self, kills: int, seconds: float, special: bool) -> Account:
        """Start the system, inject faults, and check the log. `special`: also inject the faults that come once each."""
        started = time.monotonic()
        lifecycle.start(self.config)
        trainers = [threading.Thread(target=self.train, args=(lane,)) for lane in range(1, self.in_flight + 1)]
        for thread in trainers:
            thread.start()
        time.sleep(3)
        once = self.faults.single_faults() if special else {}
        todo = self.random.sample(sorted(once), len(once))
        count, due = 0, [kills * (n + 1) // (len(todo) + 1) for n in range(len(todo))]
        while (count < kills and time.monotonic() - started < seconds) or todo:
            at = time.monotonic()
            if todo and (count >= due[-len(todo)] or at - started >= seconds):
                name = todo[0] if once[todo[0]]() else ""
                todo = todo[1:] if name else todo
            else:
                name = self.faults.inject_random()
                count += name.startswith("kill")
            if not name:
                time.sleep(0.2)
                self.start_if_dead()
                continue
            self.account.faults[name] += 1
            self.injected.append((at, name))
            print(f"\r  {self.account.backend}: {count}/{kills} kills, {len(self.finalized)} batches, {name:<45}",
                  end="", file=sys.stderr, flush=True)
            self.pause()
        print(file=sys.stderr)
        self.over.set()
        self.start_if_dead()
        for thread in trainers:
            thread.join(timeout=SETTLE_SECONDS + 240)
        if self.database is not None and special:
            self.fail_over(self.database)
        self.account.seconds = time.monotonic() - started
        end_system(self.config)
        self.watch.close()
        self.account.kills = self.faults.kills
        self.account.person += self.faults.trouble
        self.account.ended = self.faults.ended
        self.account.left = [p.pid for p in leftovers(self.config)]
        Evidence(self.config.store.url, self.tasks, self.submitted, self.finalized, self.notes / "ran", self.watch.seen,
                 self.injected).add_to(self.account)
        return self.account

    def pause(self) -> None:
        """Wait before the next fault: mostly until a task ends, sometimes less, so that the fault hits a restart."""
        until = time.monotonic() + (self.random.uniform(0.0, 2.0) if self.random.random() < 0.25 else 20.0)
        with contextlib.suppress(TrinityError), trinity_es.open_log(self.config.store.url) as log:
            last = log.head().position
            while time.monotonic() < until:
                if any(isinstance(r.event, ev.RunsFinished) for r in log.events(after=last)):
                    return
                time.sleep(0.1)

    def fail_over(self, database: Server) -> None:
        """Replace the database by an older copy that lacks an acknowledged batch: every client must get LogRewound.

        Then restore the newer data, as an operator would, and check that the run goes on.
        """
        self.account.faults["database failed over to an older copy"] += 1
        database.keep_copy()
        number = 1_000_000
        self.round_trip(number, 60)
        database.fail_over()
        self.watch.close()  # its positions are of the newer data
        self.expect_refusal("the server failed over", number + 1)
        kill(by_kind(self.config).get("coordinator", []))
        self.expect_refusal("the coordinator was killed", number + 1)
        kill([p for group in by_kind(self.config).values() for p in group])
        self.expect_refusal("every process was killed", number + 1)
        end_system(self.config)
        database.fail_over()
        self.start_if_dead()
        again = self.request(lambda c: c.finalize_train_batch(number, timeout=60), 120)
        if again != self.finalized[number]:
            self.account.lost.append("the newer data gave another result of the last batch")

    def expect_refusal(self, what: str, batch: int) -> None:
        """Check that a submit is refused with LogRewound within the time limit."""
        deadline, last = time.monotonic() + TOLD_SECONDS, "nobody answered"
        while time.monotonic() < deadline:
            try:
                with trinity_es.connect(self.config) as client:
                    client.submit_batch(batch_id=batch, tasks=self.tasks_of(batch), batch_type="train")
                self.account.not_told.append(f"after {what} a submit was acknowledged")
                return
            except LogRewound:
                return
            except (TrinityError, TimeoutError, OSError) as e:
                last = f"{type(e).__name__}: {e}"
                try:
                    self.start_if_dead()
                except LogRewound:
                    return
                time.sleep(0.2)
        self.account.not_told.append(f"after {what} nobody was told of it in {TOLD_SECONDS:.0f} s: {last}")


# --- one run ---------------------------------------------------------------------------------------------------------
def chaos(
    backend: str, *, kills: int, seconds: float, seed: int, batches: int = 4, tasks: int = 50, special: bool = False,
    namespace: bool = False, payloads: str = "",
) -> Account:
    """Run the benchmark on one backend, in a temporary folder.

    `special`: also inject the faults that come once each, and on PostgreSQL a failover. `namespace`: this process has
    its own mount namespace.
    """
    with contextlib.ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        made.chmod(0o755)  # PostgreSQL's server runs as another user
        beside, folder = made / "beside", made / "disk"
        beside.mkdir()
        folder.mkdir()
        disk = stack.enter_context(contextlib.closing(Disk(folder))) if special and namespace else None
        clock = stack.enter_context(contextlib.closing(SteppedClock(beside, namespace=namespace))) if special else None
        if clock is not None:
            stack.enter_context(mock.patch.dict(os.environ, clock.environment))
        database = Server(str(folder / "data"), durable=True) if backend == "postgresql" else None
        if database is not None:
            stack.callback(database.cleanup)
        run = Chaos(
            None if database is None else database.url("postgres"), folder, beside, seed, database, disk, clock,
            batches=batches, tasks=tasks, payloads=payloads,
        )
        if special and not namespace:
            run.account.left_out = ["a full disk and a stepped boot time, which need root and `unshare`"]
        try:
            account = run.run(kills, seconds, special)
            wanted = [f"kill -9 of {kind}" for kind in KILLED]
            account.left_out += [f"{what}: it was never done" for what in wanted if what not in account.faults]
            return account
        finally:
            run.over.set()
            run.watch.close()
            end_system(run.config)
            if os.environ.get("KEEP_CHAOS"):
                shutil.copytree(made, os.environ["KEEP_CHAOS"], dirs_exist_ok=True)


def main() -> int:
    options = options_of(__doc__, [
        ("--backend", {"choices": ["sqlite", "postgresql", "both"], "default": "both"}),
        ("--kills", {"type": int, "default": 100, "help": "faults by kill -9, on each backend"}),
        ("--seconds", {"type": float, "default": 420.0, "help": "and no longer than this, on each backend"}),
        ("--payloads", {"default": "", "help": "store.payloads; `s3`: a bucket of a server that runs meanwhile"}),
    ], quick=False, seed=0)
    namespace = in_namespace("benchmarks.chaos")
    backends = ["sqlite", "postgresql"] if options.backend == "both" else [options.backend]
    accounts = []
    own_bucket = options.payloads == "s3"
    with s3_server() if own_bucket else contextlib.nullcontext():
        for backend in backends:
            accounts.append(chaos(
                backend, kills=options.kills, seconds=options.seconds, seed=options.seed, special=True,
                namespace=namespace, payloads=f"s3://{BUCKET}/chaos" if own_bucket else options.payloads,
            ))
            print(report(accounts[-1]))
    write_json(options.json, [vars(a) for a in accounts])
    return 0 if all(a.clean for a in accounts) else 1


if __name__ == "__main__":
    sys.exit(main())
