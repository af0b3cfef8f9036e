"""The command `what-if`: recorded batches, played again under other settings."""

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

LAST = 10
"""Number of batches that are played if none is named."""


def what_if(
    batches: Annotated[list[str] | None, typer.Argument(
        metavar="[BATCH...|all]", help=f"Batches to play. Default: the last {LAST}.", show_default=False)] = None,
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

    The coordinator's own decisions play them again in virtual time. Each attempt takes as long as in the log; one that
    never ran takes the duration of another attempt of its batch, drawn at random with --seed. Without other settings
    the result shows how closely this reproduces the recorded run.

    Not modelled: how engines slow each other down (more places or runners on one GPU look better than they are), what
    the trainer would do with other experiences, how long attempts that timed out would have run, batches of a
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
        named = None if not batches or batches == ["all"] else [find_batch(opened, name) for name in batches]
        prediction = predict(opened, named, settings, last=None if batches else LAST)
    if as_json:
        print_json(_as_json(prediction))
    else:
        _print(prediction)


def _totals(prediction: Prediction) -> dict[str, dict[str, Any]]:
    """Return sums over the chosen batches that ended both in the log and in the prediction."""
    both = [r for r in prediction.batches
            if r.chosen and r.recorded.seconds is not None and r.predicted.seconds is not None]
    out: dict[str, dict[str, Any]] = {}
    for which in ("recorded", "predicted"):
        figures: list[Figures] = [getattr(r, which) for r in both]
        out[which] = {
            "seconds": sum(getattr(r, which).seconds for r in both), "span": getattr(prediction, f"{which}_span"),
            **{name: sum(getattr(f, name) for f in figures) for name in ("finished", "failed", "dropped", "attempts")},
        }
    return out


def _as_json(prediction: Prediction) -> dict[str, Any]:
    settings = asdict(prediction.settings)
    return {
        "seed": settings.pop("seed"), "recorded_settings": prediction.was,
        "settings": {k: prediction.was[k] if v is None else v for k, v in settings.items()},
        "batches": [asdict(row) for row in prediction.batches], "totals": _totals(prediction),
        "left_out": prediction.left_out, "not_modelled": list(NOT_MODELLED),
    }


def _print(prediction: Prediction) -> None:
    out = console()
    changed = {k: v for k in prediction.was if (v := getattr(prediction.settings, k)) is not None}
    settings = ", ".join(f"{k} {v} (was {prediction.was[k]})" for k, v in changed.items())
    out.print(Text(f"with {settings or 'the recorded settings'}"))
    numbers = ("tasks", "seconds", "predicted", "", "finished", "failed", "dropped", "attempts", "drawn")
    table = columns("id", "type", *numbers, right=numbers, whole=("id", "type"))
    for row in prediction.batches:
        if row.chosen:
            table.add_row(
                Text(plain(row.batch_id)), row.batch_type, str(row.tasks), *_seconds(row.recorded, row.predicted),
                *(_change(getattr(row.recorded, name), getattr(row.predicted, name))
                  for name in ("finished", "failed", "dropped", "attempts")), str(row.drawn),
            )
    out.print(table)
    totals = _totals(prediction)
    was, now = totals["recorded"], totals["predicted"]
    counts = ", ".join(f"{name} {_change(was[name], now[name])}" for name in ("finished", "failed", "dropped"))
    out.print(Text(
        f"together {was['seconds']:.2f} s -> {now['seconds']:.2f} s{_percent(was['seconds'], now['seconds'])}; "
        f"from the first submission to the last end {was['span']:.2f} s -> {now['span']:.2f} s; {counts}"
    ))
    beside = [r for r in prediction.batches if not r.chosen]
    if beside:
        out.print(Text(f"{len(beside)} batches that ran at the same time were played too", style="dim"))
    if prediction.left_out:
        out.print(Text(f"{len(prediction.left_out)} batches of a Scheduler were left out", style="dim"))
    out.print(Text("engines that slow each other down are not modelled: see --help", style="dim"))


def _seconds(was: Figures, now: Figures) -> tuple[str, str, str]:
    before, after = ("not ended" if f.seconds is None else f"{f.seconds:.2f}" for f in (was, now))
    both = was.seconds is not None and now.seconds is not None
    return before, after, _percent(was.seconds or 0.0, now.seconds or 0.0) if both else ""


def _percent(was: float, now: float) -> str:
    return f" ({(now - was) / was:+.1%})" if was else ""


def _change(was: int, now: int) -> str:
    return str(was) if was == now else f"{was} -> {now}"
