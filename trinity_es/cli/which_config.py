"""Choice of a command's config: a file, a store's URL, or the config recorded in a log."""

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

__all__ = ["config_from_options", "config_of_run", "is_config_file", "one_of"]


def config_from_options(config: Path | None, log: str | None) -> Config:
    """Return the config for the options --config and --log: the file's, or a default one for the log's store.

    The latter uses the recorded folder of text logs and the recorded key file, if that folder is on this machine.
    """
    if config is not None and log is None:
        return read_config(config)
    url = parse_url(choose_log(log, config)).render_as_string(hide_password=False)
    system: dict[str, str] = {}
    with contextlib.suppress(LogUnavailable):  # the database is down; a wrong URL is an error
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


def one_of(argument: str | None, option: str | None) -> str | None:
    """Return the argument or the option, whichever is set. Raises typer.BadParameter if both are set and differ."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"the argument is {argument}, but the option is {option}: give only one of them")
    return argument if option is None else option


def is_config_file(name: str) -> bool:
    """Return True if a command's argument names a config file and not a log."""
    if name.endswith((".yaml", ".yml")):
        return True
    if not Path(name).is_file():
        return False
    with Path(name).open("rb") as f:
        return not f.read(16).startswith(b"SQLite format 3")


def config_of_run(name: str | None, overrides: list[str] | None) -> Config:
    """Return the config in a config file, or the config recorded in a log. Raises ConfigError, LogNotFound."""
    if name is not None and is_config_file(name):
        return read_config(Path(name), overrides)
    url = parse_url(choose_log(name))
    with open_log(url.render_as_string(hide_password=False)) as log:
        data = log.config(serve=False)[1]
        copied_from = log.processes().get("copied_from", "")
    if not data:
        raise ConfigError(f"{masked(url)} holds no config yet: name the config file, as in "
                          "`trinity-es resume config.yaml`")
    data.get("hosts", {}).pop("tls", None)  # only in older logs, as hosts now always use TLS
    store = data.setdefault("store", {})
    _require_own_folders(url, store.get("url", ""), copied_from)
    # The log records its URL without the password.
    store["url"] = url.render_as_string(hide_password=False)
    data = escape_texts(data)
    apply_overrides(data, overrides or [])
    if hidden := masked_keys({k: v for k, v in data.items() if k != "store"}):
        raise ConfigError(f"the config in {masked(url)} was recorded without its secrets ({', '.join(hidden)}): name "
                          "the config file, as in `trinity-es resume config.yaml`, or set each with --set")
    return Config.from_dict(data, source="the config in the log")


def _require_own_folders(url: URL, recorded_url: str, copied_from: str) -> None:
    """Raise ConfigError if the log is a copy, because its config names the folders of the original.

    A file is a copy if the file in `recorded_url`, the store of its config, is another existing file.
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
