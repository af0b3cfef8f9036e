"""Start an actor system in a clean interpreter: `python -m trinity_es.actors.launch SETUP.json`.

A clean interpreter, because a trainer holds CUDA contexts, threads and database connections that a fork would inherit.
The setup file holds the resolved config, address and port, and the number of the first runner process (incarnation).
The environment says where the key is (`system_key.py`). This process exits with 0 when the coordinator has its lease,
or with 1 after the deadline; the actor system stays. The actors are forks with this module's imports, so no import may
start a thread (numpy ends its own at a fork) or open a file.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # saves a tenth of the time of the imports, which are most of a start

import ctypes
import importlib
import io
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.guardian.actor import NAME, Guardian, host_agent_class, import_ahead
from trinity_es.actors.messages import Configure
from trinity_es.actors.requests import Where, WhereReply
from trinity_es.actors.sealed_transport import AuthenticatedSystemBase
from trinity_es.actors.server_addresses import no_proxy_variables
from trinity_es.actors.system_key import read_key
from trinity_es.events.processes import raise_file_limit
from trinity_es.events.store.checks.log_end import claims_of

__all__ = ["main"]

ARENAS_OPTION, ARENAS = -8, 2
"""M_ARENA_MAX of malloc.h, and the number of heaps that a process's threads share. Each heap keeps its freed memory."""
SILENT_SECONDS = 20.0
"""How long a guardian, which never blocks, may be silent before it counts as dead."""


def main(setup_path: str) -> int:
    """Start the actor system that a setup file describes, and return the exit status."""
    _save_memory()
    # Unbuffered. A buffer that a full disk did not take would be kept, and each fork would fail to write it first.
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace",
                                               write_through=True) for fd in (1, 2))
    from thespian.actors import ActorSystem
    from thespian.system import multiprocCommon

    # Thespian gives its admin 5 s, which is too short on a busy machine.
    multiprocCommon.MAX_ADMIN_STARTUP_DELAY = timedelta(seconds=60)
    _end_with_guardian(multiprocCommon.MultiProcAdmin)
    raise_file_limit()
    setup = json.loads(Path(setup_path).read_text())
    # Only this user may read the system's files. Runners restore the umask for the user's own code.
    config = LaunchedConfig.model_validate({**setup["config"], "umask": os.umask(0o077)})
    if config.host is not None or config.hosts.address:
        host_agent_class()  # imported before the fork of the actors
    _import_engines(config)
    gc.enable()
    gc.freeze()  # the imports stay, so garbage collection in the actors, which are forks, need not visit them
    os.environ.update(no_proxy_variables(os.environ, config.system.address))  # also for workflows and their programs
    log_defs = {"version": 1, "disable_existing_loggers": False, "root": {"level": 40, "handlers": []}}
    multiprocCommon.MultiProcAdmin.logDefs = log_defs  # Thespian forgets it; then the admin dies with its logger
    key = read_key()
    system = ActorSystem(AuthenticatedSystemBase(config.system.address, setup["port"], key, log_defs))
    # Only after the fork of the admin: this process forks no more, so a thread is safe. It reports an admin that has
    # died at once, and Thespian itself would wait for a minute.
    threading.Thread(target=_exit_when_gone, args=(config.system.address, setup["port"]), daemon=True).start()
    guardian = system.createActor(Guardian, globalName=NAME)
    system.tell(guardian, Configure(
        config, setup["port"], setup["first_incarnation"], claims_of(setup["known"])))
    last_answer = time.monotonic()
    deadline = last_answer + setup["deadline_seconds"]
    while time.monotonic() < deadline:
        sent_at = time.monotonic()
        answer = system.ask(guardian, Where("launch"), 1.0)
        suspended = time.monotonic() - sent_at - SILENT_SECONDS / 2
        if suspended > 0:  # this process was suspended, perhaps with the whole machine
            last_answer, deadline = time.monotonic(), deadline + suspended
        if isinstance(answer, WhereReply):
            last_answer = time.monotonic()
            if "admin_file" in setup:  # on a host that joins: no lease names its system, and its head may be away
                if any(c["name"] == "coordinator" and c["state"] == "up" for c in answer.status.get("children", ())):
                    Path(setup["admin_file"]).write_text(json.dumps({**answer.status["admin"], **setup["told"]}))
                    return 0
            elif answer.coordinator is not None:
                return 0
        elif time.monotonic() - last_answer > SILENT_SECONDS:
            print("the guardian died while the system started", file=sys.stderr)
            return 1
        time.sleep(0.05)
    print(f"the coordinator did not come up within {setup['deadline_seconds']} s", file=sys.stderr)
    return 1


def _end_with_guardian(admin_class: Any) -> None:
    """Make the admin exit when the guardian dies. An admin without its guardian would run on and do nothing."""
    original = admin_class.h_ChildActorExited

    def child_exited(admin: Any, envelope: Any) -> Any:
        if not hasattr(admin, "_exiting"):  # no shutdown was requested
            os._exit(1)
        return original(admin, envelope)

    admin_class.h_ChildActorExited = child_exited


def _save_memory() -> None:
    """Import modules that forked actors share, and limit malloc's heaps. An idle runner then takes 16 MB, not 22."""
    import_ahead()
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only; programs that engines start are not affected
    if set_option is not None:
        set_option(ARENAS_OPTION, ARENAS)


def _import_engines(config: LaunchedConfig) -> None:
    """Import this package's own engines that need no vLLM, which starts threads. A user's engine may change later."""
    modules = {model.engine_class.partition(":")[0] for model in config.models.values() if model.engine_type != "vllm"}
    for module in modules:
        if module.startswith("trinity_es."):
            importlib.import_module(module)


def _exit_when_gone(address: str, port: int) -> None:
    """Wait in a thread until no process listens on the admin's port, then exit this process with status 1."""
    while True:
        try:
            socket.create_connection((address, port), 1.0).close()
        except ConnectionRefusedError:
            break
        except OSError:
            pass  # a busy process still listens
        time.sleep(0.2)
    print("the actor system died while it started", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
