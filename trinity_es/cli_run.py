"""The commands that start, watch and end something: `demo, up, down, status, run`.

A system that a command started, it also ends: when it is done, on an error and on Ctrl-C, down to the last process.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from events.errors import ConfigError, LogNotFound, NotALog
from trinity_es.cli_common import (
    ConfigArgument,
    ConfigOption,
    JsonOption,
    LogOption,
    SetOption,
    choose_log,
    note,
    print_json,
    read_config,
)

if TYPE_CHECKING:
    from projections.run import RunState
    from trinity_es.config import Config

__all__ = ["demo", "down", "explore", "print_summary", "run", "run_summary", "status", "up"]

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TQDM_DISABLE": "1",
}
"""A trainer that runs here shares the terminal with the progress view."""


def up(
    config: ConfigArgument,
    overrides: SetOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Don't wait for the engines.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the actor system of a config and wait for its engines; it then serves any trainer that connects.

    \b
    Example:
      trinity-es up config.yaml --set explorer.rollout_model.engine_num=2
    """
    from trinity_es import cleanup, system
    from trinity_es.client import connect

    settings = read_config(config, overrides)
    started = time.monotonic()
    admin = system.start(settings)
    try:
        if not no_wait:
            with connect(settings) as client:
                client.wait_ready(progress=_Told())
    except BaseException:
        cleanup.end_system(settings)
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
    from trinity_es import cleanup, system

    settings = _settings(config, log)
    running = system.find(settings)
    ended = cleanup.end_system(settings)
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


def _settings(config: Path | None, log: str | None) -> Config:
    """A config that names the store, whichever way it was named."""
    if config is not None and log is None:
        return read_config(config)
    from events.database import parse_url
    from projections.audit import open_log
    from trinity_es.config import Config

    url = parse_url(choose_log(log, config))
    open_log(url.render_as_string(hide_password=False)).close()  # a wrong place is an error, not a system that is down
    return Config.from_dict({"store": {"url": url.render_as_string(hide_password=False)}})


def status(config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False) -> None:
    """Tell whether a system is up and well: its coordinator, runners and open batches.

    Exits 1 when it is down or something is wrong; of a dead system it tells what the log knows.

    \b
    Example:
      trinity-es status --config config.yaml
    """
    from trinity_es import health

    settings = _settings(config, log)
    found = health.look(settings)
    if as_json:
        print_json(found)
    else:
        from trinity_es.views import console

        health.show(console(), found)
    if found["problems"]:
        raise typer.Exit(1)


def run(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Explore (and train, where the config names a trainer) from the first step to the last, with a live view.

    Starts the actor system where none runs, and ends the one that it started, also on an error or Ctrl-C.

    \b
    Example:
      trinity-es run config.yaml --set name=second --set total_steps=20
    """
    settings = read_config(config, overrides)
    state = explore(settings, as_json=as_json)
    told = run_summary(settings, state)
    if as_json:
        print_json(told)
    else:
        print_summary(told)


def explore(settings: Config, *, as_json: bool = False) -> RunState:
    """Run the explorer of this config to its end, in view; whatever happens, what was started here is ended.

    With `as_json` the view goes to stderr. Raises what the explorer raises.
    """
    from trinity_es import cleanup, system
    from trinity_es.progress import RunView
    from trinity_es.views import console

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    head = _require_empty(settings)
    mine = system.find(settings) is None
    view = RunView(settings.store.url, console(stderr=as_json), total_steps=settings.total_steps, after=head)
    try:
        with view:
            try:
                asyncio.run(_explore(settings))
            except BaseException:
                if mine:  # a thread that was starting it when Ctrl-C came ends before what atexit calls
                    atexit.register(cleanup.end_system, settings)
                raise
            finally:
                if mine:
                    cleanup.end_system(settings)
    except asyncio.CancelledError:  # SIGTERM
        raise typer.Exit(143) from None
    return view.state


def _require_empty(settings: Config) -> int:
    """The last position of the store's log, 0 where there is none. Raises ConfigError when a run is in it.

    Said before anything is started: an engine takes a while.
    """
    from projections.audit import open_log

    try:
        with open_log(settings.store.url) as log:
            count, position = len(log.batches()), log.head().position
    except (LogNotFound, NotALog):
        return 0
    if count:
        raise ConfigError(
            f"the store {settings.masked()['store']['url']} holds a run already ({count} batches): choose another "
            "name, as in --set name=second, so that its log stays what it is"
        )
    return position


async def _explore(settings: Config) -> None:
    from trinity_es.explorer import Explorer

    explorer = Explorer(settings)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await explorer.prepare()
        await explorer.explore()
    finally:
        await explorer.shutdown()


# --- the summary ----------------------------------------------------------------------------------------------------
def run_summary(settings: Config, state: RunState) -> dict[str, Any]:
    """What came of a run, from the fold of its log, as plain JSON."""
    train = [b for b in state.train() if b.reward is not None]
    evals = [{"batch_id": b.batch_id, "reward": b.reward} for b in state.evals() if b.reward is not None]
    busy = sum((b.ended_at or b.submitted_at) - b.submitted_at for b in state.batches.values())
    seconds = (state.last_at or 0.0) - (state.started_at or 0.0)
    return {
        "log": _short_url(settings),
        "batches": len(state.batches),
        "train_batches": len(train),
        "weight_versions": state.published_version and sum(b.trained_step is not None for b in train) + 1,
        "model_version": state.model_version,
        "response_tokens": state.response_tokens,
        "prompt_tokens": state.prompt_tokens,
        "tokens_per_second": state.response_tokens / busy if busy else 0.0,
        "failed_attempts": state.failed_attempts,
        "seconds": seconds,
        "rewards": [b.reward for b in train],
        "evals": evals,
        "eval_reward_before": evals[0]["reward"] if evals else None,
        "eval_reward_after": evals[-1]["reward"] if len(evals) > 1 else None,
    }


def _short_url(settings: Config) -> str:
    """The log as a person types it: a path where it is a file."""
    url = str(settings.masked()["store"]["url"])
    if not url.startswith("sqlite:///"):
        return url
    path = Path(url.removeprefix("sqlite:///"))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_summary(told: dict[str, Any]) -> None:
    """The end of a run, for a person: what came of it, and what to ask next."""
    from trinity_es.views import sparkline

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    print(f"\nbatches          {told['batches']} ({told['train_batches']} to train on, {len(told['evals'])} evals)")
    print(f"tokens           {told['response_tokens']:,} generated, {told['tokens_per_second']:,.0f} a second "
          "while batches ran")
    print(f"weights          {told['weight_versions'] or 1} versions, the last is {told['model_version']}")
    print(f"failed attempts  {told['failed_attempts']}")
    print(f"time             {told['seconds']:.0f} s")
    if told["rewards"]:
        print(f"reward           {number(told['rewards'][0])} to {number(told['rewards'][-1])}  "
              f"{sparkline(told['rewards'])}")
    if told["evals"]:
        before, after = number(told["eval_reward_before"]), number(told["eval_reward_after"])
        print(f"eval reward      {before} before, {after} after")
    if told.get("picture"):
        print(f"picture          {told['picture']}")
    print(f"log              {told['log']}")
    some = min(3, told["train_batches"])
    if some:
        print("\nnext:")
        for command in ("batches", f"show {some}", f"events {some}", f"replay {some}", "verify"):
            print(f"  trinity-es {command} --log {told['log']}")


def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="A new folder for it. Default: runs/demo-<time>.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of model, taskset and engine.")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps to train. Default: enough to learn.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "scripted"], typer.Option("--engine", help="scripted: no model, nothing is learnt, seconds.")
    ] = "vllm",
    as_json: JsonOption = False,
) -> None:
    """Train a tiny language model with a real engine, here and now, and show what the log knows of it.

    Makes a folder with a model of 0.4 million random weights, a taskset, a trainer and a config, all yours to change,
    and runs it: evals before, during and after. Exits 1 when the model did not learn its task.

    \b
    Example:
      trinity-es demo --steps 40 --seed 1
    """
    from trinity_es import demo as demonstration

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    place = demonstration.make(folder, seed=seed, steps=steps, engine=engine)
    note(f"made {place.folder}: model, taskset, trainer and config.yaml of this demo")
    settings = read_config(place.config)
    state = explore(settings, as_json=as_json)
    told = run_summary(settings, state)
    told["folder"], told["config"] = str(place.folder), str(place.config)
    told["picture"] = demonstration.draw(state, place.folder / "reward.png")
    verdict = demonstration.judge(told, steps=place.steps, engine=engine)
    told["learned"], told["verdict"] = verdict.learned, verdict.text
    if as_json:
        print_json(told)
    else:
        print_summary(told)
        if place.learns:
            print(f"  trinity-es run {place.config} --set name=second")
        print(f"\n{verdict.text}")
    if verdict.learned is False:
        raise typer.Exit(1)
