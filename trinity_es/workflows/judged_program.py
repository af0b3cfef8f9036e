"""Script that runs a model's program and its tests: `judged_program.py SOLUTION [TESTS]`, in a folder of its own.

It imports nothing of this package. Audit hooks refuse processes, sockets, ctypes, and changes of files outside the
folder. They stop accidents and tricks that a model learns, but not an attacker. After all tests the script prints the
first line of its standard input as the verdict, so a solution that exits early passes no test.
"""

from __future__ import annotations

import ctypes  # noqa: F401  # many packages do: its own import is what the hooks would refuse
import os
import resource
import signal
import sys
import types
from socket import AF_UNIX
from typing import Any

__all__ = ["main"]

_REFUSED = (
    "ctypes.", "fcntl.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.", "signal.pthread_kill", "socket.", "subprocess.", "syslog.", "webbrowser.",
)
_CHANGED_PATHS = {
    "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1,
    "os.symlink": 2, "os.truncate": 1, "os.utime": 1, "os.setxattr": 1, "os.removexattr": 1,
}
"""Number of leading arguments that are paths of changed files, by audit event."""


def _install_audit_hook(folder: str) -> None:
    """Install an audit hook that refuses forbidden actions, such as changing files outside this folder."""
    allowed_prefix = os.path.realpath(folder) + os.sep
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def require_inside(path: Any) -> None:
        if isinstance(path, int):
            return  # a file that it has open
        name = os.fsdecode(path)
        if not (os.path.realpath(name) + os.sep).startswith(allowed_prefix) and name != os.devnull:
            raise PermissionError(f"a judged program may change files in its own folder only, not {path!r}")

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & write_flags
            if path is not None and (writes or (not isinstance(path, int) and os.path.isdir(path))):
                require_inside(path)  # a folder too, since a file could be named from there
        elif event in _CHANGED_PATHS:
            for path in args[: _CHANGED_PATHS[event]]:
                require_inside(path)
        elif event == "socket.__new__" and args[1] == AF_UNIX:
            return  # asyncio's loop has a pair of them; connect, bind and sendto are refused
        elif event == "resource.setrlimit" and args[0] == resource.RLIMIT_CPU:
            raise PermissionError("a judged program may not change its limit of CPU time")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"a judged program may not do this: {event}")

    sys.addaudithook(audit)


def main() -> None:
    """Run the program and its tests as one module, then print the verdict."""
    _, solution, *tests = sys.argv
    sources = []
    for path in (solution, *tests):
        with open(path, encoding="utf-8", errors="surrogatepass") as f:
            sources.append((f.read(), os.path.basename(path)))
    verdict = sys.stdin.readline() if tests else ""
    sys.argv[:] = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    sys.setrecursionlimit(10_000)
    for signal_module in (signal, sys.modules["_signal"]):  # no hook sees it, and a killed process gets no verdict
        vars(signal_module).pop("raise_signal", None)
    _install_audit_hook(os.getcwd())
    module = types.ModuleType("solution" if tests else "__main__")
    sys.modules[module.__name__] = module  # where dataclasses, pickle and typing look for it
    for source, name in sources:
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    sys.stdout.flush()
    os.write(1, f"\n{verdict}".encode())


if __name__ == "__main__":
    main()
