"""The command `what-if`, which simulates recorded batches under other settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from trinity_es.audit.whatif.forecast import NOT_MODELLED, Figures, Prediction, Settings, predict
from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, open_chosen, print_json
from trinity_es.cli.render.batch_tables import columns, console
from trinity_es.safe_text import plain

__all__ = ["what_if"]

LAST_BATCHES = 10


def what_if(
    batches: Annotated[list[str] | None, typer.Argument(
        metavar="[BATCH...|all]", help=f"Batches to simulate. Default: the last {LAST_BATCHES}.",
        show_default=False)] = None,
    timeout: Annotated[float | None, typer.Option(
        "--timeout", min=0.001, metavar="SECONDS", help="Value for explorer.max_timeout.")] = None,
    over_rollout_ratio: Annotated[float | None, typer.Option(
        "--over-rollout-ratio", min=0.0, max=0.999, help="Value for explorer.over_rollout.ratio.")] = None,
    runners: Annotated[int | None, typer.Option("--runners", min=1, help="Number of engines.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(
        "--max-concurrency", min=1, help="Value for explorer.max_concurrency.")] = None,
    max_retry: Annotated[int | None, typer.Option(
        "--max-retry", min=0, help="Value for explorer.max_retry_times.")] = None,
    runs_per_unit: Annotated[int | None, typer.Option(
        "--runs-per-unit", min=1, help="Value for explorer.max_repeat_times_per_runner.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the durations that are drawn at random.")] = 0,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Predict how long recorded batches would have taken under other settings, and what they would have dropped.

    A simulation replays the batches with the coordinator's own decisions. Each attempt takes as long as in the log. An
    attempt that never ran takes the duration of another attempt of its batch, drawn at random with --seed. Without
    other settings, the result shows how closely the simulation reproduces the recorded run.

    Not modelled: how engines slow each other down (more concurrency or runners on one GPU look better than they are),
    what the trainer would do with other experiences, how long attempts that timed out would have run, batches of a
    Scheduler. See docs/WHATIF.md.

    \b
    Examples:
      trinity-es what-if
      trinity-es what-if all --runners 4
      trinity-es what-if 3 4 5 --timeout 60 --over-rollout-ratio 0.25
    """
    settings = Settings(
        timeout=timeout, over_rollout_ratio=over_rollout_ratio, runners=runners,
        max_concurrency=max_concurrency, max_retry=max_retry, runs_per_unit=runs_per_unit, seed=seed,
    )
    with open_chosen(log, config) as opened:
        batch_ids = None if not batches or batches == ["all"] else [find_batch(opened, name) for name in batches]
        prediction = predict(opened, batch_ids, settings, last=None if batches else LAST_BATCHES)
    if as_json:
        print_json(_as_json(prediction))
    else:
        _print_prediction(prediction)


def _totals(prediction: Prediction) -> dict[str, dict[str, Any]]:
    """Return recorded and predicted sums over the chosen batches that ended in the log and in the prediction."""
    ended_in_both = [r for r in prediction.batches
                     if r.chosen and r.recorded.seconds is not None and r.predicted.seconds is not None]
    totals: dict[str, dict[str, Any]] = {}
    for side in ("recorded", "predicted"):
        figures: list[Figures] = [getattr(r, side) for r in ended_in_both]
        totals[side] = {
            "seconds": sum(f.seconds or 0.0 for f in figures), "span": getattr(prediction, f"{side}_span"),
            **{name: sum(getattr(f, name) for f in figures) for name in ("finished", "failed", "dropped", "attempts")},
        }
    return totals


def _as_json(prediction: Prediction) -> dict[str, Any]:
    """Return the prediction for `--json`. Unchanged settings have their recorded values."""
    settings = asdict(prediction.settings)
    return {
        "seed": settings.pop("seed"), "recorded_settings": prediction.recorded_settings,
        "settings": {k: prediction.recorded_settings[k] if v is None else v for k, v in settings.items()},
        "batches": [asdict(row) for row in prediction.batches], "totals": _totals(prediction),
        "left_out": prediction.left_out, "not_modelled": list(NOT_MODELLED),
    }


def _print_prediction(prediction: Prediction) -> None:
    out = console()
    changed = {k: v for k in prediction.recorded_settings if (v := getattr(prediction.settings, k)) is not None}
    settings = ", ".join(f"{k} {v} (was {prediction.recorded_settings[k]})" for k, v in changed.items())
    out.print(Text(f"with {settings or 'the recorded settings'}"))
    numbers = ("tasks", "seconds", "predicted", "", "finished", "failed", "dropped", "attempts", "drawn")
    table = columns("id", "type", *numbers, right=numbers, whole=("id", "type"))
    for row in prediction.batches:
        if row.chosen:
            table.add_row(
                Text(plain(row.batch_id)), row.batch_type, str(row.tasks), *_seconds_cells(row.recorded, row.predicted),
                *(_change(getattr(row.recorded, name), getattr(row.predicted, name))
                  for name in ("finished", "failed", "dropped", "attempts")), str(row.drawn),
            )
    out.print(table)
    totals = _totals(prediction)
    recorded, predicted = totals["recorded"], totals["predicted"]
    names = ("finished", "failed", "dropped")
    counts = ", ".join(f"{name} {_change(recorded[name], predicted[name])}" for name in names)
    seconds = recorded["seconds"], predicted["seconds"]
    out.print(Text(
        f"together {seconds[0]:.2f} s -> {seconds[1]:.2f} s{_percent(*seconds)}; from the first submission to the last "
        f"end {recorded['span']:.2f} s -> {predicted['span']:.2f} s; {counts}"
    ))
    other_count = sum(not r.chosen for r in prediction.batches)
    if other_count:
        out.print(Text(f"{other_count} batches that ran at the same time were simulated too", style="dim"))
    if prediction.left_out:
        out.print(Text(f"{len(prediction.left_out)} batches of a Scheduler were left out", style="dim"))
    out.print(Text("engines that slow each other down are not modelled: see --help", style="dim"))


def _seconds_cells(recorded: Figures, predicted: Figures) -> tuple[str, str, str]:
    before, after = ("not ended" if f.seconds is None else f"{f.seconds:.2f}" for f in (recorded, predicted))
    if recorded.seconds is None or predicted.seconds is None:
        return before, after, ""
    return before, after, _percent(recorded.seconds, predicted.seconds)


def _percent(recorded: float, predicted: float) -> str:
    return f" ({(predicted - recorded) / recorded:+.1%})" if recorded else ""


def _change(recorded: int, predicted: int) -> str:
    return str(recorded) if recorded == predicted else f"{recorded} -> {predicted}"
