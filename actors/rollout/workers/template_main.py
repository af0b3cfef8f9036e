"""A template process: it imports what workers need, once, and forks them when it is told to.

The first template of a runner is a clean interpreter that has imported `workers/main.py`. For each module with
workflows one of the templates forks a child that imports it, and that becomes a template as well: a module whose
import fails, hangs or ends its process takes nobody along. What a module starts or opens when it is imported (a thread,
a socket, a file, a GPU) does not survive a fork, so such a module is said to be `unsafe` and is left to each worker to
import.

A template has one thread and does nothing by itself. It ends with its parent (PDEATHSIG), as its workers end with it.
What is said between it and the runner's side (`workers/templates.py`): see `workers/protocol.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any

from trinity_es.actors.plugins import resolve
from trinity_es.actors.rollout.workers import grader_main
from trinity_es.actors.rollout.workers import main as worker_main
from trinity_es.actors.rollout.workers.protocol import MOST, note
from trinity_es.events.errors import UnknownWorkflow
from trinity_es.events.processes import end_with_parent

__all__ = ["main"]

_PR_SET_NAME = 15
_BY_ITSELF = 128
"""Bits of entropy that numpy gives a generator which nobody gave a seed."""


class _Template:
    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.children: dict[int, int] = {}
        """Number by pid."""
        self.generators: list[Any] = []
        """Those of numpy that modules made for themselves and gave no seed."""

    def serve(self) -> None:
        """Obey until the runner is gone. A child returns from here as well, and says what it is to do."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        own = [self.end, woken, wake]
        while True:
            readable, _, _ = select.select([self.end, woken], [], [])
            if woken in readable:
                with contextlib.suppress(BlockingIOError):
                    while woken.recv(4096):
                        pass
                self.reap()
            if self.end not in readable:
                continue
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # the runner went before it read what it was told
                data, fds, _, _ = socket.recv_fds(self.end, MOST, 1)
            if not data:
                os._exit(1)
            order, number, *said = pickle.loads(data)
            if not self.fork(number, own):
                self.end = socket.socket(fileno=fds[0])
                self.children = {}
                self.obey(order, *said)
                # Only a child that imported a module is here still: it serves as its parent does.
                return self.serve()
            for fd in fds:
                os.close(fd)

    def fork(self, number: int, own: list[socket.socket]) -> bool:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            self.tell("failed", number, f"{type(e).__name__}: {e}")
            return True
        if pid:
            self.children[pid] = number
            self.tell("forked", number, pid)
            return True
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in own:
            end.close()
        end_with_parent(parent)
        return False

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self.children.pop(pid, None)
            if number is not None:  # else a process that a module started when it was imported
                self.tell("ended", number, os.waitstatus_to_exitcode(status))

    def tell(self, *message: Any) -> None:
        try:
            self.end.sendall(note(*message))
        except OSError:
            os._exit(1)  # the runner is gone

    def obey(self, order: str, *said: Any) -> None:
        """Be a worker or a grader, which never ends here, or import a module to be a template. Runs in a child."""
        if order == "work":
            _name("worker")
            self.reseed()
            worker_main.play(self.end)
            os._exit(1)
        if order == "grade":
            _name("grader")
            self.reseed()
            grader_main.answer(self.end)
            os._exit(1)
        try:
            self.learn(*said)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def learn(self, workflow: str) -> None:
        """Import a workflow's module, and tell whether workers may be forked of what it left."""
        before = _opened()
        try:
            resolve(workflow, {}, "workflow")
        except UnknownWorkflow as e:
            self.tell("refused", str(e))
            os._exit(0)
        why = _unsafe(before)
        if why:
            self.tell("unsafe", why)
            os._exit(0)
        self.generators = _unseeded()
        gc.collect()
        gc.freeze()  # or the first collection in each worker would make these pages its own
        self.tell("ready")

    def reseed(self) -> None:
        """Other numbers in each worker. Python does that for its own generator."""
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if numpy is not None:
            numpy.seed()
        for generator in self.generators:
            generator.bit_generator.state = type(generator.bit_generator)().state
        if torch is not None:
            torch.seed()


def _opened() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, which is closed by now
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def _unsafe(before: set[str]) -> str:
    """Return why this process is not to be forked; empty where it may be."""
    pid = os.fork()  # ends the pools that take care of forks by themselves, such as numpy's
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"started {threads} thread{'s' * (threads > 1)} when it was imported"
    opened = sorted(of.partition(" ")[2] for of in _opened() - before)
    return f"left {', '.join(opened)} open when it was imported" if opened else ""


def _unseeded() -> list[Any]:
    """Return generators that a module made without a seed, for all its workers to draw other numbers from.

    One that got a seed gives each worker the same numbers: somebody wanted that.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    found = {}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is numpy.random.Generator:
                entropy = getattr(value.bit_generator.seed_seq, "entropy", None)
                if isinstance(entropy, int) and entropy.bit_length() > _BY_ITSELF // 2:
                    found[id(value)] = value
    return list(found.values())


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main() -> None:
    """Be the first template of a runner: `fd of the socket, pid of the runner, log file`."""
    _, fd, parent, log_file = sys.argv
    del sys.argv[1:]  # a workflow that reads arguments is to find none
    end_with_parent(int(parent))
    _name("worker-template")
    worker_main.refuse_group_signals()  # of a module that is imported here, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the runner decides
    faulthandler.enable()
    if log_file:
        form = "%(asctime)s %(levelname)s %(name)s %(message)s"
        logging.basicConfig(filename=log_file, format=form, level=logging.WARNING)
    os.set_inheritable(int(fd), False)
    template = _Template(socket.socket(fileno=int(fd)))
    gc.collect()
    gc.freeze()
    template.tell("ready")
    try:
        template.serve()
    except BaseException:
        traceback.print_exc()
    os._exit(1)
