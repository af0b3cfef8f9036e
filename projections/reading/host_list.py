"""Hosts of a run, one row each, the head's own first, from the log and the running system's status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_es.projections.host_states import HostLife, host_of, last_lives
from trinity_es.projections.tables.runner_history import RunnerIncarnation, natural

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = ["HostRow", "host_list", "read_hosts"]

OPEN = ("running", "finalizing", "pending")
"""States of open batches."""


@dataclass(slots=True, kw_only=True)
class HostRow:
    host: str
    """Name; empty for the head's own."""
    machine: str = ""
    """Machine name of the head's own host."""
    epoch: int = 0
    """Epoch of its life; for the head's own host, the coordinator's epoch."""
    state: str
    """`joined`, `draining`, `lost` or `left`. For the head's own: `leads`, `ended`, `gone` (its processes died) or
    `unseen` (not visible from this machine)."""
    since: float | None = None
    """Unix seconds at which this state began."""
    address: str = ""
    pid: int | None = None
    places: dict[str, int] = field(default_factory=dict)
    """Numbers of `gpus` and `cores`."""
    runners: list[str] = field(default_factory=list)
    """Runners alive now, or at the end of the log."""
    ready: list[str] = field(default_factory=list)
    """Those that serve; none of a host whose processes are gone."""
    runner_places: int = 0
    """Maximum number of concurrent units on its ready runners."""
    units: int = 0
    """Units on its runners now, or at the end of the log."""
    finished: int = 0
    """Tasks that ended on it, counting each batch since its last submission."""
    joined: int = 0
    lost: int = 0
    runner_deaths: int = 0
    """Deaths of its runners, without those that went with the host."""
    attempts_lost: int = 0
    """Attempts lost with their runner, for any reason."""
    connected: bool | None = None
    """True if it is connected to the coordinator; None if the coordinator was not asked."""
    away_for: float | None = None
    """Seconds since it was last heard of, if it is not connected."""
    why_away: str = ""
    reason: str = ""

    @property
    def there(self) -> bool:
        """True if it takes part, or may do so where this machine can't see it."""
        return self.state in ("leads", "unseen", "joined", "draining")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def host_list(
    lives: list[HostLife], runner_lives: list[RunnerIncarnation], *, finished: Mapping[str, int], all_finished: int,
    units: Mapping[str, int], processes: Mapping[str, Any], live: Mapping[str, Any] | None = None,
) -> list[HostRow]:
    """Return one row for each host, the head's own first.

    `finished`: tasks that ended on each host that joined. `units`: units on each host's runners by the log.
    `processes`: state of the head's system, from `Log.processes`. `live`: the coordinator's status, if available.
    """
    head = HostRow(
        host="", machine=str(processes.get("host") or ""), pid=processes.get("pid"),
        state=_head_state(processes, answers=live is not None),
        finished=all_finished - sum(finished.values()), units=units.get("", 0),
    )
    rows = {"": head}
    for life in sorted(last_lives(lives).values(), key=lambda life: natural(life.host)):
        rows[life.host] = HostRow(
            host=life.host, epoch=life.epoch, state=life.state, since=life.since, address=life.address, pid=life.pid,
            places=dict(life.places), reason=life.reason, finished=finished.get(life.host, 0),
            units=units.get(life.host, 0), joined=sum(other.host == life.host for other in lives),
            lost=sum(other.host == life.host and other.state == "lost" for other in lives),
        )
    last_runner_lives = {life.runner: life for life in runner_lives}
    for runner_life in runner_lives:
        row = rows.setdefault(host_of(runner_life.runner), HostRow(host=host_of(runner_life.runner), state="left"))
        row.runner_deaths += runner_life.died and not runner_life.went_with_host
        row.attempts_lost += runner_life.attempts_lost
        is_alive = last_runner_lives[runner_life.runner] is runner_life and runner_life.how == "running"
        if is_alive and (row.there or not row.host):
            row.runners.append(runner_life.runner)
            if runner_life.ready_at is not None and row.there:
                row.ready.append(runner_life.runner)
                row.runner_places += runner_life.places
    if live is not None:
        _apply_live(rows, live)
    return list(rows.values())


def _head_state(processes: Mapping[str, Any], *, answers: bool) -> str:
    """Return the state of the head's own host. `answers`: whether the coordinator sent its status."""
    up = processes.get("up")
    if answers or up:
        return "leads"
    if up is None:
        return "unseen"
    return "ended" if processes.get("released") else "gone"


def _apply_live(rows: dict[str, HostRow], live: Mapping[str, Any]) -> None:
    """Replace the log's values by those that the running system reported."""
    rows[""].epoch = int(live.get("epoch") or 0)
    runners = [r for r in live.get("runners", []) if r["state"] not in ("lost", "quarantined", "retired")]
    for row in rows.values():
        own_runners = [r for r in runners if host_of(r["runner"]) == row.host]
        row.runners = [r["runner"] for r in own_runners]
        row.ready = [r["runner"] for r in own_runners if r["state"] == "ready"]
        row.runner_places = sum(int(r.get("places") or 0) for r in own_runners if r["state"] == "ready")
        row.units = sum(int(r.get("load") or 0) for r in own_runners)
    for host in live.get("hosts", []):
        row_of_host = rows.get(host["host"])
        if row_of_host is not None and row_of_host.epoch == host["epoch"]:
            row_of_host.connected, row_of_host.away_for = bool(host["connected"]), host["away_for"]
            row_of_host.why_away, row_of_host.units = str(host["why_away"]), int(host["units"])


def read_hosts(
    log: Log, live: Mapping[str, Any] | None = None, system: Mapping[str, Any] | None = None, *,
    count_units: bool = True,
) -> list[HostRow]:
    """Return one row for each host of this log.

    `live`: the running system's answer to `status`. `system`: more facts on its processes. Without `live`, units are
    counted by folding the open batches; with `count_units=False` they stay 0.
    """
    status = live if live is not None and "weights_version" in live else None
    unit_counts = Counter[str]()
    if status is None and count_units:
        for row in (b for state in OPEN for b in log.batches(state=state)):
            batch = log.current(row.batch_id)
            unit_counts.update(host_of(flight.runner) for flight in (batch.flights.values() if batch else ()))
    return host_list(
        log.hosts(), log.runner_lives(), finished=log.finished_elsewhere(), units=unit_counts, live=status,
        all_finished=sum(total.finished for total in log.totals()), processes={**log.processes(), **(system or {})},
    )
