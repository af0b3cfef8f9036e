"""Base class of all actors. It handles errors, threads, timers and log files, which Thespian leaves to its users.

- An exception never reaches Thespian, which would run the handler again. The actor logs it and calls `on_crash`.
- A thread never sends. It passes a callable to `post`, and the actor's own loop runs it, woken through a socket pair
  under ThespianWatch. Every handler must return that watch, or Thespian forgets it.
- A fault of the C level (a segfault in an engine) ends the process instead of being caught and re-run for ever.
- Timers have names, by which `cancel` cancels them. Thespian itself can't cancel a timer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from thespian.actors import Actor, ActorExitRequest, ChildActorExited, ThespianWatch, WakeupMessage, WatchMessage

from trinity_es.events.private_files import create_private, make_private_folder
from trinity_es.events.processes import process_start_time

__all__ = ["BaseActor", "kill_group", "process_start_time"]

_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FIRST_ROOT = logging.getLogger()
"""Root logger at import. Thespian gives each actor another root; loggers of modules stay below this one."""


class BaseActor(Actor):  # type: ignore[misc]  # thespian is untyped
    """Base of guardian, coordinator and runner. Its handlers are methods `on_<MessageClass>(message, sender)`."""

    def __init__(self) -> None:
        super().__init__()
        faulthandler.disable()  # a forked process inherits "enabled", and enabling it again would do nothing
        for signal_number in _FATAL:
            signal.signal(signal_number, signal.SIG_DFL)
        faulthandler.enable()
        self.log = logging.getLogger(f"trinity_es.{type(self).__name__}")
        self._posted: deque[Callable[[], None]] = deque()
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """Sockets by which `post` wakes the actor: the first is read here, threads write to the second."""
        self._timers: dict[str, tuple[int, Callable[[], None]]] = {}
        """Number and call of each armed timer, by name."""
        self._timer_number = 0

    # --- for subclasses -------------------------------------------------------------------------------------------
    def on_crash(self, error: BaseException) -> None:
        """Handle an exception of a handler, after it was logged: a hook for subclasses."""

    def accepts(self, message: Any) -> bool:
        """Return True if the actor handles this message now. Otherwise it is dropped, and its sender repeats it."""
        return True

    def after_message(self) -> None:
        """Run at the end of each message or wake-up."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def chance(self) -> float:
        """Return a random number, uniform in [0, 1)."""
        return random.random()

    def open_log(self, directory: str, name: str) -> None:
        """Write this actor's log to `directory/name.log`, since Thespian's own logging goes through its transport."""
        make_private_folder(directory)
        file = Path(directory) / f"{name}.log"
        create_private(file)
        handler = logging.FileHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        root = logging.getLogger()
        for existing in list(root.handlers):  # Thespian's handler sends every record as a message
            logging.Logger.removeHandler(root, existing)
        logging.Logger.addHandler(root, handler)
        _FIRST_ROOT.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.getLogger("trinity_es").setLevel(logging.INFO)

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the actor's own loop, soon. Any thread may call this."""
        self._posted.append(call)
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):  # the buffer is full of wake-ups already
                self._pair[1].send(b"x")

    def start_watch(self) -> None:
        """Open the socket pair by which threads wake the actor. Call it in a handler: `__init__` lacks the address."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None:
        """Set a timer that runs `call` once, `seconds` from now. It replaces a timer of the same name."""
        self._timer_number += 1
        self._timers[name] = self._timer_number, call
        self.wakeupAfter(timedelta(seconds=seconds), payload=(name, self._timer_number))

    def cancel_timer(self, name: str) -> None:
        """Cancel the timer of this name, if there is one."""
        self._timers.pop(name, None)

    def has_timer(self, name: str) -> bool:
        return name in self._timers

    # --- Thespian's side ------------------------------------------------------------------------------------------
    def receiveMessage(self, message: Any, sender: Any) -> ThespianWatch | None:
        """Handle a message, then run the posted calls. Thespian calls this, and keeps the returned watch for `post`."""
        try:
            self._handle(message, sender)
            self._run_posted_calls()
            self.after_message()
        except BaseException as e:
            self._handle_exception(e)
        return None if self._pair is None else ThespianWatch([self._pair[0].fileno()])

    def _handle(self, message: Any, sender: Any) -> None:
        if isinstance(message, WatchMessage):
            return  # a call was posted, which _run_posted_calls runs
        if isinstance(message, WakeupMessage):
            name, number = message.payload
            armed_number, call = self._timers.get(name, (None, None))
            if call is not None and number == armed_number:  # otherwise it was cancelled or replaced
                del self._timers[name]
                call()
            return
        if isinstance(message, ActorExitRequest):
            self.on_exit()
            return
        if isinstance(message, ChildActorExited):
            self.on_child_exit(message.childAddress)
            return
        handler = getattr(self, f"on_{type(message).__name__}", None)
        if handler is None:
            self.log.debug("no handler for %s", type(message).__name__)
            return
        if self.accepts(message):
            handler(message, sender)

    def _run_posted_calls(self) -> None:
        if self._pair is not None:
            try:
                while self._pair[0].recv(4096):
                    pass
            except BlockingIOError:
                pass
        while self._posted:
            call = self._posted.popleft()
            try:
                call()
            except BaseException as e:
                self._handle_exception(e)

    def _handle_exception(self, error: BaseException) -> None:
        self.log.error("%s: %s", type(error).__name__, error, exc_info=error)
        try:
            self.on_crash(error)
        except BaseException as e:
            self.log.critical("on_crash() itself failed", exc_info=e)

    def on_exit(self) -> None:
        """Clean up before this actor ends at the request of the actor system: a hook for subclasses."""

    def on_child_exit(self, child: Any) -> None:
        """Handle the end of the child process with this address: a hook for subclasses."""


def kill_group(pgid: int) -> None:
    """Kill a whole process group at once. A group that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)
