"""Grader process: it calls one function, sends the result, and waits until `Graders` kills its process group."""

from __future__ import annotations

import os
import resource
import signal
import socket
import traceback
from typing import Any

import orjson

from trinity_es.actors.plugin_lookup import resolve
from trinity_es.actors.rollout.workers.protocol import LENGTH
from trinity_es.events.errors import TrinityError, error_to_dict

__all__ = ["answer"]

TRACEBACK_CHARACTERS = 3000


def answer(end: socket.socket) -> None:
    """Work as a grader on this end of the socket; return when the other end is closed."""
    os.setsid()  # so that child processes are killed with this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pid, stream = os.getpid(), end.makefile("rb")
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return
    result = _call_result(orjson.loads(stream.read(*LENGTH.unpack(head))))
    if os.getpid() != pid:
        os._exit(1)  # the function forked, and this is the copy
    end.sendall(LENGTH.pack(len(result)) + result)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the function may have left an alarm
    stream.read(1)


def _call_result(request: dict[str, Any]) -> bytes:
    """Call the requested function, and return its value or error as the answer's JSON."""
    try:
        function: Any = resolve(request["function"], {}, "grader")
        value = function(*request["args"], **request["kwargs"])
        try:
            return orjson.dumps({"value": value})
        except TypeError as e:
            raise TypeError(f"the reward is a {type(value).__name__}, which is not plain JSON: {e}") from None
    except TrinityError as e:
        return orjson.dumps({"error": error_to_dict(e)})
    except BaseException as e:
        lines = "".join(traceback.format_exception(e)).rstrip()[-TRACEBACK_CHARACTERS:]
        text = f"{type(e).__name__}: {e}\n{lines}".encode(errors="replace").decode()
        return orjson.dumps({"raised": text})
