"""The command `regenerate`, which generates a recorded run again with an engine in this process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from trinity_es.audit import regenerate as regenerating
from trinity_es.audit.regenerate import Regeneration, Turn
from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, open_chosen, print_json
from trinity_es.cli.render.batch_tables import console
from trinity_es.safe_text import plain

__all__ = ["regenerate"]


def regenerate(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch.", show_default=False)],
    task: Annotated[int, typer.Argument(metavar="TASK", min=0, help="Number of the task in it.", show_default=False)],
    run: Annotated[int, typer.Argument(metavar="RUN", min=0, help="Which run of the task.", show_default=False)],
    model: Annotated[str | None, typer.Option(
        "--model", metavar="PATH", help="Path of the model, if it has moved.")] = None,
    weights: Annotated[str | None, typer.Option(
        "--weights", metavar="PATH", help="Path of the published weights, if they have moved.")] = None,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Generate a recorded run again from the recorded weights, prompt and seed, and compare the tokens.

    It starts an engine like the recorded one on this machine, which needs as much memory. Exits 0 if every token is the
    same, 1 if tokens differ (it prints how many agree and possible reasons), 2 if the run can't be generated.

    \b
    Example:
      trinity-es regenerate 3 12 0
    """
    with open_chosen(log, config) as opened:
        rollout = regenerating.find_rollout(opened, find_batch(opened, batch), task, run)
    result = regenerating.regenerate(rollout, model=model, weights=weights)
    if as_json:
        print_json(_as_json(result))
    else:
        _print_result(result)
    if not result.equal:
        raise typer.Exit(1)


def _as_json(result: Regeneration) -> dict[str, Any]:
    rollout, row = result.rollout, result.rollout.row
    return {
        "batch_id": row.batch_id, "task": row.task, "run": row.run, "attempt": row.attempt,
        "equal": result.equal, "model_version": rollout.version, "model": result.model, "weights": result.weights,
        "runner": row.runner, "host": rollout.host, "engine_recorded": rollout.engine_version,
        "engine": result.engine_version, "turns": [asdict(turn) for turn in result.turns], "why": result.why,
    }


def _print_result(result: Regeneration) -> None:
    out, rollout, row = console(), result.rollout, result.rollout.row
    out.print(Text(
        f"batch {plain(row.batch_id)}, task {row.task}, run {row.run}: attempt {row.attempt} on "
        f"{plain(row.runner)} #{row.incarnation}, weights {rollout.version}\n"
        f"generated again with {plain(result.weights) or 'no model'}, "
        f"{plain(result.engine_version) or 'engine unknown'}"
    ))
    for turn in result.turns:
        out.print(Text(f"  {plain(turn.experience)}: {_comparison(turn)}"))
    if result.equal:
        out.print(Text("every token is the same", style="green"))
        return
    out.print(Text("THE TOKENS DIFFER. Possible reasons:", style="red"))
    for why in result.why or ["none in the log: perhaps the engine itself, or a changed file of the model"]:
        out.print(Text(f"  - {plain(why)}"))


def _comparison(turn: Turn) -> str:
    logprobs = "no logprobs to compare"
    if turn.logprob_max is not None:
        logprobs = (f"logprobs of {turn.logprob_tokens} tokens differ by {turn.logprob_max:.2g} at most, "
                    f"{turn.logprob_mean:.2g} on average")
    if turn.first_difference is None:
        return f"{len(turn.recorded)} tokens from {turn.start} on, all equal; {logprobs}"
    at = turn.first_difference
    recorded, new = (tokens[at] if at < len(tokens) else "its end" for tokens in (turn.recorded, turn.regenerated))
    return (f"{len(turn.recorded)} tokens from {turn.start} on, {len(turn.regenerated)} generated now: the first {at} "
            f"are equal, then {recorded} became {new}; {turn.agreement:.0%} of positions agree; {logprobs}")
