"""The keeper: a process that has the actor system started, and started again when its guardian or its admin died.

Nothing else restarts the guardian, or Thespian's admin above it. If either dies, the whole system ends (children die
with their parent, the admin with its guardian). Then the keeper, which is no actor, has what is left ended and the
system started again on the same store. An orderly `down` ends it.

A suspended or hung admin or guardian counts as dead: the keeper knocks at both every few seconds (`frames.knock`), and
ends the system if one is silent for `system.heartbeat_timeout`. If the keeper itself was suspended, perhaps with
the whole machine, both get that time again.

It lives as long as the system, so it holds neither the config's classes nor the database's: a process of its own
(`keeper_start.py`) makes each start. `lifecycle.start` sends the config by standard input, so that no password is on a
command line or in a file. The answer goes to standard output, as a pickle, with the admin or the error of the first
start. The log of both is `keeper.log`.
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
from trinity_es.events.store.checks.host_memory import Claim, Memory, claim_to_dict

__all__ = ["main"]

KNOCK_SECONDS = 2.0
"""Interval between two knocks at the same process, and the wait for an answer."""
AGAIN_SECONDS = 5.0
"""Pause after a start whose process was killed, or could not begin."""
STOOD_STILL_SECONDS = 2.0
"""Delay of one step of this process, in seconds, from which it counts as suspended."""

_log = logging.getLogger("trinity_es.system.keeper")


def _wait_for_end(system: Mapping[str, Any], remember: Callable[[], None]) -> str:
    """Wait until the system or its owner has ended, or kill a hanging system. Return the reason."""
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
    """Return True if the process that listens at these addresses handles messages, or if its key can't be read."""
    try:
        key = read_key(key_file)
    except WrongKey as e:
        _log.warning("guardian and admin can't be checked for signs of life: %s", e)
        return True
    return all(knock(host, port, key, KNOCK_SECONDS) is not None for host, port in addresses)


def _keep(config: Mapping[str, Any], system: dict[str, Any], keeper: Mapping[str, Any], policy: Policy) -> None:
    """Have the system started again whenever it has died, with growing pauses, until it is no longer needed."""
    short_life_count, born_at = 0, time.monotonic()
    memory = Memory(Path(system["memory"]), "")
    claims: list[Claim] = []  # the newest about each generation of the log: how far this host knows that it was written

    def remember() -> None:
        """Copy the newest claims from this host's memory: its file may be deleted or set back before a start."""
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
        code, new_system = _in_child(request)
        while code != 0:
            _log.error("the start ended with status %d; once more in %.0f s", code, AGAIN_SECONDS)
            time.sleep(AGAIN_SECONDS)
            code, new_system = _in_child(request)
        if new_system is None:
            return
        system, born_at = new_system, time.monotonic()


def _in_child(request: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Make a start in a process of its own; return its exit status and its answer, None if it has none."""
    process = subprocess.run(
        [sys.executable, "-m", "trinity_es.system.keeper_start"], input=json.dumps(request).encode(),
        stdout=subprocess.PIPE, check=False,
    )
    return process.returncode, json.loads(process.stdout if process.returncode == 0 else b"null")


def main() -> int:
    """Have the system started that standard input asks for, answer, and keep it running; return the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    request = json.load(sys.stdin.buffer)
    keeper = {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    _, answer = _in_child({**request, "keeper": keeper})
    if answer is None:
        return 1
    with os.fdopen(os.dup(1), "wb") as pipe:
        pipe.write(base64.b64decode(answer["outcome"]))
    os.dup2(2, 1)  # closes the pipe, so that the starter sees the end of the answer
    if "admin" not in answer:
        return 1
    _keep(request["config"], answer, keeper, Policy())
    return 0


if __name__ == "__main__":
    sys.exit(main())
