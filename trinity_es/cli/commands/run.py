"""The commands `run` and `resume`, which execute a run to its last step."""

from __future__ import annotations

from typing import Annotated

import typer

from trinity_es.cli import demo_folder
from trinity_es.cli.commands.bench_and_debug import run_benchmark
from trinity_es.cli.commands.demo import end_demo
from trinity_es.cli.common import ConfigArgument, JsonOption, LogOption, SetOption, print_json, read_config
from trinity_es.cli.render.progress import last_failure
from trinity_es.cli.run_in_view import explore, print_summary, run_summary
from trinity_es.cli.which_config import config_of_run, one_of
from trinity_es.config.config import Config
from trinity_es.events.errors import WorkflowError
from trinity_es.projections.reading.log_reader import open_log

__all__ = ["resume", "run"]


def run(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Explore, and train if the config names a trainer, from the first step to the last, with a live view.

    If the store already holds this run, the run is continued, as by `resume`. The command starts the actor system if
    none runs, and ends it at the end, on an error and on Ctrl-C. Explorer and trainer may be two processes, with
    mode=explore and mode=train.

    \b
    Examples:
      trinity-es run config.yaml --set name=second --set total_steps=20
      trinity-es run config.yaml --set mode=explore & trinity-es run config.yaml --set mode=train
    """
    settings = read_config(config, overrides)
    if settings.mode == "bench":
        run_benchmark(settings, as_json)
    else:
        explore(settings, as_json=as_json)
        _print_end(settings, as_json)


def resume(
    config_or_log: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|LOG]", help="Config file of the run, or its log (path or URL), which holds the "
                       "config. Default: the newest run under ./runs.", show_default=False),
    ] = None,
    overrides: SetOption = None,
    log: LogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run that was interrupted, whatever died. Finished tasks are not generated again.

    The trainer starts from its newest checkpoint and gets the batches after it. Open batches are finished, and each
    prompt is used as often as without the interruption. For a complete run the summary is printed.

    \b
    Examples:
      trinity-es resume
      trinity-es resume config.yaml --set total_steps=400
    """
    settings = config_of_run(one_of(config_or_log, log), overrides)
    if settings.mode == "bench":
        run_benchmark(settings, as_json)
        return
    explore(settings, as_json=as_json, resuming=True)
    demo = demo_folder.find(settings)
    if demo is None:
        _print_end(settings, as_json)
    else:
        end_demo(demo, settings, as_json)


def _print_end(settings: Config, as_json: bool) -> None:
    """Print the summary of a run. Raises WorkflowError if nothing was generated because every run failed."""
    with open_log(settings.store.url) as log:
        summary = run_summary(settings, log)
        last_failed = next((row for row in reversed(log.batches()) if row.failed_attempts), None)
        error = "" if last_failed is None else last_failure(log, last_failed, 1000)
    if as_json:
        print_json(summary)
    else:
        print_summary(summary)
    if last_failed is not None and not summary["response_tokens"]:
        raise WorkflowError(f"nothing was generated because every run failed, the last with {error}: `trinity-es show "
                            f"{last_failed.batch_id}` shows all failures")
