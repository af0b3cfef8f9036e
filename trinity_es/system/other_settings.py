"""Differences between a config and the one that the system of its store was started with."""

from __future__ import annotations

from collections.abc import Iterable

from trinity_es.config.config import Config
from trinity_es.config.interpolation import escaped
from trinity_es.events.errors import ConfigError, LogError
from trinity_es.events.values import shown
from trinity_es.projections.reading.diff import OWN, Change, changes
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["other_settings", "require_same_settings", "said_of"]

_RUN_SETTINGS = (
    "project", "total_steps", "checkpoint_root_dir", "trainer", "monitor.monitor_type", "monitor.monitor_args",
    "buffer.batch_size", "buffer.explorer_input", "synchronizer.sync_style", "synchronizer.sync_interval",
    "synchronizer.sync_offset", "synchronizer.max_inflight_batches", "explorer.name", "explorer.eval_interval",
    "explorer.eval_on_startup", "explorer.bench_on_latest_checkpoint", "explorer.listen_address",
    "explorer.proxy_port", "explorer.proxy_tls", "explorer.proxy_without_key", "system.startup_timeout",
)
"""Keys that the process of a run reads itself; all others are the system's."""
_NOT_COMPARED = (*OWN, "mode", "code_path", "hosts")
"""Keys that may differ: the names of the run, the part of a process in it, folders, and what a launcher sets."""


def other_settings(config: Config, *, serve: bool = False) -> list[Change]:
    """Return how this config differs from the one with which the system of its store was last started.

    Returns [] if there is no log, or if this release can't read the config in it. `serve`: compare with a system in
    mode `serve` too.
    """
    try:
        with open_log(config.store.url) as log:
            recorded = log.config(serve=serve)[1]
        before = Config.from_dict(escaped(recorded)).masked() if recorded else config.masked()
    except (ConfigError, LogError):
        return []
    return [c for c in changes(before, config.masked()) if not _is_in(c.path, _NOT_COMPARED)]


def _is_in(path: str, keys: Iterable[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def require_same_settings(config: Config) -> None:
    """Raise ConfigError if the running system of this store was started with other settings."""
    if changed := [c for c in other_settings(config, serve=True) if not _is_in(c.path, _RUN_SETTINGS)]:
        raise ConfigError(
            f"the actor system of {config.masked()['store']['url']} runs, and was started with other settings: "
            f"{said_of(changed)}. End it with `trinity-es down`, and start again; or put the settings back"
        )


def said_of(settings: Iterable[Change]) -> str:
    """Return the changed settings as a phrase for a message."""
    return ", ".join(
        f"{c.path} has changed" if isinstance(c.before, list | dict) or isinstance(c.after, list | dict)
        else f"{c.path} was {shown(c.before)} and is {shown(c.after)}" for c in settings
    )
