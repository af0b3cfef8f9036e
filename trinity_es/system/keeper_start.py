"""One start of a system for its keeper: the first, or a restart after the system has died. Ends after the start.

The request comes as JSON on standard input. The answer on standard output is a JSON object with the facts that the
keeper watches the system by. A first start adds `outcome`, a pickle of the admin or of the error. The answer is null
if the system is no longer needed.
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
"""Seconds that a system gets to end by itself before its keeper kills it."""

_log = logging.getLogger("trinity_es.system.keeper")


def _watch_facts(config: Config, admin: dict[str, Any]) -> dict[str, Any]:
    return {
        "admin": admin, "addresses": {"admin": listening_addresses(admin["pid"]),
                                      "guardian": listening_addresses(admin["guardian"])},
        "key_file": running_system.key_file(config), "heartbeat_timeout": config.system.heartbeat_timeout,
        "memory": str(remembered_log_end.memory(config).path),
    }


def _first_start(config: Config, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start the system for the first time, and return the answer for the keeper. An error is in `outcome`."""
    outcome: dict[str, Any] | Exception
    try:
        outcome = lifecycle.start_here(
            config, create=request["create"], owner=request["owner"], keeper=request["keeper"])
    except Exception as e:
        outcome = e
    watched = {} if isinstance(outcome, Exception) else _watch_facts(config, outcome)
    return {**watched, "outcome": base64.b64encode(pickle.dumps(outcome)).decode()}


def _restart(config: Config, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Restart a dead system, and return the answer for the keeper. If no longer needed, end it and return None."""
    admin = request["admin"]
    if reason := _reason_to_stop(config, admin):
        _log.warning("the system ends: %s", reason)
        if process_lives(admin["pid"], admin["started"]):
            alive = running_system.wait_gone(running_system.processes(admin), END_SECONDS)
            for process in alive:
                _log.warning("process %d did not end by itself", process.pid)
            running_system.end(alive)
        return None
    _log.warning("%s; next start in %.1f s", request["cause"], request["pause"])
    time.sleep(request["pause"])
    new_admin = _start_with_retries(config, admin, request["keeper"], claims_of(request["claims"]))
    if new_admin is None:
        return None
    _log.warning("the system is up again: admin %s", new_admin["pid"])
    return _watch_facts(config, new_admin)


def _reason_to_stop(config: Config, admin: dict[str, Any]) -> str:
    return owner_end_reason(admin.get("owner")) or store_loss_reason(config.store.url)


def _start_with_retries(
    config: Config, admin: dict[str, Any], keeper: Mapping[str, Any], claims: Sequence[Claim]
) -> dict[str, Any] | None:
    """Try until the system is up, and return its admin; None if it is not needed or another process started it."""
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
    """Make the start that the request on standard input describes, and answer. Return the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    request = json.load(sys.stdin.buffer)
    end_with_parent(request["keeper"]["pid"])
    config = Config.from_dict(request["config"], folder="/")
    answer = _restart(config, request) if "admin" in request else _first_start(config, request)
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
