"""Template process, which imports the modules of workflows once, and forks workers and graders on demand.

The first template of a runner is a new interpreter that has imported `workers/main.py`. For each module with workflows
a template forks a child, which imports the module and becomes a template too. If the import fails, hangs or ends its
process, only that child is lost. Threads, sockets, files and GPUs that a module opens on import do not survive a fork.
Such a module is `unsafe`, and each worker imports it itself.

A template has one thread and only executes the runner's orders. It ends with its parent (PDEATHSIG), and its workers
with it.
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

from trinity_es.actors.plugin_lookup import resolve
from trinity_es.actors.rollout.workers import grader_main
from trinity_es.actors.rollout.workers import main as worker_main
from trinity_es.actors.rollout.workers.protocol import MOST, note
from trinity_es.events.errors import UnknownWorkflow
from trinity_es.events.processes import end_with_parent

__all__ = ["main"]

_PR_SET_NAME = 15
_ENTROPY_BITS = 128
"""Bits of entropy of numpy's generators without a seed."""


class _Template:
    """Template in this process; `end` is its end of the socket to the runner."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.children: dict[int, int] = {}
        """Number that the runner gave each child, by pid."""
        self.generators: list[Any] = []
        """Random generators of numpy to reseed in each worker."""

    def serve(self) -> None:
        """Execute the runner's orders until the runner is gone. A forked child executes its own order first."""
        wakeup_reader, wakeup_writer = socket.socketpair()  # readable after a signal, such as the end of a child
        wakeup_reader.setblocking(False)
        wakeup_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        own_sockets = [self.end, wakeup_reader, wakeup_writer]
        while True:
            readable, _, _ = select.select([self.end, wakeup_reader], [], [])
            if wakeup_reader in readable:
                with contextlib.suppress(BlockingIOError):
                    while wakeup_reader.recv(4096):
                        pass
                self.report_ended_children()
            if self.end not in readable:
                continue
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # the runner ended with unread messages
                data, fds, _, _ = socket.recv_fds(self.end, MOST, 1)
            if not data:
                os._exit(1)
            order, number, *arguments = pickle.loads(data)
            if not self.fork(number, own_sockets):  # in the child
                self.end = socket.socket(fileno=fds[0])
                self.children = {}
                self.execute(order, *arguments)
                # Only a child that imported a module gets here, and serves as a template.
                return self.serve()
            for fd in fds:
                os.close(fd)

    def fork(self, number: int, own_sockets: list[socket.socket]) -> bool:
        """Fork a child and report it under this number; return True. In the child, close the sockets; return False."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            self.send("failed", number, f"{type(e).__name__}: {e}")
            return True
        if pid:
            self.children[pid] = number
            self.send("forked", number, pid)
            return True
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for own_socket in own_sockets:
            own_socket.close()
        end_with_parent(parent)
        return False

    def report_ended_children(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self.children.pop(pid, None)
            if number is not None:  # otherwise a module started this process on import
                self.send("ended", number, os.waitstatus_to_exitcode(status))

    def send(self, *message: Any) -> None:
        """Send a message to the runner; exit if the runner is gone."""
        try:
            self.end.sendall(note(*message))
        except OSError:
            os._exit(1)

    def execute(self, order: str, *arguments: Any) -> None:
        """Work as a worker or grader and then exit, or import a module and return. Called in a forked child."""
        if order == "work":
            _name_process("worker")
            self.reseed()
            worker_main.play(self.end)
            os._exit(1)
        if order == "grade":
            _name_process("grader")
            self.reseed()
            grader_main.answer(self.end)
            os._exit(1)
        try:
            self.import_module(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def import_module(self, workflow: str) -> None:
        """Import a workflow's module. Report "ready" if workers may be forked now; else report why not, and exit."""
        files_before = _open_files()
        try:
            resolve(workflow, {}, "workflow")
        except UnknownWorkflow as e:
            self.send("refused", str(e))
            os._exit(0)
        defect = _fork_defect(files_before)
        if defect:
            self.send("unsafe", defect)
            os._exit(0)
        self.generators = _unseeded_generators()
        gc.collect()
        gc.freeze()  # otherwise the first garbage collection in each worker would copy these pages
        self.send("ready")

    def reseed(self) -> None:
        """Reseed the random generators, so that workers draw different numbers. Python reseeds its own."""
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        if numpy is not None:
            numpy.seed()
        for generator in self.generators:
            generator.bit_generator.state = type(generator.bit_generator)().state
        if torch is not None:
            torch.seed()


def _open_files() -> set[str]:
    """Return descriptor and target of each file that this process has open."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor, now closed
            files.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return files


def _fork_defect(files_before: set[str]) -> str:
    """Return a message about threads or files that an imported module left, so that forks are unsafe; "" if none."""
    pid = os.fork()  # ends thread pools that handle forks themselves, such as numpy's
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    thread_count = len(os.listdir("/proc/self/task")) - 1  # without this one
    if thread_count:
        return f"started {thread_count} thread{'s' * (thread_count > 1)} when it was imported"
    opened = sorted(file.partition(" ")[2] for file in _open_files() - files_before)
    return f"left {', '.join(opened)} open when it was imported" if opened else ""


def _unseeded_generators() -> list[Any]:
    """Return the numpy generators that modules made without a seed. Seeded ones stay equal in all workers."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    generators = {}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is numpy.random.Generator:
                entropy = getattr(value.bit_generator.seed_seq, "entropy", None)
                if isinstance(entropy, int) and entropy.bit_length() > _ENTROPY_BITS // 2:
                    generators[id(value)] = value
    return list(generators.values())


def _name_process(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main() -> None:
    """Work as the first template of a runner. Command line: the socket's fd, the runner's pid, a log file."""
    _, fd, runner_pid, log_file = sys.argv
    del sys.argv[1:]
    end_with_parent(int(runner_pid))
    _name_process("worker-template")
    worker_main.refuse_group_signals()  # also for modules that are imported here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group, and the runner handles it
    faulthandler.enable()
    if log_file:
        line_format = "%(asctime)s %(levelname)s %(name)s %(message)s"
        logging.basicConfig(filename=log_file, format=line_format, level=logging.WARNING)
    os.set_inheritable(int(fd), False)
    template = _Template(socket.socket(fileno=int(fd)))
    gc.collect()
    gc.freeze()
    template.send("ready")
    try:
        template.serve()
    except BaseException:
        traceback.print_exc()
    os._exit(1)
