"""A client of a running system, whatever it runs: how it is, what its runners do, its log, its end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from trinity_es.actors.commands import Command, DrainHost, GetRunnerStates, GetStatus, RestartRunner, ScaleServers
from trinity_es.client import validation
from trinity_es.client.connection import PATIENCE_SECONDS, Connection, system_gone
from trinity_es.config.config import Config
from trinity_es.events.errors import LogRewound, NotRunning, RunnerNotFound, TrinityError, WrongKey
from trinity_es.events.store.checks.log_end import Claim
from trinity_es.events.store.payloads.payloads import later, open_payloads
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.system import lifecycle, remembered_log_end, running_system
from trinity_es.system.leftovers import leftovers

__all__ = ["SystemClient"]

FACTS_SECONDS = 10.0
"""How long to wait for the running system before answering from the log alone."""

A = TypeVar("A")


class SystemClient:
    """See the module. Thread-safe. Raises NotRunning where no system runs on the store."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._payloads = later(lambda: open_payloads(config.store.url, durability=config.store.durability))
        self._link = Connection(self._payloads, self._running)
        self._log: Log | None = None

    def _running(self, gone: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the admin of the running system; None while the keeper starts it.

        `gone`: admin of the system that was joined before. Raises NotRunning if nobody starts one, and LogRewound if
        the log lacks what this client, or this host, knows of it.
        """
        admin = running_system.find(self.config)
        if admin is None:
            if gone is None:
                remembered_log_end.require(self.config)
            else:
                self._require_log()
            if running_system.stopped(self.config)["kept"] is None:
                raise running_system.none_runs(self.config) if gone is None else system_gone(gone)
        return admin

    def _require_log(self) -> None:
        """Raise LogRewound where the log lacks what this client, or this host, knows of it."""
        mark = self._link.known
        remembered_log_end.require(self.config, [] if mark is None else [Claim(mark, self._link.by)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the system; it goes on without this client."""
        self._link.close()
        if self._log is not None:
            self._log.close()

    @property
    def log(self) -> Log:
        """The log, for reading."""
        if self._log is None:
            self._log = open_log(self.config.store.url)
        return self._log

    def request(self, command: Command[A], timeout: float | None = None) -> A:
        """Return the coordinator's answer to one command of `trinity_es.actors.commands`, for those that have no method
        here.

        Raises what it answers, NotRunning; TimeoutError after `timeout` seconds.
        """
        return self._link.call(command, timeout)

    def status(self, patience: float = 30.0) -> dict[str, Any]:
        """Return batches, runners and processes at a glance, as plain JSON.

        Raises TimeoutError after `patience` seconds.
        """
        patience = validation.number("patience", patience)
        until = time.monotonic() + patience
        where = self._link.where(min(patience / 2, PATIENCE_SECONDS))
        rollout = {}
        if where.coordinator is not None or self._link.knows_coordinator:  # a guardian that is stopped tells nothing
            rollout = self._link.call(GetStatus(), max(0.0, until - time.monotonic()))
        return {"system": where.status, "batches": [], "runners": [], **rollout}

    def restart_runner(self, name: str, *, reason: str = "", timeout: float = 60.0) -> dict[str, Any]:
        """End a runner's process and start another; returns `runner` and its new `incarnation` when that lives.

        What it had is attempted again, blamed for nothing; its engine then loads (`wait_ready`). `RunnerLost` records
        who asked, and `reason`. One that failed, was given up or waits to be started again is started at once. Raises
        RunnerNotFound (KeyError), TimeoutError.
        """
        limit = validation.seconds("timeout", timeout) or 60.0
        until = time.monotonic() + limit
        told = self._link.where(min(limit, PATIENCE_SECONDS)).status
        if not told:
            raise TimeoutError(f"restart_runner: the guardian did not answer within {PATIENCE_SECONDS:.0f} s")
        lives = {c["name"]: c["incarnation"] for c in told.get("children", []) if c["name"] != "coordinator"}
        if validation.text("name", name) not in lives:  # one of another host, perhaps
            rows = self._link.call(GetStatus(), max(0.0, until - time.monotonic()))["runners"]
            lives |= {r["runner"]: r["incarnation"] for r in rows if r["runner"] not in lives}
        if name not in lives:
            raise RunnerNotFound(f"there is no runner {name!r}: there are {', '.join(sorted(lives)) or 'none'}")
        asked = f"a restart was asked for by pid {os.getpid()} on {socket.gethostname()}"
        command = RestartRunner(
            runner=name,
            incarnation=lives[name],  # a request that comes twice ends one life
            reason=f"{asked}: {reason}" if reason else asked,
        )
        begun = self._link.call(command, max(0.0, until - time.monotonic()))
        return dict(begun)

    def scale_servers(self, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Add servers of others as engines (`engine_type: http`), and take others away; return all that there are now.

        One that is taken away gets no more tasks, ends those that it has, and is let go. This goes before the list of
        the config: what is added here stays, what is removed stays away. Raises DataError for a URL that is none, and
        for removing what was never a server.
        """
        command = ScaleServers(add=list(add), remove=list(remove))
        return [dict(server) for server in self._link.call(command)["servers"]]

    def drain_host(self, name: str, *, reason: str = "") -> dict[str, Any]:
        """Have a host that joined leave: it gets nothing new, ends what it has, and its system ends.

        Returns its epoch, and how many units it has now. Raises HostNotFound.
        """
        asked = f"pid {os.getpid()} on {socket.gethostname()} asked for it"
        done = self._link.call(DrainHost(host=name, reason=f"{asked}: {reason}" if reason else asked))
        return dict(done)

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return what every runner does right now, by its name: `actors.activity` says what a state holds."""
        return self._link.call(GetRunnerStates(names=None))

    def get_runner_state(self, name: str) -> dict[str, Any]:
        """Return the same of one runner; {} where there is none of this name."""
        return self._link.call(GetRunnerStates(names=[name])).get(name, {})

    def get_key_state(self, key: str) -> dict[str, Any]:
        """Return one value of every runner's state, `workflow_id` say, by the runner's name.

        {} where none has this key.
        """
        validation.text("key", key)
        return {name: state[key] for name, state in self.get_all_state().items() if key in state}

    def facts(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """`live` and `system` for `Log.why`: what the system says of itself, and what is known of its processes."""
        try:
            status = self.status(FACTS_SECONDS)
        except NotRunning:
            if running_system.find(self.config) is None:
                return None, {"up": False, **running_system.stopped(self.config)}
            return None, {"up": True}
        except (LogRewound, WrongKey):
            raise  # it is not the system that is silent
        except (TrinityError, TimeoutError):
            return None, {"up": True}
        return (status if status["system"] else None), {"up": True}

    def wait_ready(self, timeout: float | None = None, progress: Any = None) -> None:
        """Wait until every engine serves. Raises StartupError with the reason of one that can't."""
        explorer = self.config.explorer
        lifecycle.wait_ready(
            self.status, validation.seconds("timeout", timeout) or self.config.system.startup_timeout,
            progress=progress, runners=explorer.engine_num, servers=len(explorer.rollout_model.servers.urls),
            logs=self.config.system.log_dir,
        )

    def _end(self) -> int:
        """End the whole system. Returns how many processes had to be killed."""
        running_system.stop_keeper(self.config)
        with contextlib.suppress(TrinityError):  # it may be another one by now than the one that was joined
            self._link.where()
        family = leftovers(self.config)
        killed = lifecycle.stop(self._link.admin, self._link.retire)
        with contextlib.suppress(TrinityError):  # the database may be away
            if running_system.find(self.config) is None:  # or it is another one by now
                killed += running_system.end(running_system.wait_gone(family, 0.5))  # what a workflow started, and left
        return killed
