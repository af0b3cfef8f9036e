"""The hosts besides the head's own: who is taken in, who is lost, who leaves; and the way to their runners.

Each host has one connection to this coordinator (`actors/hosts/link.py`), on which its runners and its guardian speak
as the head's own do: here their messages get the address that leads back to them. A host that is not heard of for
`hosts.timeout` seconds is lost, and with it all its runners at once: what they had is attempted again and blamed for
nothing. A coordinator that takes over gives the hosts of its predecessor the same time to find it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trinity_es.actors.config.hosts import HostsConfig
from trinity_es.actors.coordinator.decisions import host_decisions as hosts
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.hosts.admission import Admission, Items
from trinity_es.actors.hosts.certificate import Certificate
from trinity_es.actors.hosts.check import facts
from trinity_es.actors.messages import HostDrained, HostLeaves, RunnerDied
from trinity_es.actors.system_key import host_key
from trinity_es.events import vocabulary as ev
from trinity_es.events.software_version import VERSION
from trinity_es.projections.host_states import Host, Hosts, host_of, left_reason, lost_reason
from trinity_es.projections.runner import Lives, RunnerState

if TYPE_CHECKING:
    from trinity_es.actors.hosts.link import HeadEnd

__all__ = ["LOOK_SECONDS", "FarProcess", "HostFleet", "far_lives", "listening", "place_of_head"]

LOOK_SECONDS = 0.5
"""Interval between two looks at who was not heard of."""
BACK_SECONDS = 5.0
"""How long a host has at least to come back to a new coordinator, however long it was silent under the one before."""
SHOWN_SECONDS = 600.0
"""How long a host that was lost is shown."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FarProcess:
    """Where a process of another host is: a runner by its name, the guardian by none, a client by its request."""

    host: str
    name: str


def far_lives(known: Hosts, lives: Lives) -> dict[str, int]:
    """Return the incarnation of each runner that may live on another host: its host has time to come back."""
    there = {host.name for host in known.values() if host.there}
    return {name: n for (name, n), life in lives.items() if host_of(name) in there and not life.state.gone}


def place_of_head(settings: HostsConfig) -> tuple[dict[str, str], Certificate | None]:
    """Return what the lease is to say of where hosts are taken in, and the certificate that it names, if they are."""
    made = Certificate.made() if settings.address else None
    return {"hosts": settings.address, "certificate": made.digest.hex() if made is not None else ""}, made


def listening(
    settings: HostsConfig, certificate: Certificate, post: Callable[[Callable[[], None]], None],
    fleet: Callable[[], HostFleet | None], folders: Callable[[], list[str]],
) -> HeadEnd:
    """Return the end that listens for hosts; what it hears is done in the actor's loop. `folders`: those that hosts
    have to have too, of models and weights."""
    from trinity_es.actors.hosts.link import HeadEnd  # with aiohttp, which a run of one host does not need

    address, _, port = (settings.listen or settings.address).rpartition(":")

    def do(call: Callable[[HostFleet], None]) -> None:
        def now() -> None:
            found = fleet()
            if found is not None:
                call(found)

        post(now)

    end = HeadEnd(
        (address.strip("[]"), int(port)), partial(host_key, settings.key_file), certificate, settings.timeout,
        hello=lambda said, where, answer: do(lambda fleet: fleet.hello(said, where, answer)),
        take=lambda host, epoch, items: do(lambda fleet: fleet.take(host, epoch, items)),
        gone=lambda host, epoch, why, heard: do(lambda fleet: fleet.gone(host, epoch, why, heard)),
        facts=lambda: facts(folders()),
    )
    end.start()
    return end


class HostFleet:
    """See the module. Works only while the log is open; what comes meanwhile is said again."""

    def __init__(
        self, settings: HostsConfig, registry: RunnerRegistry, end: HeadEnd, *, epoch: int,
        handle: Callable[[Any, Any], None], died: Callable[[RunnerDied], None],
        models: Mapping[str, str] = MappingProxyType({}), heard: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`epoch`: of the coordinator. `handle(message, from)` takes a message as if it came from an actor; `died` the
        loss of a runner. `models`: the model paths of the config, by the names of the models. `heard`: when a
        predecessor of this one last heard of hosts, monotonic seconds."""
        self._settings, self._registry, self._live = settings, registry, registry.live
        self._end, self._epoch, self._handle, self._died = end, epoch, handle, died
        self._models = models
        self._connected: dict[str, int] = {}
        """Host -> epoch, of those that have a connection; one that is only taken in has none yet."""
        # A host that was silent under a predecessor is not given the whole time again, only enough to come back.
        least = registry.sender.now() - settings.timeout + min(BACK_SECONDS, settings.timeout)
        self._heard = {host: max(at, least) for host, at in heard.items()}
        """When a host without a connection was last heard, or seen to have none, monotonic seconds."""
        self._why: dict[str, str] = {}
        """Why a connection ended."""
        self._lost: dict[str, float] = {}
        """When this coordinator saw a host be lost, monotonic seconds."""

    def heard(self) -> dict[str, float]:
        """Return when each host that takes part was last heard of, monotonic seconds."""
        last = self._heard | self._end.heard()
        return {host.name: last[host.name] for host in self.there() if host.name in last}

    def there(self) -> list[Host]:
        """Return the hosts that take part."""
        return [host for host in self._live.hosts.values() if host.there]

    # --- what the connection tells ----------------------------------------------------------------------------------
    def hello(self, said: Mapping[str, Any], address: str, answer: Callable[[Admission], None]) -> None:
        """Decide on a host that wants to take part; it is told when that, and what it rests on, is in the log. One that
        wants files is told at once: it shows for it that it has the key."""
        if "fetch" in said:
            answer(self._folder(said))
            return
        try:
            asks = hosts.Hello(
                str(said["name"]), str(said["life"]), address, int(said["pid"]),
                {str(k): int(v) for k, v in dict(said["places"]).items()}, str(said["build"]),
            )
        except (KeyError, TypeError, ValueError):
            answer(Admission(refused="what it says of itself is not understood: another version?", for_good=True))
            return
        decided = hosts.hello(self._live.hosts, asks, build=VERSION, connected=asks.name in self._connected)
        if isinstance(decided, hosts.Refusal):
            # Durable first: a head that was cut off believes all hosts lost, while another leads and has them.
            refusal = Admission(refused=decided.reason, for_good=decided.for_good)
            self._live.then(lambda: answer(refusal))
            return
        if said.get("check"):
            answer(Admission())
            return
        for event in decided:
            if isinstance(event, ev.HostLost):
                self._lose(event)
            else:
                self._live.record(event)
        epoch = self._live.hosts[asks.name].epoch
        self._heard[asks.name] = self._registry.sender.now()
        self._live.then(lambda: answer(Admission(epoch, self._epoch)))

    def _folder(self, said: Mapping[str, Any]) -> Admission:
        """Return which folder a host gets the files of, or why none."""
        asked = said["fetch"] if isinstance(said["fetch"], Mapping) else {}
        found = hosts.folder_of(
            asked, str(said.get("build")), own_build=VERSION, weights=self._live.weights, adapters=self._live.adapters,
            models=self._models,
        )
        if isinstance(found, hosts.Refusal):
            return Admission(refused=found.reason, for_good=found.for_good)
        return Admission(folder=found)

    def take(self, host: str, epoch: int, items: Items) -> None:
        """Take what a host's processes say. What comes of an epoch that is over is dropped; its connection ends."""
        known = self._live.hosts.get(host)
        if known is None or known.epoch != epoch or not known.there:
            self._end.hang_up(host, epoch)
            return
        if self._connected.get(host) != epoch:
            self._connected[host] = epoch
            self._heard.pop(host, None)
        for name, message in items:
            if isinstance(message, HostLeaves):
                self._leaves(known, message)
            elif not name or host_of(name) == host or name.startswith("client "):
                self._handle(message, FarProcess(host, name))
            else:
                _log.error("host %s speaks for %s, which is not its own", host, name)

    def gone(self, host: str, epoch: int, why: str, heard: float) -> None:
        """Take note that a connection ended: its host, last heard then, has some seconds to come back."""
        if self._connected.get(host) == epoch:
            del self._connected[host]
            self._heard[host], self._why[host] = heard, why
            _log.warning("the connection to host %s #%d ended: %s", host, epoch, why)

    # --- time -------------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """See who was not heard of for too long, and who has nothing any more and may leave."""
        now = self._registry.sender.now()
        there, open_now = self.there(), self._end.heard()
        units = self._units() if any(host.state == "draining" for host in there) else {}
        for host in there:
            if self._is_connected(host):
                if host.state == "draining" and not units.get(host.name):
                    self.send(FarProcess(host.name, ""), HostDrained())
                if host.name in open_now:
                    self._heard.pop(host.name, None)
                    continue
                # Its connection ended, which is told in a moment; were it not, its time begins now.
            since = self._heard.setdefault(host.name, now)
            if now - since >= self._settings.timeout:
                why = self._why.get(host.name, "it did not come back to this coordinator")
                for event in hosts.lost(self._live.hosts, host.name, f"not heard of for {now - since:.0f} s: {why}"):
                    self._lose(event)

    def drain(self, name: str, reason: str) -> None:
        """Have a host get nothing new; when its runners have nothing any more it is told, and leaves."""
        self._live.record(*hosts.drained(self._live.hosts, name, reason))

    def status(self) -> list[dict[str, Any]]:
        """Return every host that takes part, and those lost not long ago, as plain JSON."""
        now = self._registry.sender.now()
        shown = [h for h in self._live.hosts.values() if h.there or (
            h.state == "lost" and now - self._lost.get(h.name, float("-inf")) < SHOWN_SECONDS)]
        units, runners = self._units(), dict[str, list[str]]()
        for name, runner in self._registry.runners.items():
            if not runner.state.gone:
                runners.setdefault(host_of(name), []).append(name)
        return [
            {
                "host": h.name, "epoch": h.epoch, "state": h.state, "address": h.address, "pid": h.pid,
                "places": dict(h.places), "reason": h.reason, "connected": self._is_connected(h),
                "away_for": None if self._is_connected(h) else now - self._heard.get(h.name, now),
                "why_away": self._why.get(h.name, ""), "lost_after": self._settings.timeout,
                "runners": sorted(runners.get(h.name, ())),
                "units": units.get(h.name, 0),
            }
            for h in sorted(shown, key=lambda h: h.name)
        ]

    def _is_connected(self, host: Host) -> bool:
        return host.there and self._connected.get(host.name) == host.epoch

    def stop(self) -> None:
        """Hear no host any more."""
        self._end.stop()

    # --- the way there ----------------------------------------------------------------------------------------------
    def send(self, to: FarProcess, message: Any) -> None:
        """Send to a process of another host."""
        self._end.send(to.host, to.name, message)

    def guardian_of(self, runner: str, own: Any) -> Any:
        """Return the guardian of a runner: `own` of those of the head."""
        host = host_of(runner)
        return FarProcess(host, "") if host else own

    # --- the ends of hosts ------------------------------------------------------------------------------------------
    def _leaves(self, host: Host, message: HostLeaves) -> None:
        self.drain(host.name, message.reason)
        if message.final:
            reason = host.reason or message.reason
            self._live.record(ev.HostLeft(host=host.name, epoch=host.epoch, reason=reason))
            self._end_runners(host.name, left_reason(host.name, reason))

    def _lose(self, event: ev.Event) -> None:
        assert isinstance(event, ev.HostLost)
        self._live.record(event)
        self._lost[event.host] = self._registry.sender.now()
        self._connected.pop(event.host, None)
        self._end.hang_up(event.host, event.epoch)
        _log.error("host %s #%d is lost: %s", event.host, event.epoch, event.reason)
        self._end_runners(event.host, lost_reason(event.host, event.reason))

    def _end_runners(self, host: str, reason: str) -> None:
        over = (RunnerState.LOST, RunnerState.QUARANTINED, RunnerState.RETIRED)
        loads = self._live.in_flight.loads
        for life in [life for (name, _), life in self._live.lives.items() if host_of(name) == host]:
            # One that retired may have units still: its host ended before they did.
            if life.state not in over or loads.get((life.name, life.incarnation)):
                self._died(RunnerDied(life.name, life.incarnation, reason, model=life.model, asked=True))

    def units_of(self, host: str) -> int:
        """Count the units that a host's runners have."""
        return self._units().get(host, 0)

    def _units(self) -> dict[str, int]:
        """Count the units of the runners of each host that has any."""
        found: dict[str, int] = {}
        for (name, _), units in self._live.in_flight.loads.items():
            found[host_of(name)] = found.get(host_of(name), 0) + units
        return found
