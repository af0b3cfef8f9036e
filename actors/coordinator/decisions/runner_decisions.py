"""Decisions about a runner's reports and the end of its process. Pure functions from a folded life (the state of one
process of a runner) and a message to events."""

from __future__ import annotations

from trinity_es.actors.messages import RunnerDied, RunnerStatus
from trinity_es.events import vocabulary as ev
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["apply_death", "apply_report", "is_late"]


def is_late(life: RunnerLife | None, report: RunnerStatus) -> bool:
    """Return True if a report is out of date: a later process of the runner has reported, or the end of this one was
    recorded. `life` is the runner's newest process that reported."""
    if life is None or life.incarnation < report.incarnation:
        return False
    return life.incarnation > report.incarnation or life.state.gone


def apply_report(life: RunnerLife | None, report: RunnerStatus, failure: str = "") -> list[ev.Event]:
    """Return the events that record the changes in a report. `life` is None if the runner has not reported to this
    coordinator; then its state is recorded again. `failure` is why a failed runner with a ready engine stays failed."""
    name, incarnation = report.name, report.incarnation
    events: list[ev.Event] = []
    if life is None or life.incarnation < incarnation:
        state = RunnerState.STARTED
        events.append(ev.RunnerStarted(
            runner=name, incarnation=incarnation, pid=report.pid, host=report.host, engine=report.engine,
            model=report.model,
        ))
    else:
        state = life.state
    if failure:
        if state is not RunnerState.FAILED:
            events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=failure))
    elif report.state != state:
        match RunnerState(report.state):
            case RunnerState.READY:
                events.append(ev.RunnerReady(
                    runner=name, incarnation=incarnation, places=report.places, model_version=report.model_version,
                    load_seconds=report.load_seconds, engine_version=report.engine_version, adapters=report.adapters,
                ))
            case RunnerState.FAILED:
                events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=report.reason))
            case RunnerState.RETIRED:
                events.append(ev.RunnerRetired(runner=name, incarnation=incarnation))
    elif life is not None and state is RunnerState.READY and report.places != life.places:
        events.append(ev.ConcurrencyChanged(
            runner=name, incarnation=incarnation, places=report.places, kv_share=report.kv_share,
            waiting=report.waiting,
        ))
    return events


def apply_death(life: RunnerLife | None, death: RunnerDied) -> list[ev.Event]:
    """Return the events of a process's end; none if it is recorded already, or if a later process has begun.

    `life` is the runner's process that reported, else its newest in the log. The guardian repeats an end to each new
    coordinator.
    """
    name, incarnation = death.name, death.incarnation
    if life is not None and life.incarnation > incarnation:
        return []
    state = life.state if life is not None and life.incarnation == incarnation else None
    if state is RunnerState.QUARANTINED and not death.asked:
        return []
    events: list[ev.Event] = []
    if state is not RunnerState.LOST:  # a restart on request ends a quarantine
        events.append(ev.RunnerLost(runner=name, incarnation=incarnation, reason=death.reason))
    if death.quarantined:
        events.append(ev.RunnerQuarantined(
            runner=name, incarnation=incarnation, deaths=death.deaths, period_seconds=death.period, reason=death.reason
        ))
    return events
