"""One start of a system for its keeper, in a process that ends with it: first, or again after the system has died.

The request comes by standard input, as JSON. The answer goes to standard output: what the keeper watches, and for a
first start `outcome`, a pickle of the admin or of the error; null if the system is not needed any more.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_es.actors.sealed_transport import listening_addresses
from trinity_es.actors.system_end_checks import owner_end_reason, store_loss_reason
from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.events.processes import end_with_parent, process_lives
from trinity_es.events.store.checks.host_memory import Claim, claims_of
from trinity_es.events.store.database.retry import Backoff
from trinity_es.system import lifecycle, remembered_log_end, running_system
from trinity_es.system.leftovers import end_leftovers

__all__ = ["main"]

END_SECONDS = 40.0
"""Seconds in which a system may end by itself before its keeper ends it."""

_log = logging.getLogger("trinity_es.system.keeper")


def _watched(config: Config, admin: dict[str, Any]) -> dict[str, Any]:
    """Return what the keeper needs to know of a running system."""
    return {
        "admin": admin, "addresses": {name: listening_addresses(admin[key]) for name, key in _PROCESSES.items()},
        "key_file": running_system.key_file(config), "heartbeat_timeout": config.system.heartbeat_timeout,
        "memory": str(remembered_log_end.memory(config).path),
    }


_PROCESSES = {"admin": "pid", "guardian": "guardian"}
"""Key of each watched process's pid in the admin's record."""


def _first(config: Config, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start the system; return what the keeper watches and the outcome, or only the outcome if it is an error."""
    outcome: dict[str, Any] | Exception
    try:
        outcome = lifecycle.start_here(
            config, create=request["create"], owner=request["owner"], keeper=request["keeper"])
    except Exception as e:
        outcome = e
    watched = {} if isinstance(outcome, Exception) else _watched(config, outcome)
    return {**watched, "outcome": base64.b64encode(pickle.dumps(outcome)).decode()}


def _again(config: Config, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Start a system again that has died, or end what is left of one that nobody needs; return what to watch."""
    admin = request["admin"]
    if reason := _reason_to_stop(config, admin):
        _log.warning("the system ends: %s", reason)
        _end(admin)
        return None
    _log.warning("%s; next start in %.1f s", request["cause"], request["pause"])
    time.sleep(request["pause"])
    new_admin = _start_again(config, admin, request["keeper"], claims_of(request["claims"]))
    if new_admin is None:
        return None
    _log.warning("the system is up again: admin %s", new_admin["pid"])
    return _watched(config, new_admin)


def _reason_to_stop(config: Config, admin: dict[str, Any]) -> str:
    """Return why no system is needed on this store any more: its owner or its store is gone; "" if one is needed."""
    return owner_end_reason(admin.get("owner")) or store_loss_reason(config.store.url)


def _end(admin: dict[str, Any]) -> None:
    """Wait for the end of a system that ends by itself, and kill what is left of it after `END_SECONDS`."""
    if not process_lives(admin["pid"], admin["started"]):
        return
    alive = running_system.wait_gone(running_system.processes(admin), END_SECONDS)
    for process in alive:
        _log.warning("process %d did not end by itself", process.pid)
    running_system.end(alive)


def _start_again(
    config: Config, admin: dict[str, Any], keeper: Mapping[str, Any], claims: Sequence[Claim]
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
            return lifecycle.start_here(config, create=False, owner=admin.get("owner"), keeper=keeper, claims=claims)
        except TrinityError as e:
            _log.error("not started: %s; once more in %.0f s", e, pause)
        except Exception:
            _log.exception("not started; once more in %.0f s", pause)
        time.sleep(pause)


def main() -> int:
    """Make the start that standard input asks for, and answer; return the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    request = json.load(sys.stdin.buffer)
    end_with_parent(request["keeper"]["pid"])
    config = Config.from_dict(request["config"], folder="/")
    answer = _again(config, request) if "admin" in request else _first(config, request)
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
