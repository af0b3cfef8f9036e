"""The keeper: a process that starts the actor system, and starts it again when its guardian or admin has died.

Nothing else restarts the guardian, or Thespian's admin above it. If either dies, the whole system ends (children die
with their parent, the admin with its guardian). The keeper, which is not an actor, then ends the remaining processes
and starts the system again on the same store. `trinity-es down` ends the keeper.

A suspended or hung admin or guardian counts as dead: the keeper probes both every few seconds (`frames.knock`), and
ends the system if one is silent for `system.heartbeat_timeout`. If the keeper itself was suspended, perhaps with
the whole machine, both get that time again.

The keeper lives as long as the system, so it stays small: a child process (`keeper_start.py`) imports the config and
the database and makes each start. `lifecycle.start` sends the config by standard input, so that no password is on a
command line or in a file. The keeper answers on standard output with a pickle of the admin or of the error of the first
start. Keeper and child log to `keeper.log`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trinity_es.actors.frames import knock
from trinity_es.actors.guardian.supervision import Policy, coordinator_pause, count_short_lives
from trinity_es.actors.system_end_checks import owner_end_reason
from trinity_es.actors.system_key import read_key
from trinity_es.events.errors import WrongKey
from trinity_es.events.processes import process_lives, process_start_time
from trinity_es.events.store.checks.host_memory import Claim, MemoryFile, claim_to_dict

__all__ = ["main"]

KNOCK_SECONDS = 2.0
"""Interval between two probes of the same process, and the wait for an answer."""
AGAIN_SECONDS = 5.0
"""Pause after a start whose child process was killed or could not begin."""
STOOD_STILL_SECONDS = 2.0
"""Seconds that a round of probes must be late for the keeper to count as suspended."""

_log = logging.getLogger("trinity_es.system.keeper")


def _wait_for_end(system: Mapping[str, Any], remember: Callable[[], None]) -> str:
    """Wait until the system or its owner ends, or kill a hanging system; return the reason. Calls `remember` often."""
    admin, addresses, limit = system["admin"], system["addresses"], system["heartbeat_timeout"]
    pids = {"admin": admin["pid"], "guardian": admin["guardian"]}
    gone = f"the admin (pid {admin['pid']}) is gone, perhaps with its guardian"
    try:
        handle = os.pidfd_open(admin["pid"])
    except ProcessLookupError:
        return gone
    try:
        if not process_lives(admin["pid"], admin["started"]):
            return gone
        heard_at = dict.fromkeys(pids, time.monotonic())
        while True:
            round_began_at = time.monotonic()
            if select.select([handle], [], [], min(KNOCK_SECONDS, limit / 4))[0]:
                return gone
            remember()
            if reason := owner_end_reason(admin.get("owner")):
                return reason
            answers = {name: _is_answering(system["key_file"], addresses[name]) for name in pids}
            now = time.monotonic()
            longest_round = KNOCK_SECONDS * (1 + len(pids))
            if now - round_began_at > longest_round + STOOD_STILL_SECONDS:  # this keeper was suspended
                heard_at = dict.fromkeys(pids, now)
            heard_at |= {name: now for name in pids if answers[name]}
            silent = next((name for name in pids if now - heard_at[name] > limit), None)
            if silent is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                silence = now - heard_at[silent]
                return f"the {silent} (pid {pids[silent]}) gave no sign of life for {silence:.0f} s and was ended"
    finally:
        os.close(handle)


def _is_answering(key_file: str, addresses: list[tuple[str, int]]) -> bool:
    """Return whether the process at these addresses answers a probe. Also True if the key to ask it can't be read."""
    try:
        key = read_key(key_file)
    except WrongKey as e:
        _log.warning("guardian and admin can't be checked for signs of life: %s", e)
        return True
    return all(knock(host, port, key, KNOCK_SECONDS) is not None for host, port in addresses)


def _restart_while_needed(
    config: Mapping[str, Any], system: dict[str, Any], keeper: Mapping[str, Any], policy: Policy
) -> None:
    short_life_count, born_at = 0, time.monotonic()
    memory = MemoryFile(Path(system["memory"]), "")
    claims: list[Claim] = []  # for each generation of the log the newest: how far this host knows that it was written

    def remember() -> None:
        """Copy the newest claims from this host's memory file, which may be deleted or set back before a start."""
        in_order = sorted([*claims, *memory.claims()], key=lambda claim: claim.mark.position)
        claims[:] = {claim.mark.generation: claim for claim in in_order}.values()

    while True:
        cause = _wait_for_end(system, remember)
        short_life_count = count_short_lives(policy, short_life_count, time.monotonic() - born_at)
        request = {
            "config": config, "admin": system["admin"], "keeper": keeper, "cause": cause,
            "claims": [claim_to_dict(claim) for claim in claims],
            "pause": coordinator_pause(policy, short_life_count, random.random()),
        }
        code, new_system = _run_start(request)
        while code != 0:
            _log.error("the start ended with status %d; once more in %.0f s", code, AGAIN_SECONDS)
            time.sleep(AGAIN_SECONDS)
            code, new_system = _run_start(request)
        if new_system is None:
            return
        system, born_at = new_system, time.monotonic()


def _run_start(request: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Run `keeper_start` with this request in a child process. Return its exit status and its answer, if any."""
    process = subprocess.run(
        [sys.executable, "-m", "trinity_es.system.keeper_start"], input=json.dumps(request).encode(),
        stdout=subprocess.PIPE, check=False,
    )
    return process.returncode, json.loads(process.stdout if process.returncode == 0 else b"null")


def main() -> int:
    """Start the system of the request on standard input, answer, and keep it running. Return the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    request = json.load(sys.stdin.buffer)
    keeper = {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    _, answer = _run_start({**request, "keeper": keeper})
    if answer is None:
        return 1
    with os.fdopen(os.dup(1), "wb") as pipe:
        pipe.write(base64.b64decode(answer["outcome"]))
    os.dup2(2, 1)  # closes the pipe, so that the starter sees the end of the answer
    if "admin" not in answer:
        return 1
    _restart_while_needed(request["config"], answer, keeper, Policy())
    return 0


if __name__ == "__main__":
    sys.exit(main())
