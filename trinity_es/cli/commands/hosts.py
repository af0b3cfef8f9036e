"""The commands of a run on several hosts: `join, hosts`."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, SetOption, note, print_json
from trinity_es.cli.render.host_tables import print_hosts
from trinity_es.cli.render.tables import console
from trinity_es.cli.which_config import settings_of
from trinity_es.client import health
from trinity_es.client.rollout_client import connect
from trinity_es.projections.reading.host_list import read_hosts
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.text import harmless_json, plain

__all__ = ["hosts", "join"]


def join(
    store: Annotated[
        str, typer.Argument(metavar="STORE_URL", envvar="STORE_URL",
                            help="The run's store: postgresql://... In the environment nobody else reads a password.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="This host's name.", show_default="the machine's")] = None,
    overrides: SetOption = None,
    log_dir: Annotated[Path | None, typer.Option(
        "--log-dir", help="Folder of text logs.", show_default="trinity-es-NAME here")] = None,
    key_file: Annotated[str, typer.Option(
        "--key-file", help="File with the run's key: goes before TRINITY_ES_KEY, and may change.")] = "",
    drain: Annotated[float, typer.Option("--drain", help="Seconds that tasks may take to end at SIGTERM.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Take part in a run that is led on another host: start this host's engines, and work for its batches.

    The config is the run's own, as its log has it; `--set` changes what differs here. Waits for the head where there is
    none yet, goes on when another takes over, and stays until it is ended: with SIGTERM or Ctrl-C the host gets no more
    tasks, ends those that it has, and leaves; what is left after --drain seconds is attempted elsewhere.

    \b
    Example:
      trinity-es join postgresql://user@db/run --name gpu-7 --set explorer.rollout_model.engine_num=8
    """
    from trinity_es.hosts.join import HostRun, host_name

    called = host_name(name)
    folder = (log_dir or Path(f"trinity-es-{called}")).absolute()

    def tell(text: str) -> None:
        if as_json:
            print(harmless_json(orjson.dumps({"host": called, "said": text})).decode(), flush=True)
        else:
            note(text)

    run = HostRun(store, called, overrides or [], folder, key_file=key_file, tell=tell)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run.run()
        except BaseException as e:
            failed.append(e)

    def ended(number: int, frame: Any) -> None:
        run.leave(signal.Signals(number).name, drain)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    worker = threading.Thread(target=work, name="join")
    worker.start()
    while worker.is_alive():  # handlers of signals run in this thread, between two waits
        worker.join(0.2)
    if failed:
        raise failed[0]


def hosts(
    action: Annotated[str | None, typer.Argument(
        metavar="[drain", help="Have a host leave.", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME]", help="Which host.", show_default=False)] = None,
    config: ConfigOption = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with who asked.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the hosts of a run, the head's own first, how they are and what they did; have one leave.

    Of a run that is over, or can't be asked from here, what its log tells. One that is drained gets no more tasks, ends
    those that it has, and its `trinity-es join` ends: nothing is lost.

    \b
    Examples:
      trinity-es hosts --config config.yaml
      trinity-es hosts --log postgresql://user@db/run --json
      trinity-es hosts drain gpu-7 --config config.yaml --reason "its disk is replaced"
    """
    if action not in (None, "drain") or (action is None) != (name is None):
        raise typer.BadParameter("say `hosts` to list them, or `hosts drain NAME`")
    settings = settings_of(config, log)
    if name is not None:
        with connect(settings) as client:
            done = client.drain_host(name, reason=reason)
        if as_json:
            print_json(done)
        else:
            print(plain(f"host {done['host']} gets no more tasks, and leaves when it has ended the {done['units']} "
                        "units that it has"))
        return
    live, system = health.facts(settings)
    with open_log(settings.store.url) as opened:
        rows, lives = read_hosts(opened, live, system), opened.hosts()
    if as_json:
        head, *others = (row.as_dict() for row in rows)
        print_json({"head": head, "hosts": others, "lives": [asdict(life) for life in lives]})
    else:
        print_hosts(console(), rows, live is not None)
