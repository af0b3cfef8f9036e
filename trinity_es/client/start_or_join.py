"""Context manager that runs an actor system, or joins one, for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from trinity_es.client.progress_lines import report_progress
from trinity_es.client.rollout_client import RolloutClient, connect
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import AlreadyRunning
from trinity_es.system import lifecycle, running_system
from trinity_es.system.other_settings import require_same_settings

__all__ = ["running"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def running(config: Config, *, timeout: float | None = None) -> Iterator[RolloutClient]:
    """Start the actor system of this config's store, or join the running one. Yields a client when the engines serve.

    The end of the block ends a system that it started. `timeout`: seconds for the engines to load, by default
    `system.startup_timeout`. Progress is logged at INFO, or printed to stderr if the program did not set up logging.
    Raises ConfigError (also if the running system has other settings), StartupError, LogRewound, errors of `connect`.
    """
    begun_at = time.monotonic()
    store_url, logs = config.masked()["store"]["url"], config.system.log_dir
    report_progress(
        _log, f"starting the actor system of {store_url}; engines may take minutes to load (text logs in {logs})")
    runs_already = running_system.is_up(config)
    if not runs_already:
        try:
            lifecycle.start(config)
        except AlreadyRunning:  # another process was faster
            runs_already = True
    if runs_already:
        require_same_settings(config)
        report_progress(_log, f"joining the running actor system of {store_url}, which goes on after this program")
    try:
        with connect(config) as client:
            client.wait_ready(timeout)
            report_progress(_log, f"the engines are ready after {time.monotonic() - begun_at:.0f} s")
            yield client
    finally:
        if not runs_already:
            end_system(config)
