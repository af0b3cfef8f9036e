"""The commands that start, watch and end something: `demo, up, down, status, why, run, resume`.

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
    find_batch,
    note,
    print_json,
    read_config,
)

if TYPE_CHECKING:
    from projections.run import RunState
    from trinity_es.config import Config
    from trinity_es.demo import Place
    from trinity_es.explorer import Explorer

__all__ = ["demo", "down", "explore", "print_summary", "resume", "run", "run_summary", "settings_of", "status",
           "up", "why"]

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

    settings = settings_of(config, log)
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


def settings_of(config: Path | None, log: str | None) -> Config:
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
    """Tell how a system is: its coordinator, its runners, its open batches and what they wait for.

    Exits 1 when something is wrong: batches are open and nothing runs, there is no coordinator, a runner failed, was
    lost or quarantined, a batch is stalled. Each is one line with the way out. Of a dead system it tells what the log
    knows.

    \b
    Example:
      trinity-es status --config config.yaml
    """
    from trinity_es import health

    settings = settings_of(config, log)
    found = health.look(settings)
    if as_json:
        print_json(found)
    else:
        from trinity_es.views import console

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
    from projections.audit import open_log
    from trinity_es import health
    from trinity_es.views import plain

    settings = settings_of(config, log)
    with open_log(settings.store.url) as opened:
        found = health.explain(settings, opened, None if batch is None else find_batch(opened, batch))
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
    runs, and ends the one that it started, also on an error or Ctrl-C.

    \b
    Example:
      trinity-es run config.yaml --set name=second --set total_steps=20
    """
    settings = read_config(config, overrides)
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
    from trinity_es import demo as demonstration

    settings = _settings_of_run(what, overrides)
    state = explore(settings, as_json=as_json, resuming=True)
    place = demonstration.find(settings)
    if place is None:
        _end(settings, state, as_json)
    else:
        _end_demo(place, settings, state, as_json)


def _settings_of_run(what: str | None, overrides: list[str] | None) -> Config:
    """The config that a person meant: that file, or what the log that they named was recorded with."""
    from events.database import masked, parse_url
    from projections.audit import open_log
    from projections.resuming import recorded_config
    from trinity_es.config import Config
    from trinity_es.config_file import apply_overrides

    if what is not None and (what.endswith((".yaml", ".yml")) or _is_text(Path(what))):
        return read_config(Path(what), overrides)
    url = parse_url(choose_log(what))
    with open_log(url.render_as_string(hide_password=False)) as log:
        data = recorded_config(log)
    if data is None:
        raise ConfigError(f"{masked(url)} holds no config yet: name the config file, as in "
                          "`trinity-es resume config.yaml`")
    # The recorded one has no password in it; the one that opened the log has.
    data["store"]["url"] = url.render_as_string(hide_password=False)
    apply_overrides(data, overrides or [])
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


def explore(settings: Config, *, as_json: bool = False, resuming: bool = False) -> RunState:
    """Run the explorer of this config to its end, in view; whatever happens, what was started here is ended.

    On a store that holds its run it goes on with it; `resuming`: it must hold one, and one that is complete is fine.
    With `as_json` the view goes to stderr. Raises what the explorer raises.
    """
    from trinity_es import cleanup
    from trinity_es.explorer import Explorer
    from trinity_es.progress import RunView
    from trinity_es.views import console

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    explorer = Explorer(settings)
    try:
        unfinished = explorer.locate()  # before anything is started: an engine takes a while
        where = settings.masked()["store"]["url"]
        if resuming and not explorer.resumed:
            raise ConfigError(f"the store {where} holds no run to resume: `trinity-es run CONFIG` begins one")
        if resuming and not unfinished:
            note(f"the run in {where} is complete")
            return _whole(settings)
        explorer.require_unfinished()
        if explorer.resumed:
            begun = f"; steps up to {explorer.step} are begun" if explorer.step > explorer.done else ""
            note(f"going on with the run in {where} at step {explorer.done + 1}, weights {explorer.version}{begun}")
        out = console(stderr=as_json)
        view = RunView(settings.store.url, out, total_steps=settings.total_steps, after=_position(settings))
        with view:
            try:
                asyncio.run(_explore(explorer))
            except BaseException:
                if explorer.owns_system:  # a thread that was starting it when Ctrl-C came ends before what atexit calls
                    atexit.register(cleanup.end_system, settings)
                raise
            finally:
                if explorer.owns_system:
                    cleanup.end_system(settings)
    except asyncio.CancelledError:  # SIGTERM
        raise typer.Exit(143) from None
    finally:
        explorer.release()
    return view.state


def _position(settings: Config) -> int:
    """The last position of the store's log; 0 where there is none."""
    from projections.audit import open_log

    try:
        with open_log(settings.store.url) as log:
            return log.head().position
    except (LogNotFound, NotALog):
        return 0


def _whole(settings: Config) -> RunState:
    """The fold of the store's log as it is."""
    from projections.audit import open_log
    from projections.run import fold_run

    with open_log(settings.store.url) as log:
        return fold_run(log.events())


async def _explore(explorer: Explorer) -> None:
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
    return _short_path(Path(url.removeprefix("sqlite:///")))


def _short_path(path: Path) -> str:
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
    note(f"if it is interrupted: trinity-es resume {_short_path(place.config)}")
    _end_demo(place, settings, explore(settings, as_json=as_json), as_json)


def _end_demo(place: Place, settings: Config, state: RunState, as_json: bool) -> None:
    """What came of a demo: the summary, the picture and the verdict. Exits 1 when the model did not learn."""
    from trinity_es import demo as demonstration

    told = run_summary(settings, state)
    told["folder"], told["config"] = str(place.folder), str(place.config)
    told["picture"] = demonstration.draw(state, place.folder / "reward.png")
    verdict = demonstration.judge(told, steps=place.steps, engine="vllm" if place.learns else "scripted")
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
