"""The account of `make chaos-hosts` sees what it is there to see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.chaos_hosts_account import Fault, HostsAccount, Work
from trinity_es.events import vocabulary as ev

JOINED: dict[str, Any] = {"address": "10.0.0.2", "pid": 7, "places": {}}


def log_of(*events: ev.Event, epochs: tuple[int, ...] = ()) -> Any:
    """Return a log with an event each second, written by a coordinator of these epochs, or of the first."""
    items = [
        SimpleNamespace(position=n, event=event, recorded_at=float(n), stream="batch/1",
                        metadata={"lease": "coordinator", "epoch": epochs[n] if epochs else 1})
        for n, event in enumerate(events)
    ]
    return SimpleNamespace(events=lambda: items)


def joined(epoch: int) -> ev.Event:
    return ev.HostJoined(host="b", epoch=epoch, life=str(epoch), **JOINED)


def started(incarnation: int) -> ev.Event:
    return ev.RunnerStarted(runner="runner-0@b", incarnation=incarnation, pid=1, host="vm", engine="scripted")


def finished(incarnation: int) -> ev.Event:
    return ev.RunsFinished(task=0, run_id_base=0, attempt=1, runner="runner-0@b", incarnation=incarnation, runs=[],
                           payload=None, model_version=0, model_version_end=0, seconds=1.0)


def lost(epoch: int) -> ev.Event:
    return ev.HostLost(host="b", epoch=epoch, reason="not heard of")


def account_of(log: Any, *faults: Fault, killed: set[str] | None = None) -> HostsAccount:
    account = HostsAccount("hosts")
    account.add_hosts(log, faults, killed or set(), 15.0)
    return account


def test_a_result_of_an_epoch_that_is_over_is_seen() -> None:
    good = account_of(log_of(joined(1), started(3), finished(3), lost(1), joined(2), started(4), finished(4)))
    assert good.clean
    assert good.epochs == 2
    assert account_of(log_of(joined(1), started(3), lost(1), finished(3))).over
    assert account_of(log_of(joined(1), started(3), lost(1), joined(2), finished(3))).over
    assert account_of(log_of(joined(1), started(3), lost(1), epochs=(1, 2, 1))).over


def test_an_attempt_that_is_blamed_for_a_lost_host_is_seen() -> None:
    failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0@b", incarnation=3,
                              kind="runner_lost", message="host b is lost", retry=True, blamed=True)
    log = log_of(joined(1), started(3), failed)
    assert account_of(log).blamed
    assert account_of(log, killed={"runner-0@b"}).clean


def test_a_loss_that_is_known_late_or_never_or_for_nothing_is_seen() -> None:
    log = log_of(*[joined(1)] * 30, lost(1))  # at 30 s
    assert account_of(log, Fault("host killed", "b", at=15.0, until=35.0, loses=True)).known == [
        (15.0, "host killed of b")]
    assert account_of(log, Fault("host killed", "b", at=5.0, until=25.0, loses=True)).late
    assert account_of(log, Fault("host killed", "b", at=31.0, until=51.0, loses=True)).late
    assert account_of(log, Fault("link away", "b", at=24.0, until=29.0, others=["c"])).needless


def test_a_host_that_does_less_while_another_is_away_or_than_the_others_is_seen() -> None:
    work = Work([])
    work.units["b"] = [(n / 2, (n + 1) / 2) for n in range(200)]
    work.units["c"] = [(n / 2, (n + 1) / 2) for n in range(100)] + [(float(n), n + 1.0) for n in range(50, 100)]
    fault = Fault("link away", "d", at=50.0, until=70.0, calm=20.0, others=["b", "c"])
    account = HostsAccount("hosts")
    account.add_work(work, [fault], (20.0, 40.0), {}, 1)
    assert [(round(ratio, 2), name) for ratio, name in account.away] == [
        (1.0, "b during link away of d"), (0.5, "c during link away of d")]
    assert len(account.slower) == 1
    assert account.shares == account.idle == []
    account.add_work(work, [], (60.0, 80.0), {}, 1)
    assert len(account.shares) == 2
