"""Reads for requests: the tasks that they bring, and the results of an earlier coordinator."""

from __future__ import annotations

from typing import Any

from trinity_es.actors.commands.fields import check_tasks
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.requests import LIMIT, Parcel, pack, unpack
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog

__all__ = ["processed_before", "submitted_tasks"]

MAX_SEARCHED_EVENTS = 1000
"""Maximum number of events searched for the result of an earlier coordinator."""


def submitted_tasks(live: LiveState, parcel: Parcel) -> tuple[list[dict[str, Any]], list[Parcel]]:
    """Return the tasks, and each packed for a message. Raises DataError, which names the task.

    If they came as a payload, a thread reads them and stores each task that is too large for a message.
    """

    def read() -> tuple[list[dict[str, Any]], list[Parcel]]:
        tasks = check_tasks(unpack(parcel, live.payloads))
        return tasks, [pack(task, live.payloads) for task in tasks]

    if parcel.inline is not None and len(parcel.inline) <= LIMIT:
        return read()
    result: tuple[list[dict[str, Any]], list[Parcel]] = live.fetch("tasks", read)
    return result


def processed_before(log: EventLog, request_id: str) -> dict[str, float] | None:
    """Return this request's metrics if an earlier coordinator did it and its answer was lost.

    A client that lost an answer asks again within minutes, so the newest events suffice.
    """
    for recorded in log.rare(["ExperiencesProcessed"], descending=True, limit=MAX_SEARCHED_EVENTS):
        event = recorded.event
        if isinstance(event, ev.ExperiencesProcessed) and event.request == request_id:
            return event.pipeline_metrics
    return None
