"""A run in view: what `run`, `resume`, `demo` and `bench` share, and the summary at its end.

A system that a command started, it also ends: when it is done, on an error and on Ctrl-C, down to the last process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from trinity_es.cli.common import note
from trinity_es.cli.render.progress import RunView
from trinity_es.cli.render.tables import console
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.store.database.urls import file_of
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import missing_runs
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.tables.batch_list import BatchRow
from trinity_es.projections.why.answer import counted, resume_command
from trinity_es.run.explorer import Explorer
from trinity_es.run.run_process import RunProcess
from trinity_es.run.trainer_loop import TrainerProcess
from trinity_es.system import remembered_log_end
from trinity_es.system.other_settings import other_settings, said_of
from trinity_es.text import sparkline

__all__ = ["explore", "in_view", "print_summary", "quiet", "quietly", "run_summary", "short_path"]

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TQDM_DISABLE": "1",
    # Python's tracker removes what an engine that was killed left in shared memory, and need not say so at our end.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}
"""A trainer that runs here shares the terminal with the progress view."""


def quiet() -> None:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Do the same for what runs in here alone: the environment is as it was afterwards."""
    mine = _QUIET.keys() - os.environ.keys()
    quiet()
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def explore(settings: Config, *, as_json: bool = False, resuming: bool = False) -> None:
    """Take this config's part in its run (explore, train or both) to its end, in view.

    On a store that holds its run it goes on with it; `resuming`: it must hold one, and one that is complete is fine.
    With `as_json` the view goes to stderr. Raises what the part raises.
    """
    quiet()
    remembered_log_end.require(settings)  # before the log is believed
    if resuming:
        _require_led_here(settings)
    part: RunProcess
    if settings.mode == "train":
        part = trainer = TrainerProcess(settings)
        work: Callable[[], Awaitable[Any]] = trainer.train
    else:
        part = explorer = Explorer(settings)
        work = explorer.explore
    try:
        unfinished = part.locate()  # before anything is started: an engine takes a while
        where = settings.masked()["store"]["url"]
        if resuming and not part.resumed:
            raise ConfigError(f"the store {where} holds no run to resume: `trinity-es run CONFIG` begins one")
        if resuming and not unfinished:
            note(": ".join(part_of for part_of in (f"the run in {where} is complete", part.said_of_end()) if part_of))
            if part.owns_system:  # its command was killed before it could
                end_system(settings)
            return
        part.require_unfinished()
        if part.resumed:
            begun = f"; steps up to {part.step} are begun" if part.step > part.done else ""
            note(f"going on with the run in {where} at step {part.done + 1}, weights {part.version}{begun}")
            if changed := other_settings(settings):
                note(f"changed since its last start: {said_of(changed)}")
        if early := part.said_of_end():
            note(early)
        in_view(settings, part, work, as_json=as_json, total_steps=part.last_step)
    finally:
        part.release()


def _require_led_here(settings: Config) -> None:
    """Require a log that `trinity-es run` led, where it holds a run. Raises ConfigError."""
    with contextlib.suppress(LogNotFound), open_log(settings.store.url) as log:
        others = any(log.count_batches(batch_type=kind) for kind in ("train", "collect"))
        if others and not log.streams("taskset/"):
            raise ConfigError(
                f"the run in {settings.masked()['store']['url']} is led by a program of its own, TRL's trainer or one "
                "that uses `connect`: start that again (TRL's with `resume_from_checkpoint=True`), and it goes on "
                "where the log ends"
            )


def in_view(
    settings: Config, part: RunProcess, work: Callable[[], Awaitable[Any]], *, as_json: bool,
    total_steps: int | None = None,
) -> Any:
    """Prepare a part, do this and shut it down, in view; return what `work` returned.

    Whatever happens, what was started here is ended.
    """
    out = console(stderr=as_json)
    signals: list[int] = []
    try:
        with RunView(settings.store.url, out, total_steps=total_steps, after=_position(settings)):
            try:
                return asyncio.run(_take_part(part, work, signals))
            except BaseException as e:
                if signals or isinstance(e, KeyboardInterrupt):
                    resume = resume_command(settings.masked()["store"]["url"])
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        note(f"interrupted: `{resume}` goes on where it was")
                if part.owns_system:  # a thread that was starting it when Ctrl-C came ends before what atexit calls
                    atexit.register(end_system, settings)
                raise
            finally:
                if part.owns_system:
                    end_system(settings)
    except asyncio.CancelledError:
        raise typer.Exit(128 + signals[0]) from None


async def _take_part(part: RunProcess, work: Callable[[], Awaitable[Any]], signals: list[int]) -> Any:
    """Prepare a part, do this and shut it down; a signal that ends that is added to `signals`."""
    task = asyncio.current_task()
    assert task is not None

    def end(number: int) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await part.prepare()
        return await work()
    finally:
        await part.shutdown()


def _position(settings: Config) -> int:
    """Return the last position of the store's log; 0 where there is none."""
    try:
        with open_log(settings.store.url) as log:
            return log.head().position
    except LogNotFound:
        return 0


# --- the summary ----------------------------------------------------------------------------------------------------
def run_summary(settings: Config, log: Log) -> dict[str, Any]:
    """Return what came of a run, from its log, as plain JSON."""
    rows, first, last = log.batches(), log.at(1), log.at(log.head().position)
    train = [b for b in rows if b.batch_type == "train" and b.reward is not None]
    evals = [{"batch_id": b.batch_id, "reward": b.reward, "missing_runs": _missing(log, b)}
             for b in rows if b.batch_type == "eval" and b.ended_at is not None]
    of_first = [e for e in evals if _taskset(e) == _taskset(evals[0])]  # one is not the after of another
    begun_at, ended_at = (0.0 if r is None else r.recorded_at for r in (first, last))
    earlier = list(_earlier(log, rows))
    tokens = sum(b.response_tokens for b in rows) + sum(getattr(e, "response_tokens", 0) for e in earlier)
    busy, versions = _serving_seconds(log, ended_at), log.count_weights()
    return {
        "log": _short_url(settings), "batches": len(rows), "train_batches": len(train),
        "weight_versions": versions and versions + 1, "model_version": log.model_version(), "response_tokens": tokens,
        "prompt_tokens": sum(b.prompt_tokens for b in rows) + sum(getattr(e, "prompt_tokens", 0) for e in earlier),
        "tokens_per_second": tokens / busy if busy else 0.0,
        "failed_attempts": sum(b.failed_attempts for b in rows) + sum(isinstance(e, ev.AttemptFailed) for e in earlier),
        "seconds": ended_at - begun_at, "rewards": [b.reward for b in train], "evals": evals,
        "eval_reward_before": evals[0]["reward"] if evals else None,
        "eval_reward_after": of_first[-1]["reward"] if len(of_first) > 1 else None,
    }


def _missing(log: Log, row: BatchRow) -> int:
    """Return how many runs the mean reward of an eval is not over."""
    last = log.last(batch_stream(row.batch_id), "BatchFinalized")
    result = last.event.result if last and isinstance(last.event, ev.BatchFinalized) else {}
    return missing_runs(row.batch_id, row.batch_type, result.get("metrics", {}))


def _earlier(log: Log, rows: Sequence[BatchRow]) -> Iterator[ev.Event]:
    """Yield what came of units of batches before their ids were submitted again: the rows are of the last tries."""
    firsts = {batch_stream(row.batch_id): row.first_position for row in rows}
    for stream in {r.stream for r in log.rare(["BatchSubmitted"]) if r.position < firsts[r.stream]}:
        for recorded in log.read(stream=stream, types=["RunsFinished", "TaskFinished", "AttemptFailed"]):
            if recorded.position < firsts[stream]:
                yield recorded.event


def _serving_seconds(log: Log, end: float) -> float:
    """Return the seconds in which a batch was open, an engine of the rollout model served, and a coordinator led."""
    began, opened = dict[str, float](), list[tuple[float, float]]()
    for r in log.rare(["BatchSubmitted", "BatchFinalized", "BatchAborted"]):
        if (since := began.pop(r.stream, None)) is not None:
            opened.append((since, r.recorded_at))
        if r.type == "BatchSubmitted":
            began[r.stream] = r.recorded_at
    opened += [(since, end) for since in began.values()]
    serving = [(life.ready_at, end if life.ended_at is None else life.ended_at)
               for life in log.runner_lives() if life.ready_at is not None and life.model == "rollout"]
    away = log.without_coordinator() + [
        (step.recorded_at - step.event.seconds, step.recorded_at) for step in log.rare(["ClockStepped"])
        if isinstance(step.event, ev.ClockStepped) and step.event.seconds > 0]
    edges = sorted((at, which, change) for which, spans in enumerate((opened, serving, away)) for span in spans
                   for at, change in zip(span, (1, -1), strict=True))
    busy, before, counts = 0.0, 0.0, [0, 0, 0]
    for at, which, change in edges:
        busy += at - before if counts[0] and counts[1] and not counts[2] else 0.0
        before, counts[which] = at, counts[which] + change
    return busy


def _taskset(told: dict[str, Any]) -> str:
    """`letters` of the eval `12/letters`."""
    return str(told["batch_id"]).partition("/")[2]


def _short_url(settings: Config) -> str:
    """Return the log as a person types it: a path where it is a file."""
    url = str(settings.masked()["store"]["url"])
    file = file_of(url)
    return url if file is None else short_path(file)


def short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_summary(told: dict[str, Any]) -> None:
    """Print the end of a run, for a person: what came of it, and what to ask next."""
    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:z.3f}"

    evals, without = counted(len(told["evals"]), "eval"), sum(e["reward"] is None for e in told["evals"])
    if without:
        evals += f", {without} of which gave no reward"
    print(f"\nbatches          {told['batches']} ({told['train_batches']} to train on, {evals})")
    print(f"tokens           {told['response_tokens']:,} generated, {told['tokens_per_second']:,.0f} a second "
          "while engines served")
    versions = counted(told["weight_versions"] or 1, "version")
    print(f"weights          {versions}, the last is {told['model_version']}")
    print(f"failed attempts  {told['failed_attempts']}")
    print(f"time             {told['seconds']:.0f} s")
    if told["rewards"]:
        first, last = number(told["rewards"][0]), number(told["rewards"][-1])
        of = f", {last} in the last" if len(told["rewards"]) > 1 else ""
        print(f"reward           {first} in the first step{of}  {sparkline(told['rewards'])}")
    if told["evals"]:
        of = f"{number(told['eval_reward_before'])} in the first eval"
        if sum(_taskset(e) == _taskset(told["evals"][0]) for e in told["evals"]) > 1:
            of += f", {number(told['eval_reward_after'])} in the last"
        missing = sum(e["missing_runs"] for e in told["evals"])
        print(f"eval reward      {of}" + (f" ({missing} runs of evals are missing)" if missing else ""))
    if told.get("picture"):
        print(f"picture          {told['picture']}")
    print(f"log              {told['log']}")
    some = min(3, told["train_batches"])
    if some:
        named = "--config CONFIG" if "***" in told["log"] else f"--log {shlex.quote(told['log'])}"
        print("\nnext:")
        for command in ("batches", f"show {some}", f"events {some}", f"replay {some}", "verify"):
            print(f"  trinity-es {command} {named}")
