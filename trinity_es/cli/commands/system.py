"""The commands that start, change and end what runs: `up, down, restart-runner, scale, redo`."""

from __future__ import annotations

import shlex
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli import common
from trinity_es.cli.which_config import named_once, names_config, settings_of
from trinity_es.client.rollout_client import connect
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.system import lifecycle, running_system
from trinity_es.text import does, plain

__all__ = ["Progress", "down", "redo", "restart_runner", "scale", "up"]


class On(StrEnum):
    RAY = "ray"


OnOption = Annotated[On | None, typer.Option("--on", help="What starts it, on several nodes: a Ray cluster.")]


def restart_runner(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Runner, as `trinity-es status` names it.")],
    config: common.ConfigOption = None,
    log: common.LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with who asked.")] = "",
    as_json: common.JsonOption = False,
) -> None:
    """End a runner's process and start another: one that hangs, failed or was given up, say.

    What it had is attempted again, elsewhere where another runner serves, and is blamed for nothing. Returns when the
    new process lives; its engine then loads.

    \b
    Example:
      trinity-es restart-runner runner-3 --config config.yaml --reason "its GPU was reset"
    """
    with connect(settings_of(config, log)) as client:
        done = client.restart_runner(name, reason=reason)
    if as_json:
        common.print_json(done)
    else:
        print(f"{done['runner']} was ended and lives again, as #{done['incarnation']}; its engine is loading")


def scale(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Config file.", show_default=False)] = None,
    add: Annotated[list[str] | None, typer.Option("--add", metavar="URL", help="Server to add; several times.")] = None,
    remove: Annotated[list[str] | None, typer.Option(
        "--remove", metavar="URL", help="Server to take away; several times.")] = None,
    log: common.LogOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Add vLLM servers as engines to a system that runs, or take some away (`engine_type: http`); list them.

    One that is taken away gets no more tasks, ends those that it has, and is let go: nothing is lost. In mode serve it
    gets no more requests, and is let go after servers.drain_timeout, so that those it has may end. One that is added
    loads the current weights before its first task. This goes before the list of the config: what is added here stays,
    what is removed stays away.

    \b
    Example:
      trinity-es scale config.yaml --add http://gpu-7:8000 --remove http://gpu-3:8000
    """
    with connect(settings_of(config, log)) as client:
        servers = client.scale_servers(add=add or [], remove=remove or [])
    if as_json:
        common.print_json({"servers": servers})
        return
    for s in servers:
        state = s["state"] if s["wanted"] else "ends its tasks, then leaves"
        waits = "waits for " if s["state"] == "ready" and s["waits_for"] else ""
        said = s["waits_for"] or s["problem"]
        print(plain(f"{s['url']}  {s['runner']}  {state}{': ' if said else ''}{waits}{said}"))
    if not servers:
        print("there is no server")


def redo(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of an open batch: 3, or 0/letters.")],
    tasks: Annotated[list[int], typer.Argument(metavar="TASK...", min=0, help="Tasks of it that have ended.")],
    config: common.ConfigOption = None,
    log: common.LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with who asked.")] = "",
    as_json: common.JsonOption = False,
) -> None:
    """Let tasks that have ended run again: one whose payload was lost, say, or that failed for what was mended since.

    All runs of each are run again, and what it had is set aside. A batch that was finalized or aborted stays as it is:
    its result was given out. `verify` names the tasks whose payloads are lost.

    \b
    Example:
      trinity-es redo 3 7 8 --config config.yaml --reason "the disk lost their payload"
    """
    settings = settings_of(config, log)
    with common.open_chosen(settings.store.url, None) as opened:
        batch_id = common.find_batch(opened, batch)
    with connect(settings) as client:
        client.redo(batch_id, tasks, reason=reason)
    if as_json:
        common.print_json({"batch_id": batch_id, "tasks": tasks})
    else:
        one = len(tasks) == 1
        print(f"{'task' if one else 'tasks'} {', '.join(map(str, tasks))} of batch {batch_id} "
              f"{'is' if one else 'are'} run again")


def wait_to_lead(settings: Config) -> None:
    """Wait until nobody has led this run for `hosts.timeout` s. Raises ConfigError where no other host can lead it."""
    from trinity_es.events.store.database.leader_lock import wait_until_led_by_nobody

    if not settings.hosts.address:
        raise ConfigError("--standby is for a run of several hosts: set hosts.address, to an address of this host")
    common.note(f"waiting to lead the run of {settings.masked()['store']['url']}: nobody may have led it for "
         f"{settings.hosts.timeout:.0f} s")
    wait_until_led_by_nobody(settings.store.url, settings.hosts.timeout)


def up(
    config: common.ConfigArgument,
    overrides: common.SetOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Don't wait for the engines.")] = False,
    standby: Annotated[bool, typer.Option(
        "--standby", help="Wait until nobody leads this run, then lead it (docs/DEPLOY.md).")] = False,
    on: OnOption = None,
    hosts: Annotated[int | None, typer.Option(
        "--hosts", min=1, metavar="N", show_default="all nodes with room now",
        help="With --on ray: hosts, each on a node of its own.")] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Start the actor system of a config and wait for its engines; it then serves any trainer that connects.

    Exits 1 when the log lacks what was acknowledged, as far as this host knows: see `trinity-es accept-rewind`. With
    `--on ray` a Ray cluster starts it, over several nodes, and again whatever of it dies (docs/DEPLOY.md).

    \b
    Examples:
      trinity-es up config.yaml --set explorer.rollout_model.engine_num=2
      trinity-es up --on ray config.yaml --hosts 4
    """
    settings = common.read_config(config, overrides)
    if on is not None:
        _up_on_ray(settings, hosts, wait=not no_wait, standby=standby, as_json=as_json)
        return
    if hosts is not None:
        raise typer.BadParameter("--hosts goes with --on ray; without it, hosts come with `trinity-es join`")
    if standby:
        wait_to_lead(settings)
    started = time.monotonic()
    admin = lifecycle.start(settings, detach=True)
    try:
        if not no_wait:
            with connect(settings) as client:
                client.wait_ready(progress=Progress())
    except BaseException:
        end_system(settings)
        raise
    answer = {"port": admin["port"], "pid": admin["pid"], "log": settings.masked()["store"]["url"],
              "log_dir": settings.system.log_dir, "ready": not no_wait, "seconds": time.monotonic() - started}
    if as_json:
        common.print_json(answer)
        return
    print(f"the actor system is up (pid {answer['pid']}, port {answer['port']}, {answer['seconds']:.1f} s)")
    print(f"log        {answer['log']}\ntext logs  {answer['log_dir']}")
    named = f"--log {shlex.quote(str(answer['log']))}"  # what was set may have changed the store
    first, last = (named, named) if overrides else (f"--config {shlex.quote(str(config))}", shlex.quote(str(config)))
    print(f"next       trinity-es status {first}\n           trinity-es down {last}")


def _up_on_ray(settings: Config, hosts: int | None, *, wait: bool, standby: bool, as_json: bool) -> None:
    from trinity_es.hosts import on_ray

    if standby:
        raise typer.BadParameter("--standby is not for --on ray: Ray starts the head again by itself")
    started = time.monotonic()
    answer = on_ray.start(settings, hosts, wait=wait, tell=common.note, progress=Progress() if wait else None)
    answer |= {"log": settings.masked()["store"]["url"], "seconds": time.monotonic() - started}
    if as_json:
        common.print_json(answer)
        return
    state = "serve" if wait else "are starting"
    print(f"Ray has placed the head and {answer['hosts']} hosts, which {state} ({answer['seconds']:.1f} s)")
    print(f"log        {answer['log']}\ntext logs  {settings.system.log_dir}, on each node")


class Progress:
    """Says what a runner is doing, or waits for, and what is wrong with the list of servers, when that changes."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._list = ""

    def __call__(self, status: dict[str, Any]) -> None:
        for runner in status["runners"]:
            now = does(runner)
            if self._last.get(runner["runner"]) != now:
                self._last[runner["runner"]] = now
                common.note(f"{runner['runner']}: {now}")
        listed = status.get("server_list") or ""
        if listed and listed != self._list:
            common.note(listed)
        self._list = listed


def down(
    what: Annotated[str | None, typer.Argument(
        metavar="[CONFIG|LOG]", help="Config file, or log (path or URL).", show_default=False)] = None,
    log: common.LogOption = None,
    on: OnOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """End the actor system of a store: engines first, then the actors. Open batches stay open in the log.

    Exits 1 when a process could not be ended. With `--on ray` it ends what Ray has of the run, on all nodes.

    \b
    Example:
      trinity-es down config.yaml
    """
    named = named_once(what, log)
    if named is not None and names_config(named):
        settings = settings_of(Path(named), None)
    else:
        settings = settings_of(None, named)
    if on is not None:
        from trinity_es.hosts import on_ray

        was_there = on_ray.down(settings)
        if as_json:
            common.print_json({"was_running": was_there})
        else:
            print("Ray has ended the run on all nodes" if was_there else "Ray has nothing of this run")
        return
    running = running_system.find(settings)
    ended = end_system(settings)
    if as_json:
        common.print_json({"was_running": running is not None, "killed": ended.killed, "left": ended.left})
    elif running is None and not ended.killed:
        print(f"no actor system ran on {settings.masked()['store']['url']}")
    else:
        killed = f"{ended.killed} processes had to be killed" if ended.killed else "every process ended by itself"
        left = f"; STILL THERE: {', '.join(map(str, ended.left))}" if ended.left else "; none is left"
        print(f"the actor system is down: {killed}{left}")
    if ended.left:
        raise typer.Exit(1)
