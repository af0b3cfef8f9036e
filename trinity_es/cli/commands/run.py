"""The commands that start, watch and end something: `up, down, status, why, run, resume`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_es.cli.commands.bench import run_benchmark
from trinity_es.cli.commands.demo import end_demo
from trinity_es.cli.common import (
    ConfigArgument,
    ConfigOption,
    JsonOption,
    LogOption,
    SetOption,
    choose_log,
    find_batch,
    note,
    print_json,
    read_config,
)
from trinity_es.cli.run_in_view import explore, print_summary, run_summary
from trinity_es.events.errors import ConfigError, LogUnavailable

if TYPE_CHECKING:
    from trinity_es.config.config import Config
    from trinity_es.projections.run import RunState

__all__ = ["down", "resume", "run", "settings_of", "settings_of_run", "status", "up", "why"]


def up(
    config: ConfigArgument,
    overrides: SetOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Don't wait for the engines.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the actor system of a config and wait for its engines; it then serves any trainer that connects.

    Exits 1 when the log lacks what was acknowledged, as far as this host knows: see `trinity-es accept-rewind`.

    \b
    Example:
      trinity-es up config.yaml --set explorer.rollout_model.engine_num=2
    """
    from trinity_es.client.rollout_client import connect
    from trinity_es.client.teardown import end_system
    from trinity_es.system import lifecycle

    settings = read_config(config, overrides)
    started = time.monotonic()
    admin = lifecycle.start(settings, detach=True)
    try:
        if not no_wait:
            with connect(settings) as client:
                client.wait_ready(progress=_Told())
    except BaseException:
        end_system(settings)
        raise
    answer = {"port": admin["port"], "pid": admin["pid"], "log": settings.masked()["store"]["url"],
              "log_dir": settings.system.log_dir, "ready": not no_wait, "seconds": time.monotonic() - started}
    if as_json:
        print_json(answer)
        return
    print(f"the actor system is up (pid {answer['pid']}, port {answer['port']}, {answer['seconds']:.1f} s)")
    print(f"log        {answer['log']}\ntext logs  {answer['log_dir']}")
    print(f"next       trinity-es status --config {config}\n           trinity-es down {config}")


class _Told:
    """Says what a runner is doing when that changes."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def __call__(self, status: dict[str, Any]) -> None:
        for runner in status["runners"]:
            if self._last.get(runner["runner"]) != runner["state"]:
                self._last[runner["runner"]] = runner["state"]
                note(f"{runner['runner']}: " + {"started": "loading engine…"}.get(runner["state"], runner["state"]))


def down(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Config file.", show_default=False)] = None,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the actor system of a store: engines first, then the actors. Open batches stay open in the log.

    Exits 1 when a process could not be ended.

    \b
    Example:
      trinity-es down config.yaml
    """
    from trinity_es.client.teardown import end_system
    from trinity_es.system import discovery

    settings = settings_of(config, log)
    running = discovery.find(settings)
    ended = end_system(settings)
    if as_json:
        print_json({"was_running": running is not None, "killed": ended.killed, "left": ended.left})
    elif running is None and not ended.killed:
        print(f"no actor system ran on {settings.masked()['store']['url']}")
    else:
        killed = f"{ended.killed} processes had to be killed" if ended.killed else "every process ended by itself"
        left = f"; STILL THERE: {', '.join(map(str, ended.left))}" if ended.left else "; none is left"
        print(f"the actor system is down: {killed}{left}")
    if ended.left:
        raise typer.Exit(1)


def settings_of(config: Path | None, log: str | None) -> Config:
    """Return a config that names the store, whichever way it was named."""
    if config is not None and log is None:
        return read_config(config)
    from trinity_es.config.config import Config
    from trinity_es.events.store.database import parse_url
    from trinity_es.events.store.retry import within
    from trinity_es.projections.reading.log_reader import open_log

    url = parse_url(choose_log(log, config))
    with contextlib.suppress(LogUnavailable):  # a wrong place is an error, not a system that is down
        within(5.0, lambda: open_log(url.render_as_string(hide_password=False)).close())
    return Config.from_dict({"store": {"url": url.render_as_string(hide_password=False)}})


def status(config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False) -> None:
    """Tell how a system is: its coordinator, its runners, its open batches and what they wait for.

    Exits 1 when something is wrong: batches are open and nothing runs, there is no coordinator, a runner failed, was
    lost or quarantined, a batch is stalled. Each is one line with the way out. Of a dead system it tells what the log
    knows.

    \b
    Example:
      trinity-es status --config config.yaml
    """
    from trinity_es.client import health

    settings = settings_of(config, log)
    found = health.look(settings)
    if as_json:
        print_json(found)
    else:
        from trinity_es.cli.render.tables import console

        health.show(console(), found)
    if found["problems"]:
        raise typer.Exit(1)


def why(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="Id of the batch; without it every open one.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a batch waits for, since when, on which runner and attempt, and what to do about it.

    From the running system and the log; of a dead system, from the log alone. Slow and hung are told apart. Without a
    batch: every open one, a line each. Exits 1 when one is stalled: nothing will come of it without a person, or
    nothing has come for longer than explorer.stall_after.

    \b
    Examples:
      trinity-es why 3 --config config.yaml
      trinity-es why
    """
    from trinity_es.client import health
    from trinity_es.text import plain

    found = health.explain(settings_of(config, log), batch, find_batch)
    if as_json:
        told = [w.as_dict() for w in found]
        print_json(told if batch is None else told[0])
    else:
        for line in found[0].sentences() if batch is not None else [w.line for w in found] or ["no batch is open"]:
            print(plain(line))
    if any(w.stalled for w in found):
        raise typer.Exit(1)


def run(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Explore (and train, where the config names a trainer) from the first step to the last, with a live view.

    On a store that holds this run already it goes on with it, like `resume`. Starts the actor system where none
    runs, and ends the one that it started, also on an error or Ctrl-C. Explorer and trainer may be two processes:
    mode explore in one, mode train in the other.

    \b
    Examples:
      trinity-es run config.yaml --set name=second --set total_steps=20
      trinity-es run config.yaml --set mode=explore & trinity-es run config.yaml --set mode=train
    """
    settings = read_config(config, overrides)
    if settings.mode == "bench":
        run_benchmark(settings, as_json)
    else:
        _end(settings, explore(settings, as_json=as_json), as_json)


def resume(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|LOG]", help="Config file of the run, or its log (path or URL), which holds the "
                       "config. Default: the newest run under ./runs.", show_default=False),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that ended before its end, whatever died: nothing that was finished is generated again.

    The trainer starts from its newest checkpoint and gets what it had not learnt by then; open batches are finished;
    each prompt is used as often as if nothing had been. Of a run that is complete it shows the summary.

    \b
    Examples:
      trinity-es resume
      trinity-es resume config.yaml --set total_steps=400
    """
    from trinity_es.cli import demo_folder

    settings = settings_of_run(what, overrides)
    if settings.mode == "bench":
        run_benchmark(settings, as_json)
        return
    state = explore(settings, as_json=as_json, resuming=True)
    place = demo_folder.find(settings)
    if place is None:
        _end(settings, state, as_json)
    else:
        end_demo(place, settings, state, as_json)


def settings_of_run(what: str | None, overrides: list[str] | None) -> Config:
    """Return the config that a person meant: that file, or what the log that they named was recorded with."""
    from trinity_es.config.config import Config
    from trinity_es.config.interpolation import escaped
    from trinity_es.config.yaml_file import apply_overrides
    from trinity_es.events.secrets import masked_keys
    from trinity_es.events.store.database import masked, parse_url
    from trinity_es.projections.reading.log_reader import open_log

    if what is not None and (what.endswith((".yaml", ".yml")) or _is_text(Path(what))):
        return read_config(Path(what), overrides)
    url = parse_url(choose_log(what))
    with open_log(url.render_as_string(hide_password=False)) as log:
        data = log.config(serve=False)[1]
    if not data:
        raise ConfigError(f"{masked(url)} holds no config yet: name the config file, as in "
                          "`trinity-es resume config.yaml`")
    # The recorded one has no password in it; the one that opened the log has.
    data["store"]["url"] = url.render_as_string(hide_password=False)
    data = escaped(data)
    apply_overrides(data, overrides or [])
    if hidden := masked_keys({k: v for k, v in data.items() if k != "store"}):
        raise ConfigError(f"the config in {masked(url)} has no secrets in it ({', '.join(hidden)}): name the config "
                          "file, as in `trinity-es resume config.yaml`, or give each with --set")
    return Config.from_dict(data, source="the config in the log")


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return not f.read(16).startswith(b"SQLite format 3")


def _end(settings: Config, state: RunState, as_json: bool) -> None:
    told = run_summary(settings, state)
    if as_json:
        print_json(told)
    else:
        print_summary(told)


