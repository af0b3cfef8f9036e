"""A Python process with slow imports done, which forks a child for each script that a test runs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import setproctitle

from tests.helpers.paths import ROOT

MAKER_SECONDS = 1.0
"""Interval at which a warm Python checks that the process that made it lives."""


class Forked(subprocess.Popen[Any]):
    """Popen whose child is forked from a warm Python. The child leads a session of its own.

    A subclass may choose another warm Python for each command, or None, which starts a new interpreter.
    """

    def __init__(self, *args: Any, warm: WarmPython | None = None, **options: Any) -> None:
        self._warm, self._status = warm, -1
        super().__init__(*args, **options)

    def choose(self, args: Sequence[str], options: Mapping[str, Any]) -> WarmPython | None:
        """Return the warm Python that forks this command, or None. `options`: options of `Popen`."""
        return self._warm

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, stdin: int, to_stdin: int, of_stdout: int, stdout: int,
        of_stderr: int, stderr: int, *more: Any,
    ) -> None:
        new = executable is not None or preexec_fn is not None or pass_fds or shell
        python = None if new else self.choose(args, {"env": os.environ if env is None else env})
        if python is None:
            super()._execute_child(  # type: ignore[misc]  # what `subprocess` itself does, which has no public name
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, stdin,
                to_stdin, of_stdout, stdout, of_stderr, stderr, *more)
            return
        streams = [fd if given == -1 else given for fd, given in enumerate((stdin, stdout, stderr))]
        self.pid, self._status = python.fork(args[1:], streams, env, cwd)
        self._child_created = True
        devnull = getattr(self, "_devnull", None)
        for theirs, ours in ((stdin, to_stdin), (stdout, of_stdout), (stderr, of_stderr)):
            if ours != -1 and theirs not in (-1, devnull):
                os.close(theirs)
        if devnull is not None:
            os.close(devnull)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return its pid and wait status, or zeros, as `os.waitpid` does for a child of this process."""
        if self._status == -1:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]  # as above
        if not select.select([self._status], [], [], 0.0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = os.read(self._status, 100)
        os.close(self._status)
        return self.pid, int(status or signal.SIGKILL)  # "" if all of them were killed

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._status == -1 or self.returncode is not None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc, no-any-return]  # as above
        if self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]  # as above
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]  # as above
        return self.returncode


class WarmPython:
    """Python process with these modules imported. Its children end with it, and it ends with its maker."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, start_new_session=True)

    def fork(
        self, arguments: Sequence[str], streams: Sequence[int], variables: Mapping[str, str] | None, folder: Any
    ) -> tuple[int, int]:
        """Run a script, or a module after "-m", as `python ARGUMENTS` does, with these standard streams.

        Return the child's pid, and a pipe with its wait status after the end.
        """
        environment = {**(os.environ if variables is None else variables), **self.variables}
        request = json.dumps([list(map(os.fspath, arguments)), environment, os.fspath(folder or os.getcwd())])
        ours, theirs = os.pipe()
        try:
            with self._turn:
                socket.send_fds(self._requests, [request.encode()], [*streams, theirs, self._requests.fileno()])
        finally:
            os.close(theirs)
        pid = b""
        while not pid.endswith(b"\n"):
            read = os.read(ours, 1)
            assert read, "the warm Python has ended: it says why on stderr"
            pid += read
        return int(pid), ours

    @classmethod
    def inherited(cls, requests: socket.socket) -> WarmPython:
        """Return the warm Python that forked this process, to fork others."""
        python = cls.__new__(cls)
        python.variables, python._requests, python._turn = {}, requests, threading.Lock()
        return python

    def start(self, arguments: Sequence[str], output: IO[Any], errors: IO[Any]) -> Forked:
        """Start a script or module with these files as its output."""
        return Forked([sys.executable, *arguments], warm=self, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)

    def run(
        self, arguments: Sequence[str], *, timeout: float, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script or module to its end, and capture its output as `subprocess.run` does."""
        with Forked(
            [sys.executable, *arguments], warm=self, env={**os.environ, **(variables or {})}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as forked:
            try:
                out, err = forked.communicate(timeout=timeout)
            except BaseException:
                os.killpg(forked.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(list(arguments), forked.returncode, out, err)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()


class Commands(Forked):
    """Popen that forks our own commands from an interpreter with their imports done, which are most of a start.

    If a test changed environment variables that an interpreter reads at its start, a new one is made.
    """

    warm: WarmPython | None = None
    modules = ("trinity_es.actors.launch", "trinity_es.cli.commands.run", "trinity_es.system.keeper")
    begun: Mapping[str, str]

    def choose(self, args: Sequence[str], options: Mapping[str, Any]) -> WarmPython | None:
        ours = list(args[:2]) == [sys.executable, "-m"] and args[2] in ("trinity_es", *self.modules)
        if not ours or _read_at_start(options["env"]) != self.begun:
            return None
        if Commands.warm is None:
            Commands.warm = WarmPython(self.modules, {})
        return Commands.warm

    @classmethod
    def fork_from_now_on(cls, warm: WarmPython | None = None) -> None:
        """Make this process fork our commands from `warm`, or from a warm Python made when needed."""
        cls.begun, cls.warm = _read_at_start(os.environ), warm
        subprocess.Popen = cls  # type: ignore[misc]  # for all who use it


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter reads at its start, without the path to our modules."""
    read = {k: v for k, v in env.items() if k.startswith(("PYTHON", "LC_", "LANG", "LD_", "TZ"))}
    if read.get("PYTHONPATH") == str(ROOT):
        del read["PYTHONPATH"]
    if read.get("TZ") == ":/etc/localtime":
        del read["TZ"]  # Thespian sets it in each process that talks to a system, and it changes nothing
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS"):  # a run in this process sets the latter, for vLLM's
        read.pop(name, None)
    return read


@contextlib.contextmanager
def warm_python(modules: Sequence[str], variables: Mapping[str, str]) -> Iterator[WarmPython]:
    python = WarmPython(modules, variables)
    try:
        yield python
    finally:
        python.close()


# --- in the warm Python -----------------------------------------------------------------------------------------------
def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _next_script(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Return its arguments in the child that runs them, and None in the parent at the end.

    Children may ask as well, so who made this process is asked after, and not only listened to.
    """
    maker = os.getppid()
    while True:
        warm = os.getpid()
        while not select.select([requests], [], [], MAKER_SECONDS)[0]:
            if os.getppid() != maker:
                return None
        request, descriptors, *_ = socket.recv_fds(requests, 1 << 18, 5)
        if not request:
            return None
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    _end_with_parent(warm)
    requests.close()
    for which in (signal.SIGCHLD, signal.SIGHUP):  # the latter is ignored where nohup started the tests
        signal.signal(which, signal.SIG_DFL)
    *streams, status, more = descriptors
    between = os.getpid()
    if (pid := os.fork()) != 0:  # this process waits for the script and reports its status
        for descriptor in (*streams, more):
            os.close(descriptor)
        os.closerange(0, 3)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)
    _end_with_parent(between)
    os.setsid()
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
    for descriptor in (*streams, status):
        os.close(descriptor)
    arguments, variables, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, closefd=False)  # those of the warm Python know where they were in other files
    sys.stdout = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    tempfile.tempdir = None  # it is looked for once
    if set(Commands.modules) <= sys.modules.keys():
        Commands.fork_from_now_on(WarmPython.inherited(socket.socket(fileno=more)))
    setproctitle.setproctitle(" ".join(["python", *arguments]))
    return list(arguments)


def main(descriptor: int, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    setproctitle.getproctitle()  # it looks for its place once, which it does not find among other variables
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those between
    arguments = _next_script(socket.socket(fileno=descriptor))
    if arguments is None:
        return
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        path = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:0] = [folder for folder in path if folder not in sys.path]
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
