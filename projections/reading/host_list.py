"""The hosts of a run, a row each, the head's own first: from its log, and from what its system says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_es.projections.history.host_lives import HostLife, last_lives
from trinity_es.projections.host_states import host_of
from trinity_es.projections.tables.runner_history import RunnerIncarnation, natural

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = ["HostRow", "host_list", "read_hosts"]

OPEN = ("running", "finalizing", "pending")
"""States of batches that have not ended."""


@dataclass(slots=True, kw_only=True)
class HostRow:
    host: str
    """Its name; empty: the head's own."""
    machine: str = ""
    """Of the head's own: the machine's name."""
    epoch: int = 0
    """Of the head's own: that of its coordinator."""
    state: str
    """`joined`, `draining`, `lost`, `left`; of the head's own `leads`, `ended`, `gone` (its processes are) or
    `unseen` (from this machine)."""
    since: float | None = None
    """When it came into this state, unix seconds."""
    address: str = ""
    pid: int | None = None
    places: dict[str, int] = field(default_factory=dict)
    """What it has: `gpus` and `cores`."""
    runners: list[str] = field(default_factory=list)
    """Those that live, or did at the log's end."""
    ready: list[str] = field(default_factory=list)
    runner_places: int = 0
    """Units that those that serve run at once."""
    units: int = 0
    """Units that they have now, or had at the log's end."""
    finished: int = 0
    """Tasks that ended there, of each batch as it was last submitted."""
    joined: int = 0
    lost: int = 0
    runner_deaths: int = 0
    """Deaths of its runners that came from themselves: not those that went with it."""
    attempts_lost: int = 0
    """Attempts that ended with their runner, whyever that ended."""
    connected: bool | None = None
    """It has a connection to the coordinator, where that could be asked."""
    away_for: float | None = None
    """Seconds that it has not been heard of, where it has no connection."""
    why_away: str = ""
    reason: str = ""

    @property
    def there(self) -> bool:
        return self.state in ("leads", "unseen", "joined", "draining")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def host_list(
    lives: list[HostLife], runner_lives: list[RunnerIncarnation], *, finished: Mapping[str, int], all_finished: int,
    units: Mapping[str, int], processes: Mapping[str, Any], live: Mapping[str, Any] | None = None,
) -> list[HostRow]:
    """Return a row a host, the head's own first. `finished`: tasks that ended on each host that joined; `units`: those
    with each host's runners, by the log; `processes`: of the head's system, as `Log.processes` tells; `live`: what its
    coordinator says, where it was asked.
    """
    up = processes.get("up")
    head = HostRow(
        host="", machine=str(processes.get("host") or ""), pid=processes.get("pid"),
        state="leads" if live is not None or up else "unseen" if up is None else
        "ended" if processes.get("released") else "gone",
        finished=all_finished - sum(finished.values()), units=units.get("", 0),
    )
    rows = {"": head}
    for life in sorted(last_lives(lives).values(), key=lambda life: natural(life.host)):
        rows[life.host] = HostRow(
            host=life.host, epoch=life.epoch, state=life.state, since=life.since, address=life.address, pid=life.pid,
            places=dict(life.places), reason=life.reason, finished=finished.get(life.host, 0),
            units=units.get(life.host, 0), joined=sum(one.host == life.host for one in lives),
            lost=sum(one.host == life.host and one.state == "lost" for one in lives),
        )
    last = {life.runner: life for life in runner_lives}
    for one in runner_lives:
        row = rows.setdefault(host_of(one.runner), HostRow(host=host_of(one.runner), state="left"))
        row.runner_deaths += one.died and not one.went_with_host
        row.attempts_lost += one.attempts_lost
        if last[one.runner] is one and one.how == "running" and (row.there or not row.host):
            row.runners.append(one.runner)
            if one.ready_at is not None:
                row.ready.append(one.runner)
                row.runner_places += one.places
    if live is not None:
        _lay_live(rows, live)
    return list(rows.values())


def _lay_live(rows: dict[str, HostRow], live: Mapping[str, Any]) -> None:
    """Lay what the running system says over what its log says."""
    rows[""].epoch = int(live.get("epoch") or 0)
    told = [r for r in live.get("runners", []) if r["state"] not in ("lost", "quarantined", "retired")]
    for row in rows.values():
        mine = [r for r in told if host_of(r["runner"]) == row.host]
        row.runners = [r["runner"] for r in mine]
        row.ready = [r["runner"] for r in mine if r["state"] == "ready"]
        row.runner_places = sum(int(r.get("places") or 0) for r in mine if r["state"] == "ready")
        row.units = sum(int(r.get("load") or 0) for r in mine)
    for host in live.get("hosts", []):
        known = rows.get(host["host"])
        if known is not None and known.epoch == host["epoch"]:
            known.connected, known.away_for = bool(host["connected"]), host["away_for"]
            known.why_away, known.units = str(host["why_away"]), int(host["units"])


def read_hosts(
    log: Log, live: Mapping[str, Any] | None = None, system: Mapping[str, Any] | None = None, *,
    count_units: bool = True,
) -> list[HostRow]:
    """Return a row a host of this log. `live`: what its running system answers to `status`; `system`: what is known of
    its processes besides. Without either, units are counted by a fold of the open batches, unless `count_units` is
    False: then there are none.
    """
    asked = live if live is not None and "weights_version" in live else None
    units = Counter[str]()
    if asked is None and count_units:
        for opened in (b for state in OPEN for b in log.batches(state=state)):
            found = log.current(opened.batch_id)
            units.update(host_of(flight.runner) for flight in (found.flights.values() if found else ()))
    return host_list(
        log.hosts(), log.runner_lives(), finished=log.finished_elsewhere(), units=units, live=asked,
        all_finished=sum(total.finished for total in log.totals()), processes={**log.processes(), **(system or {})},
    )
