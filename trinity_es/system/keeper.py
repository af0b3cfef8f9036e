"""The keeper: a process that starts the actor system, and starts it again when its guardian or its admin died.

Nothing else restarts the guardian, or Thespian's admin above it. If either dies, the whole system ends (children die
with their parent, the admin with its guardian). Then the keeper, which is no actor, ends what is left and starts the
system again on the same store. An orderly `down` ends it.

A suspended or hung admin or guardian counts as dead: the keeper knocks at both every few seconds (`frames.knock`), and
ends the system if one is silent for `system.heartbeat_timeout`. If the keeper itself was suspended, perhaps with
the whole machine, both get that time again.

`lifecycle.start` sends it the config by standard input, so that no password is on a command line or in a file. It
answers by standard output, as a pickle, with the admin or the error of the first start. Its log is `keeper.log`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_es.actors.frames import knock
from trinity_es.actors.guardian.supervision import Policy, coordinator_pause, short_lives
from trinity_es.actors.sealed_transport import listening
from trinity_es.actors.system_end_checks import owner_gone, store_gone
from trinity_es.actors.system_key import read_key
from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError, WrongKey
from trinity_es.events.processes import process_lives, process_start_time
from trinity_es.events.store.checks.log_end import Claim
from trinity_es.events.store.database.retry import Backoff
from trinity_es.system import lifecycle, remembered_log_end, running_system
from trinity_es.system.leftovers import end_leftovers

__all__ = ["main"]

END_SECONDS = 40.0
"""Seconds in which a system may end by itself before its keeper ends it."""
KNOCK_SECONDS = 2.0
"""Interval between two knocks at the same process, and the wait for an answer."""
STOOD_STILL_SECONDS = 2.0
"""Delay of one step of this process, in seconds, from which it counts as suspended."""

_log = logging.getLogger("trinity_es.system.keeper")


def _wait_for_end(config: Config, admin: Mapping[str, Any], remember: Callable[[], None]) -> str:
    """Wait until the system or its owner has ended, or kill a hanging system. Return the reason."""
    pids = {"the admin": admin["pid"], "the guardian": admin["guardian"]}
    gone = f"the admin (pid {admin['pid']}) is gone, perhaps with its guardian"
    try:
        handle = os.pidfd_open(admin["pid"])
    except ProcessLookupError:
        return gone
    try:
        if not process_lives(admin["pid"], admin["started"]):
            return gone
        addresses = {name: listening(pid) for name, pid in pids.items()}
        limit, heard_at = config.system.heartbeat_timeout, dict.fromkeys(pids, time.monotonic())
        while True:
            round_began_at = time.monotonic()
            if select.select([handle], [], [], min(KNOCK_SECONDS, limit / 4))[0]:
                return gone
            remember()
            if reason := owner_gone(admin.get("owner")):
                return reason
            answers = {name: _is_answering(config, addresses[name]) for name in pids}
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
                return f"{silent} (pid {pids[silent]}) gave no sign of life for {silence:.0f} s and was ended"
    finally:
        os.close(handle)


def _is_answering(config: Config, addresses: list[tuple[str, int]]) -> bool:
    """Return True if the process that listens at these addresses handles messages, or if its key can't be read."""
    try:
        key = read_key(running_system.key_file(config))
    except WrongKey as e:
        _log.warning("guardian and admin can't be checked for signs of life: %s", e)
        return True
    return all(knock(host, port, key, KNOCK_SECONDS) is not None for host, port in addresses)


def keep(config: Config, admin: dict[str, Any], this_keeper: Mapping[str, Any], policy: Policy) -> None:
    """Start the system again whenever it has died, with growing pauses, until it is no longer needed."""
    short_life_count, born_at = 0, time.monotonic()
    memory = remembered_log_end.memory(config)
    claims: list[Claim] = []
    """The newest claim about each generation of the log: how far this host knows that it was written."""

    def remember() -> None:
        """Copy the newest claims from this host's memory: its file may be deleted or set back before a start."""
        in_order = sorted([*claims, *memory.claims()], key=lambda claim: claim.mark.position)
        claims[:] = {claim.mark.generation: claim for claim in in_order}.values()

    while True:
        cause = _wait_for_end(config, admin, remember)
        if reason := _reason_to_stop(config, admin):
            _log.warning("the system ends: %s", reason)
            _end(admin)
            return
        short_life_count = short_lives(policy, short_life_count, time.monotonic() - born_at)
        pause = coordinator_pause(policy, short_life_count, random.random())
        _log.warning("%s; next start in %.1f s", cause, pause)
        time.sleep(pause)
        new_admin = _start_again(config, admin, this_keeper, claims)
        if new_admin is None:
            return
        admin, born_at = new_admin, time.monotonic()
        _log.warning("the system is up again: admin %s", admin["pid"])


def _reason_to_stop(config: Config, admin: dict[str, Any]) -> str:
    """Return why no system is needed on this store any more: its owner or its store is gone; "" if one is needed."""
    return owner_gone(admin.get("owner")) or store_gone(config.store.url)


def _end(admin: dict[str, Any]) -> None:
    """Wait for the end of a system that ends by itself, and kill what is left of it after `END_SECONDS`."""
    if not process_lives(admin["pid"], admin["started"]):
        return
    alive = running_system.wait_gone(running_system.processes(admin), END_SECONDS)
    for process in alive:
        _log.warning("process %d did not end by itself", process.pid)
    running_system.end(alive)


def _start_again(
    config: Config, admin: dict[str, Any], this_keeper: Mapping[str, Any], claims: Sequence[Claim]
) -> dict[str, Any] | None:
    """Start the system again, with retries. Return its admin; None if it isn't needed or another process started it."""
    pauses = Backoff(1.0, 60.0)
    while True:
        pause = pauses.next(0.0)
        if reason := _reason_to_stop(config, admin):
            _log.warning("the system is not started again: %s", reason)
            return None
        try:
            head = running_system.find_head(config)
            if head is not None and head["pid"] != admin["pid"]:
                return None
            end_leftovers(config)  # first: if the admin still lives, the system seems to run
            return lifecycle.start_here(
                config, create=False, owner=admin.get("owner"), keeper=this_keeper, claims=claims)
        except TrinityError as e:
            _log.error("not started: %s; once more in %.0f s", e, pause)
        except Exception:
            _log.exception("not started; once more in %.0f s", pause)
        time.sleep(pause)


def main() -> int:
    """Start the system that standard input asks for, answer, and keep the system running; return the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    request = json.load(sys.stdin.buffer)
    config = Config.from_dict(request["config"], folder="/")
    this_keeper = {"pid": os.getpid(), "started": process_start_time(os.getpid())}
    outcome: dict[str, Any] | Exception
    try:
        outcome = lifecycle.start_here(config, create=request["create"], owner=request["owner"], keeper=this_keeper)
    except Exception as e:
        outcome = e
    with os.fdopen(os.dup(1), "wb") as answer:
        answer.write(pickle.dumps(outcome))
    os.dup2(2, 1)  # closes the pipe, so that the starter sees the end of the answer
    if isinstance(outcome, Exception):
        return 1
    keep(config, outcome, this_keeper, Policy())
    return 0


if __name__ == "__main__":
    sys.exit(main())
