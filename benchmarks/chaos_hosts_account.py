"""The result of `benchmarks.chaos_hosts`: what the log says about hosts, in addition to `chaos_account`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trinity_es
from benchmarks.chaos_account import BAD, Account
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.projections.host_states import Hosts, evolve_hosts, host_of

KNOWN_SECONDS = 5.0
"""Seconds after `hosts.timeout` by which the loss of a host must be noticed; 20 s in all by default."""
SHARE = 0.1
"""Tolerance for a host's rate while another host is away, and for its share of the work."""
LEAST_SECONDS = 8.0
"""Minimum length of an interval in which work is counted: shorter ones have too few tasks."""
PROMISES = {
    **{name: label for name, label in BAD.items() if name not in ("ended", "not_told", "left")},
    "over": "results of an epoch that was over", "blamed": "attempts blamed for the loss of a host",
    "late": "losses that were not known in time", "needless": "hosts lost that were away for a moment",
    "slower": "hosts slower while another was away",
    "shares": "hosts without their share of the work", "idle": "hosts with places idle while work waited",
}
"""{list of a `HostsAccount` that must be empty: its label}."""


@dataclass
class Fault:
    """An injected fault. Times are unix seconds."""

    kind: str
    host: str
    at: float
    until: float = 0.0
    """End of the fault: the host was restarted, or its link was back."""
    loses: bool = False
    """True if the run loses the host, which ends its epoch."""
    restarts: bool = False
    disturbed: bool = False
    """True if another fault came before this one was over."""
    calm: float = 0.0
    """Seconds without faults before this one."""
    others: Sequence[str] = ()
    """Hosts that worked before and are not affected; "" is the head."""


class Work:
    """Finished units of each host, as (begin, end) in unix seconds."""

    def __init__(self, log: Iterable[Recorded]) -> None:
        began: dict[tuple[str, int, int, int], float] = {}
        self.units: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for item in log:
            event = item.event
            if isinstance(event, ev.TasksDispatched):
                for unit in event.units:
                    began[item.stream, unit.task, unit.run_id_base, unit.attempt] = item.recorded_at
            elif isinstance(event, ev.RunsFinished):
                key = item.stream, event.task, event.run_id_base, event.attempt
                self.units[host_of(event.runner)].append((began[key], item.recorded_at))

    def rate(self, host: str, begin: float, end: float) -> float:
        """Return a host's units per second in an interval. A unit that crosses its edge counts in part."""
        parts = (_overlap(unit, begin, end) / max(unit[1] - unit[0], 1e-6) for unit in self.units[host])
        return sum(parts) / (end - begin)

    def assigned_share(self, host: str, places: int, begin: float, end: float) -> float:
        """Return the share of a host's places to which the coordinator had assigned units."""
        return sum(_overlap(unit, begin, end) for unit in self.units[host]) / (places * (end - begin))


def _overlap(unit: tuple[float, float], begin: float, end: float) -> float:
    return max(0.0, min(unit[1], end) - max(unit[0], begin))


def busy_shares(notes: Path, places: int, begin: float, end: float) -> dict[str, float]:
    """Return {host: share of its places in which tasks slept}, from the tasks' notes. Times are monotonic."""
    found: dict[str, float] = defaultdict(float)
    for line in notes.read_text().splitlines():
        host, start, stop = line.split()
        found[host] += _overlap((float(start), float(stop)), begin, end) / (places * (end - begin))
    return {host: share for host, share in sorted(found.items()) if share}


@dataclass
class HostsAccount(Account):
    over: list[str] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    shares: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    known: list[tuple[float, str]] = field(default_factory=list)
    """(seconds from a fault to HostLost, the fault)."""
    away: list[tuple[float, str]] = field(default_factory=list)
    """(tasks per second of a host while another host was away, as a share of its rate before; host and fault)."""
    spread: dict[str, float] = field(default_factory=dict)
    """Tasks per second of each host before any fault."""
    busy: dict[str, float] = field(default_factory=dict)
    """{host: share of its places in which tasks slept before any fault}; the rest is time between tasks."""
    given: dict[str, float] = field(default_factory=dict)
    """{host: share of its places with assigned units before any fault}."""
    epochs: int = 0
    coordinators: int = 0
    trainers: int = 0
    """Number of trainer processes, which ran one after the other."""

    @property
    def clean(self) -> bool:
        return not any(getattr(self, name) for name in PROMISES)

    def add_hosts(self, log: trinity_es.Log, faults: Sequence[Fault], killed: set[str], timeout: float) -> None:
        """Add from the log: results of ended epochs, attempts that got a strike, and late or needless losses of hosts.

        `killed`: runners whose process was killed, so their attempts may get a strike. `timeout`: `hosts.timeout`.
        """
        hosts: Hosts = {}
        lives: dict[tuple[str, int], int] = {}
        losses: dict[str, list[float]] = defaultdict(list)
        leads = 0
        for item in log.events():
            event, epoch = item.event, int(item.metadata.get("epoch", 0))
            if item.metadata.get("lease") == "coordinator":
                if epoch < leads:
                    self.over.append(f"event {item.position} is of coordinator {epoch}, after one of {leads}")
                leads = max(leads, epoch)
            match event:
                case ev.CoordinatorStarted():
                    self.coordinators += 1
                case ev.HostJoined() | ev.HostDraining() | ev.HostLost() | ev.HostLeft():
                    evolve_hosts(hosts, event)
                    self.epochs += isinstance(event, ev.HostJoined)
                    if isinstance(event, ev.HostLost):
                        losses[event.host].append(item.recorded_at)
                case ev.RunnerStarted():
                    lives.setdefault((event.runner, event.incarnation), _epoch(hosts, event.runner))
                case ev.RunnerLost() | ev.RunnerRetired() | ev.RunnerQuarantined():
                    lives[event.runner, event.incarnation] = -1
                case ev.RunsFinished():
                    of, now = lives.get((event.runner, event.incarnation), -1), _epoch(hosts, event.runner)
                    if of == -1 or of != now:
                        self.over.append(f"event {item.position}: {event.runner} #{event.incarnation} of epoch {of}")
                case ev.AttemptFailed() if event.blamed and event.runner not in killed:
                    self.blamed.append(f"task {event.task} for {event.runner}: {event.kind}: {event.message}")
        for fault in faults:
            if fault.loses:
                self._add_loss(fault, losses[fault.host], timeout + KNOWN_SECONDS)
            elif fault.others and not fault.disturbed and fault.until - fault.at < timeout / 2:
                self.needless += [f"{fault.kind} of {fault.host} for {fault.until - fault.at:.1f} s"
                                  for at in losses[fault.host] if fault.at <= at <= fault.until + timeout]

    def _add_loss(self, fault: Fault, losses: Sequence[float], limit: float) -> None:
        after = [at for at in losses if at >= fault.at]
        name = f"{fault.kind} of {fault.host}"
        if not after or min(after) > fault.until + 60:
            self.late.append(f"{name}: never")
            return
        seconds = min(after) - fault.at
        self.known.append((seconds, f"{name}{', with another fault' if fault.disturbed else ''}"))
        if seconds > limit and not fault.disturbed:
            self.late.append(f"{name}: after {seconds:.1f} s")

    def add_work(
        self, work: Work, faults: Sequence[Fault], quiet: tuple[float, float], busy: Mapping[str, float], places: int
    ) -> None:
        """Compare each host's rate while another was away with the rate before, and all hosts in the `quiet` time."""
        for fault in faults:
            length = fault.until - fault.at
            if fault.disturbed or length < LEAST_SECONDS or fault.calm < LEAST_SECONDS:
                continue
            for host in fault.others:
                before = work.rate(host, fault.at - min(length, fault.calm), fault.at)
                ratio = work.rate(host, fault.at, fault.until) / before if before else 0.0
                name = f"{host or 'the head'} during {fault.kind} of {fault.host}"
                self.away.append((ratio, name))
                if ratio < 1 - SHARE:
                    self.slower.append(f"{name}: {ratio:.2f} of before")
        self.busy = dict(busy)
        self.spread = {host or "the head": work.rate(host, *quiet) for host in sorted(work.units)}
        self.spread = {host: rate for host, rate in self.spread.items() if rate}
        mean = statistics.fmean(self.spread.values())
        self.shares += [f"{host}: {rate:.2f} tasks/s, the mean is {mean:.2f}" for host, rate in self.spread.items()
                        if abs(rate / mean - 1) > SHARE]
        self.given = {host or "the head": share for host in sorted(work.units)
                      if (share := work.assigned_share(host, places, *quiet))}
        self.idle += [f"{host}: {share:.0%} of its places were given away" for host, share in self.given.items()
                      if share < 1 - SHARE]


def _epoch(hosts: Hosts, runner: str) -> int:
    """Return the current epoch of a runner's host; 0 for runners of the head, -2 if the host is gone."""
    name = host_of(runner)
    if not name:
        return 0
    return hosts[name].epoch if name in hosts and hosts[name].is_present else -2


def hosts_report(account: HostsAccount) -> str:
    lines = [f"hosts: {account.batches} batches, {account.tasks} tasks finished in {account.seconds:.0f} s"]
    lines += [f"  {count:>6}  {name}" for name, count in sorted(account.faults.items())]
    lines.append(f"  {sum(account.faults.values()):>6}  faults in all; {account.epochs} times a host joined, "
                 f"{account.coordinators} coordinators led, {account.trainers} processes were the trainer")
    for name, label in PROMISES.items():
        found = getattr(account, name)
        lines.append(f"  {len(found):>6}  {label}")
        lines += [f"          {line}" for line in found[:10]]
    for what, times, low in (("a fault to the next finished task", account.recoveries, False),
                             ("a fault to HostLost", account.known, False),
                             ("tasks/s of a host while another is away, of its own before", account.away, True)):
        if times:
            (worst, cause), most, unit = (min(times), "least", "") if low else (max(times), "most", " s")
            middle = statistics.median(value for value, _ in times)
            lines.append(f"  {what}: median {middle:.2f}{unit}, {most} {worst:.2f}{unit} ({cause}), of {len(times)}")
    for what, shares, form in (("tasks/s before any fault", account.spread, ".2f"),
                               ("places given away then", account.given, ".1%"),
                               ("places in which tasks slept then", account.busy, ".1%")):
        if shares:
            lines.append(f"  {what}: " + ", ".join(f"{host} {value:{form}}" for host, value in shares.items()))
    return "\n".join(lines)
