"""Which config is meant: that of a file, of a store, or the one that a log was recorded with."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer
from sqlalchemy import URL

from trinity_es.cli.common import choose_log, read_config
from trinity_es.config.config import Config
from trinity_es.config.interpolation import escaped
from trinity_es.config.yaml_file import apply_overrides
from trinity_es.events.errors import ConfigError, LogUnavailable
from trinity_es.events.secrets import masked_keys
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.database.urls import file_of, masked, parse_url
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["named_once", "names_config", "settings_of", "settings_of_run"]


def settings_of(config: Path | None, log: str | None) -> Config:
    """Return a config that names the store, whichever way it was named."""
    if config is not None and log is None:
        return read_config(config)
    url = parse_url(choose_log(log, config)).render_as_string(hide_password=False)
    system: dict[str, str] = {}
    with contextlib.suppress(LogUnavailable):  # a wrong place is an error, not a system that is down
        system = within(5.0, lambda: _places(url))
    return Config.from_dict({"store": {"url": url}, "system": system})


def _places(url: str) -> dict[str, str]:
    """Return where the system of a log has its files, as it was last started, where that is on this machine.

    The locks, the key and what this machine knows of the log lie there.
    """
    with open_log(url) as log:
        system = log.config()[1].get("system") or {}
    folder = system.get("log_dir")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        return {}
    return {"log_dir": folder, **({"key_file": system["key_file"]} if system.get("key_file") else {})}


def named_once(what: str | None, option: str | None) -> str | None:
    """Return what an argument or an option named. Raises typer.BadParameter where both did, and not the same."""
    if what is not None and option is not None and what != option:
        raise typer.BadParameter(f"{what} and {option} are named: name one")
    return what if option is None else option


def names_config(what: str) -> bool:
    """Return True if this is a config file, not a log."""
    return what.endswith((".yaml", ".yml")) or _is_text(Path(what))


def settings_of_run(what: str | None, overrides: list[str] | None) -> Config:
    """Return the config that a person meant: that file, or what the log that they named was recorded with."""
    if what is not None and names_config(what):
        return read_config(Path(what), overrides)
    url = parse_url(choose_log(what))
    with open_log(url.render_as_string(hide_password=False)) as log:
        data = log.config(serve=False)[1]
        copied_from = log.processes().get("copied_from", "")
    if not data:
        raise ConfigError(f"{masked(url)} holds no config yet: name the config file, as in "
                          "`trinity-es resume config.yaml`")
    data.get("hosts", {}).pop("tls", None)  # of an older log: hosts speak TLS by themselves
    store = data.setdefault("store", {})
    _require_own_folders(url, store.get("url", ""), copied_from)
    # The recorded one has no password in it; the one that opened the log has.
    store["url"] = url.render_as_string(hide_password=False)
    data = escaped(data)
    apply_overrides(data, overrides or [])
    if hidden := masked_keys({k: v for k, v in data.items() if k != "store"}):
        raise ConfigError(f"the config in {masked(url)} has no secrets in it ({', '.join(hidden)}): name the config "
                          "file, as in `trinity-es resume config.yaml`, or give each with --set")
    return Config.from_dict(data, source="the config in the log")


def _require_own_folders(url: URL, recorded: str, copied_from: str) -> None:
    """Raise ConfigError for the log of a copied run: its config names the folders of the original."""
    given, origin = file_of(url.render_as_string(hide_password=False)), file_of(recorded) if recorded else None
    if given is not None:
        copied_from = str(origin) if origin is not None and origin.exists() and not origin.samefile(given) else ""
    if copied_from:
        raise ConfigError(
            f"{masked(url)} is a copy of {copied_from}, and the config in it names the folders of that run: "
            "name the config file of the copy, as in `trinity-es resume config.yaml`"
        )


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return not f.read(16).startswith(b"SQLite format 3")
