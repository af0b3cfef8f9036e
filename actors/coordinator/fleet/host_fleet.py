"""Hosts that joined the head: their admission, loss and departure, and the connection to their processes.

Each host has one connection to this coordinator (`actors/hosts/link.py`), which its runners and its guardian share.
Here their messages get an address for the answers (`FarProcess`). A host that is silent for `hosts.timeout` seconds is
lost together with its runners; their units are attempted again and not blamed. After a takeover, hosts have the same
time to find the new coordinator.
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
from trinity_es.actors.hosts.admission_answer import Admission, Items
from trinity_es.actors.hosts.certificate import Certificate
from trinity_es.actors.hosts.host_comparison import facts
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
"""Interval between two checks for silent hosts."""
BACK_SECONDS = 5.0
"""Minimum time that a host has to reach a new coordinator, even if it was silent under the previous one."""
SHOWN_SECONDS = 600.0
"""How long `status` shows a lost host."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FarProcess:
    """Address of a process on another host: a runner by its name, the guardian by "", a client by its request."""

    host: str
    name: str


def far_lives(states: Hosts, lives: Lives) -> dict[str, int]:
    """Return the incarnation of each runner that may live on another host."""
    present = {host.name for host in states.values() if host.there}
    return {name: n for (name, n), life in lives.items() if host_of(name) in present and not life.state.gone}


def place_of_head(settings: HostsConfig) -> tuple[dict[str, str], Certificate | None]:
    """Return the lease's fields about where hosts can join, and the head's certificate; None if no host may join."""
    certificate = Certificate.made() if settings.address else None
    digest = certificate.digest.hex() if certificate is not None else ""
    return {"hosts": settings.address, "certificate": digest}, certificate


def listening(
    settings: HostsConfig, certificate: Certificate, post: Callable[[Callable[[], None]], None],
    fleet: Callable[[], HostFleet | None], folders: Callable[[], list[str]],
) -> HeadEnd:
    """Return a started server for hosts, whose messages are handled in the actor's loop.

    `folders` returns the folders of models and weights that hosts need too.
    """
    from trinity_es.actors.hosts.link import HeadEnd  # it imports aiohttp, which a run on one host does not need

    address, _, port = (settings.listen or settings.address).rpartition(":")

    def do(call: Callable[[HostFleet], None]) -> None:
        def now() -> None:
            current = fleet()
            if current is not None:
                call(current)

        post(now)

    end = HeadEnd(
        (address.strip("[]"), int(port)), partial(host_key, settings.key_file), certificate, settings.timeout,
        hello=lambda offer, where, answer: do(lambda fleet: fleet.hello(offer, where, answer)),
        take=lambda host, epoch, items: do(lambda fleet: fleet.take(host, epoch, items)),
        gone=lambda host, epoch, why, heard: do(lambda fleet: fleet.gone(host, epoch, why, heard)),
        facts=lambda: facts(folders()),
    )
    end.start()
    return end


class HostFleet:
    """Hosts of a run, handled only while the log is open; hosts repeat what they sent meanwhile."""

    def __init__(
        self, settings: HostsConfig, registry: RunnerRegistry, end: HeadEnd, *, epoch: int,
        handle: Callable[[Any, Any], None], died: Callable[[RunnerDied], None],
        models: Mapping[str, str] = MappingProxyType({}), heard: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`handle(message, from)` takes a message as if it came from an actor; `died` takes the loss of a runner.

        `models` has the config's model paths by name. `heard` has the time when a predecessor last heard of each host,
        in monotonic seconds.
        """
        self._settings, self._registry, self._live = settings, registry, registry.live
        self._end, self._epoch, self._handle, self._died = end, epoch, handle, died
        self._models = models
        self._connected: dict[str, int] = {}
        """Epoch of each host that has a connection; a host just admitted has none yet."""
        # A host that was silent under a predecessor does not get the whole time again, only enough to come back.
        least = registry.sender.now() - settings.timeout + min(BACK_SECONDS, settings.timeout)
        self._heard = {host: max(at, least) for host, at in heard.items()}
        """When each host without a connection was last heard of, monotonic seconds."""
        self._end_reasons: dict[str, str] = {}
        """Reason for the end of each host's last connection."""
        self._lost: dict[str, float] = {}
        """When this coordinator declared each host lost, monotonic seconds."""

    def heard(self) -> dict[str, float]:
        """Return when each present host was last heard of, monotonic seconds."""
        last = self._heard | self._end.heard()
        return {host.name: last[host.name] for host in self.there() if host.name in last}

    def there(self) -> list[Host]:
        return [host for host in self._live.hosts.values() if host.there]

    # --- messages of connections ------------------------------------------------------------------------------------
    def hello(self, offer: Mapping[str, Any], address: str, answer: Callable[[Admission], None]) -> None:
        """Decide on a host that wants to join, and answer once everything recorded so far is durable.

        Answer a request for files at once, since its sender has shown that it has the key.
        """
        if "fetch" in offer:
            answer(self._folder(offer))
            return
        try:
            hello = hosts.Hello(
                str(offer["name"]), str(offer["life"]), address, int(offer["pid"]),
                {str(k): int(v) for k, v in dict(offer["places"]).items()}, str(offer["build"]),
            )
        except (KeyError, TypeError, ValueError):
            answer(Admission(refused="its hello is not understood: does it run another version?", for_good=True))
            return
        decision = hosts.hello(self._live.hosts, hello, build=VERSION, connected=hello.name in self._connected)
        if isinstance(decision, hosts.Refusal):
            # Durable first: a head that was cut off believes all hosts lost, while another head leads and has them.
            refusal = Admission(refused=decision.reason, for_good=decision.for_good)
            self._live.then(lambda: answer(refusal))
            return
        if offer.get("check"):
            answer(Admission())
            return
        for event in decision:
            if isinstance(event, ev.HostLost):
                self._lose(event)
            else:
                self._live.record(event)
        epoch = self._live.hosts[hello.name].epoch
        self._heard[hello.name] = self._registry.sender.now()
        self._live.then(lambda: answer(Admission(epoch, self._epoch)))

    def _folder(self, offer: Mapping[str, Any]) -> Admission:
        wanted = offer["fetch"] if isinstance(offer["fetch"], Mapping) else {}
        folder = hosts.folder_of(
            wanted, str(offer.get("build")), own_build=VERSION, weights=self._live.weights,
            adapters=self._live.adapters, models=self._models,
        )
        if isinstance(folder, hosts.Refusal):
            return Admission(refused=folder.reason, for_good=folder.for_good)
        return Admission(folder=folder)

    def take(self, host: str, epoch: int, items: Items) -> None:
        """Handle messages of a host's processes; drop those of a past epoch, and close their connection."""
        state = self._live.hosts.get(host)
        if state is None or state.epoch != epoch or not state.there:
            self._end.hang_up(host, epoch)
            return
        if self._connected.get(host) != epoch:
            self._connected[host] = epoch
            self._heard.pop(host, None)
        for name, message in items:
            if isinstance(message, HostLeaves):
                self._leaves(state, message)
            elif not name or host_of(name) == host or name.startswith("client "):
                self._handle(message, FarProcess(host, name))
            else:
                _log.error("host %s sent a message of %s, which is not its own runner", host, name)

    def gone(self, host: str, epoch: int, why: str, heard: float) -> None:
        """Note that a connection ended; its host has until its timeout to come back."""
        if self._connected.get(host) == epoch:
            del self._connected[host]
            self._heard[host], self._end_reasons[host] = heard, why
            _log.warning("the connection to host %s #%d ended: %s", host, epoch, why)

    # --- time -------------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Find hosts that were silent for too long, and drained hosts that may leave."""
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
                # Its connection has ended, and `gone` follows; if it does not, the host's time begins now.
            since = self._heard.setdefault(host.name, now)
            if now - since >= self._settings.timeout:
                cause = self._end_reasons.get(host.name, "it did not come back to this coordinator")
                for event in hosts.lost(self._live.hosts, host.name, f"not heard of for {now - since:.0f} s: {cause}"):
                    self._lose(event)

    def drain(self, name: str, reason: str) -> None:
        """Give a host no new units; once its runners have none left it may leave."""
        self._live.record(*hosts.drained(self._live.hosts, name, reason))

    def status(self) -> list[dict[str, Any]]:
        """Return every present host, and those lost recently, as plain JSON."""
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
                "why_away": self._end_reasons.get(h.name, ""), "lost_after": self._settings.timeout,
                "runners": sorted(runners.get(h.name, ())),
                "units": units.get(h.name, 0),
            }
            for h in sorted(shown, key=lambda h: h.name)
        ]

    def _is_connected(self, host: Host) -> bool:
        return host.there and self._connected.get(host.name) == host.epoch

    def stop(self) -> None:
        self._end.stop()

    # --- messages to hosts ------------------------------------------------------------------------------------------
    def send(self, to: FarProcess, message: Any) -> None:
        self._end.send(to.host, to.name, message)

    def guardian_of(self, runner: str, own: Any) -> Any:
        """Return the guardian of a runner, which is `own` on the head."""
        host = host_of(runner)
        return FarProcess(host, "") if host else own

    # --- departure and loss of hosts --------------------------------------------------------------------------------
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
            # A retired runner may still have units, if its host ended before they did.
            if life.state not in over or loads.get((life.name, life.incarnation)):
                self._died(RunnerDied(life.name, life.incarnation, reason, model=life.model, asked=True))

    def units_of(self, host: str) -> int:
        return self._units().get(host, 0)

    def _units(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (name, _), units in self._live.in_flight.loads.items():
            counts[host_of(name)] = counts.get(host_of(name), 0) + units
        return counts
