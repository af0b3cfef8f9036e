"""What `leases` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from trinity_es.cli.render.tables import columns, fitted
from trinity_es.projections.leases import OpenLease
from trinity_es.projections.why.answer import span
from trinity_es.text import error_line, plain

__all__ = ["print_leases"]


def print_leases(out: Console, leases: Sequence[OpenLease], now: float) -> None:
    if not leases:
        out.print("no lease is open")
        return
    names = ("lease", "state", "age", "provider", "handle", "batch", "task", "run", "attempt", "runner", "of")
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
    fitted(out, table, ("run", "attempt", "handle", "runner", "provider"))
