"""The command by which a person goes on with a log that lost what was acknowledged: `accept-rewind`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli.common import JsonOption, LogOption, choose_log, print_json, read_config
from trinity_es.cli.which_config import settings_of, settings_of_run
from trinity_es.client.accept_rewind import accept
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogError
from trinity_es.system import remembered_log_end
from trinity_es.text import plain

__all__ = ["accept_rewind"]


def accept_rewind(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Config file.", show_default=False)] = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with what is given up, and who said so.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Say that a log goes on without events that were acknowledged: it was restored from an older copy, on purpose.

    Everything refuses such a log until this was said. What is given up is recorded in the log (RewindAccepted), which
    is another log from then on. A system that stands still because of it is ended: start it again. Look for the better
    copy first: what is given up here is gone. Exits 1 when the log has all that this host knows of it.

    \b
    Example:
      trinity-es accept-rewind config.yaml --reason "the disk of the database died, this is the backup of Monday"
    """
    settings = _meant(config, log)
    done = accept(settings, reason)
    shown = settings.masked()["store"]["url"]
    if as_json:
        print_json({"log": shown, "accepted": done})
    elif done is None:
        path = remembered_log_end.memory(settings).path
        print(f"there is nothing to accept: {shown} has all that this host knows of it ({path})")
    else:
        print(f"given up: positions {done['first']} to {done['last']}; {shown} goes on after position {done['kept']}")
        for lost in done["lost"]:
            print(f"  {plain(lost['by'])} knew position {lost['position']}, hash {lost['hash'][:12]}")
        print(f"recorded at position {done['position']}; next: `trinity-es up` or `trinity-es resume`")
    if done is None:
        raise typer.Exit(1)


def _meant(config: Path | None, log: str | None) -> Config:
    """Return the config of the store that is meant: of a log that was named, as it was recorded, or as it lies now."""
    if config is not None and log is None:
        return read_config(config)
    url = choose_log(log)
    found = [settings_of(None, url)]
    with suppress(ConfigError, LogError):
        found.insert(0, settings_of_run(url, None))
    return next((settings for settings in found if remembered_log_end.look(settings) is not None), found[0])
