"""Differences between a config and the config with which its store's system was started."""

from __future__ import annotations

from collections.abc import Iterable

from trinity_es.config.config import Config
from trinity_es.config.interpolation import escape_texts
from trinity_es.events.errors import ConfigError, LogError
from trinity_es.events.values import shown
from trinity_es.projections.reading.diff import MISSING, OWN, Change, changes
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["other_settings", "require_same_settings", "settings_phrase"]

_RUN_SETTINGS = (
    "project", "total_steps", "checkpoint_root_dir", "trainer", "monitor.monitor_type", "monitor.monitor_args",
    "buffer.batch_size", "buffer.explorer_input", "synchronizer.sync_style", "synchronizer.sync_interval",
    "synchronizer.sync_offset", "synchronizer.max_inflight_batches", "explorer.name", "explorer.eval_interval",
    "explorer.eval_on_startup", "explorer.bench_on_latest_checkpoint", "explorer.listen_address",
    "explorer.proxy_port", "explorer.proxy_tls", "explorer.proxy_without_key", "system.startup_timeout",
)
"""Keys that only the explorer or trainer process reads; the actor system uses all others."""
_NOT_COMPARED = (*OWN, "mode", "code_path", "hosts")
"""Keys that may differ: names, mode, folders, and keys that a launcher sets."""


def other_settings(config: Config, *, serve: bool = False) -> list[Change]:
    """Return the settings in which this config differs from the one that its store's system was last started with.

    Returns [] if there is no log, or if this release can't read the config in it. `serve`: also compare with a system
    in mode `serve`.
    """
    try:
        with open_log(config.store.url) as log:
            _, recorded_config = log.config(serve=serve)
        if not recorded_config:
            return []
        settings_before = Config.from_dict(escape_texts(recorded_config)).masked()
    except (ConfigError, LogError):
        return []
    return [change for change in changes(settings_before, config.masked()) if not _is_in(change.path, _NOT_COMPARED)]


def _is_in(path: str, keys: Iterable[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


def require_same_settings(config: Config) -> None:
    """Raise ConfigError if the running system of this store was started with other settings."""
    differences = [c for c in other_settings(config, serve=True) if not _is_in(c.path, _RUN_SETTINGS)]
    if differences:
        raise ConfigError(
            f"the actor system of {config.masked()['store']['url']} runs, and was started with other settings: "
            f"{settings_phrase(differences)}. End it with `trinity-es down`, and start again; or put the settings back"
        )


def settings_phrase(settings: Iterable[Change]) -> str:
    """Return the changes as a phrase for a message, such as `buffer.batch_size was 8 and is 16`."""
    phrases = []
    for change in settings:
        is_long = isinstance(change.before, list | dict) or isinstance(change.after, list | dict)
        before, after = ("not set" if value == MISSING else shown(value) for value in (change.before, change.after))
        values = "has changed" if is_long else f"was {before} and is {after}"
        phrases.append(f"{change.path} {values}")
    return ", ".join(phrases)
