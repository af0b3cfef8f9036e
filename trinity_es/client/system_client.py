"""`SystemClient`: the client's methods about the system itself, such as status, runners, hosts and shutdown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from trinity_es.actors.commands import Command, DrainHost, GetRunnerStates, GetStatus, RestartRunner, ScaleServers
from trinity_es.client import argument_checks
from trinity_es.client.connection import PATIENCE_SECONDS, Connection, system_gone
from trinity_es.config.config import Config
from trinity_es.events.errors import LogRewound, NotRunning, RunnerNotFound, TrinityError, WrongKey
from trinity_es.events.store.checks.log_end import Claim
from trinity_es.events.store.payloads.payloads import open_lazily, open_payloads
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.system import lifecycle, remembered_log_end, running_system
from trinity_es.system.leftovers import leftovers

__all__ = ["SystemClient"]

FACTS_SECONDS = 10.0
"""How long `facts` waits for the running system; after that the caller uses the log alone."""

A = TypeVar("A")


class SystemClient:
    """Client of the system that runs on a store. Thread-safe. Raises NotRunning if none runs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._payloads = open_lazily(lambda: open_payloads(config.store.url, durability=config.store.durability))
        self._link = Connection(self._payloads, self._find_admin)
        self._log: Log | None = None

    def _find_admin(self, last_admin: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the admin of the running system; None while the keeper starts a system.

        `last_admin`: the admin of the previous system, which has ended. Raises NotRunning if no keeper starts a system,
        and LogRewound as `_require_log`.
        """
        admin = running_system.find(self.config)
        if admin is None:
            if last_admin is None:
                remembered_log_end.require_remembered(self.config)
            else:
                self._require_log()
            if running_system.stopped(self.config)["kept"] is None:
                raise running_system.not_running_error(self.config) if last_admin is None else system_gone(last_admin)
        return admin

    def _require_log(self) -> None:
        """Raise LogRewound if the log lacks an event that this client or this host remembers."""
        mark = self._link.last_mark
        remembered_log_end.require_remembered(self.config, [] if mark is None else [Claim(mark, self._link.name)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. The system goes on."""
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
        """Send a command of `trinity_es.actors.commands` to the coordinator, and return its answer.

        Raises the error that the coordinator answers with, NotRunning, and TimeoutError after `timeout` seconds.
        """
        return self._link.call(command, timeout)

    def status(self, patience: float = 30.0) -> dict[str, Any]:
        """Return the state of batches, runners and processes as plain JSON. Raises TimeoutError after `patience` s."""
        patience = argument_checks.number("patience", patience)
        deadline = time.monotonic() + patience
        where = self._link.where(min(patience / 2, PATIENCE_SECONDS))
        coordinator_status = {}
        if where.coordinator is not None or self._link.knows_coordinator:  # a stopped guardian gives no address
            coordinator_status = self._link.call(GetStatus(), max(0.0, deadline - time.monotonic()))
        return {"system": where.status, "batches": [], "runners": [], **coordinator_status}

    def restart_runner(self, name: str, *, reason: str = "", timeout: float = 60.0) -> dict[str, Any]:
        """End a runner's process and start another. Returns `runner` and its new `incarnation` when the process runs.

        The new engine is still loading then (`wait_ready`). The runner's tasks are attempted again, which doesn't count
        as a failed attempt. A runner that failed, is quarantined or waits for its restart is started at once. The event
        `RunnerLost` records this caller and `reason`. Raises RunnerNotFound (KeyError), TimeoutError.
        """
        limit = argument_checks.timeout_seconds(timeout) or 60.0
        deadline = time.monotonic() + limit
        status = self._link.where(min(limit, PATIENCE_SECONDS)).status
        if not status:
            raise TimeoutError("restart_runner: the guardian, which restarts runners, did not answer within "
                               f"{PATIENCE_SECONDS:.0f} s: see `trinity-es status`")
        incarnations = {c["name"]: c["incarnation"] for c in status.get("children", []) if c["name"] != "coordinator"}
        if argument_checks.text("name", name) not in incarnations:  # perhaps a runner of another host
            rows = self._link.call(GetStatus(), max(0.0, deadline - time.monotonic()))["runners"]
            incarnations = {r["runner"]: r["incarnation"] for r in rows} | incarnations
        if name not in incarnations:
            raise RunnerNotFound(f"there is no runner {name!r}. The runners are: "
                                 f"{', '.join(sorted(incarnations)) or 'none'}")
        command = RestartRunner(
            runner=name,
            incarnation=incarnations[name],  # so a request that arrives twice ends one process only
            reason=argument_checks.reason_with_caller(reason),
        )
        answer = self._link.call(command, max(0.0, deadline - time.monotonic()))
        return dict(answer)

    def scale_servers(self, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Add or remove running vLLM servers (`engine_type: http`). Returns all servers after the change.

        A removed server gets no more tasks, finishes its current ones, and is disconnected. The change overrides the
        config's list, also after a restart. Raises DataError for an invalid URL, and if an unknown server is removed.
        """
        command = ScaleServers(add=list(add), remove=list(remove))
        return [dict(server) for server in self._link.call(command)["servers"]]

    def drain_host(self, name: str, *, reason: str = "") -> dict[str, Any]:
        """Make a joined host leave: it gets no new units, finishes its current ones, and ends its processes.

        Returns the host's epoch and the number of its current units. Raises HostNotFound.
        """
        answer = self._link.call(DrainHost(host=name, reason=argument_checks.reason_with_caller(reason)))
        return dict(answer)

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return the current activity of every runner, by name; its keys are documented in `actors.activity`."""
        return self._link.call(GetRunnerStates(names=None))

    def get_runner_state(self, name: str) -> dict[str, Any]:
        """Return the current activity of one runner; {} if there is no runner of this name."""
        return self._link.call(GetRunnerStates(names=[name])).get(name, {})

    def get_key_state(self, key: str) -> dict[str, Any]:
        """Return the value of `key` in each runner's state, by runner. A runner without this key is left out."""
        argument_checks.text("key", key)
        return {name: state[key] for name, state in self.get_all_state().items() if key in state}

    def facts(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return `live` and `system` for `Log.why`: the system's status (None without an answer), and its processes."""
        try:
            status = self.status(FACTS_SECONDS)
        except NotRunning:
            if running_system.find(self.config) is None:
                return None, {"up": False, **running_system.stopped(self.config)}
            return None, {"up": True}
        except (LogRewound, WrongKey):
            raise  # these say more than "no answer"
        except (TrinityError, TimeoutError):
            return None, {"up": True}
        return (status if status["system"] else None), {"up": True}

    def wait_ready(self, timeout: float | None = None, progress: Any = None) -> None:
        """Wait until every engine serves. Raises StartupError with the reason if an engine can't."""
        explorer = self.config.explorer
        lifecycle.wait_ready(
            self.status, argument_checks.timeout_seconds(timeout) or self.config.system.startup_timeout,
            progress=progress, runners=explorer.engine_num, servers=len(explorer.rollout_model.servers.urls),
            logs=self.config.system.log_dir,
        )

    def _end(self) -> int:
        running_system.stop_keeper(self.config)
        with contextlib.suppress(TrinityError):  # reconnects if the keeper has started another system
            self._link.where()
        processes = leftovers(self.config)
        killed_count = lifecycle.stop(self._link.admin, self._link.retire)
        with contextlib.suppress(TrinityError):  # the database may be away
            if running_system.find(self.config) is None:  # else another system runs by now
                # These are processes that workflows started and did not end.
                killed_count += running_system.end(running_system.wait_gone(processes, 0.5))
        return killed_count
