"""The command `trinity-es`. Each command is in the module of its kind; this one puts them together.

`trinity_es.cli_log`: reading a log (`batches, show, replay, verify, rebuild`), which needs no actor system, as what
follows it: `trinity_es.cli_follow`: `events, watch`; `trinity_es.cli_diff`: `diff`; `trinity_es.cli_audit`: `runners,
weights, usage, prompts`; `trinity_es.cli_export`: `export`;
`trinity_es.cli_run`: what runs (`up, down, status, why, run, resume`); `trinity_es.cli_runner`: `restart-runner`;
`trinity_es.cli_demo`: `demo`; `trinity_es.cli_bench`: `bench, debug`; `trinity_es.cli_serve`: `serve`;
`trinity_es.cli_doctor`: `doctor`; `trinity_es.cli_whatif`: `what-if`;
`trinity_es.cli_regenerate`: `regenerate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from events.version import VERSION
from trinity_es import (
    cli_audit,
    cli_bench,
    cli_dashboard,
    cli_demo,
    cli_diff,
    cli_doctor,
    cli_export,
    cli_follow,
    cli_log,
    cli_regenerate,
    cli_run,
    cli_runner,
    cli_serve,
    cli_whatif,
)
from trinity_es.cli_common import Group

__all__ = ["app", "main"]

app = typer.Typer(
    name="trinity-es", cls=Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"trinity-es {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Run the rollouts of LLM reinforcement learning, and ask later what happened.

    \b
    First steps:
      trinity-es demo              train a tiny model with a real engine, in minutes
      trinity-es batches           what ran
      trinity-es show 3            one batch, task by task
      trinity-es replay 3          its state, computed from the log
      trinity-es dashboard --open  all of it in a browser
      trinity-es run config.yaml   a run of your own
      trinity-es resume            go on with what was interrupted

    Exit codes: 0 yes, 1 the answer is no, 2 an error.
    """


_COMMANDS: dict[Callable[..., None], str] = {
    cli_demo.demo: "Train a tiny model with a real engine, here and now.",
    cli_run.up: "Start the actor system of a config.",
    cli_run.down: "End it, to the last process.",
    cli_run.status: "Is all well?",
    cli_run.why: "What does a batch wait for?",
    cli_runner.restart_runner: "End a runner's process and start another.",
    cli_run.run: "Explore and train with a config, in view.",
    cli_run.resume: "Go on with a run that was interrupted.",
    cli_bench.bench: "Evaluate the checkpoints of a run.",
    cli_bench.debug: "Play one task here, and look at it.",
    cli_serve.serve: "Serve an OpenAI-compatible API with the engines.",
    cli_dashboard.dashboard: "Show a log in a browser.",
    cli_follow.watch: "Watch a run at a glance, as it goes.",
    cli_log.batches: "List batches.",
    cli_log.show: "Show one batch, one task or one rollout.",
    cli_follow.events: "Print what happened, an event a line.",
    cli_log.replay: "Compute a batch's state from the log, at any moment.",
    cli_diff.diff: "What changed in a batch, or differs between two logs?",
    cli_audit.runners: "How often did each runner die, and what did it cost?",
    cli_audit.weights: "Which weights were published, and who had them when?",
    cli_audit.usage: "Was any experience used twice?",
    cli_audit.prompts: "Which prompts were tried, which never?",
    cli_export.export: "Write experiences, events or a trace to files.",
    cli_log.verify: "Check a whole log.",
    cli_log.rebuild: "Make a log's tables again.",
    cli_whatif.what_if: "Recorded batches under other settings.",
    cli_regenerate.regenerate: "A recorded rollout once more, token by token.",
    cli_doctor.doctor: "Is what a run needs here?",
}
for _command, _line in _COMMANDS.items():
    app.command(short_help=_line)(_command)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
