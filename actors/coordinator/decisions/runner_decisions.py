"""What a runner's word, and the end of its process, mean. Pure: a life as it was folded, what came in -> events."""

from __future__ import annotations

from trinity_es.actors.messages import RunnerDied, RunnerStatus
from trinity_es.events import vocabulary as ev
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["ended", "is_late", "reported"]


def is_late(known: RunnerLife | None, report: RunnerStatus) -> bool:
    """Return True if a later life has spoken, or this one's end is known: these were its last words."""
    if known is None or known.incarnation < report.incarnation:
        return False
    return known.incarnation > report.incarnation or known.state.gone


def reported(known: RunnerLife | None, report: RunnerStatus, lacks: str = "") -> list[ev.Event]:
    """Return what is news in a report that is not late. `known`: the life, where this coordinator heard of it before.
    `lacks`: why a life stays failed though its engine is ready.

    A coordinator that takes over knows of none, so it records anew how each runner is.
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
    """Return what is news in the end of a process: nothing where a later life has begun.

    `known`: the life that speaks to this coordinator, else the newest in the log. The guardian says an end again to
    each coordinator that comes up.
    """
    name, incarnation = death.name, death.incarnation
    this = known is not None and known.incarnation == incarnation
    if known is not None and known.incarnation > incarnation:
        return []
    state = known.state if this and known is not None else None
    if state is RunnerState.QUARANTINED and not death.asked:
        return []
    events: list[ev.Event] = []
    if state is not RunnerState.LOST:  # one in quarantine whose end was asked for comes back
        events.append(ev.RunnerLost(runner=name, incarnation=incarnation, reason=death.reason))
    if death.quarantined:
        quarantined = ev.RunnerQuarantined(
            runner=name, incarnation=incarnation, deaths=death.deaths, period_seconds=death.period, reason=death.reason
        )
        events.append(quarantined)
    return events
