"""The command `demo`, and the summary of a demo, which `resume` prints too."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli import demo_folder
from trinity_es.cli.common import JsonOption, note, print_json, read_config
from trinity_es.cli.demo_folder import Demo
from trinity_es.cli.run_in_view import explore, print_summary, run_summary, short_path, silence_libraries
from trinity_es.config.config import Config
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["demo", "end_demo"]


def demo(
    folder: Annotated[Path | None, typer.Option(
        "--dir", metavar="DIR", help="New folder for the demo. Default: runs/demo-<time>.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of model, taskset and engine.")] = 0,
    steps: Annotated[int | None, typer.Option(
        "--steps", min=1, help="Steps to train. Default: enough to learn.")] = None,
    engine: Annotated[demo_folder.EngineName, typer.Option(
        "--engine", help="http: a vLLM server in a separate process. scripted: no model, nothing is learned.",
    )] = "vllm",
    as_json: JsonOption = False,
) -> None:
    """Train a tiny language model on this machine with a real engine, and show the result from the log.

    Creates a folder with a model of 0.4 million random weights, a taskset, a trainer and a config, which you may
    change. Then it trains, with evals before, during and after training. Exits 1 if the model did not learn its task.

    \b
    Example:
      trinity-es demo --steps 40 --seed 1
    """
    silence_libraries()
    this_demo = demo_folder.make(folder, seed=seed, steps=steps, engine=engine)
    note(f"made {this_demo.folder}: model, taskset, trainer and config.yaml of this demo")
    settings = read_config(this_demo.config)
    note(f"if it is interrupted: trinity-es resume {shlex.quote(short_path(this_demo.config))}")
    with demo_folder.running_server(this_demo):
        explore(settings, as_json=as_json)
    end_demo(this_demo, settings, as_json)


def end_demo(this_demo: Demo, settings: Config, as_json: bool) -> None:
    """Print the summary and the verdict of a demo, and draw its reward curve. Exits 1 if the model did not learn."""
    with open_log(settings.store.url) as log:
        summary, rows = run_summary(settings, log), log.batches()
    summary |= {"folder": str(this_demo.folder), "config": str(this_demo.config)}
    summary["picture"] = demo_folder.draw(rows, this_demo.folder / "reward.png")
    has_learned, verdict = demo_folder.judge(summary, steps=this_demo.steps, learns=this_demo.learns)
    summary |= {"learned": has_learned, "verdict": verdict}
    if as_json:
        print_json(summary)
    else:
        print_summary(summary)
        if this_demo.learns:
            print(f"  trinity-es run {shlex.quote(str(this_demo.config))} --set name=second")
        print(f"\n{verdict}")
    if has_learned is False:
        raise typer.Exit(1)
