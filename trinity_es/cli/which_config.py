"""Choice of the config: from a file, from a store's URL, or the one recorded in a log."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer
from sqlalchemy import URL

from trinity_es.cli.common import choose_log, read_config
from trinity_es.config.config import Config
from trinity_es.config.interpolation import escape_texts
from trinity_es.config.yaml_file import apply_overrides
from trinity_es.events.errors import ConfigError, LogUnavailable
from trinity_es.events.secrets import masked_keys
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.database.urls import file_of, masked, parse_url
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["named_once", "names_config", "settings_of", "settings_of_run"]


def settings_of(config: Path | None, log: str | None) -> Config:
    """Return the config of the options --config and --log: the file's, or one that names only the log.

    The latter has the log's own folder of text logs and key file, if they are on this machine.
    """
    if config is not None and log is None:
        return read_config(config)
    url = parse_url(choose_log(log, config)).render_as_string(hide_password=False)
    system: dict[str, str] = {}
    with contextlib.suppress(LogUnavailable):  # a wrong URL stays an error; a database that is down is none
        system = within(5.0, lambda: _system_paths(url))
    return Config.from_dict({"store": {"url": url}, "system": system})


def _system_paths(url: str) -> dict[str, str]:
    """Return `log_dir` and `key_file` of the system that last used a log, if that folder is on this machine."""
    with open_log(url) as log:
        system = log.config()[1].get("system") or {}
    folder = system.get("log_dir")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        return {}
    return {"log_dir": folder, **({"key_file": system["key_file"]} if system.get("key_file") else {})}


def named_once(argument: str | None, option: str | None) -> str | None:
    """Return the argument or the option, whichever is set. Raises typer.BadParameter if both are and differ."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"the argument is {argument} and the option {option}: give only one of them")
    return argument if option is None else option


def names_config(name: str) -> bool:
    """Return True if this argument names a config file, not a log."""
    return name.endswith((".yaml", ".yml")) or _is_text(Path(name))


def settings_of_run(name: str | None, overrides: list[str] | None) -> Config:
    """Return the config in this file, or the one recorded in this log. Raises ConfigError, LogNotFound."""
    if name is not None and names_config(name):
        return read_config(Path(name), overrides)
    url = parse_url(choose_log(name))
    with open_log(url.render_as_string(hide_password=False)) as log:
        data = log.config(serve=False)[1]
        copied_from = log.processes().get("copied_from", "")
    if not data:
        raise ConfigError(f"{masked(url)} holds no config yet: name the config file, as in "
                          "`trinity-es resume config.yaml`")
    data.get("hosts", {}).pop("tls", None)  # older logs have it; hosts now always use TLS
    store = data.setdefault("store", {})
    _require_own_folders(url, store.get("url", ""), copied_from)
    # The log records its URL without the password; the URL that opened the log has it.
    store["url"] = url.render_as_string(hide_password=False)
    data = escape_texts(data)
    apply_overrides(data, overrides or [])
    if hidden := masked_keys({k: v for k, v in data.items() if k != "store"}):
        raise ConfigError(f"the config in {masked(url)} was recorded without its secrets ({', '.join(hidden)}): name "
                          "the config file, as in `trinity-es resume config.yaml`, or set each with --set")
    return Config.from_dict(data, source="the config in the log")


def _require_own_folders(url: URL, recorded_url: str, copied_from: str) -> None:
    """Raise ConfigError for the log of a copied run, whose config names the folders of the original.

    `recorded_url` is the store's in the recorded config; a file counts as a copy if the original is still there.
    """
    file = file_of(url.render_as_string(hide_password=False))
    original = file_of(recorded_url) if recorded_url else None
    if file is not None:
        is_copy = original is not None and original.exists() and not original.samefile(file)
        copied_from = str(original) if is_copy else ""
    if copied_from:
        raise ConfigError(
            f"the log {masked(url)} is a copy of {copied_from}, and its config names the folders of the original: name "
            "the config file of the copy, as in `trinity-es resume config.yaml`")


def _is_text(path: Path) -> bool:
    """Return whether this is an existing file that is no SQLite database."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return not f.read(16).startswith(b"SQLite format 3")
