"""The command `trinity-es`: puts the commands of `commands/` together. `render/` is what they print for a person.

Those that read a log need no actor system.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from trinity_es.cli.commands import (
    accept_rewind,
    audit,
    batches,
    bench,
    dashboard,
    demo,
    diff,
    doctor,
    events,
    export,
    regenerate,
    run,
    serve,
    system,
    whatif,
)
from trinity_es.cli.common import Group
from trinity_es.events.version import VERSION

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
    demo.demo: "Train a tiny model with a real engine, here and now.",
    run.up: "Start the actor system of a config.",
    run.down: "End it, to the last process.",
    run.status: "Is all well?",
    run.why: "What does a batch wait for?",
    system.restart_runner: "End a runner's process and start another.",
    system.redo: "Let tasks that have ended run again.",
    accept_rewind.accept_rewind: "Go on with a log that lost acknowledged events.",
    run.run: "Explore and train with a config, in view.",
    run.resume: "Go on with a run that was interrupted.",
    bench.bench: "Evaluate the checkpoints of a run.",
    bench.debug: "Play one task here, and look at it.",
    serve.serve: "Serve an OpenAI-compatible API with the engines.",
    dashboard.dashboard: "Show a log in a browser.",
    events.watch: "Watch a run at a glance, as it goes.",
    batches.batches: "List batches.",
    batches.show: "Show one batch, one task or one rollout.",
    events.events: "Print what happened, an event a line.",
    batches.replay: "Compute a batch's state from the log, at any moment.",
    diff.diff: "What changed in a batch, or differs between two logs?",
    audit.runners: "How often did each runner die, and what did it cost?",
    audit.weights: "Which weights were published, and who had them when?",
    audit.usage: "Was any experience used twice?",
    audit.prompts: "Which prompts were tried, which never?",
    export.export: "Write experiences, events or a trace to files.",
    batches.verify: "Check a whole log.",
    batches.rebuild: "Make a log's tables again.",
    whatif.what_if: "Recorded batches under other settings.",
    regenerate.regenerate: "A recorded rollout once more, token by token.",
    doctor.doctor: "Is what a run needs here?",
}
for _command, _line in _COMMANDS.items():
    app.command(short_help=_line)(_command)


def main() -> None:
    """Run the command line."""
    # Seldom looked through for garbage in cycles: folding a large batch makes a million small values, all of them in
    # use, and going through them again and again took a third of a command's time; its last look, as it ends, a sixth.
    gc.set_threshold(100_000, 20, 20)
    try:
        app()
    finally:
        if not {"torch", "triton"} & sys.modules.keys():  # they complain at length of what is left at the end
            gc.freeze()
