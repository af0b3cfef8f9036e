"""Output of `runners`, `weights`, `usage`, `leases` and `prompts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, counted_text, print_fitted, print_left_out, state_text, when
from trinity_es.events.values import BatchId
from trinity_es.projections.adapter_versions import AdapterVersion
from trinity_es.projections.event_texts import counted
from trinity_es.projections.host_states import host_of
from trinity_es.projections.leases import OpenLease
from trinity_es.projections.reading.untried_prompts import PromptsTried
from trinity_es.projections.tables.experience_usage import Usage
from trinity_es.projections.tables.runner_history import (
    RunnerIncarnation,
    RunnerLives,
    WeightsVersion,
    by_runner,
    natural_key,
    visible_state,
)
from trinity_es.projections.why.answer import span
from trinity_es.safe_text import error_line, plain

__all__ = [
    "MAX_ROWS", "print_adapters", "print_leases", "print_lives", "print_prompts", "print_runners", "print_usage",
    "print_weights",
]

MAX_ROWS = 50
MAX_RANGES = 40


def _table(*names: str, right: Sequence[str] = ()) -> Table:
    return columns(*names, right=right,
                   whole=(*right, "state", "how", "started", "ended", "published", "last death"))


def print_runners(out: Console, lives: Sequence[RunnerIncarnation], up: bool | None = None) -> None:
    """Print a line per runner. `up`: whether their system runs, None if unknown."""
    runners = by_runner(lives, up)
    on_several_hosts = any(host_of(runner.name) for runner in runners)
    # With several hosts, deaths by the loss of a host have their own column.
    host_loss_column = ["with host"] if on_several_hosts else []
    right = ("lives", "deaths", "with host", "attempts lost", "seconds lost", "weights")
    table = _table(*(["host"] if on_several_hosts else []), "runner", "state", "weights", "lives", "deaths",
                   *host_loss_column, "attempts lost", "seconds lost", "last death", "reason", right=right)
    for runner in sorted(runners, key=lambda runner: natural_key(host_of(runner.name))):
        last_death = next((life for life in reversed(runner.all) if life.died), None)
        deaths, with_host = runner.deaths - runner.with_host, runner.with_host
        table.add_row(
            *([Text(plain(host_of(runner.name) or "(head)", 40))] if on_several_hosts else []),
            Text(plain(runner.name)), state_text(runner.how), str(runner.last.model_version), str(runner.lives),
            counted_text(deaths), *([counted_text(with_host, "yellow")] if on_several_hosts else []),
            str(runner.attempts_lost), f"{runner.seconds_lost:.1f}", when(last_death.ended_at if last_death else None),
            Text(error_line(last_death.reason, 100) if last_death else ""),
        )
    print_fitted(out, table, ("weights", "lives", "seconds lost", "attempts lost", "last death"))
    _print_unseen_ends(out, lives, up)
    if on_several_hosts:
        _print_by_host(out, runners)


def _print_by_host(out: Console, runners: Sequence[RunnerLives]) -> None:
    """Print the cost of the deaths of runners on each host: alone, and with the loss of the host."""
    deaths_by_host: dict[str, list[RunnerIncarnation]] = {}
    for runner in runners:
        deaths_by_host.setdefault(host_of(runner.name), []).extend(life for life in runner.all if life.died)
    for host, deaths in sorted(deaths_by_host.items(), key=lambda item: natural_key(item[0])):
        own_deaths = [life for life in deaths if not life.went_with_host]
        host_deaths = [life for life in deaths if life.went_with_host]
        costs = [f"{counted(len(lives), 'death')} {cause} ({counted(sum(x.attempts_lost for x in lives), 'attempt')}, "
                 f"{sum(x.seconds_lost for x in lives):.1f} s lost)"
                 for lives, cause in ((own_deaths, "of a runner"), (host_deaths, "with the host")) if lives]
        out.print(Text(f"{f'host {plain(host, 40)}' if host else 'the head'}: {', '.join(costs) or 'no deaths'}"),
                  soft_wrap=True)


def print_lives(out: Console, lives: Sequence[RunnerIncarnation], up: bool | None = None) -> None:
    """Print a line per process of a runner. `up`: whether their system runs, None if unknown."""
    right = ("load s", "attempts lost", "seconds lost", "weights")
    table = _table("life", "pid", "host", "engine", "started", "load s", "ended", "how", "weights", "attempts lost",
                   "seconds lost", "reason", right=right)
    for life in lives[-MAX_ROWS:]:
        table.add_row(
            Text(plain(f"{life.runner} #{life.incarnation}", 60)), str(life.pid), Text(plain(life.host, 40)),
            Text(plain(life.engine, 20)), when(life.started_at),
            "" if life.load_seconds is None else f"{life.load_seconds:.1f}", when(life.ended_at),
            state_text(visible_state(life, up)), str(life.model_version), str(life.attempts_lost),
            f"{life.seconds_lost:.1f}",
            Text(error_line(life.reason, 100)),
        )
    print_fitted(out, table, ("engine", "weights", "pid", "host", "seconds lost", "started", "load s", "attempts lost"))
    print_left_out(out, len(lives), MAX_ROWS)
    _print_unseen_ends(out, lives[-MAX_ROWS:], up)


def _print_unseen_ends(out: Console, lives: Sequence[RunnerIncarnation], up: bool | None) -> None:
    """Explain the table's values for runner processes whose end was not recorded."""
    states = {visible_state(life, up) for life in lives}
    for state, text in (
        ("replaced", "the whole system ended unseen; for `ended` and seconds lost, its last event before that counts"),
        ("gone", "the whole system ended unseen, after the log's last event; the next start counts what was lost"),
    ):
        if state in states:
            out.print(Text(f"{state}: {text}", style="dim"), soft_wrap=True)


def print_weights(
    out: Console, versions: Sequence[WeightsVersion], deliveries: Mapping[int, int], left_out: int
) -> None:
    """Print a line per version of the weights.

    `deliveries`: number of delivered experiences by version. `left_out`: number of older versions that are not printed.
    """
    table = _table("version", "published", "method", "path", "loaded by (seconds after)", "failed", "delivered",
                   right=("version", "delivered"))
    for version in versions:
        loads = ", ".join(f"{plain(load.runner, 30)} {load.at - version.published_at:+.1f}"
                          for load in version.loads[:16])
        failed = ", ".join(f"{plain(load.runner, 30)}: {error_line(load.error, 80)}" for load in version.failures[:4])
        table.add_row(str(version.version), when(version.published_at), Text(plain(version.method, 20)),
                      Text(plain(version.path, 80)), Text(loads), Text(failed, style="red"),
                      f"{deliveries.get(version.version, 0):,}")
    print_fitted(out, table, ("method", "path"))
    if deliveries.get(0):
        out.print(Text(f"version 0, the original model, made {deliveries[0]:,} delivered experiences", style="dim"))
    print_left_out(out, left_out, 0)


def print_adapters(out: Console, adapters: Sequence[AdapterVersion]) -> None:
    """Print a line per version of a LoRA adapter, the newest last."""
    table = _table("adapter", "version", "published", "rank", "bytes", "path", "loaded by (seconds after)", "failed",
                   "removed", right=("version", "rank", "bytes"))
    for adapter in adapters[-MAX_ROWS:]:
        loads = ", ".join(f"{plain(runner, 30)} {at - adapter.published_at:+.1f}"
                          for runner, _, at, _ in adapter.loads[:16])
        failed = ", ".join(f"{plain(runner, 30)}: {error_line(error, 80)}"
                           for runner, _, _, error in adapter.failures[:4])
        table.add_row(
            Text(plain(adapter.adapter, 60)), str(adapter.version), when(adapter.published_at), str(adapter.rank),
            f"{adapter.size:,}",
            Text(plain(adapter.path, 80)), Text(loads), Text(failed, style="red"), when(adapter.removed_at),
        )
    print_fitted(out, table, ("removed", "rank", "path"))
    print_left_out(out, len(adapters), MAX_ROWS, "before them (--adapters)")


def print_usage(out: Console, usage: Usage) -> None:
    """Print how often delivered experiences were used, and the steps of those that were used more than once."""
    out.print(Text(f"{usage.delivered:,} experiences delivered to training: {usage.once:,} used once, "
                   f"{usage.never:,} not used, {usage.more:,} used more than once"))
    if usage.redone:
        out.print(Text(f"{usage.redone:,} uses were undone: the trainer returned to an older checkpoint"))
    for used in usage.twice[:MAX_ROWS]:
        steps = ", ".join("?" if step is None else str(step) for step in used.steps)
        positions = ", ".join(map(str, used.positions))
        out.print(Text(f"  batch {plain(used.batch_id)} experiences {used.first} to {used.first + used.count - 1}: "
                       f"in steps {steps} (positions {positions})", style="red"), soft_wrap=True)
    print_left_out(out, len(usage.twice), MAX_ROWS, "more")


def print_prompts(
    out: Console, tried: PromptsTried, unread: Mapping[str, list[int]], texts: Mapping[tuple[BatchId, int], str | None]
) -> None:
    """Print how many prompts were tried, and the prompts in `texts` that were never tried.

    `texts`: the prompts to print, by (batch, task). `unread`: the rows of each taskset that no batch ever had.
    """
    prompts_were = "prompt was" if len(tried.never) == 1 else "prompts were"
    out.print(Text(f"{tried.tasks:,} tasks submitted, {tried.sent:,} of them sent to a runner; "
                   f"{len(tried.never):,} {prompts_were} never tried", style="bold"))
    for untried in tried.never:
        if (untried.batch_id, untried.task) in texts:
            row = "" if untried.row is None else \
                f", {'' if untried.taskset is None else plain(untried.taskset, 60) + ' '}row {plain(untried.row, 40)}"
            prompt = texts[untried.batch_id, untried.task]
            out.print(Text(f"  batch {plain(untried.batch_id)} task {untried.task}{row}, the batch is "
                           f"{untried.reason}{'' if prompt is None else ': ' + plain(prompt, 100)}"), soft_wrap=True)
    if len(texts) < len(tried.never):
        out.print(Text(f"  and {len(tried.never) - len(texts)} more: --never shows them", style="dim"))
    for name, (epoch, offset) in tried.read.items():
        rows = unread.get(name)
        rest = "" if rows is None else f"; rows that no batch ever held: {_ranges(rows) or 'none'}"
        out.print(Text(f"taskset {plain(name, 80)}: read to task {offset} of epoch {epoch + 1}{rest}"), soft_wrap=True)


def _ranges(rows: Sequence[int]) -> str:
    """Return rows as at most MAX_RANGES ranges, such as `1-5, 9`, and the number of further ranges."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row - 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:MAX_RANGES])
    return text + (f" and {len(ranges) - MAX_RANGES} more ranges" if len(ranges) > MAX_RANGES else "")


def print_leases(out: Console, leases: Sequence[OpenLease], now: float) -> None:
    """Print a line per open lease, in red if its release failed, in yellow if its run is over."""
    if not leases:
        out.print("no lease is open")
        return
    names = ("lease", "state", "age", "provider", "handle", "batch", "task", "run", "attempt", "runner", "reason")
    table = columns(*names, right=("age", "task", "run", "attempt"), whole=("state", "age"))
    for lease in leases:
        taken = lease.taken
        style = "red" if lease.error else "yellow" if lease.orphaned else ""
        table.add_row(
            Text(plain(taken.lease, 40)), Text(lease.state, style=style), span(now - lease.taken_at),
            Text(plain(taken.provider, 60)), Text(plain("" if lease.handle is None else lease.handle, 60)),
            Text(plain(taken.batch_id, 30)), str(taken.unit.task), str(taken.run), str(taken.unit.attempt),
            Text(plain(f"{taken.runner} #{taken.incarnation}", 40)),
            Text(error_line(f"try {lease.tries}: {lease.error}" if lease.error else lease.orphaned, 120), style=style),
        )
    print_fitted(out, table, ("run", "attempt", "handle", "runner", "provider"))
