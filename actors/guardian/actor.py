"""The guardian, which starts, watches and restarts all other processes, and does no work that could make it fail.

Runners are its children, not the coordinator's, so they outlive a coordinator. The guardian tells runners where the
coordinator and the auxiliary models are, the coordinator which runners died, and clients where to send requests.

A child fails in four ways: its process ends (Thespian reports it), it never sends a heartbeat, its heartbeat stops, or
its engine's loop does not answer although the heartbeat goes on. In the last three the guardian kills it with SIGKILL,
a runner with its whole process group. `supervision.py` decides which child is overdue and when it is started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from thespian.actors import ActorExitRequest

from trinity_es.actors import messages, requests
from trinity_es.actors.base import BaseActor, kill_group, process_start_time
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.engines.devices import first_gpus
from trinity_es.actors.frames import PROTOCOL
from trinity_es.actors.guardian.log_size_limit import cut_long_files, standard_output_file
from trinity_es.actors.guardian.supervision import CHECK_SECONDS, ENDED, Child, Policy, Supervision
from trinity_es.actors.runner.actor import Runner, import_ahead
from trinity_es.actors.system_end_checks import end_processes, owner_end_reason
from trinity_es.events.store.checks.log_end import Claim

__all__ = ["NAME", "Guardian", "host_agent_class", "import_ahead"]

NAME = "trinity-es-guardian"
"""Global name of the guardian in the actor system."""

END_SECONDS = 20.0
"""How long an orderly end may take before the processes are killed."""
RETIRE_SECONDS = 10.0
"""How long runners may take to stop their engines before the coordinator closes the log without them."""
LEFT_SECONDS = 1.0
"""Delay before a retired runner is ended, so that its last messages arrive."""
CENSUS_CHECKS = 10
"""Number of checks between two EndedRunners messages."""


def host_agent_class() -> type[BaseActor]:
    """Import and return HostAgent. Only runs on several hosts need it, and it imports aiohttp."""
    from trinity_es.actors.hosts.host_agent import HostAgent

    return HostAgent


class Guardian(BaseActor):
    """Guardian of one system. The launcher starts it with Configure, and clients find it under NAME."""

    def on_Configure(self, message: messages.Configure, sender: Any) -> None:
        """Start the runners of this host and the coordinator (on a joined host: its host agent), and watch them."""
        if hasattr(self, "config"):
            return  # the launcher sent it twice
        self.config = message.config
        system = self.config.system
        parent = os.getppid()  # top-level actors are children of the admin
        self.admin: dict[str, Any] = {
            "port": message.port, "pid": parent, "started": process_start_time(parent),
            "guardian": os.getpid(), "guardian_started": process_start_time(os.getpid()),
            "protocol": PROTOCOL, "owner": self.config.owner,
        }
        self.open_log(system.log_dir, "guardian")
        self.policy = Policy(
            restarts=system.restarts, pause=system.restart_pause, heartbeat_timeout=system.heartbeat_timeout,
            hang_timeout=system.hang_timeout, startup_timeout=system.startup_timeout)
        self.supervision = Supervision(self.policy, self.now())
        self.children, self.runners = self.supervision.children, self.supervision.runners
        self.coordinator_address: Any = None
        self.waiting_coordinator: Any = None
        """Address of a coordinator that can't take over yet. It answers clients with the reason."""
        self.epoch = 0
        self.log_end = message.known
        self.hosts_heard: dict[str, float] = {}
        self.incarnation = message.first_incarnation - 1
        self.stopping = False
        """True once the children end for good, because the system ends or another one took the store."""
        self.ending = False
        """True once this guardian also ends the other processes of its host."""
        self.fencing_owner = ""
        """Owner of the system that took the store from this one; empty if none did."""
        rollout = self.config.rollout
        count = rollout.engine_num if rollout.engine_type != "http" else 0  # the coordinator sends the list of servers
        host = self.config.host
        suffix = "" if host is None else f"@{host.name}"
        has_engines = host is not None or self.config.hosts.engines_on_head
        slots = [(f"runner-{number}{suffix}", "rollout", rollout) for number in range(count if has_engines else 0)]
        self.urls: dict[str, str] = {}
        """URL of the external server that a runner supervises, by runner."""
        self.weights = 0, ""
        """Version and folder of the rollout model's current weights."""
        for model, engines in self.config.auxiliary.items() if has_engines else ():
            slots += [(f"{model}-{number}{suffix}", model, engines) for number in range(engines.engine_num)]
            self.urls |= {f"{model}-{n}{suffix}": url for n, url in enumerate(engines.servers.urls)}
        sizes = [(name, engines.tensor_parallel_size) for name, _, engines in slots if name not in self.urls]
        self.first_place, self.place_count = first_gpus(sizes), sum(size for _, size in sizes)
        output_file, leader_name = standard_output_file(), "coordinator" if host is None else "host"
        names = ("guardian", leader_name, *(name for name, *_ in slots))
        self.log_files = {f"{system.log_dir}/{name}.log" for name in names}
        if output_file is not None:
            self.log_files.add(output_file)
        self.cut_files: set[str] = set()
        """Log files that were cut at least once."""
        for name, model, _ in slots:
            self.start_runner(name, model)
        self.leader_class = Coordinator if host is None else host_agent_class()
        self.start_coordinator()
        self.check_count = 0
        self.after(CHECK_SECONDS, "check", self.check)

    # --- children ---------------------------------------------------------------------------------------------------
    def start_runner(self, name: str, model: str = "rollout") -> None:
        """Start a process for a runner, and send it the addresses of the coordinator and the auxiliary models."""
        self.incarnation += 1
        child = self.supervision.begin(name, self.incarnation, self.createActor(Runner), self.now(), model)
        url = self.urls.get(name, "")
        place = self.first_place.get(name, 0), self.place_count
        weights = self.weights if model == "rollout" else (0, "")
        self.send(child.address, messages.StartRunner(
            name, self.incarnation, self.config, model, *place, url, weights))
        if self.coordinator_address is not None:
            self.send(child.address, messages.CoordinatorUp(self.coordinator_address, self.epoch))
        self.send_endpoints([child])

    def start_coordinator(self) -> None:
        """Start a coordinator (on a joined host: the host agent), and tell it which runners live."""
        child = self.supervision.begin("coordinator", 0, self.createActor(self.leader_class), self.now())
        alive = {c.name: c.incarnation for c in self.runners() if not c.is_gone()}
        informed_runners = frozenset(alive) if self.epoch else frozenset()  # a coordinator told them the log's end
        self.send(child.address, messages.StartCoordinator(
            self.config, self.admin, alive, self.log_end, informed_runners, self.hosts_heard))
        self.send_endpoints([child])

    def send_endpoints(self, receivers: list[Child] | None = None) -> None:
        """Send the auxiliary models' endpoints to the coordinator and rollout runners among these children, or all."""
        if not self.config.auxiliary:
            return
        models: dict[str, dict[str, str]] = {model: {} for model in self.config.auxiliary}
        for child in self.runners():
            if child.model in models and child.state == "ready" and child.endpoint:
                models[child.model][child.name] = child.endpoint
        for child in list(self.children.values()) if receivers is None else receivers:
            if (child.is_coordinator() or child.model == "rollout") and not child.is_gone():
                self.send(child.address, messages.Endpoints(models))

    def on_Heartbeat(self, message: messages.Heartbeat, sender: Any) -> None:
        """Record a child's heartbeat, and repeat CoordinatorUp if it was lost. Kill the sender if it was replaced."""
        child = self.children.get(message.name)
        if child is None or child.address != sender or child.is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(message.pid, signal.SIGKILL)
            return
        if child.pid != message.pid:
            child.pid, child.started = message.pid, process_start_time(message.pid) or ""
            child.state = "up" if child.state == "starting" else child.state
        child.seen, child.silent = self.now(), message.silent
        if message.waits_for:
            child.born = self.now()  # it can't start yet, so its time to start begins later
        if message.end is not None:
            self.log_end, self.hosts_heard = (Claim(message.end, "the guardian"),), message.hosts_heard
        if child.is_coordinator() and message.epoch and self.coordinator_address is None:
            self.on_CoordinatorUp(messages.CoordinatorUp(sender, message.epoch), sender)  # its own message was lost
        if not child.is_coordinator() and message.epoch < self.epoch and self.coordinator_address is not None:
            self.send(child.address, messages.CoordinatorUp(self.coordinator_address, self.epoch))  # the first was lost

    def on_CoordinatorUp(self, message: messages.CoordinatorUp, sender: Any) -> None:
        """Tell all runners of the new coordinator, and report to it the runners that died."""
        child = self.children["coordinator"]
        if child.address != sender or child.is_gone():
            return  # from an earlier coordinator
        self.coordinator_address, self.epoch = message.coordinator, message.epoch
        self.waiting_coordinator = None
        child.state = "up"
        if child.up_at is None:
            child.up_at = self.now()
        for other in self.runners():
            if other.is_gone():  # perhaps while there was no coordinator to tell
                self.report_death(other)
            else:
                self.send(other.address, message)

    def on_CoordinatorWaits(self, message: messages.CoordinatorWaits, sender: Any) -> None:
        child = self.children["coordinator"]
        if child.address == sender and not child.is_gone():
            self.waiting_coordinator = message.coordinator

    def on_RunnerStatus(self, message: messages.RunnerStatus, sender: Any) -> None:
        """Record a runner's state. If it failed, end its process, except a first one that sent a heartbeat."""
        child = self.children.get(message.name)
        if child is None or child.incarnation != message.incarnation or child.is_gone():
            return
        child.seen = self.now()
        if child.state == message.state:
            return
        child.state, child.endpoint = message.state, message.endpoint
        if child.model != "rollout":
            self.send_endpoints()
        if message.state == "ready":
            child.up_at = self.now()
        elif message.state == "retired" and child.is_leaving:
            self.after(LEFT_SECONDS, f"left:{child.name}", lambda: self.forget_child(child))
        elif message.state == "failed":
            child.reason = message.reason
            # It is not the runner's first process, so the cause may pass: another process in the GPU's memory, say. Or
            # it never sent a heartbeat, and then it can't report to the coordinator itself.
            if (not child.is_first or child.pid == 0) and not self.stopping:
                self.end_child(child, child.end_reason(message.reason))
        self.retire_coordinator_after_runners()

    def on_Servers(self, message: messages.Servers, sender: Any) -> None:
        """Start a runner for each of these external servers, and retire the rollout model's other runners."""
        if sender != self.coordinator_address or self.stopping:
            return
        self.weights = message.weights
        for name, url in message.servers.items():
            self.urls[name] = url
            if name not in self.children:
                self.log_files.add(f"{self.config.system.log_dir}/{name}.log")
                self.start_runner(name)
        for child in [c for c in self.runners() if c.model == "rollout" and c.name not in message.servers]:
            self.retire_runner(child)
        for name, incarnation in message.retire.items():
            if name not in self.children:
                self.send(sender, messages.RunnerDied(name, incarnation, "its server was taken away", asked=True))

    def retire_runner(self, child: Child) -> None:
        """Ask a runner to finish and end, and forget it after RETIRE_SECONDS at the latest."""
        if child.is_gone():
            self.forget_child(child)
        elif not child.is_leaving:
            child.is_leaving = True
            self.send(child.address, messages.Retire())
            self.after(RETIRE_SECONDS, f"left:{child.name}", lambda: self.forget_child(child))

    def forget_child(self, child: Child) -> None:
        """Stop watching a runner that retired, and kill its process if it still runs."""
        if self.children.get(child.name) is not child or self.stopping:
            return
        del self.children[child.name]
        self.cancel_timer(f"left:{child.name}")
        self.cancel_timer(f"start:{child.name}")
        if child.pid and not child.is_gone():
            kill_group(child.pid)
        elif not child.is_gone():
            self.send(child.address, ActorExitRequest())

    def on_child_exit(self, address: Any) -> None:
        """Handle the end of a child's process, which Thespian reports."""
        for child in list(self.children.values()):
            if child.address != address or child.is_gone():
                continue
            if child.pid and process_start_time(child.pid) == child.started:
                continue  # a late report about an earlier actor that had the same address
            self.on_child_ended(child, f"process {child.pid} ended")

    def check(self) -> None:
        """End the system if its owner has ended. End overdue children, cut long logs, repeat some messages."""
        self.after(CHECK_SECONDS, "check", self.check)
        if reason := owner_end_reason(self.admin["owner"]):
            self.end(reason)
        overdue = self.supervision.find_overdue(self.now())
        for path in set(cut_long_files(self.log_files)) - self.cut_files:
            self.cut_files.add(path)
            self.log.warning("%s grew too long and was cut; further cuts of it are not logged", path)
        for child, reason in [] if self.stopping else overdue:
            self.end_child(child, reason)
        self.check_count += 1
        if self.check_count % CENSUS_CHECKS == 0 and self.coordinator_address is not None:
            last_ended = {c.name: c.incarnation if c.is_gone() else c.incarnation - 1 for c in self.runners()}
            self.send(self.coordinator_address, messages.EndedRunners(last_ended))
            self.send_endpoints()

    def on_ReplaceRunner(self, message: messages.ReplaceRunner, sender: Any) -> None:
        """Start a runner again, even if it failed, is quarantined, or waits for its next start."""
        child = self.children.get(message.name)
        if child is None or child.incarnation != message.incarnation or self.stopping:
            return  # done already
        child.deaths = []
        if child.is_gone():
            child.reason, child.state = message.reason, "waiting"
            self.report_death(child, asked=True)
            self.start_again(child)
        else:
            self.end_child(child, message.reason, asked=True)

    def end_child(self, child: Child, reason: str, *, asked: bool = False) -> None:
        """Kill a child's process; `asked` means that the end was requested."""
        if child.pid == 0:
            self.send(child.address, ActorExitRequest())
        elif child.is_coordinator():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        self.on_child_ended(child, reason, asked=asked)

    def report_death(self, child: Child, *, asked: bool = False) -> None:
        if self.coordinator_address is not None:
            self.send(self.coordinator_address, messages.RunnerDied(
                child.name, child.incarnation, child.reason, deaths=len(child.deaths), period=self.policy.period,
                quarantined=child.state == "quarantined", model=child.model, asked=asked,
            ))

    def on_child_ended(self, child: Child, reason: str, *, asked: bool = False) -> None:
        """Record and report the end of a child, kill the rest of its process group, and schedule its next start."""
        self.log.warning("%s is gone: %s", child.name, reason)
        if child.is_coordinator():
            self.coordinator_address = self.waiting_coordinator = None
        elif child.pid:
            kill_group(child.pid)  # a runner leads its process group: engine and workers go with it
        pause = self.supervision.end_life(child, reason, self.now(), self.chance(), asked=asked, for_good=self.stopping)
        if child.is_leaving:
            self.report_death(child, asked=asked)
            self.forget_child(child)
            return
        if child.state == "quarantined":
            ends, period = len(child.deaths), self.policy.period
            self.log.error("%s ended %d times in %.0f s: quarantined", child.name, ends, period)
        if not child.is_coordinator():
            self.report_death(child, asked=asked)
        if child.model != "rollout":
            self.send_endpoints()
        if pause is None:
            self.retire_coordinator_after_runners()
        elif pause:
            self.after(pause, f"start:{child.name}", lambda: self.start_again(child))
        else:
            self.start_again(child)

    def start_again(self, child: Child) -> None:
        if self.stopping or self.children.get(child.name) is not child or child.state != "waiting":
            return
        if child.is_coordinator():
            self.start_coordinator()
        else:
            self.start_runner(child.name, child.model)

    def on_LeaseLost(self, message: messages.LeaseLost, sender: Any) -> None:
        """End all children for good: another system took the store, and the two would take it in turns for ever."""
        if self.children["coordinator"].address != sender:
            return  # from an earlier coordinator: its successor decides
        self.log.error("fenced off: %s", message.owner)
        self.fencing_owner, self.stopping = message.owner, True
        for child in list(self.children.values()):
            if not child.is_gone():
                self.end_child(child, "the store belongs to another system")

    # --- clients and launcher ---------------------------------------------------------------------------------------
    def on_Where(self, message: requests.Where, sender: Any) -> None:
        if not hasattr(self, "config"):
            self.send(sender, requests.WhereReply(message.id, None, {}))
            return
        now = self.now()
        status = {
            "guardian": os.getpid(), "admin": self.admin, "fenced": self.fencing_owner,
            "children": [
                {
                    "name": c.name, "pid": c.pid, "started": c.started, "state": c.state,
                    "incarnation": c.incarnation, "deaths": len(c.deaths),
                    "restart_in": max(0.0, c.restart_at - now) if c.state == "waiting" else None,
                    "seen_ago": now - c.seen, "reason": c.reason, "model": "" if c.is_coordinator() else c.model,
                }
                for c in self.children.values()
            ],
        }
        self.send(sender, requests.WhereReply(message.id, self.coordinator_address or self.waiting_coordinator, status))

    def on_Retire(self, message: messages.Retire, sender: Any) -> None:
        """End the runners in order, then the coordinator, which records their end."""
        self.stopping = True
        for child in self.runners():
            if child.state == "waiting":
                child.state = "down"
            elif not child.is_gone():
                self.send(child.address, message)
        self.after(RETIRE_SECONDS, "retire", self.retire_coordinator)
        self.retire_coordinator_after_runners()

    def on_HostLeaves(self, message: messages.HostLeaves, sender: Any) -> None:
        """Ask the head to give this host no new units; end the host at once if no head has ever admitted it. `join`
        repeats the message, which is lost while the agent, its connection or the head's log is away."""
        if self.config.host is None or self.stopping:
            return
        if not self.epoch:
            self.end("this host leaves, and no head has admitted it")
        elif self.coordinator_address is not None:
            self.send(self.coordinator_address, message)

    def on_HostDrained(self, message: messages.HostDrained, sender: Any) -> None:
        if self.config.host is not None:
            self.end("this host was drained")

    def retire_coordinator_after_runners(self) -> None:
        """End the coordinator in order if the system ends and all runners have ended."""
        if self.stopping and all(c.state in ENDED for c in self.runners()):
            self.cancel_timer("retire")  # the timer that would have done so without them
            self.retire_coordinator()

    def retire_coordinator(self) -> None:
        """Have the coordinator close the log and end. If it has ended and the system ends, kill the other processes."""
        child = self.children["coordinator"]
        if child.state == "waiting":  # for its restart
            child.state = "down"
        elif child.state not in ENDED:
            self.send(child.address, messages.Retire())
        if self.ending and child.state in ENDED:
            self.end_processes()

    def on_Retired(self, message: messages.Retired, sender: Any) -> None:
        """Record that the coordinator has closed the log, and kill the remaining processes if the system ends."""
        self.children["coordinator"].state = "retired"
        if self.ending:
            self.end_processes()

    def on_StoreGone(self, message: messages.StoreGone, sender: Any) -> None:
        self.end(message.reason)

    def end(self, reason: str) -> None:
        """End all children in order, or after END_SECONDS by force, and then the admin and this process."""
        if not self.ending:
            self.log.warning("the system ends: %s", reason)
            self.ending = True
            self.after(END_SECONDS, "end", self.end_processes)
            self.on_Retire(messages.Retire(), None)

    def end_processes(self) -> None:
        """Kill the remaining runners, the admin and this process."""
        end_processes(self.admin["pid"], [c.pid for c in self.runners() if c.pid and not c.is_gone()])

    def on_exit(self) -> None:
        """Terminate the process groups of the runners, since the actor system ends."""
        if not hasattr(self, "children"):
            return
        self.stopping = True
        for child in self.runners():
            if child.pid and process_start_time(child.pid) == child.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
