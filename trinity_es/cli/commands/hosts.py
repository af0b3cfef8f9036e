"""The commands `join` and `hosts`, for a run on several hosts."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, SetOption, note, print_json
from trinity_es.cli.render.batch_tables import console
from trinity_es.cli.render.host_tables import print_hosts
from trinity_es.cli.which_config import config_from_options
from trinity_es.client import health
from trinity_es.client.rollout_client import connect
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.safe_text import harmless_json, plain

__all__ = ["hosts", "join"]


def join(
    store: Annotated[
        str, typer.Argument(metavar="STORE_URL", envvar="STORE_URL",
                            help="The run's store: postgresql://... Put a URL with a password into the environment.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="This host's name.", show_default="the machine's")] = None,
    overrides: SetOption = None,
    log_dir: Annotated[Path | None, typer.Option(
        "--log-dir", help="Folder of text logs.", show_default="trinity-es-NAME here")] = None,
    key_file: Annotated[str, typer.Option(
        "--key-file", help="File with the run's key, read again when it changes. Wins over TRINITY_ES_KEY.")] = "",
    drain: Annotated[float, typer.Option("--drain", help="Seconds for tasks to end after SIGTERM.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Join a run that another host (the head) leads: start engines on this host, which play tasks of the run.

    The config comes from the run's log; --set changes keys for this host. `join` waits until a head runs, follows
    another head that takes over, and stays until it gets SIGTERM or Ctrl-C. Then this host gets no more tasks,
    finishes its current ones and leaves. Tasks that take longer than --drain seconds are attempted elsewhere.

    \b
    Example:
      trinity-es join postgresql://user@db/run --name gpu-7 --set explorer.rollout_model.engine_num=8
    """
    from trinity_es.hosts.join import HostRun, host_name

    host = host_name(name)
    folder = (log_dir or Path(f"trinity-es-{host}")).absolute()

    def tell(text: str) -> None:
        if as_json:
            print(harmless_json(orjson.dumps({"host": host, "said": text})).decode(), flush=True)
        else:
            note(text)

    host_run = HostRun(store, host, overrides or [], folder, key_file=key_file, report=tell)

    def leave(signal_number: int, frame: Any) -> None:
        host_run.leave(signal.Signals(signal_number).name, drain)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, leave)
    with ThreadPoolExecutor(1, thread_name_prefix="join") as pool:
        running = pool.submit(host_run.run)
        while not running.done():  # signal handlers run in this thread, between two waits
            wait([running], 0.2)
    running.result()


def hosts(
    action: Annotated[str | None, typer.Argument(
        metavar="[drain", help="Make a host leave.", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME]", help="The host.", show_default=False)] = None,
    config: ConfigOption = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded with pid and host.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the hosts of a run, the head first, with their state and work; or make a host leave (drain).

    If the system has ended or can't be reached from here, the list comes from the log alone. A drained host gets no
    more tasks and finishes its current ones; then its `trinity-es join` ends. Nothing is lost.

    \b
    Examples:
      trinity-es hosts --config config.yaml
      trinity-es hosts --log postgresql://user@db/run --json
      trinity-es hosts drain gpu-7 --config config.yaml --reason "its disk is replaced"
    """
    if action not in (None, "drain") or (action is None) != (name is None):
        raise typer.BadParameter("use `trinity-es hosts` to list the hosts, or `trinity-es hosts drain NAME` to drain "
                                 "one")
    settings = config_from_options(config, log)
    if name is not None:
        with connect(settings) as client:
            drained = client.drain_host(name, reason=reason)
        if as_json:
            print_json(drained)
        else:
            print(plain(f"host {drained['host']} gets no more tasks and leaves when its {drained['units']} units have "
                        "ended"))
        return
    live, system = health.facts(settings)
    with open_log(settings.store.url) as opened:
        rows, lives = read_hosts(opened, live, system), opened.hosts()
    if as_json:
        head, *others = (row.as_dict() for row in rows)
        print_json({"head": head, "hosts": others, "lives": [asdict(life) for life in lives]})
    else:
        print_hosts(console(), rows, live=live is not None)
