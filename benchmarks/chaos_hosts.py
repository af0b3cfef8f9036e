"""Is anything lost when hosts die and networks fail? Several hosts, random faults, then a check of the log.

Each host is a network namespace of this machine with its own address and processes (`tests/helpers/namespaces.py`);
PostgreSQL is reached over TCP. Two hosts can lead: their launchers repeat `trinity-es up --standby`. The others run
`trinity-es join`. A trainer on one of the joined hosts keeps batches in flight on the ScriptedEngine, and moves to
another host when its own dies. Seeded faults come one after the other; some come during another one. A host is killed,
with or without its network, and started again later. A link is down for up to 20 s, or loses packets in one direction.
Hosts join, are drained, get SIGTERM. A runner, a guardian, a host agent or a coordinator is killed. The head's host is
killed or loses its link, so that the other head leads. PostgreSQL crashes and is restarted.

At the end the log is compared with the trainer's results, as in `benchmarks.chaos`. It must also show that
- no result of an ended epoch (one stay of a host in the run) was accepted;
- no attempt got a strike for the loss of a host;
- each loss was noticed within 20 s (`hosts.timeout` is 15 s by default);
- hosts worked as fast as before while another host was away;
- each host had its share of the work, and all its places were busy.

`python -m benchmarks.chaos_hosts [--faults 30] [--seed 0] [--json FILE]`. Exit code 1 if a promise broke, 0 (with the
reason) if namespaces can't be made.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trinity_es
from benchmarks.chaos_account import Evidence, LogWatch
from benchmarks.chaos_hosts_account import Fault, HostsAccount, Work, busy_shares, hosts_report
from benchmarks.chaos_hosts_machines import HeadMachine, HostMachine, Machine, Trainer
from benchmarks.compared import options_of, write_json
from tests.helpers.namespaces import Network, Postgres, lacks, made_network, made_postgres
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.store.log import EventLog

T = TypeVar("T")

KINDS = {
    "host killed": 3, "host without power": 2, "link away": 5, "packets lost one way": 4, "host joins": 1,
    "host drained": 2, "SIGTERM to a host": 2, "runner of a host killed": 3, "guardian of a host killed": 1,
    "host agent killed": 1, "coordinator killed": 2, "host of the head killed": 1, "link of the head away": 1,
    "PostgreSQL restarted": 2,
}
"""{fault: its number among 30 faults}."""
SHORT = ("runner of a host killed", "host agent killed", "coordinator killed", "PostgreSQL restarted")
"""Faults that may come during another fault."""
PLACES = 6
"""Number of units that each host plays at once."""
SECONDS = 1.5
"""Seconds that a task sleeps."""
MEND_SECONDS = 120.0
"""Time limit for all hosts to work again after a fault; if they do not, the run counts as needing a person."""
DISTURBED = 0.25
"""Probability of a second fault while a host is away."""
CALM_SECONDS = 8.5
"""Seconds without faults before a fault, to measure its effect on the other hosts."""


class Watch(LogWatch):
    def serves(self, host: str, since: float) -> bool:
        """Return whether the host's runner is up and got ready after the time `since`."""
        ready = 0.0
        for item in list(self.events):
            event = item.event
            if isinstance(event, ev.RunnerReady) and event.runner == f"runner-0@{host}":
                ready = item.recorded_at
            gone = isinstance(event, ev.RunnerLost | ev.RunnerRetired) and event.runner == f"runner-0@{host}"
            if gone or (isinstance(event, ev.HostLost | ev.HostLeft) and event.host == host):
                ready = 0.0
        return ready > since

    def finished(self) -> int:
        return sum(isinstance(item.event, ev.RunsFinished) for item in list(self.events))


class HostsChaos:
    def __init__(
        self, network: Network, database: Postgres, folder: Path, seed: int, *, hosts: int = 4, lanes: int = 6,
        tasks: int = 200, timeout: float = 15.0,
    ) -> None:
        """Set up machines and trainer. `timeout`: `hosts.timeout`; `lanes`: batches of `tasks` tasks in flight."""
        self.network, self.database, self.random, self.folder = network, database, random.Random(seed), folder
        explorer = {"max_concurrency": PLACES, "max_retry_times": 20, "rollout_model": {"engine_type": "scripted"}}
        config = {"mode": "explore", "store": {"url": database.url}, "explorer": explorer}
        port = _free_port(network.head)
        self.heads = [HeadMachine(name, network, folder, config, port, timeout) for name in ("head1", "head2")]
        self.hosts = {
            name: HostMachine(name, network, folder, database.url) for name in [f"h{n}" for n in range(1, hosts + 1)]
        }
        self.spare = HostMachine("h9", network, folder, database.url)
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.trainer = Trainer(database.url, folder, self.notes, lanes=lanes, tasks=tasks, seconds=SECONDS)
        self.account = HostsAccount("hosts")
        self.faults: list[Fault] = []
        self.killed: set[str] = set()
        self.tasks, self.timeout, self.calm_since = tasks, timeout, 0.0

    # --- what is waited for -----------------------------------------------------------------------------------------
    def wait(self, condition: Callable[[], T], what: str, seconds: float) -> T | None:
        """Wait for a condition and return its value. After `seconds` note that the run needs a person."""
        until = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > until:
                self.account.person.append(f"{what}: not after {seconds:.0f} s")
                return None
            time.sleep(0.2)
        return found

    def leading_head(self) -> HeadMachine | None:
        """Return the head that has the lease if its coordinator is alive and the database is reachable."""
        lease = None
        with contextlib.suppress(TrinityError), EventLog.open(self.database.url, read_only=True) as log:
            lease = log.read_lease("coordinator")
        where = lease.owner.get("hosts") if lease is not None and lease.owner else None
        return next((h for h in self.heads if h.address == where and h.processes("Coordinator")), None)

    def active_hosts(self) -> list[HostMachine]:
        """Return the hosts that should take part. A host whose join ended by itself is noted and restarted."""
        wanted = [h for h in [*self.hosts.values(), self.spare] if h.is_wanted]
        for host in wanted:
            if not host.is_on():
                self.account.person.append(f"join of host {host.name} ended by itself")
                host.start()
        return wanted

    def wait_recovered(self, last: Fault | None = None) -> None:
        """Wait until all started hosts work and the run makes progress. `last`: the fault that just ended."""
        self.wait(self.leading_head, "somebody leads", MEND_SECONDS)
        for host in self.active_hosts():
            since = last.until if last is not None and last.restarts and last.host == host.name else 0.0
            what = f"host {host.name} works after {last.kind if last else 'its start'}"
            if not self.wait(partial(self.watch.serves, host.name, since), what, MEND_SECONDS):
                host.kill()
                host.start()
        count = self.watch.finished()
        self.wait(lambda: self.watch.finished() > count, "another task ends", MEND_SECONDS)
        self.calm_since = time.time()

    # --- the run ----------------------------------------------------------------------------------------------------
    def run(self, deck: Sequence[str], *, measured: bool = True) -> HostsAccount:
        """Start all machines, inject these faults, and check the log. `measured`: also measure the hosts' work."""
        started, self.began = time.monotonic(), time.time()
        self.heads[0].start()
        self.wait(self.leading_head, "somebody leads", 90)
        self.watch = Watch(self.database.url)
        for host in self.hosts.values():
            host.start()
        self.heads[1].start()
        for host in self.hosts.values():
            self.wait(partial(self.watch.serves, host.name, 0.0), f"host {host.name} works", 120)
        self.trainer.run_on(list(self.hosts.values()))
        self.wait_recovered()
        time.sleep(3 if measured else 0)
        self.calm = CALM_SECONDS if measured else 0.0
        quiet, offset = time.time(), time.time() - time.monotonic()
        time.sleep(2 * self.calm)
        quiet_time = quiet, time.time()
        time.sleep(2 * SECONDS if measured else 0.0)  # tasks of the quiet time end before the first fault
        todo = list(deck)
        while todo:
            self.inject(todo.pop(0), todo)
        self.trainer.end(MEND_SECONDS + 120)
        self.account.seconds = time.monotonic() - started
        self.watch.close()
        self.check_results(offset)
        if measured:
            self.compare_work(quiet_time, offset)
        return self.account

    def random_faults(self, count: int) -> list[str]:
        every = [kind for kind, often in KINDS.items() for _ in range(often)]
        self.random.shuffle(every)
        return [every[n % len(every)] for n in range(count)]

    def record_fault(self, kind: str, host: str, **more: Any) -> Fault:
        fault = Fault(kind, host, time.time(), **more)
        self.faults.append(fault)
        self.account.faults[kind] += 1
        at = time.time() - self.began
        print(f"  {at:5.0f} s  {len(self.faults):>3}  {kind}: {host}", file=sys.stderr, flush=True)
        return fault

    # --- the faults -------------------------------------------------------------------------------------------------
    def inject(self, kind: str, deck: list[str]) -> None:
        """Inject a fault of this kind, and wait until the run has recovered. `deck`: the faults still to come."""
        host = self.random.choice(self.active_hosts())
        match kind:
            case "host killed" | "host without power" | "link away" | "packets lost one way":
                fault = self.take_away(kind, host, deck)
            case "host joins":
                fault = self.record_fault(kind, self.spare.name)
                self.spare.start()
            case "host drained" | "SIGTERM to a host":
                fault = self.remove_host(kind, host)
            case "host of the head killed" | "link of the head away":
                fault = self.take_head_away(kind)
            case _:
                fault = self.inject_short(kind, host)
        fault.until = fault.until or time.time()
        self.wait_recovered(fault)

    def take_away(self, kind: str, host: HostMachine, deck: list[str]) -> Fault:
        """Kill or disconnect a host for some time. Sometimes inject a second fault from `deck` meanwhile."""
        time.sleep(max(0.0, self.calm_since + self.calm - time.time()))
        disturbing = next((k for k in deck if k in SHORT), None) if self.random.random() < DISTURBED else None
        others = ["", *(h.name for h in self.active_hosts() if h is not host)]
        off = kind in ("host killed", "host without power")
        for_good = self.random.random() < 0.6
        seconds = self.timeout + 5 if for_good else self.timeout * self.random.uniform(0.2, 0.8)
        fault = self.record_fault(kind, f"{host.name}", others=others, calm=time.time() - self.calm_since,
                           loses=off or for_good, restarts=off)
        with contextlib.ExitStack() as healed:
            if kind == "packets lost one way":
                healed.enter_context(self.network.one_way(host.name, self.random.choice(["to head", "to host"])))
            elif kind != "host killed":
                self.network.away(host.name)
                healed.callback(self.network.back, host.name)
            if off:
                host.kill()
            until = time.time() + seconds
            if disturbing is not None:
                deck.remove(disturbing)
                fault.disturbed = True
                time.sleep(self.random.uniform(1, seconds - 1))
                self.inject_short(disturbing, self.random.choice([h for h in self.active_hosts() if h is not host]))
            time.sleep(max(0.0, until - time.time()))
            fault.until = time.time()
        if off:
            host.start()
        return fault

    def remove_host(self, kind: str, host: HostMachine) -> Fault:
        """Make a host leave the run in order, and start it again."""
        fault = self.record_fault(kind, host.name)
        if kind == "host drained":
            head = self.leading_head() or self.heads[0]
            command = [*head.command_prefix(), sys.executable, "-m", "trinity_es", "hosts", "drain", host.name,
                       "--config", str(head.config)]
            done = subprocess.run(command, env=head.env, cwd=head.folder, capture_output=True, text=True, check=False,
                                  timeout=120)
            if done.returncode:
                self.account.person.append(f"hosts drain {host.name}: {done.stderr.strip()[-300:]}")
                host.sigterm()
        else:
            host.sigterm()
        if wrong := host.wait_left():
            self.account.person.append(wrong)
        fault.until = time.time()
        host.start()
        return fault

    def take_head_away(self, kind: str) -> Fault:
        """Disconnect the head's machine until the other head leads, then let it return as standby."""
        head = self.wait(self.leading_head, "somebody leads", MEND_SECONDS) or self.heads[0]
        fault = self.record_fault(kind, head.name)
        self.network.away(head.name)
        if kind == "host of the head killed":
            head.kill()
        self.wait(lambda: self.leading_head() not in (None, head), "the other head leads", MEND_SECONDS)
        fault.until = time.time()
        self.network.back(head.name)
        if kind == "host of the head killed":
            head.start()
        return fault

    def inject_short(self, kind: str, host: HostMachine) -> Fault:
        """Inject a fault that is over at once: kill a process, or restart PostgreSQL."""
        if kind == "PostgreSQL restarted":
            fault = self.record_fault(kind, "")
            self.database.stop()
            time.sleep(self.random.uniform(0.2, 2.0))
            self.database.start()
            return fault
        of_head = kind == "coordinator killed"
        machine: Machine | None = self.wait(self.leading_head, "somebody leads", MEND_SECONDS) if of_head else host
        restarts = kind[0] == "g"  # a guardian takes its whole host with it
        fault = self.record_fault(kind, "" if machine is None else machine.name, loses=restarts, restarts=restarts)
        if kind == "runner of a host killed":
            self.killed.add(f"runner-0@{host.name}")
        title = {"r": "Runner", "g": "Guardian", "h": "HostAgent", "c": "Coordinator"}[kind[0]]
        if machine is None or not self.wait(lambda: machine.kill_one(title), f"a {title} on {fault.host}", 60):
            fault.loses = fault.restarts = False
        return fault

    # --- the account ------------------------------------------------------------------------------------------------
    def check_results(self, offset: float) -> None:
        """Compare the log with the trainer's notes. `offset`: unix time at which the monotonic clock was 0."""
        account, trainer = self.account, self.trainer
        account.person += trainer.trouble
        account.trainers = trainer.starts
        with trinity_es.open_log(self.database.url) as log:
            seen = {item.position: item.recorded_at - offset for item in log.events()}
            account.add_hosts(log, self.faults, self.killed, self.timeout)
        faults = [(fault.at - offset, f"{fault.kind} {fault.host}") for fault in self.faults]
        Evidence(self.database.url, self.tasks, trainer.submitted, trainer.finalized, self.notes / "ran", seen,
                 faults).add_to(account)

    def compare_work(self, quiet: tuple[float, float], offset: float) -> None:
        """Compare the hosts' work in the `quiet` interval with their work around the faults."""
        busy = busy_shares(self.notes / "slept", PLACES, quiet[0] - offset, quiet[1] - offset)
        with trinity_es.open_log(self.database.url) as log:
            self.account.add_work(Work(log.events()), self.faults, quiet, busy, PLACES)

    def close(self) -> None:
        self.trainer.kill()
        for machine in [*self.hosts.values(), self.spare, *self.heads]:
            machine.kill()
        if hasattr(self, "watch"):
            self.watch.close()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def chaos_hosts(
    *, seed: int, faults: int = 0, kinds: Sequence[str] = (), measured: bool = True, **more: Any
) -> HostsAccount:
    """Run the benchmark in a temporary folder, with this number of random faults or with faults of these `kinds`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-hosts-")))
        folder.chmod(0o755)  # PostgreSQL's server runs as another user
        network = stack.enter_context(made_network())
        database = stack.enter_context(made_postgres(network.head, _free_port(network.head), network.all))
        run = HostsChaos(network, database, folder, seed, **more)
        try:
            return run.run(kinds or run.random_faults(faults), measured=measured)
        finally:
            run.close()
            if os.environ.get("KEEP_CHAOS"):
                shutil.copytree(folder, os.environ["KEEP_CHAOS"], dirs_exist_ok=True)


def main() -> int:
    options = options_of(__doc__, quick=False, faults=30, seed=0)
    if reason := lacks():
        print(f"skipped: {reason}")
        return 0
    account = chaos_hosts(faults=options.faults, seed=options.seed)
    print(hosts_report(account))
    write_json(options.json, vars(account))
    return 0 if account.clean else 1


if __name__ == "__main__":
    sys.exit(main())
