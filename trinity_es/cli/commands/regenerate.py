"""`regenerate`: a recorded rollout once more, on the recorded weights. It starts an engine, no actor system."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from trinity_es.audit import regenerate as regenerating
from trinity_es.audit.regenerate import Regeneration, Turn
from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, open_chosen, print_json
from trinity_es.cli.render.tables import console
from trinity_es.text import plain

__all__ = ["regenerate"]


def regenerate(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch.", show_default=False)],
    task: Annotated[int, typer.Argument(metavar="TASK", min=0, help="Number of the task in it.", show_default=False)],
    run: Annotated[int, typer.Argument(metavar="RUN", min=0, help="Which run of the task.", show_default=False)],
    model: Annotated[str | None, typer.Option(
        "--model", metavar="PATH", help="Where the model lies now, if elsewhere.")] = None,
    weights: Annotated[str | None, typer.Option(
        "--weights", metavar="PATH", help="Where the published weights lie now.")] = None,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Generate a recorded rollout again, on the recorded weights, prompt and seed, and compare the tokens.

    It starts an engine like the one that made it, here, which needs the room that an engine needs. Exits 0 when every
    token is the same, 1 when they differ, and says how far they agree and why they may not; 2 when it can't be done.

    \b
    Example:
      trinity-es regenerate 3 12 0
    """
    with open_chosen(log, config) as opened:
        rollout = regenerating.find_rollout(opened, find_batch(opened, batch), task, run)
    again = regenerating.regenerate(rollout, model=model, weights=weights)
    if as_json:
        print_json(_as_json(again))
    else:
        _print(again)
    if not again.equal:
        raise typer.Exit(1)


def _as_json(again: Regeneration) -> dict[str, Any]:
    rollout = again.rollout
    return {
        "batch_id": rollout.batch_id, "task": rollout.task, "run": rollout.run, "attempt": rollout.attempt,
        "equal": again.equal, "model_version": rollout.version, "model": again.model, "weights": again.weights,
        "runner": rollout.runner, "host": rollout.host, "engine_recorded": rollout.engine_version,
        "engine": again.engine_version, "turns": [asdict(turn) for turn in again.turns], "why": again.why,
    }


def _print(again: Regeneration) -> None:
    out, rollout = console(), again.rollout
    out.print(Text(
        f"batch {plain(rollout.batch_id)}, task {rollout.task}, run {rollout.run}: attempt {rollout.attempt} on "
        f"{plain(rollout.runner)} #{rollout.incarnation}, weights {rollout.version}\n"
        f"generated again with {plain(again.weights) or 'no model'}, {plain(again.engine_version) or 'engine unknown'}"
    ))
    for turn in again.turns:
        out.print(Text(f"  {plain(turn.experience)}: {_told(turn)}"))
    if again.equal:
        out.print(Text("every token is the same", style="green"))
        return
    out.print(Text("THE TOKENS DIFFER. Why they may:", style="red"))
    for why in again.why or ["nothing that the log knows of: the engine itself, or files of the model that changed"]:
        out.print(Text(f"  - {plain(why)}"))


def _told(turn: Turn) -> str:
    logprobs = "no logprobs to compare"
    if turn.logprob_max is not None:
        logprobs = (f"logprobs of {turn.logprob_tokens} tokens differ by {turn.logprob_max:.2g} at most, "
                    f"{turn.logprob_mean:.2g} on average")
    if turn.first_difference is None:
        return f"{len(turn.recorded)} tokens from {turn.start} on, all equal; {logprobs}"
    at = turn.first_difference
    was, now = (tokens[at] if at < len(tokens) else "its end" for tokens in (turn.recorded, turn.regenerated))
    return (f"{len(turn.recorded)} tokens from {turn.start} on, again {len(turn.regenerated)}: the first {at} are "
            f"equal, then {was} was {now}; {turn.agreement:.0%} of positions agree; {logprobs}")
