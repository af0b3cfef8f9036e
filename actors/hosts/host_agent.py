"""Host agent, which stands for the coordinator on a joined host. The guardian starts and restarts it.

The host's guardian, runners and clients use it as their coordinator. It decides nothing: it forwards their messages to
the head over one connection, and the head's messages to their receivers. The log's lease has the head's address. An
order to load a folder that this host can't read waits here until the folder was pulled from the head
(`pulled_loads.py`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

from trinity_es.actors import messages, requests
from trinity_es.actors.base import BaseActor
from trinity_es.actors.engines.devices import device_counts
from trinity_es.actors.hosts.admission_answer import Items
from trinity_es.actors.hosts.folder_puller import FolderPuller, pulled_dir
from trinity_es.actors.hosts.head_client import HeadDialer, HeadPlace
from trinity_es.actors.hosts.link import HostEnd
from trinity_es.actors.hosts.pulled_loads import PulledLoads
from trinity_es.actors.system_key import read_host_key
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.log import EventLog

__all__ = ["HostAgent"]

FIND_SECONDS = 2.0
"""Time limit for asking the database which process is the head."""
LEFT_SECONDS = 1.0
"""Time limit for the last messages to the head."""
MAX_CLIENTS = 10_000
"""Maximum number of open requests of this host's clients. The oldest beyond it gets no answer, and is repeated."""


class HostAgent(BaseActor):
    """Actor of the host agent. The guardian starts it with StartCoordinator."""

    def on_StartCoordinator(self, message: messages.StartCoordinator, sender: Any) -> None:
        config = self.config = message.config
        assert config.host is not None
        self.guardian = sender
        self.open_log(config.system.log_dir, "host")
        self.start_watch()
        self.epoch = 0
        """Epoch of the coordinator; 0 until the head has admitted this host."""
        self.addresses: dict[str, Any] = {}
        self.clients: OrderedDict[str, Any] = OrderedDict()
        """Request id -> address of the client."""
        self.last_problem = ""
        """Last logged reason for a failed connection."""
        self.connected_file = Path(config.system.log_dir) / "connected"
        self.show_connected(False)
        identity = {"name": config.host.name, "life": config.host.life, "pid": message.admin["pid"], "build": VERSION}
        key = partial(read_host_key, config.hosts.key_file)
        dialer = HeadDialer(config.host.name, key, self.find_head, config.hosts.timeout)
        self.loads = PulledLoads(
            FolderPuller(pulled_dir(config.hosts.weights_dir, config.store.url, config.system.log_dir), dialer),
            to_runner=self.to_runner, to_head=lambda name, result: self.connection.send(name, result), post=self.post,
            log=self.log,
        )
        self.connection = HostEnd(
            {**identity, "places": device_counts()}, dialer,
            up=lambda epoch, coordinator_epoch: self.post(lambda: self.connected(epoch, coordinator_epoch)),
            take=lambda items: self.post(lambda: self.deliver(items)),
            down=lambda why: self.post(lambda: self.disconnected(why)),
            refused=lambda why: self.post(lambda: self.refused(why)),
        )
        self.beat()
        self.connection.start()

    def find_head(self) -> HeadPlace | None:
        """Return the head's address from the log; None if there is no head. Blocks. Raises the log's errors."""
        with EventLog.open(self.config.store.url, read_only=True, patience=FIND_SECONDS) as log:
            lease = log.read_lease("coordinator")
        return HeadPlace.of(lease.owner) if lease is not None else None

    def beat(self) -> None:
        self.after(self.config.system.beat_seconds, "beat", self.beat)
        self.send(self.guardian, messages.Heartbeat("coordinator", 0, os.getpid(), epoch=self.epoch))

    # --- the connection ---------------------------------------------------------------------------------------------
    def connected(self, epoch: int, coordinator_epoch: int) -> None:
        """Note the coordinator and tell the guardian, so that runners report and repeat unacknowledged messages."""
        self.log.info("the head admitted this host with epoch %d; the coordinator's is %d", epoch, coordinator_epoch)
        self.epoch, self.last_problem = coordinator_epoch, ""
        self.show_connected(True)
        self.send(self.guardian, messages.CoordinatorUp(self.myAddress, coordinator_epoch))

    def show_connected(self, connected: bool) -> None:
        """Create or delete the file `connected` in the log folder, which a health probe may check."""
        file = self.connected_file
        try:
            if connected:
                file.touch()
            else:
                file.unlink(missing_ok=True)
        except OSError as e:
            self.log.warning("%s does not show whether this host is connected: %s", file, e.strerror)

    def disconnected(self, why: str) -> None:
        """Log why there is no connection, unless the last logged reason is the same."""
        self.show_connected(False)
        if why != self.last_problem:
            self.last_problem = why
            self.log.warning("no connection to the head: %s", why)

    def refused(self, why: str) -> None:
        """End this host's system, because the head refuses it for good."""
        self.log.error("the head refuses this host: %s", why)
        self.send(self.guardian, messages.LeaseLost(why))

    def deliver(self, items: Items) -> None:
        """Pass on the head's messages: replies to clients, orders to load to `loads`, all others to runners."""
        for name, message in items:
            if isinstance(message, requests.Reply):
                client = self.clients.pop(message.id, None)
                if client is not None:
                    self.send(client, message)
            elif isinstance(message, messages.LoadWeights):
                self.loads.load_weights(name, message)
            elif isinstance(message, messages.LoadAdapters):
                self.loads.load_adapters(name, message)
            else:
                self.to_runner(name, message)

    def to_runner(self, name: str, message: Any) -> None:
        """Send a message to a runner of this host, or to the guardian, whose name is ""."""
        receiver = self.addresses.get(name) if name else self.guardian
        if receiver is not None:
            self.send(receiver, message)

    # --- messages of this host's processes --------------------------------------------------------------------------
    def to_head(self, message: Any, sender: Any) -> None:
        """Forward a message of the guardian or a runner to the head, and keep a runner's address for replies."""
        forwarded = self.loads.complete_message(message)
        if sender == self.guardian:
            self.connection.send("", forwarded)
        else:
            self.addresses[message.name] = sender
            self.connection.send(message.name, forwarded)

    on_RunnerStatus = on_Heartbeat = on_RunnerActivity = on_OutcomeReport = on_LeaseReport = to_head  # noqa: N815
    on_WeightsLoadResult = on_AdaptersLoadResult = on_GroupJoinResult = to_head  # noqa: N815
    on_RunnerDied = on_EndedRunners = to_head  # noqa: N815

    def on_Request(self, message: requests.Request, sender: Any) -> None:
        """Forward a client's request, and keep its address for the answer."""
        self.clients[message.id] = sender
        while len(self.clients) > MAX_CLIENTS:
            self.clients.popitem(last=False)
        self.connection.send(f"client {message.id}", message)

    # --- the end ----------------------------------------------------------------------------------------------------
    def on_HostLeaves(self, message: messages.HostLeaves, sender: Any) -> None:
        self.connection.send("", message)

    def on_Retire(self, message: messages.Retire, sender: Any) -> None:
        """Tell the head that this host has ended, and after LEFT_SECONDS the guardian that this agent may end."""
        self.show_connected(False)
        self.loads.stop()
        if not self.epoch:  # never admitted: stop trying
            self.connection.stop()
        self.connection.send("", messages.HostLeaves("it was ended", final=True))
        self.after(LEFT_SECONDS, "left", lambda: self.send(self.guardian, messages.Retired()))
