"""A Python that has imported what takes long to import, and forks a child for each script that a test runs."""

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
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import setproctitle

__all__ = ["Forked", "WarmPython", "warm_python"]


class Forked:
    """A child of a warm Python, with what is used of a `subprocess.Popen`. It leads a session of its own."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status)
        pid = self._status.readline()
        assert pid, "the warm Python has ended: it says why on stderr"
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, if it has ended; that of a signal is negative."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        if self._read(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._status:
                self.returncode = int(self._status.readline() or -signal.SIGKILL)  # "": all of them were killed
        return self.returncode


class WarmPython:
    """A Python with these modules. Its children end with it, and it ends with the process that made it."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, start_new_session=True)

    def start(
        self, arguments: Sequence[str], output: IO[Any], errors: IO[Any], variables: Mapping[str, str] | None = None
    ) -> Forked:
        """Run what `python ARGUMENTS` runs: a script, or a module after "-m"; with these further variables."""
        request = json.dumps([list(arguments), {**os.environ, **self.variables, **(variables or {})}, os.getcwd()])
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._requests, [request.encode()], [output.fileno(), errors.fileno(), theirs])
        finally:
            os.close(theirs)
        return Forked(ours)

    def run(
        self, arguments: Sequence[str], *, timeout: float, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, as `subprocess.run` does that captures its output."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            forked = self.start(arguments, output, errors, variables)
            try:
                code = forked.wait(timeout)
            except BaseException:
                os.killpg(forked.pid, signal.SIGKILL)
                raise
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(list(arguments), code, output.read(), errors.read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()


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
    """Fork for each request; return its arguments in the child that is to run them, and None at the end."""
    while True:
        warm = os.getpid()
        request, descriptors, *_ = socket.recv_fds(requests, 1 << 18, 3)
        if not request:
            return None
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    _end_with_parent(warm)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, status = descriptors
    between = os.getpid()
    if (pid := os.fork()) != 0:  # in a process that waits for the script's end, and says how it ended
        os.close(output)
        os.close(errors)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    _end_with_parent(between)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    arguments, variables, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
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
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
