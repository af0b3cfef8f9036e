"""Execution of a run with a live view, for `run`, `resume`, `demo` and `bench`, and the summary at its end.

A command that starts an actor system ends all its processes when the command is done, fails or gets Ctrl-C.
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
from trinity_es.cli.render.batch_tables import console
from trinity_es.cli.render.progress import RunView, kept_tokens
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.store.database.urls import file_of
from trinity_es.events.values import batch_stream
from trinity_es.projections.event_texts import counted
from trinity_es.projections.metric_aggregation import missing_runs
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.tables.batch_queries import BatchRow
from trinity_es.projections.why.answer import resume_command
from trinity_es.run.explorer import Explorer
from trinity_es.run.run_base import RunProcess
from trinity_es.run.trainer_loop import TrainerProcess
from trinity_es.safe_text import sparkline
from trinity_es.system import remembered_log_end
from trinity_es.system.other_settings import other_settings, settings_phrase

__all__ = [
    "explore", "play_part", "print_summary", "run_summary", "run_with_view", "short_path", "silence_libraries",
]

_QUIET_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TQDM_DISABLE": "1",
    # At the command's end Python's resource tracker removes shared memory that a killed engine left, and warns of it.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}


def silence_libraries() -> None:
    """Keep the libraries of a trainer in this process from printing into the live view."""
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def explore(settings: Config, *, as_json: bool = False, resuming: bool = False) -> None:
    """Run the config's part (explore, train or both) to its end, with a live view; continue the run if there is one.

    `resuming`: the store must hold a run, which may be complete. `as_json`: the view goes to stderr. Raises
    ConfigError, and the errors of the part.
    """
    silence_libraries()
    remembered_log_end.require_remembered(settings)  # before anything relies on the log
    if resuming:
        _require_made_by_run(settings)
    part: RunProcess
    if settings.mode == "train":
        part = trainer = TrainerProcess(settings)
        play: Callable[[], Awaitable[Any]] = trainer.train
    else:
        part = explorer = Explorer(settings)
        play = explorer.explore
    try:
        is_unfinished = part.locate()  # before the engines start, which is slow
        store_url = settings.masked()["store"]["url"]
        if resuming and not part.resumed:
            raise ConfigError(f"the store {store_url} holds no run to resume: `trinity-es run CONFIG` begins one")
        if resuming and not is_unfinished:
            note(": ".join(text for text in (f"the run in {store_url} is complete", part.end_note()) if text))
            if part.owns_system:  # the run's command was killed before it ended the system
                end_system(settings)
            return
        part.require_unfinished()
        if part.resumed:
            begun = f"; steps up to {part.step} have begun" if part.step > part.done else ""
            note(f"going on with the run in {store_url} at step {part.done + 1}, weights {part.version}{begun}")
            if changed := other_settings(settings):
                note(f"changed since its last start: {settings_phrase(changed)}")
        if early := part.end_note():
            note(early)
        run_with_view(settings, part, play, as_json=as_json, total_steps=part.last_step)
    finally:
        part.release()


def _require_made_by_run(settings: Config) -> None:
    """Raise ConfigError if another program than `trinity-es run` made the log's batches."""
    with contextlib.suppress(LogNotFound), open_log(settings.store.url) as log:
        has_batches = any(log.count_batches(batch_type=batch_type) for batch_type in ("train", "collect"))
        if has_batches and not log.streams("taskset/"):
            raise ConfigError(
                f"the run in {settings.masked()['store']['url']} belongs to another program, TRL's trainer or one that "
                "uses `connect`. Start that program again (TRL's with `resume_from_checkpoint=True`): it continues "
                "where the log ends")


def run_with_view(
    settings: Config, part: RunProcess, play: Callable[[], Awaitable[Any]], *, as_json: bool,
    total_steps: int | None = None,
) -> Any:
    """Prepare a part of the run, await `play`, shut the part down, and return the result of `play`.

    A live view shows the progress. A system that the part started is always ended. SIGTERM and SIGHUP exit with 128 +
    the signal's number.
    """
    out = console(stderr=as_json)
    signals: list[int] = []
    try:
        with RunView(settings.store.url, out, total_steps=total_steps, after=_last_position(settings)):
            try:
                return asyncio.run(play_part(part, play, signals))
            except BaseException as e:
                if signals or isinstance(e, KeyboardInterrupt):
                    command = resume_command(settings.masked()["store"]["url"])
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        note(f"interrupted: `{command}` continues the run")
                if part.owns_system:  # again at exit: on Ctrl-C a thread may still be starting the system
                    atexit.register(end_system, settings)
                raise
            finally:
                if part.owns_system:
                    end_system(settings)
    except asyncio.CancelledError:
        raise typer.Exit(128 + signals[0]) from None


async def play_part(part: RunProcess, play: Callable[[], Awaitable[Any]], signals: list[int]) -> Any:
    """Prepare a part, await `play` and shut the part down. SIGTERM and SIGHUP cancel it, and are added to `signals`."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(signal_number: int) -> None:
        signals.append(signal_number)
        task.cancel()

    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(signal_number, cancel, signal_number)
    try:
        await part.prepare()
        return await play()
    finally:
        await part.shutdown()


def _last_position(settings: Config) -> int:
    try:
        with open_log(settings.store.url) as log:
            return log.head().position
    except LogNotFound:
        return 0


# --- the summary ----------------------------------------------------------------------------------------------------
def run_summary(settings: Config, log: Log) -> dict[str, Any]:
    """Return the figures of a run (batches, tokens, rewards, time) from its log, as plain JSON."""
    rows = log.batches()
    first, last = log.at(1), log.at(log.head().position)
    trained = [b for b in rows if b.batch_type == "train" and b.reward is not None]
    evals = [{"batch_id": b.batch_id, "reward": b.reward, "missing_runs": _missing_runs(log, b)}
             for b in rows if b.batch_type == "eval" and b.ended_at is not None]
    # The evals before and after training have to be of the same taskset, the taskset of the first eval.
    comparable_evals = [e for e in evals if _taskset_of_eval(e) == _taskset_of_eval(evals[0])]
    begun_at, ended_at = (0.0 if r is None else r.recorded_at for r in (first, last))
    earlier = list(_events_before_resubmission(log, rows))
    tokens = sum(b.response_tokens for b in rows) + sum(getattr(e, "response_tokens", 0) for e in earlier)
    streams = {r.stream for r in log.read_rare(["AttemptKept"])}
    kept = sum(kept_tokens(log, b) for b in rows if batch_stream(b.batch_id) in streams)
    url = str(settings.masked()["store"]["url"])
    file = file_of(url)
    serving_seconds, published_count = _serving_seconds(log, ended_at), log.count_weights()
    return {
        "log": url if file is None else short_path(file), "batches": len(rows), "train_batches": len(trained),
        "weight_versions": published_count and published_count + 1,  # version 0 counts if another was published
        "model_version": log.model_version(), "response_tokens": tokens,
        "prompt_tokens": sum(b.prompt_tokens for b in rows) + sum(getattr(e, "prompt_tokens", 0) for e in earlier),
        "tokens_per_second": (tokens - kept) / serving_seconds if serving_seconds else 0.0,
        "failed_attempts": sum(b.failed_attempts for b in rows) + sum(isinstance(e, ev.AttemptFailed) for e in earlier),
        "seconds": ended_at - begun_at, "rewards": [b.reward for b in trained], "evals": evals,
        "eval_reward_before": evals[0]["reward"] if evals else None,
        "eval_reward_after": comparable_evals[-1]["reward"] if len(comparable_evals) > 1 else None,
    }


def _missing_runs(log: Log, row: BatchRow) -> int:
    """Return the number of runs that are missing from an eval's mean reward."""
    finalized = log.last(batch_stream(row.batch_id), "BatchFinalized")
    result = finalized.event.result if finalized and isinstance(finalized.event, ev.BatchFinalized) else {}
    return missing_runs(row.batch_id, row.batch_type, result.get("metrics", {}))


def _events_before_resubmission(log: Log, rows: Sequence[BatchRow]) -> Iterator[ev.Event]:
    """Yield results and failures from earlier submissions of batch ids, as a batch's row has only the last one."""
    first_positions = {batch_stream(row.batch_id): row.first_position for row in rows}
    for stream in {r.stream for r in log.read_rare(["BatchSubmitted"]) if r.position < first_positions[r.stream]}:
        for recorded in log.read(stream=stream, types=["RunsFinished", "TaskFinished", "AttemptFailed"]):
            if recorded.position < first_positions[stream]:
                yield recorded.event


def _serving_seconds(log: Log, log_end_at: float) -> float:
    """Return for how long a batch was open while an engine of the rollout model served and a coordinator ran."""
    open_since = dict[str, float]()
    open_spans = list[tuple[float, float]]()
    for r in log.read_rare(["BatchSubmitted", "BatchFinalized", "BatchAborted"]):
        if (submitted_at := open_since.pop(r.stream, None)) is not None:
            open_spans.append((submitted_at, r.recorded_at))
        if r.type == "BatchSubmitted":
            open_since[r.stream] = r.recorded_at
    open_spans += [(submitted_at, log_end_at) for submitted_at in open_since.values()]
    serving_spans = [(life.ready_at, log_end_at if life.ended_at is None else life.ended_at)
                     for life in log.runner_lives() if life.ready_at is not None and life.model == "rollout"]
    # Excluded: times without a coordinator, and times that a step of the clock skipped.
    excluded_spans = log.without_coordinator() + [
        (step.recorded_at - step.event.seconds, step.recorded_at) for step in log.read_rare(["ClockStepped"])
        if isinstance(step.event, ev.ClockStepped) and step.event.seconds > 0]
    edges = sorted((at, kind, change) for kind, spans in enumerate((open_spans, serving_spans, excluded_spans))
                   for span in spans for at, change in zip(span, (1, -1), strict=True))
    seconds, last_at = 0.0, 0.0
    active_counts = [0, 0, 0]  # number of spans of each kind that are open at the current edge
    for at, kind, change in edges:
        open_count, serving_count, excluded_count = active_counts
        if open_count and serving_count and not excluded_count:
            seconds += at - last_at
        last_at = at
        active_counts[kind] += change
    return seconds


def _taskset_of_eval(evaluation: dict[str, Any]) -> str:
    """Return the name of an eval's taskset: `letters` for the batch `12/letters`."""
    return str(evaluation["batch_id"]).partition("/")[2]


def short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_summary(run: dict[str, Any]) -> None:
    """Print a `run_summary` as text, with commands for a closer look at the run."""
    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:z.3f}"

    evals = counted(len(run["evals"]), "eval")
    if unrewarded_count := sum(e["reward"] is None for e in run["evals"]):
        evals += f", {unrewarded_count} without a reward"
    print(f"\nbatches          {run['batches']} ({run['train_batches']} to train on, {evals})")
    print(f"tokens           {run['response_tokens']:,} generated, {run['tokens_per_second']:,.0f} a second "
          "while a batch was open and engines served")
    versions = counted(run["weight_versions"] or 1, "version")
    print(f"weights          {versions}, the last is {run['model_version']}")
    print(f"failed attempts  {run['failed_attempts']}")
    print(f"time             {run['seconds']:.0f} s")
    if run["rewards"]:
        first, last = number(run["rewards"][0]), number(run["rewards"][-1])
        rewards = f"{first} in the first step" + (f", {last} in the last" if len(run["rewards"]) > 1 else "")
        print(f"reward           {rewards}  {sparkline(run['rewards'])}")
    if run["evals"]:
        rewards = f"{number(run['eval_reward_before'])} in the first eval"
        if sum(_taskset_of_eval(e) == _taskset_of_eval(run["evals"][0]) for e in run["evals"]) > 1:
            rewards += f", {number(run['eval_reward_after'])} in the last"
        missing = sum(e["missing_runs"] for e in run["evals"])
        print(f"eval reward      {rewards}" + (f" ({missing} runs of evals are missing)" if missing else ""))
    if run.get("picture"):
        print(f"picture          {run['picture']}")
    print(f"log              {run['log']}")
    batch = min(3, run["train_batches"])
    if batch:
        option = "--config CONFIG" if "***" in run["log"] else f"--log {shlex.quote(run['log'])}"
        print("\nnext:")
        for command in ("batches", f"show {batch}", f"events {batch}", f"replay {batch}", "verify"):
            print(f"  trinity-es {command} {option}")
