"""The command `trinity-es`. Each subcommand's module is imported when the subcommand is called.

Commands that read a log need no actor system. Exit codes: 0 yes, 1 the answer is no (also LogRewound), 2 wrong use or
another `TrinityError` (one line on stderr), 130 Ctrl-C, 141 closed pipe.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_command_from_info
from typer.models import CommandInfo

from trinity_es.actors.plugin_lookup import registered, resolve
from trinity_es.events.errors import ConfigError, LogRewound, TrinityError
from trinity_es.events.software_version import VERSION

__all__ = ["app", "main"]

_COMMANDS = {
    "demo": ("demo", "Train a tiny model with a real engine on this machine."),
    "up": ("system", "Start the actor system of a config."),
    "down": ("system", "End the actor system, to the last process."),
    "status": ("status", "Show the state of a system, and what is wrong with it."),
    "why": ("status", "Show what a batch waits for."),
    "restart-runner": ("system", "End a runner's process and start another."),
    "scale": ("system", "Add servers as engines, or remove some."),
    "join": ("hosts", "Take part in a run that another host leads."),
    "hosts": ("hosts", "List the hosts of a run, or make one leave."),
    "redo": ("system", "Let settled tasks run again."),
    "accept-rewind": ("accept_rewind", "Continue with a log that lost acknowledged events."),
    "run": ("run", "Explore and train with a config, with a live view."),
    "resume": ("run", "Continue a run that was interrupted."),
    "bench": ("bench_and_debug", "Evaluate the checkpoints of a run."),
    "debug": ("bench_and_debug", "Play one task in this process, and show the result."),
    "serve": ("serve", "Serve an OpenAI-compatible API with the engines."),
    "dashboard": ("dashboard", "Show a log in a browser."),
    "watch": ("events", "Show a live picture of a run."),
    "batches": ("batches_replay_verify", "List batches."),
    "show": ("batches_replay_verify", "Show one batch, one task or one rollout."),
    "events": ("events", "Print events, a line each."),
    "replay": ("batches_replay_verify", "Compute a batch's state from the log, at any moment."),
    "diff": ("diff", "Show what changed in a batch, or how two logs differ."),
    "runners": ("runners_weights_usage", "Show how often each runner died, and the cost."),
    "leases": ("runners_weights_usage", "List the sandboxes and sessions that runs hold open."),
    "weights": ("runners_weights_usage", "List published weights, and when each runner loaded them."),
    "usage": ("runners_weights_usage", "Show whether any experience was used twice."),
    "prompts": ("prompts", "Show which prompts were never tried."),
    "export": ("export", "Write experiences, events or a trace to files."),
    "verify": ("batches_replay_verify", "Check a whole log."),
    "rebuild": ("batches_replay_verify", "Rebuild a log's tables from its events."),
    "payloads": ("payloads", "Move the payloads of a log."),
    "what-if": ("whatif", "Predict recorded batches under other settings."),
    "regenerate": ("regenerate", "Generate a recorded rollout again, and compare tokens."),
    "workflows": ("workflows", "List the workflows and rewards of the package."),
    "env": ("env", "Install verifiers environments, and try them."),
    "doctor": ("doctor", "Check whether this machine has what a run needs."),
}
"""Module in `commands/` and line in the list of `--help`, by command, in the order of that list."""


class _Group(TyperGroup):
    """The group of all commands. It prints a `TrinityError` as one line on stderr and exits with 2 or 1."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        names: Any = dict.fromkeys(_COMMANDS)
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the command of this name, of trinity_es or of a plugin package; None if there is none."""
        if cmd_name in _COMMANDS:
            module, line = _COMMANDS[cmd_name]
            function = getattr(import_module(f"trinity_es.cli.commands.{module}"), cmd_name.replace("-", "_"))
        elif (path := registered("command").get(cmd_name)) is not None:
            function, line = resolve(cmd_name, {cmd_name: path}, "command"), ""
        else:
            return None
        if isinstance(function, typer.Typer):  # it has subcommands
            return get_command(function)
        return get_command_from_info(
            CommandInfo(name=cmd_name, callback=function, short_help=line), pretty_exceptions_short=True,
            rich_markup_mode=None,
        )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands for `--help` without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])
        if others := registered("command").keys() - _COMMANDS.keys():
            with formatter.section("Commands of other packages"):
                formatter.write_dl([(name, registered("command")[name]) for name in sorted(others)])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. `--debug` may stand anywhere, also after the command."""
        if "--debug" in args:
            args = ["--debug", *(a for a in args if a != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Turns a closed pipe, Ctrl-C and errors that users can cause into exit codes."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process at once, without a traceback
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `trinity-es events | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as e:
            line = _error_line(e)
            if line is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            from trinity_es.safe_text import plain  # not at the top: --help does not need it

            lines = line.splitlines() if isinstance(e, ConfigError) else [line]  # a ConfigError has a line per problem
            print("error: " + "\n".join(map(plain, lines)), file=sys.stderr)
            raise typer.Exit(1 if isinstance(e, LogRewound) else 2) from None


def _error_line(error: Exception) -> str | None:
    """Return an error that users can cause as one line, with its notes; None for a bug."""
    message = _message(error)
    return None if message is None else " - ".join([message, *getattr(error, "__notes__", ())])


def _message(error: Exception) -> str | None:
    """Return the message of an error that users can cause; None for a bug."""
    if isinstance(error, TrinityError):
        return error.message
    if isinstance(error, FileNotFoundError) and not error.filename and _is_working_directory_gone():
        return f"the working directory {os.environ.get('PWD', '')} was deleted or renamed: cd to an existing one"
    if isinstance(error, OSError):  # TimeoutError is one
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if type(error).__module__.startswith("sqlalchemy"):
        return f"the database: {str(error).splitlines()[0]}"
    return None


def _is_working_directory_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


app = typer.Typer(
    name="trinity-es", cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"trinity-es {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    version: Annotated[bool, typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Run the rollouts of LLM reinforcement learning, and look up later what happened.

    \b
    First steps:
      trinity-es demo              train a tiny model with a real engine, in minutes
      trinity-es batches           what ran
      trinity-es show 3            one batch, task by task
      trinity-es replay 3          its state, computed from the log
      trinity-es dashboard --open  all of it in a browser
      trinity-es run config.yaml   a run of your own
      trinity-es resume            continue an interrupted run

    Exit codes: 0 yes, 1 the answer is no, 2 an error.
    """


def main() -> None:
    """Run the command line."""
    # Collect garbage rarely. The fold of a large batch has a million small values, all in use: scanning them repeatedly
    # took a third of a command's time, and the collection at exit a sixth.
    gc.set_threshold(100_000, 20, 20)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:  # closed, as by `>&-`: replace it, since print needs a stream
            stream = open(os.devnull, mode)  # noqa: SIM115  # it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal lacks become escapes, not an error
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    finally:
        if not {"torch", "triton"} & sys.modules.keys():  # these print long messages at exit if objects are frozen
            gc.freeze()
