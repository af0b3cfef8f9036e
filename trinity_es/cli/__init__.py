"""The command `trinity-es`: a command's module is imported when it is called. `render/` is what they print for people.

Those that read a log need no actor system. Exit codes: 0 yes, 1 the answer is no (also: the log lost what was
acknowledged), 2 wrong use or another `TrinityError` (one line on stderr), 130 Ctrl-C.
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

from trinity_es.actors.plugins import registered, resolve
from trinity_es.events.errors import ConfigError, LogRewound, TrinityError
from trinity_es.events.software_version import VERSION

__all__ = ["app", "main"]

_COMMANDS = {
    "demo": ("demo", "Train a tiny model with a real engine, here and now."),
    "up": ("system", "Start the actor system of a config."),
    "down": ("system", "End it, to the last process."),
    "status": ("status", "Is all well?"),
    "why": ("status", "What does a batch wait for?"),
    "restart-runner": ("system", "End a runner's process and start another."),
    "scale": ("system", "Add servers as engines, or take some away."),
    "join": ("hosts", "Take part in a run that is led on another host."),
    "hosts": ("hosts", "Which other hosts take part?"),
    "redo": ("system", "Let tasks that have ended run again."),
    "accept-rewind": ("accept_rewind", "Go on with a log that lost acknowledged events."),
    "run": ("run", "Explore and train with a config, in view."),
    "resume": ("run", "Go on with a run that was interrupted."),
    "bench": ("bench", "Evaluate the checkpoints of a run."),
    "debug": ("bench", "Play one task here, and look at it."),
    "serve": ("serve", "Serve an OpenAI-compatible API with the engines."),
    "dashboard": ("dashboard", "Show a log in a browser."),
    "watch": ("events", "Watch a run at a glance, as it goes."),
    "batches": ("batches", "List batches."),
    "show": ("batches", "Show one batch, one task or one rollout."),
    "events": ("events", "Print what happened, an event a line."),
    "replay": ("batches", "Compute a batch's state from the log, at any moment."),
    "diff": ("diff", "What changed in a batch, or differs between two logs?"),
    "runners": ("runners_weights_usage", "How often did each runner die, and what did it cost?"),
    "leases": ("runners_weights_usage", "Which sandboxes and sessions do runs hold open?"),
    "weights": ("runners_weights_usage", "Which weights were published, and who had them when?"),
    "usage": ("runners_weights_usage", "Was any experience used twice?"),
    "prompts": ("prompts", "Which prompts were tried, which never?"),
    "export": ("export", "Write experiences, events or a trace to files."),
    "verify": ("batches", "Check a whole log."),
    "rebuild": ("batches", "Make a log's tables again."),
    "what-if": ("whatif", "Recorded batches under other settings."),
    "regenerate": ("regenerate", "A recorded rollout once more, token by token."),
    "workflows": ("workflows", "Which workflows and rewards come with the package?"),
    "env": ("env", "Install environments of others, and try them."),
    "doctor": ("doctor", "Is what a run needs here?"),
}
"""Our commands by name, in the order of the list: the module of `commands/` that has each, and its line in the list."""


class _Group(TyperGroup):
    """All commands. An error that this software raises on purpose is one line on stderr and exit code 2 (or 1)."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        names: Any = dict.fromkeys(_COMMANDS)
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS:
            module, line = _COMMANDS[cmd_name]
            function = getattr(import_module(f"trinity_es.cli.commands.{module}"), cmd_name.replace("-", "_"))
        elif (path := registered("command").get(cmd_name)) is not None:
            function, line = resolve(cmd_name, {cmd_name: path}, "command"), ""
        else:
            return None
        if isinstance(function, typer.Typer):  # commands of its own
            return get_command(function)
        return get_command_from_info(
            CommandInfo(name=cmd_name, callback=function, short_help=line), pretty_exceptions_short=True,
            rich_markup_mode=None,
        )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])
        if others := registered("command").keys() - _COMMANDS.keys():
            with formatter.section("Commands of other packages"):
                formatter.write_dl([(name, registered("command")[name]) for name in sorted(others)])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:  # may stand anywhere
            args = ["--debug", *(a for a in args if a != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends this process at once, without a traceback
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `trinity-es events | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as e:
            line = _one_line(e)
            if line is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            from trinity_es.text import plain  # not for --help

            lines = line.splitlines() if isinstance(e, ConfigError) else [line]  # its problems, a line each
            print("error: " + "\n".join(map(plain, lines)), file=sys.stderr)
            raise typer.Exit(1 if isinstance(e, LogRewound) else 2) from None


def _one_line(error: Exception) -> str | None:
    """Return the line for an error that can happen to anyone; None for one that is a bug of ours."""
    if isinstance(error, TrinityError):
        return error.message
    if isinstance(error, FileNotFoundError) and not error.filename and _folder_is_gone():
        return (f"the working directory {os.environ.get('PWD', '')} is gone, it was deleted or renamed: "
                "cd to one that is there")
    if isinstance(error, OSError):  # TimeoutError is one
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if type(error).__module__.startswith("sqlalchemy"):
        return f"the database: {str(error).splitlines()[0]}"
    return None


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


app = typer.Typer(
    name="trinity-es", cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
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


def main() -> None:
    """Run the command line."""
    # Seldom looked through for garbage in cycles: folding a large batch makes a million small values, all of them in
    # use, and going through them again and again took a third of a command's time; its last look, as it ends, a sixth.
    gc.set_threshold(100_000, 20, 20)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:  # it was closed, as by `>&-`: what is printed there goes nowhere
            stream = open(os.devnull, mode)  # noqa: SIM115  # it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no such letter gets its number, and no traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    finally:
        if not {"torch", "triton"} & sys.modules.keys():  # they complain at length of what is left at the end
            gc.freeze()
