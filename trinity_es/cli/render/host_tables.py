"""Output of `hosts`: a line per host, the head first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, counted_text, print_fitted, state_text, when
from trinity_es.projections.reading.host_list import HostRow
from trinity_es.projections.why.answer import span
from trinity_es.safe_text import devices, error_line, plain

__all__ = ["print_hosts"]

_NUMBERS = ("epoch", "units", "places", "tasks", "lost")


def print_hosts(out: Console, rows: Sequence[HostRow], *, live: bool) -> None:
    """Print a line per host. `live`: False if the rows come from the log alone."""
    table = columns("host", "epoch", "state", "since", "last heard", "address", "devices", "runners", "units", "places",
                    "tasks", "lost", "reason", right=_NUMBERS,
                    whole=(*_NUMBERS, "state", "since", "last heard", "runners"))
    for row in rows:
        table.add_row(
            Text(plain(row.host or f"{row.machine or 'this'} (head)", 40)), str(row.epoch or ""),
            state_text(row.state),
            when(row.since), _last_heard(row), Text(plain(row.address, 40)),
            devices(row.places), f"{len(row.ready)} of {len(row.runners)} ready" if row.runners else "",
            str(row.units), str(row.runner_places), f"{row.finished:,}",
            counted_text(row.lost) if row.host else "",
            Text(error_line(_reason(row), 120)),
        )
    print_fitted(out, table, ("lost", "devices", "places", "epoch", "address", "since"))
    if len(rows) == 1:
        out.print(Text("no other host takes part: run `trinity-es join STORE_URL` on each, with the run's key"))
    if not live:
        out.print(Text("from the log alone: its system does not run, or can't be reached from here", style="dim"))


def _last_heard(row: HostRow) -> Text:
    if row.connected is None:
        return Text("")
    if row.connected:
        return Text("now")
    return Text(f"{span(row.away_for or 0.0)} ago", style="red")


def _reason(row: HostRow) -> str:
    """Return the recorded reason of the host's state, and why its connection is broken."""
    if row.reason and not row.is_present:
        return row.reason
    return "; ".join(part for part in (row.reason, "" if row.connected else row.why_away) if part)
