"""Table of a run's hosts, from the log and the running system's status. The head is the host of the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_es.projections.host_states import HostLife, host_of, last_lives
from trinity_es.projections.tables.runner_history import RunnerIncarnation, natural_key

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = ["HostRow", "host_list", "read_hosts"]


@dataclass(slots=True, kw_only=True)
class HostRow:
    host: str
    """Name of the host; empty for the head."""
    machine: str = ""
    """Machine name of the head; empty for other hosts."""
    epoch: int = 0
    """Number of its join; for the head, the coordinator's epoch."""
    state: str
    """`joined`, `draining`, `lost` or `left`. For the head: `leads`, `ended`, `gone` (its processes died) or `unseen`
    (not visible from this machine)."""
    since: float | None = None
    """Unix seconds at which this state began."""
    address: str = ""
    pid: int | None = None
    places: dict[str, int] = field(default_factory=dict)
    """Numbers of `gpus` and `cores`."""
    runners: list[str] = field(default_factory=list)
    """Runners that are alive, by the running system or by the end of the log."""
    ready: list[str] = field(default_factory=list)
    """Runners whose engine has loaded; [] if the host's processes are gone."""
    runner_places: int = 0
    """Maximum number of concurrent units on its ready runners."""
    units: int = 0
    """Units on its runners, by the running system or by the end of the log."""
    finished: int = 0
    """Tasks that finished on its runners, in the last submission of each batch."""
    joined: int = 0
    lost: int = 0
    runner_deaths: int = 0
    """Deaths of its runners, without those because the host was lost or left."""
    attempts_lost: int = 0
    """Attempts that were lost because their runner ended."""
    connected: bool | None = None
    """True if it is connected to the coordinator; None if unknown."""
    away_for: float | None = None
    """Seconds since the coordinator last heard from it, if it is not connected."""
    why_away: str = ""
    reason: str = ""

    @property
    def is_present(self) -> bool:
        """True if the host belongs to the run now, as far as this machine can see."""
        return self.state in ("leads", "unseen", "joined", "draining")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def host_list(
    lives: list[HostLife], runner_lives: list[RunnerIncarnation], *, finished: Mapping[str, int], all_finished: int,
    units: Mapping[str, int], processes: Mapping[str, Any], live: Mapping[str, Any] | None = None,
) -> list[HostRow]:
    """Return a row for each host, the head first.

    `finished`: finished tasks of each joined host. `all_finished`: finished tasks of the run. `units`: units on each
    host's runners by the log. `processes`: facts from `Log.processes`. `live`: the coordinator's status, if available.
    """
    head = HostRow(
        host="", machine=str(processes.get("host") or ""), pid=processes.get("pid"),
        state=_head_state(processes, answers=live is not None),
        finished=all_finished - sum(finished.values()), units=units.get("", 0),
    )
    rows = {"": head}
    for life in sorted(last_lives(lives).values(), key=lambda life: natural_key(life.host)):
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
        if is_alive and (row.is_present or not row.host):
            row.runners.append(runner_life.runner)
            if runner_life.ready_at is not None and row.is_present:
                row.ready.append(runner_life.runner)
                row.runner_places += runner_life.places
    if live is not None:
        _apply_live(rows, live)
    return list(rows.values())


def _head_state(processes: Mapping[str, Any], *, answers: bool) -> str:
    """Return the state of the head, as in `HostRow.state`. `answers`: True if the coordinator sent its status."""
    up = processes.get("up")
    if answers or up:
        return "leads"
    if up is None:
        return "unseen"
    return "ended" if processes.get("released") else "gone"


def _apply_live(rows: dict[str, HostRow], live: Mapping[str, Any]) -> None:
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
    """Return a row for each host of this log's run, the head first.

    `live`: the running system's answer to `status`. `system`: facts that replace those of `Log.processes`. Without
    `live`, units are counted by a fold of the open batches, unless `count_units` is False.
    """
    status = live if live is not None and "weights_version" in live else None
    unit_counts = Counter[str]()
    if status is None and count_units:
        open_rows = (row for state in ("running", "finalizing", "pending") for row in log.batches(state=state))
        for row in open_rows:
            batch = log.current(row.batch_id)
            unit_counts.update(host_of(flight.runner) for flight in (batch.flights.values() if batch else ()))
    return host_list(
        log.hosts(), log.runner_lives(), finished=log.finished_elsewhere(), units=unit_counts, live=status,
        all_finished=sum(total.finished for total in log.totals()), processes={**log.processes(), **(system or {})},
    )
