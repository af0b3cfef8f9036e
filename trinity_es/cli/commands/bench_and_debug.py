"""The commands `bench` and `debug`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli.common import ConfigArgument, JsonOption, SetOption, note, print_json, read_config
from trinity_es.cli.run_in_view import run_with_view, silence_libraries
from trinity_es.config.config import Config
from trinity_es.projections.metric_aggregation import missing_runs
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.run import single_task
from trinity_es.run.checkpoint_eval import BenchRow, batch_id_of, read_results
from trinity_es.run.explorer import Explorer
from trinity_es.run.single_task import PlayedTask
from trinity_es.safe_text import error_line, plain

__all__ = ["bench", "debug", "run_benchmark"]

SHOWN_CHARACTERS = 2000


def bench(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Evaluate the checkpoints of a run, in order, on the eval tasksets of its config.

    Results go to a separate log, bench/log.sqlite beside the run's log. Each checkpoint is evaluated once; with
    explorer.bench_on_latest_checkpoint only the newest one. Exits 1 if a checkpoint could not be evaluated.

    \b
    Example:
      trinity-es bench config.yaml --set explorer.bench_on_latest_checkpoint=true
    """
    run_benchmark(read_config(config, [*(overrides or []), "mode=bench"]), as_json)


def run_benchmark(settings: Config, as_json: bool) -> None:
    """Run or continue a benchmark with a live view, and print its results. Exits 1 if a result is missing."""
    silence_libraries()
    explorer = Explorer(settings)
    store_url = settings.masked()["store"]["url"]
    names = [c.name for c in settings.buffer.explorer_input.eval_tasksets]
    rows: list[BenchRow]
    try:
        if explorer.locate():
            if explorer.resumed:
                note(f"continuing the benchmark in {store_url}")
            rows = run_with_view(settings, explorer, explorer.benchmark, as_json=as_json)
        else:
            note(f"the benchmark in {store_url} is complete")
            with open_log(settings.store.url) as log:
                rows = read_results(log, [], names, {})
    finally:
        explorer.release()
    if as_json:
        print_json({"log": store_url, "checkpoints": [asdict(row) for row in rows]})
    else:
        _print_rewards(rows, names, store_url)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _print_rewards(rows: list[BenchRow], names: list[str], store_url: str) -> None:
    width = max(12, *(len(name) for name in names))
    print("\n" + f"{'checkpoint':<12}" + "".join(f"{name:>{width + 2}}" for name in names))
    for row in rows:
        rewards = (row.rewards.get(name) for name in names)
        cells = "".join(f"{'-' if reward is None else f'{reward:z.3f}':>{width + 2}}" for reward in rewards)
        missing = [f"{count} runs of {name} missing" for name in names
                   if (count := missing_runs(batch_id_of(row.step, name), "eval", row.metrics))]
        problems = ", ".join([*missing, *([row.problem] if row.problem else [])])
        print(f"{row.step or 'the model':<12}{cells}" + (f"  {problems}" if problems else ""))
    print(f"\nmean rewards; --json has every metric\nlog  {store_url}")


def debug(
    config: ConfigArgument,
    overrides: SetOption = None,
    taskset: Annotated[str | None, typer.Option("--taskset", metavar="NAME", help="Default: the first one.")] = None,
    index: Annotated[int, typer.Option("--index", metavar="N", help="Row of the taskset, counted from 0.")] = 0,
    runs: Annotated[int | None, typer.Option(
        "--runs", min=1, help="Runs of the task. Default: the taskset's repeat_times.")] = None,
    workflow: Annotated[str | None, typer.Option(
        "--workflow", metavar="NAME", help="Another workflow: a name, or module:Class.")] = None,
    keep: Annotated[Path | None, typer.Option(
        "--keep", metavar="DIR", help="Folder for the results. Default: debug/<time> beside the log.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Play one task in this process, with the engine of the config, and show its experiences and errors.

    It needs no actor system and no log: use it to try out a workflow or a reward function. Exits 1 if a run failed.

    \b
    Example:
      trinity-es debug config.yaml --taskset letters --index 3 --runs 2
    """
    silence_libraries()
    settings = read_config(config, overrides)
    task = single_task.choose(settings, taskset, index, workflow)
    folder = keep or Path(settings.system.log_dir).parent / "debug" / time.strftime("%Y%m%d-%H%M%S")
    model = settings.explorer.rollout_model
    note(f"loading engine {model.engine_type}{f' ({model.model_path})' if model.model_path else ''}…")
    played = asyncio.run(single_task.play(settings, task, runs=runs, folder=folder.absolute()))
    if as_json:
        print_json(played.as_dict())
    else:
        _print_played(played)
    if played.failures:
        raise typer.Exit(1)


def _print_played(played: PlayedTask) -> None:
    def indented(text: str | None) -> str:
        lines = "\n".join(f"    {plain(line)}" for line in (text or "").split("\n"))
        return lines if len(lines) <= SHOWN_CHARACTERS else lines[:SHOWN_CHARACTERS] + " …"

    index: dict[str, Any] = played.task.index
    print(f"{index['taskset']} row {index['index']}: {len(played.metrics)} of {played.runs} runs completed in "
          f"{played.seconds:.2f} s")
    for e in played.experiences:
        reward = "-" if e.reward is None else f"{e.reward:g}"
        truncation = f", {e.truncate_status}" if e.truncate_status else ""
        print(f"\nrun {e.eid.run} step {e.eid.step}: reward {reward}, {e.prompt_length} prompt tokens, "
              f"{len(e.tokens) - e.prompt_length} response tokens{truncation}")
        print(f"  prompt\n{indented(e.prompt_text)}\n  response\n{indented(e.response_text)}")
        if e.metrics:
            print("  metrics\n" + "\n".join(f"    {plain(k)} = {v:g}" for k, v in sorted(e.metrics.items())))
    for run, kind, message in played.failures:
        print(f"\nrun {run} FAILED ({kind}): {error_line(message, 300)}")
    for text in played.tracebacks:
        print("\n" + "\n".join(plain(line) for line in text.split("\n")))
    print(f"\nresults are in {played.folder}")
