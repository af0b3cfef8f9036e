"""An actor system for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from trinity_es.client.progress_lines import tell
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
    """Start the system of this config's store, or join the one that runs; yields a client when its engines serve.

    At the end of the block a system that was started here is ended. `timeout`: seconds that the engines may take,
    `system.startup_timeout` by default. Progress is logged at INFO, or printed to stderr if the program did not set up
    logging. Raises ConfigError, also if a system runs with other settings, StartupError, LogRewound and the errors of
    `connect`.
    """
    begun_at = time.monotonic()
    store_url, logs = config.masked()["store"]["url"], config.system.log_dir
    tell(_log, f"starting the actor system of {store_url}; engines may take minutes to load (text logs in {logs})")
    runs_already = running_system.is_up(config)
    if not runs_already:
        try:
            lifecycle.start(config)
        except AlreadyRunning:  # another process was faster
            runs_already = True
    if runs_already:
        require_same_settings(config)
        tell(_log, f"the actor system of {store_url} runs already: it is joined, and goes on after this")
    try:
        with connect(config) as client:
            client.wait_ready(timeout)
            tell(_log, f"the engines are ready after {time.monotonic() - begun_at:.0f} s")
            yield client
    finally:
        if not runs_already:
            end_system(config)
