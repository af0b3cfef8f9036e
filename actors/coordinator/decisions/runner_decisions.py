"""Decisions about a runner's reports and the end of its process. Pure: a folded life and a message in, events out."""

from __future__ import annotations

from trinity_es.actors.messages import RunnerDied, RunnerStatus
from trinity_es.events import vocabulary as ev
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["ended", "is_late", "reported"]


def is_late(known: RunnerLife | None, report: RunnerStatus) -> bool:
    """Return True if a later life has reported, or this one's end is recorded."""
    if known is None or known.incarnation < report.incarnation:
        return False
    return known.incarnation > report.incarnation or known.state.gone


def reported(known: RunnerLife | None, report: RunnerStatus, lacks: str = "") -> list[ev.Event]:
    """Record what is new in a report that is not late; `lacks` is why a ready engine's life stays failed.

    `known` is the life if this coordinator has heard of it. After a takeover it is None, and every state is recorded
    again.
    """
    name, incarnation = report.name, report.incarnation
    events: list[ev.Event] = []
    state = None if known is None or known.incarnation < incarnation else known.state
    if state is None:
        state = RunnerState.STARTED
        started = ev.RunnerStarted(
            runner=name, incarnation=incarnation, pid=report.pid, host=report.host, engine=report.engine,
            model=report.model,
        )
        events.append(started)
    if lacks:
        if state is not RunnerState.FAILED:
            events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=lacks))
    elif report.state != state:
        match RunnerState(report.state):
            case RunnerState.READY:
                ready = ev.RunnerReady(
                    runner=name, incarnation=incarnation, places=report.places, model_version=report.model_version,
                    load_seconds=report.load_seconds, engine_version=report.engine_version, adapters=report.adapters,
                )
                events.append(ready)
            case RunnerState.FAILED:
                events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=report.reason))
            case RunnerState.RETIRED:
                events.append(ev.RunnerRetired(runner=name, incarnation=incarnation))
    elif known is not None and state is RunnerState.READY and report.places != known.places:
        changed = ev.ConcurrencyChanged(
            runner=name, incarnation=incarnation, places=report.places, kv_share=report.kv_share,
            waiting=report.waiting,
        )
        events.append(changed)
    return events


def ended(known: RunnerLife | None, death: RunnerDied) -> list[ev.Event]:
    """Record what is new in the end of a process; nothing if a later life has begun.

    `known` is the life that this coordinator has heard of, else the newest in the log. The guardian repeats an end to
    each new coordinator.
    """
    name, incarnation = death.name, death.incarnation
    this = known is not None and known.incarnation == incarnation
    if known is not None and known.incarnation > incarnation:
        return []
    state = known.state if this and known is not None else None
    if state is RunnerState.QUARANTINED and not death.asked:
        return []
    events: list[ev.Event] = []
    if state is not RunnerState.LOST:  # a quarantined runner whose end was asked for comes back
        events.append(ev.RunnerLost(runner=name, incarnation=incarnation, reason=death.reason))
    if death.quarantined:
        quarantined = ev.RunnerQuarantined(
            runner=name, incarnation=incarnation, deaths=death.deaths, period_seconds=death.period, reason=death.reason
        )
        events.append(quarantined)
    return events
