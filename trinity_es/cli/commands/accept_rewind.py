"""The command `accept-rewind`, with which an operator accepts that a log lost acknowledged events."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli.common import JsonOption, LogOption, choose_log, print_json, read_config
from trinity_es.cli.which_config import config_from_options, config_of_run
from trinity_es.client.accept_rewind import accept
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogError
from trinity_es.safe_text import plain
from trinity_es.system import remembered_log_end

__all__ = ["accept_rewind"]


def accept_rewind(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Config file.", show_default=False)] = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded with what is lost and your name.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Continue with a log that lacks acknowledged events because it was restored from an older copy.

    No system runs on such a log until you accept the loss by this command. First look for a better copy: after this the
    missing events are gone for good. The loss is recorded in the log (RewindAccepted), which counts as another log from
    then on. A system that halted because of the loss is ended: start it again. Exits 1 if this host knows of no missing
    event.

    \b
    Example:
      trinity-es accept-rewind config.yaml --reason "the disk of the database died, this is the backup of Monday"
    """
    settings = _settings(config, log)
    loss = accept(settings, reason)
    masked_url = settings.masked()["store"]["url"]
    if as_json:
        print_json({"log": masked_url, "accepted": loss})
    elif loss is None:
        path = remembered_log_end.memory(settings).path
        print(f"there is nothing to accept: {masked_url} has all events that this host knows of ({path})")
    else:
        print(f"given up: positions {loss['first']} to {loss['last']}; {masked_url} goes on after position "
              f"{loss['kept']}")
        for witness in loss["lost"]:
            print(f"  {plain(witness['by'])} knew position {witness['position']}, hash {witness['hash'][:12]}")
        print(f"recorded at position {loss['position']}; next: `trinity-es up` or `trinity-es resume`")
    if loss is None:
        raise typer.Exit(1)


def _settings(config: Path | None, log: str | None) -> Config:
    """Return the settings of the config file, or for a log its recorded config or a config with only its URL.

    Of the last two it is the first with which this host remembers events that the log lacks.
    """
    if config is not None and log is None:
        return read_config(config)
    url = choose_log(log)
    candidates = [config_from_options(None, url)]
    with suppress(ConfigError, LogError):
        candidates.insert(0, config_of_run(url, None))
    rewound = (settings for settings in candidates if remembered_log_end.rewind_message(settings) is not None)
    return next(rewound, candidates[0])
