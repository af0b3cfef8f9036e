"""Start an actor system in a clean interpreter: `python -m actors.launch SETUP.json`.

Never forked out of a trainer that holds CUDA contexts, threads and database connections. The setup file holds the
resolved config, the port, and the first incarnation; the process ends when the coordinator has its lease (0) or the
deadline is over (1), and the system stays. Import-light on purpose: with `spawn`, what this module opens at import
would be closed in the children.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

from actors.guardian import NAME, Guardian
from actors.messages import Configure, Where, WhereReply

__all__ = ["CAPABILITIES", "main"]

CAPABILITIES = {"Process Startup Method": "spawn"}


def main(setup_path: str) -> int:
    from thespian.actors import ActorSystem
    from thespian.system import multiprocCommon

    # Thespian gives its admin 5 s, which a spawned interpreter on a busy machine does not always make.
    multiprocCommon.MAX_ADMIN_STARTUP_DELAY = timedelta(seconds=60)
    setup = json.loads(Path(setup_path).read_text())
    log_defs = {"version": 1, "disable_existing_loggers": False, "root": {"level": 40, "handlers": []}}
    system = ActorSystem("multiprocTCPBase", {**CAPABILITIES, "Admin Port": setup["port"]}, logDefs=log_defs)
    guardian = system.createActor(Guardian, globalName=NAME)
    system.tell(guardian, Configure(setup["config"], setup["port"], setup["first_incarnation"]))
    deadline = time.monotonic() + setup["deadline_seconds"]
    while time.monotonic() < deadline:
        answer = system.ask(guardian, Where("launch"), 1.0)
        if isinstance(answer, WhereReply) and answer.coordinator is not None:
            return 0
        time.sleep(0.05)
    print(f"the coordinator did not come up within {setup['deadline_seconds']} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
