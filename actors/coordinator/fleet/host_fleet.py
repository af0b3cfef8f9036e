"""Hosts that joined the head: their admission, loss and departure, and the connection to their processes.

Each host has one connection to this coordinator (`actors/hosts/link.py`), which its runners and its guardian share. A
`FarProcess` is the address for answers to one of them. A host that is silent for `hosts.timeout` seconds is lost
together with its runners. Their units are attempted again, and the loss counts against none of them. A new coordinator
gives hosts the same time to find it.
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
from trinity_es.actors.hosts.host_comparison import machine_facts
from trinity_es.actors.messages import HostDrained, HostLeaves, RunnerDied
from trinity_es.actors.system_key import read_host_key
from trinity_es.events import vocabulary as ev
from trinity_es.events.software_version import VERSION
from trinity_es.projections.host_states import Host, Hosts, host_of, left_reason, lost_reason
from trinity_es.projections.runner import Lives, RunnerState

if TYPE_CHECKING:
    from trinity_es.actors.hosts.link import HeadEnd

__all__ = ["LOOK_SECONDS", "FarProcess", "HostFleet", "far_runners", "lease_fields", "start_head"]

LOOK_SECONDS = 0.5
"""Interval between two checks for silent hosts."""
RETURN_SECONDS = 5.0
"""Minimum time that a host has to reach a new coordinator, even if it was silent before."""
SHOWN_SECONDS = 600.0
"""How long `status` shows a lost host."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FarProcess:
    """Address of a process on another host: a runner's name, "" for the guardian, "client ID" for a client."""

    host: str
    name: str


def far_runners(hosts: Hosts, lives: Lives) -> dict[str, int]:
    """Return the incarnation of each runner on another host whose process may be alive."""
    present_hosts = {host.name for host in hosts.values() if host.is_present}
    return {name: n for (name, n), life in lives.items() if host_of(name) in present_hosts and not life.state.gone}


def lease_fields(settings: HostsConfig) -> tuple[dict[str, str], Certificate | None]:
    """Return the lease's fields by which hosts find the head, and a new certificate; None if no hosts may join."""
    certificate = Certificate.create() if settings.address else None
    digest = certificate.digest.hex() if certificate is not None else ""
    return {"hosts": settings.address, "certificate": digest}, certificate


def start_head(
    settings: HostsConfig, certificate: Certificate, post: Callable[[Callable[[], None]], None],
    fleet: Callable[[], HostFleet | None], folders: Callable[[], list[str]],
) -> HeadEnd:
    """Start the server that hosts connect to, and return it. `post` has the fleet that `fleet()` returns handle each
    message in the actor's loop; while there is none, messages are dropped. `folders` returns the folders of models and
    weights that hosts may copy from the head."""
    from trinity_es.actors.hosts.link import HeadEnd  # it imports aiohttp, which a run on one host does not need

    address, _, port = (settings.listen or settings.address).rpartition(":")

    def call_fleet(call: Callable[[HostFleet], None]) -> None:
        def call_if_open() -> None:
            current_fleet = fleet()
            if current_fleet is not None:
                call(current_fleet)

        post(call_if_open)

    head_end = HeadEnd(
        (address.strip("[]"), int(port)), partial(read_host_key, settings.key_file), certificate, settings.timeout,
        hello=lambda offer, where, answer: call_fleet(lambda fleet: fleet.hello(offer, where, answer)),
        take=lambda host, epoch, items: call_fleet(lambda fleet: fleet.take(host, epoch, items)),
        gone=lambda host, epoch, why, heard: call_fleet(lambda fleet: fleet.on_disconnected(host, epoch, why, heard)),
        facts=lambda: machine_facts(folders()),
    )
    head_end.start()
    return head_end


class HostFleet:
    """Hosts of a run. Their messages are handled only while the log is open; hosts repeat unanswered ones."""

    def __init__(
        self, settings: HostsConfig, registry: RunnerRegistry, head_end: HeadEnd, *, epoch: int,
        handle: Callable[[Any, Any], None], end_runner: Callable[[RunnerDied], None],
        models: Mapping[str, str] = MappingProxyType({}), heard_at: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`handle(message, sender)` handles a message like one of a local actor; `end_runner` handles a runner's loss.

        `epoch` is that of the coordinator's lease. `models` has the config's model paths by name. `heard_at` has the
        monotonic seconds at which an earlier coordinator last heard from each host.
        """
        self._settings, self._registry, self._live = settings, registry, registry.live
        self._head_end, self._epoch, self._handle, self._end_runner = head_end, epoch, handle, end_runner
        self._models = models
        self._connected_epochs: dict[str, int] = {}
        """Host -> epoch of its connection. A host that was just admitted gets its connection later."""
        # A host that was silent under an earlier coordinator does not get the whole time again, only enough to return.
        earliest = registry.actor.now() - settings.timeout + min(RETURN_SECONDS, settings.timeout)
        self._heard_at = {host: max(at, earliest) for host, at in heard_at.items()}
        """Host without a connection -> monotonic seconds at which it was last heard from."""
        self._end_reasons: dict[str, str] = {}
        """Host -> reason for the end of its last connection."""
        self._lost_at: dict[str, float] = {}
        """Host -> monotonic seconds at which this coordinator declared it lost."""

    def last_heard(self) -> dict[str, float]:
        """Return the monotonic seconds at which each present host was last heard from."""
        heard_at = self._heard_at | self._head_end.last_heard()
        return {host.name: heard_at[host.name] for host in self.present() if host.name in heard_at}

    def present(self) -> list[Host]:
        """Return the hosts that have joined and are neither gone nor lost."""
        return [host for host in self._live.hosts.values() if host.is_present]

    # --- messages of connections ------------------------------------------------------------------------------------
    def hello(self, offer: Mapping[str, Any], address: str, answer: Callable[[Admission], None]) -> None:
        """Admit or refuse a host that wants to join, and call `answer` once everything recorded so far is durable.

        A request for a folder (`fetch`) is answered at once, since the host has proved that it has the key. A `check`
        only asks whether the host would be admitted.
        """
        if "fetch" in offer:
            answer(self._folder_answer(offer))
            return
        try:
            hello = hosts.Hello(
                str(offer["name"]), str(offer["life"]), address, int(offer["pid"]),
                {str(k): int(v) for k, v in dict(offer["places"]).items()}, str(offer["build"]),
            )
        except (KeyError, TypeError, ValueError):
            answer(Admission(refused="its request to join can't be read: does it run another version?", for_good=True))
            return
        is_connected = hello.name in self._connected_epochs
        decision = hosts.admit(self._live.hosts, hello, build=VERSION, connected=is_connected)
        if isinstance(decision, hosts.Refusal):
            # Durable first: a head that was cut off believes all hosts lost, while another head leads and has them.
            refusal = Admission(refused=decision.reason, for_good=decision.for_good)
            self._live.when_durable(lambda: answer(refusal))
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
        self._heard_at[hello.name] = self._registry.actor.now()
        self._live.when_durable(lambda: answer(Admission(epoch, self._epoch)))

    def _folder_answer(self, offer: Mapping[str, Any]) -> Admission:
        wanted = offer["fetch"] if isinstance(offer["fetch"], Mapping) else {}
        folder = hosts.find_folder(
            wanted, str(offer.get("build")), own_build=VERSION, weights=self._live.weights,
            adapters=self._live.adapters, models=self._models,
        )
        if isinstance(folder, hosts.Refusal):
            return Admission(refused=folder.reason, for_good=folder.for_good)
        return Admission(folder=folder)

    def take(self, host: str, epoch: int, items: Items) -> None:
        """Handle the messages of a host's processes. If their epoch is over, drop them and close the connection."""
        state = self._live.hosts.get(host)
        if state is None or state.epoch != epoch or not state.is_present:
            self._head_end.hang_up(host, epoch)
            return
        if self._connected_epochs.get(host) != epoch:
            self._connected_epochs[host] = epoch
            self._heard_at.pop(host, None)
        for name, message in items:
            if isinstance(message, HostLeaves):
                self._on_leaves(state, message)
            elif not name or host_of(name) == host or name.startswith("client "):
                self._handle(message, FarProcess(host, name))
            else:
                _log.error("host %s sent a message of %s, which is not its own runner", host, name)

    def on_disconnected(self, host: str, epoch: int, reason: str, heard_at: float) -> None:
        """Note that a host's connection ended. The host is lost if it does not return within `hosts.timeout`."""
        if self._connected_epochs.get(host) == epoch:
            del self._connected_epochs[host]
            self._heard_at[host], self._end_reasons[host] = heard_at, reason
            _log.warning("the connection to host %s #%d ended: %s", host, epoch, reason)

    # --- time -------------------------------------------------------------------------------------------------------
    def check_connections(self) -> None:
        """Record the loss of hosts that were silent for too long, and tell drained hosts that they may leave."""
        now = self._registry.actor.now()
        present_hosts, open_connections = self.present(), self._head_end.last_heard()
        units = self.unit_counts() if any(host.state == "draining" for host in present_hosts) else {}
        for host in present_hosts:
            if self._is_connected(host):
                if host.state == "draining" and not units.get(host.name):
                    self.send(FarProcess(host.name, ""), HostDrained())
                if host.name in open_connections:
                    self._heard_at.pop(host.name, None)
                    continue
                # The connection has ended, so `on_disconnected` follows; else the host's time begins now.
            since = self._heard_at.setdefault(host.name, now)
            if now - since >= self._settings.timeout:
                cause = self._end_reasons.get(host.name, "it did not come back to this coordinator")
                for event in hosts.lose(self._live.hosts, host.name, f"not heard of for {now - since:.0f} s: {cause}"):
                    self._lose(event)

    def drain(self, name: str, reason: str) -> None:
        """Give a host no new units. Once its runners are without units, it may leave."""
        self._live.record(*hosts.drain(self._live.hosts, name, reason))

    def status(self) -> list[dict[str, Any]]:
        """Return a row of plain JSON for each present host, and for each that was lost recently."""
        now = self._registry.actor.now()
        shown_hosts = [h for h in self._live.hosts.values() if h.is_present or (
            h.state == "lost" and now - self._lost_at.get(h.name, float("-inf")) < SHOWN_SECONDS)]
        unit_counts, runners_by_host = self.unit_counts(), dict[str, list[str]]()
        for name, runner in self._registry.runners.items():
            if not runner.state.gone:
                runners_by_host.setdefault(host_of(name), []).append(name)
        return [
            {
                "host": h.name, "epoch": h.epoch, "state": h.state, "address": h.address, "pid": h.pid,
                "places": dict(h.places), "reason": h.reason, "connected": self._is_connected(h),
                "away_for": None if self._is_connected(h) else now - self._heard_at.get(h.name, now),
                "why_away": self._end_reasons.get(h.name, ""), "lost_after": self._settings.timeout,
                "runners": sorted(runners_by_host.get(h.name, ())), "units": unit_counts.get(h.name, 0),
            }
            for h in sorted(shown_hosts, key=lambda h: h.name)
        ]

    def _is_connected(self, host: Host) -> bool:
        """Return True if the host has a connection with its current epoch, as far as this coordinator knows."""
        return host.is_present and self._connected_epochs.get(host.name) == host.epoch

    def stop(self) -> None:
        self._head_end.stop()

    # --- messages to hosts ------------------------------------------------------------------------------------------
    def send(self, to: FarProcess, message: Any) -> None:
        self._head_end.send(to.host, to.name, message)

    def guardian_of(self, runner: str, head_guardian: Any) -> Any:
        """Return the address of the guardian that started a runner: `head_guardian` for a runner on the head."""
        host = host_of(runner)
        return FarProcess(host, "") if host else head_guardian

    # --- departure and loss of hosts --------------------------------------------------------------------------------
    def _on_leaves(self, host: Host, message: HostLeaves) -> None:
        """Give a leaving host no new units. After its final message, record that it left and end its runners."""
        self.drain(host.name, message.reason)
        if message.final:
            reason = host.reason or message.reason
            self._live.record(ev.HostLeft(host=host.name, epoch=host.epoch, reason=reason))
            self._end_runners(host.name, left_reason(host.name, reason))

    def _lose(self, event: ev.Event) -> None:
        assert isinstance(event, ev.HostLost)
        self._live.record(event)
        self._lost_at[event.host] = self._registry.actor.now()
        self._connected_epochs.pop(event.host, None)
        self._head_end.hang_up(event.host, event.epoch)
        _log.error("host %s #%d is lost: %s", event.host, event.epoch, event.reason)
        self._end_runners(event.host, lost_reason(event.host, event.reason))

    def _end_runners(self, host: str, reason: str) -> None:
        """Record the end of a host's runners, except of runners whose end is recorded and that have no units."""
        end_states = (RunnerState.LOST, RunnerState.QUARANTINED, RunnerState.RETIRED)
        loads = self._live.in_flight.loads
        for life in [life for (name, _), life in self._live.lives.items() if host_of(name) == host]:
            # A retired runner may still have units, if its host ended before they did.
            if life.state not in end_states or loads.get((life.name, life.incarnation)):
                self._end_runner(RunnerDied(life.name, life.incarnation, reason, model=life.model, asked=True))

    def unit_counts(self) -> dict[str, int]:
        """Return the number of units in flight on each host that has any."""
        counts: dict[str, int] = {}
        for (name, _), load in self._live.in_flight.loads.items():
            counts[host_of(name)] = counts.get(host_of(name), 0) + load
        return counts
