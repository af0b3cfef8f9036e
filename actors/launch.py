"""Start an actor system in a clean interpreter: `python -m trinity_es.actors.launch SETUP.json`.

Never forked out of a trainer that holds CUDA contexts, threads and database connections. The setup file holds the
resolved config, address and port, and the first incarnation; the environment says where the key is (`keys.py`).
The process ends when the coordinator has its lease (0) or the deadline is over (1), and the system stays. The actors
are forked from what this module imports, so none of it may start a thread (numpy's own ends at a fork) or open a file.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # a tenth of the time that the imports take, which is most of a start

import ctypes
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

from trinity_es.actors.addresses import past_proxies
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.guardian.actor import NAME, Guardian, host_agent, import_ahead
from trinity_es.actors.messages import Configure
from trinity_es.actors.requests import Where, WhereReply
from trinity_es.actors.system_key import read_key
from trinity_es.actors.transport import AuthenticatedSystemBase
from trinity_es.events.processes import open_files
from trinity_es.events.store.checks.log_end import claims_of

__all__ = ["main"]

ARENAS_OPTION, ARENAS = -8, 2
"""M_ARENA_MAX of malloc.h, and of how many heaps a process's threads take: each keeps what was freed in it."""
SILENT_SECONDS = 20.0
"""How long a guardian, which never blocks, may answer nothing before it is gone too."""


def main(setup_path: str) -> int:
    _save_memory()
    # What a full disk does not take must not be kept: each fork tries to write it again first, and fails.
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace",
                                               write_through=True) for fd in (1, 2))
    gc.enable()
    gc.freeze()  # what is imported stays; the actors, which are forks, need not go through it again and again
    from thespian.actors import ActorSystem
    from thespian.system import multiprocCommon

    # Thespian gives its admin 5 s, which it does not always make on a busy machine.
    multiprocCommon.MAX_ADMIN_STARTUP_DELAY = timedelta(seconds=60)
    _end_with_guardian(multiprocCommon.MultiProcAdmin)
    open_files()
    setup = json.loads(Path(setup_path).read_text())
    # What the system writes is this user's alone. Runners, in which the user's own code runs, give it back.
    config = LaunchedConfig.model_validate({**setup["config"], "umask": os.umask(0o077)})
    if config.host is not None or config.hosts.address:
        host_agent()  # the actors are forked with it
    os.environ.update(past_proxies(os.environ, config.system.address))  # workflows and their programs, too
    log_defs = {"version": 1, "disable_existing_loggers": False, "root": {"level": 40, "handlers": []}}
    multiprocCommon.MultiProcAdmin.logDefs = log_defs  # Thespian forgets it, and its admin dies when its logger did
    key = read_key()
    system = ActorSystem(AuthenticatedSystemBase(config.system.address, setup["port"], key, log_defs))
    # After the admin was forked, and this process forks nobody else: a thread does no harm. Thespian itself would wait
    # for a minute for an admin that has died.
    threading.Thread(target=_end_with, args=(config.system.address, setup["port"]), daemon=True).start()
    guardian = system.createActor(Guardian, globalName=NAME)
    system.tell(guardian, Configure(
        config, setup["port"], setup["first_incarnation"], claims_of(setup["known"])))
    heard = time.monotonic()
    deadline = heard + setup["deadline_seconds"]
    while time.monotonic() < deadline:
        asked = time.monotonic()
        answer = system.ask(guardian, Where("launch"), 1.0)
        stood_still = time.monotonic() - asked - SILENT_SECONDS / 2
        if stood_still > 0:  # this process itself, with the whole machine perhaps
            heard, deadline = time.monotonic(), deadline + stood_still
        if isinstance(answer, WhereReply):
            heard = time.monotonic()
            if "admin_file" in setup:  # of a host that joins, whose system no lease names; its head may be away
                if any(c["name"] == "coordinator" and c["state"] == "up" for c in answer.status.get("children", ())):
                    Path(setup["admin_file"]).write_text(json.dumps({**answer.status["admin"], **setup["told"]}))
                    return 0
            elif answer.coordinator is not None:
                return 0
        elif time.monotonic() - heard > SILENT_SECONDS:
            print("the guardian died while the system started", file=sys.stderr)
            return 1
        time.sleep(0.05)
    print(f"the coordinator did not come up within {setup['deadline_seconds']} s", file=sys.stderr)
    return 1


def _end_with_guardian(admin_class: Any) -> None:
    """Have the admin end when its only actor does: without a guardian it would seem to run, and do nothing."""
    go_on = admin_class.h_ChildActorExited

    def child_exited(admin: Any, envelope: Any) -> Any:
        if not hasattr(admin, "_exiting"):  # it was not asked to shut down
            os._exit(1)
        return go_on(admin, envelope)

    admin_class.h_ChildActorExited = child_exited


def _save_memory() -> None:
    """Have the actors share what each would have for itself: a runner that is idle takes 16 MB so, and 22 without."""
    import_ahead()
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; what engines start has its own again
    if set_option is not None:
        set_option(ARENAS_OPTION, ARENAS)


def _end_with(address: str, port: int) -> None:
    while not _gone(address, port):
        time.sleep(0.2)
    print("the actor system died while it started", file=sys.stderr, flush=True)
    os._exit(1)


def _gone(address: str, port: int) -> bool:
    """Return True if nobody listens there any more; a process that is only busy does."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
