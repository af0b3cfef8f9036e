"""A grader: a process that calls one function, tells what it gave, and waits for its end.

Forked from a template process (`worker_template_main.py`), which has imported the function's module, for one call; the
runner's `Graders` kills it, with its process group, whatever came of it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import traceback
from typing import Any

import orjson

from trinity_es.actors.plugins import resolve
from trinity_es.actors.rollout.workers.protocol import LENGTH
from trinity_es.events.errors import TrinityError, error_to_dict

__all__ = ["answer"]

TRACEBACK_CHARACTERS = 3000


def answer(end: socket.socket) -> None:
    """Be a grader, with this end of the socket. Returns when nobody listens any more."""
    os.setsid()  # what it starts is ended with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pid, stream = os.getpid(), end.makefile("rb")
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return  # whoever asked is gone
    said = _called(orjson.loads(stream.read(*LENGTH.unpack(head))))
    if os.getpid() != pid:
        os._exit(1)  # the function forked, and this is the copy
    end.sendall(LENGTH.pack(len(said)) + said)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # what the function left behind
    stream.read(1)


def _called(asked: dict[str, Any]) -> bytes:
    """Return what the function gave or raised, as JSON."""
    try:
        function: Any = resolve(asked["function"], {}, "grader")
        value = function(*asked["args"], **asked["kwargs"])
        try:
            return orjson.dumps({"value": value})
        except TypeError as e:
            raise TypeError(f"it gave a {type(value).__name__}, which is no plain JSON: {e}") from None
    except TrinityError as e:
        return orjson.dumps({"error": error_to_dict(e)})
    except BaseException as e:
        lines = "".join(traceback.format_exception(e)).rstrip()[-TRACEBACK_CHARACTERS:]
        told = f"{type(e).__name__}: {e}\n{lines}".encode(errors="replace").decode()
        return orjson.dumps({"raised": told})
