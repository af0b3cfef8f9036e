"""The commands `up`, `down`, `restart-runner`, `scale` and `redo`."""

from __future__ import annotations

import shlex
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli import common
from trinity_es.cli.which_config import config_from_options, is_config_file, one_of
from trinity_es.client.rollout_client import connect
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.safe_text import does, plain
from trinity_es.system import lifecycle, run_lock, running_system

__all__ = ["Progress", "down", "redo", "restart_runner", "scale", "up"]


RUN_ENDS_SECONDS = 3.0
"""How long a `trinity-es run` may take to notice that its system is gone and end."""


class Cluster(StrEnum):
    """Values of `--on`."""

    RAY = "ray"


OnOption = Annotated[Cluster | None, typer.Option("--on", help="Cluster that runs the system on several nodes: ray.")]


def restart_runner(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Runner, as `trinity-es status` names it.")],
    config: common.ConfigOption = None,
    log: common.LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded with pid and host.")] = "",
    as_json: common.JsonOption = False,
) -> None:
    """End a runner's process and start a new one, for a runner that hangs, failed or is quarantined.

    Its tasks are attempted again, on another runner if one serves. This does not count as a failed attempt. The command
    returns when the new process runs; the engine is still loading then.

    \b
    Example:
      trinity-es restart-runner runner-3 --config config.yaml --reason "its GPU was reset"
    """
    with connect(config_from_options(config, log)) as client:
        restarted = client.restart_runner(name, reason=reason)
    if as_json:
        common.print_json(restarted)
    else:
        print(f"{restarted['runner']} was restarted as #{restarted['incarnation']}; its engine is loading")


def scale(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Config file.", show_default=False)] = None,
    add: Annotated[list[str] | None, typer.Option("--add", metavar="URL", help="Server to add; repeat.")] = None,
    remove: Annotated[list[str] | None, typer.Option(
        "--remove", metavar="URL", help="Server to remove; repeat.")] = None,
    log: common.LogOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Add vLLM servers as engines to a running system (`engine_type: http`), remove some, or list them.

    A new server loads the current weights before its first task. A removed server gets no more tasks and finishes its
    current ones; in mode serve it gets no more requests and has servers.drain_timeout to finish. Nothing is lost. These
    changes override the config's list, also after a restart.

    \b
    Example:
      trinity-es scale config.yaml --add http://gpu-7:8000 --remove http://gpu-3:8000
    """
    with connect(config_from_options(config, log)) as client:
        servers = client.scale_servers(add=add or [], remove=remove or [])
    if as_json:
        common.print_json({"servers": servers})
        return
    for server in servers:
        state = server["state"] if server["wanted"] else "finishes its tasks, then leaves"
        waits = "waits for " if server["state"] == "ready" and server["waits_for"] else ""
        reason = server["waits_for"] or server["problem"]
        print(plain(f"{server['url']}  {server['runner']}  {state}{': ' if reason else ''}{waits}{reason}"))
    if not servers:
        print("there is no server")


def redo(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of an open batch: 3, or 0/letters.")],
    tasks: Annotated[list[int], typer.Argument(metavar="TASK...", min=0, help="Settled tasks of the batch.")],
    config: common.ConfigOption = None,
    log: common.LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded with pid and host.")] = "",
    as_json: common.JsonOption = False,
) -> None:
    """Let settled tasks run again, if their payload was lost or the cause of their failure is fixed.

    All runs of each task are repeated, and its earlier results are ignored. A batch that was finalized or aborted can't
    be changed, because its result was delivered. `verify` names the tasks whose payloads are lost.

    \b
    Example:
      trinity-es redo 3 7 8 --config config.yaml --reason "the disk lost their payload"
    """
    settings = config_from_options(config, log)
    with common.open_chosen(settings.store.url, None) as opened:
        batch_id = common.find_batch(opened, batch)
    with connect(settings) as client:
        client.redo(batch_id, tasks, reason=reason)
    if as_json:
        common.print_json({"batch_id": batch_id, "tasks": tasks})
    else:
        is_one = len(tasks) == 1
        print(f"{'task' if is_one else 'tasks'} {', '.join(map(str, tasks))} of batch {batch_id} "
              f"{'is' if is_one else 'are'} run again")


def wait_to_lead(settings: Config) -> None:
    """Wait until no host has led this run for `hosts.timeout` s. Raises ConfigError if `hosts.address` is not set."""
    from trinity_es.events.store.database.leader_lock import wait_until_leaderless

    if not settings.hosts.address:
        raise ConfigError("--standby needs a run on several hosts: set hosts.address to an address of this host")
    common.note(f"waiting to lead the run of {settings.masked()['store']['url']}, until no host has led it for "
                f"{settings.hosts.timeout:.0f} s")
    wait_until_leaderless(settings.store.url, settings.hosts.timeout)


def up(
    config: common.ConfigArgument,
    overrides: common.SetOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Don't wait for the engines.")] = False,
    standby: Annotated[bool, typer.Option(
        "--standby", help="Wait until no other host leads this run, then lead it (docs/DEPLOY.md).")] = False,
    on: OnOption = None,
    hosts: Annotated[int | None, typer.Option(
        "--hosts", min=1, metavar="N", show_default="all nodes with room now",
        help="With --on ray: number of hosts, each on its own node.")] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Start the actor system of a config and wait for its engines. Then any trainer can connect.

    Exits 1 if the log lacks events that were acknowledged to this host: see `trinity-es accept-rewind`. With `--on ray`
    a Ray cluster runs the system on several nodes and restarts any part that dies (docs/DEPLOY.md).

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
        raise typer.BadParameter("--hosts needs --on ray: without Ray, each host joins by `trinity-es join`")
    if standby:
        wait_to_lead(settings)
    started_at = time.monotonic()
    admin = lifecycle.start(settings, detach=True)
    try:
        if not no_wait:
            with connect(settings) as client:
                client.wait_ready(progress=Progress())
    except BaseException:
        end_system(settings)
        raise
    answer = {"port": admin["port"], "pid": admin["pid"], "log": settings.masked()["store"]["url"],
              "log_dir": settings.system.log_dir, "ready": not no_wait, "seconds": time.monotonic() - started_at}
    if as_json:
        common.print_json(answer)
        return
    print(f"the actor system is up (pid {answer['pid']}, port {answer['port']}, {answer['seconds']:.1f} s)")
    print(f"log        {answer['log']}\ntext logs  {answer['log_dir']}")
    if overrides:  # they may have changed the store
        status_option = down_option = f"--log {shlex.quote(str(answer['log']))}"
    else:
        down_option = shlex.quote(str(config))
        status_option = f"--config {down_option}"
    print(f"next       trinity-es status {status_option}\n           trinity-es down {down_option}")


def _up_on_ray(settings: Config, hosts: int | None, *, wait: bool, standby: bool, as_json: bool) -> None:
    """Start the run's head and hosts on a Ray cluster. With `wait`, returns when their engines serve."""
    from trinity_es.hosts import run_on_ray

    if standby:
        raise typer.BadParameter("leave out --standby with --on ray, because Ray restarts the head by itself")
    started_at = time.monotonic()
    answer = run_on_ray.start(settings, hosts, wait=wait, tell=common.note, progress=Progress() if wait else None)
    answer |= {"log": settings.masked()["store"]["url"], "seconds": time.monotonic() - started_at}
    if as_json:
        common.print_json(answer)
        return
    state = "serve" if wait else "are starting"
    print(f"Ray has placed the head and {answer['hosts']} hosts, which {state} ({answer['seconds']:.1f} s)")
    print(f"log        {answer['log']}\ntext logs  {settings.system.log_dir}, on each node")


class Progress:
    """Callback that takes statuses and prints changes of a runner's activity, or of the server list's problem."""

    def __init__(self) -> None:
        self._activity_by_runner: dict[str, str] = {}
        self._list_problem = ""

    def __call__(self, status: dict[str, Any]) -> None:
        for runner in status["runners"]:
            activity = does(runner)
            if self._activity_by_runner.get(runner["runner"]) != activity:
                self._activity_by_runner[runner["runner"]] = activity
                common.note(f"{runner['runner']}: {activity}")
        problem = status.get("server_list") or ""
        if problem and problem != self._list_problem:
            common.note(problem)
        self._list_problem = problem


def down(
    config_or_log: Annotated[str | None, typer.Argument(
        metavar="[CONFIG|LOG]", help="Config file, or log (path or URL).", show_default=False)] = None,
    log: common.LogOption = None,
    on: OnOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """End the actor system of a store: engines first, then the actors. Open batches stay open in the log.

    A `trinity-es run` that uses the system ends by itself; if it hangs in your code, its pid is printed. Exits 1 if a
    process of the system could not be ended. With `--on ray` the run's actors on all nodes of the Ray cluster end.

    \b
    Example:
      trinity-es down config.yaml
    """
    name = one_of(config_or_log, log)
    if name is not None and is_config_file(name):
        settings = config_from_options(Path(name), None)
    else:
        settings = config_from_options(None, name)
    if on is not None:
        from trinity_es.hosts import run_on_ray

        was_running = run_on_ray.down(settings)
        if as_json:
            common.print_json({"was_running": was_running})
        else:
            print("Ray has ended the run on all nodes" if was_running else "this run does not run on Ray")
        return
    running = running_system.find(settings)
    killed_count, left_pids = end_system(settings)
    running_system.wait_for(lambda: not run_lock.holders(settings), RUN_ENDS_SECONDS)
    run_pids = set(run_lock.holders(settings).values())
    if as_json:
        common.print_json({"was_running": running is not None, "killed": killed_count, "left": left_pids,
                           "run": sorted(run_pids)})
    elif running is None and not killed_count:
        print(f"no actor system ran on {settings.masked()['store']['url']}")
    else:
        killed = f"{killed_count} processes had to be killed" if killed_count else "every process ended by itself"
        left = f"; STILL THERE: {', '.join(map(str, left_pids))}" if left_pids else "; none is left"
        print(f"the actor system is down: {killed}{left}")
    if run_pids and not as_json:  # not killed here: its user started it
        pids = " ".join(map(str, sorted(run_pids)))
        print(f"its `trinity-es run` (pid {pids}) is still there, and would end by itself if code in it did not hang: "
              f"`kill -9 {pids}` ends it, and nothing in the log is lost")
    if left_pids:
        raise typer.Exit(1)
