"""The guardian: one well-known name. It starts, watches and restarts the others, and does no work, so it does not die.

Runners are its children, not the coordinator's: a dead coordinator takes no runner along. It tells runners where the
coordinator is, the coordinator which runners died, and clients where to send their requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from actors.base import SafeActor, kill_group, process_start_time
from actors.coordinator import Coordinator
from actors.limits import RESTARTS
from actors.messages import (
    Configure,
    CoordinatorUp,
    Hello,
    Retire,
    Retired,
    RunnerDied,
    RunnerUp,
    StartCoordinator,
    StartRunner,
    Where,
    WhereReply,
)
from actors.runner import Runner

__all__ = ["NAME", "Guardian"]

NAME = "trinity-es-guardian"
"""Its global name in the actor system."""

ENDED = frozenset({"retired", "failed", "down"})
"""States of a child from which nothing more is to be waited for."""
RETIRE_SECONDS = 10.0
"""So long have runners to stop their engines before the coordinator closes the log without them."""
PERIOD_SECONDS = 600.0
"""A child that ends more often than RESTARTS times in this period stays down, and the status says so."""


@dataclass(slots=True)
class Child:
    name: str
    incarnation: int
    address: Any
    pid: int = 0
    started: float = 0.0
    """Start time of the process (unix seconds): with the pid it names one process."""
    deaths: list[float] = field(default_factory=list)
    """Monotonic times."""
    state: str = "starting"


class Guardian(SafeActor):
    """See the module. Started by the launcher with Configure, found by clients under NAME."""

    def on_Configure(self, message: Configure, sender: Any) -> None:
        if hasattr(self, "config"):
            return  # asked twice
        self.config = message.config
        parent = os.getppid()  # top-level actors are children of the admin
        self.admin = {"port": message.port, "pid": parent, "started": process_start_time(parent)}
        self.open_log(self.config["system"]["log_dir"], "guardian")
        self.coordinator_address: Any = None
        self.epoch = 0
        self.incarnation = message.first_incarnation - 1
        self.stopping = False
        count = self.config["explorer"]["rollout_model"]["engine_num"]
        self.children: dict[str, Child] = {}
        for number in range(count):
            self.start_runner(f"runner-{number}", [])
        self.start_coordinator([])

    # --- children ---------------------------------------------------------------------------------------------------
    def start_runner(self, name: str, deaths: list[float]) -> None:
        self.incarnation += 1
        address = self.createActor(Runner)
        self.children[name] = Child(name, self.incarnation, address, deaths=deaths)
        self.send(address, StartRunner(name, self.incarnation, self.config))
        if self.coordinator_address is not None:
            self.send(address, CoordinatorUp(self.coordinator_address, self.epoch))

    def start_coordinator(self, deaths: list[float]) -> None:
        address = self.createActor(Coordinator)
        self.children["coordinator"] = Child("coordinator", 0, address, deaths=deaths)
        runners = [c for c in self.children.values() if c.name != "coordinator"]
        alive = {c.name: c.incarnation for c in runners if c.state != "down"}
        self.send(address, StartCoordinator(self.config, self.admin, alive))

    def on_Hello(self, message: Hello, sender: Any) -> None:
        for child in self.children.values():
            if child.address == sender:
                child.pid, child.started = message.pid, process_start_time(message.pid) or 0.0
                child.state = "up"

    def on_CoordinatorUp(self, message: CoordinatorUp, sender: Any) -> None:
        self.coordinator_address, self.epoch = message.coordinator, message.epoch
        child = self.children["coordinator"]
        child.state = "up"
        for other in self.children.values():
            if other.state == "down":  # perhaps while nobody listened
                self.send(message.coordinator, RunnerDied(other.name, other.incarnation, f"process {other.pid} ended"))
            elif other.name != "coordinator":
                self.send(other.address, message)

    def on_RunnerUp(self, message: RunnerUp, sender: Any) -> None:
        child = self.children.get(message.name)
        if child is not None and child.incarnation == message.incarnation:
            child.state = message.state
            self.check_retired()

    def on_child_exit(self, address: Any) -> None:
        for child in list(self.children.values()):
            if child.address == address and child.state != "down":
                self.child_died(child)

    def child_died(self, child: Child) -> None:
        self.log.warning("%s (pid %s) is gone", child.name, child.pid)
        child.state = "down"
        if child.name != "coordinator" and child.pid:
            kill_group(child.pid)  # a runner leads its process group: engine and workers go with it
        if child.name == "coordinator":
            self.coordinator_address = None
        elif self.coordinator_address is not None:
            reason = f"process {child.pid} ended"
            self.send(self.coordinator_address, RunnerDied(child.name, child.incarnation, reason))
        if self.stopping:
            self.check_retired()
            return
        now = time.monotonic()
        deaths = [t for t in child.deaths if now - t < PERIOD_SECONDS] + [now]
        child.deaths = deaths
        if len(deaths) > RESTARTS:
            self.log.error("%s ended %d times in %.0f s: it stays down", child.name, len(deaths), PERIOD_SECONDS)
            return
        if child.name == "coordinator":
            self.start_coordinator(deaths)
        else:
            self.start_runner(child.name, deaths)

    # --- clients and launcher ---------------------------------------------------------------------------------------
    def on_Where(self, message: Where, sender: Any) -> None:
        if not hasattr(self, "config"):
            self.send(sender, WhereReply(message.id, None, {}))
            return
        status = {
            "guardian": os.getpid(),
            "admin": self.admin,
            "children": [
                {
                    "name": c.name,
                    "pid": c.pid,
                    "started": c.started,
                    "state": c.state,
                    "incarnation": c.incarnation,
                    "deaths": len(c.deaths),
                }
                for c in self.children.values()
            ],
        }
        self.send(sender, WhereReply(message.id, self.coordinator_address, status))

    def on_Retire(self, message: Retire, sender: Any) -> None:
        """Bring everyone down in order: runners, then the coordinator, which writes that they ended."""
        self.stopping = True
        for child in self.children.values():
            if child.name != "coordinator":
                self.send(child.address, message)
        self.after(RETIRE_SECONDS, "retire", self.retire_coordinator)
        self.check_retired()

    def check_retired(self) -> None:
        runners = [c for c in self.children.values() if c.name != "coordinator"]
        if self.stopping and all(c.state in ENDED for c in runners):
            self.cancel("retire")
            self.retire_coordinator()

    def retire_coordinator(self) -> None:
        child = self.children["coordinator"]
        if child.state not in ENDED:
            self.send(child.address, Retire())

    def on_Retired(self, message: Retired, sender: Any) -> None:
        self.children["coordinator"].state = "retired"

    def on_exit(self) -> None:
        if not hasattr(self, "children"):
            return
        self.stopping = True
        for child in self.children.values():
            if child.name == "coordinator" or not child.pid:
                continue
            if process_start_time(child.pid) == child.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
