"""Inputs of requests that may have to be read: submitted tasks, and the result of an earlier coordinator."""

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
    """Return the tasks in a command's parcel, and each of them packed for a message. Raises DataError for a wrong task.
    If the parcel names a payload, a thread reads it, and stores each task that is too large for a message."""

    def read() -> tuple[list[dict[str, Any]], list[Parcel]]:
        tasks = check_tasks(unpack(parcel, live.payloads))
        return tasks, [pack(task, live.payloads) for task in tasks]

    if parcel.inline is not None and len(parcel.inline) <= LIMIT:
        return read()
    result: tuple[list[dict[str, Any]], list[Parcel]] = live.fetch("tasks", read)
    return result


def processed_before(log: EventLog, request_id: str) -> dict[str, float] | None:
    """Return the pipeline's metrics if an earlier coordinator handled this request and its answer was lost, else None.

    A client that lost an answer repeats its request within minutes, so only the newest events are searched.
    """
    for recorded in log.read_rare(["ExperiencesProcessed"], descending=True, limit=MAX_SEARCHED_EVENTS):
        event = recorded.event
        if isinstance(event, ev.ExperiencesProcessed) and event.request == request_id:
            return event.pipeline_metrics
    return None
