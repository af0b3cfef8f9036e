"""What requests need to have read: the tasks that they hand in, and what became of those that came before."""

from __future__ import annotations

from typing import Any

from trinity_es.actors.commands.fields import check_tasks
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.requests import LIMIT, Parcel, pack, unpack
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog

__all__ = ["given_tasks", "processed_before"]

REMEMBERED_REQUESTS = 1000
"""Maximum of the requests that are looked through for one that an earlier coordinator did."""


def given_tasks(live: LiveState, parcel: Parcel) -> tuple[list[dict[str, Any]], list[Parcel]]:
    """Return the tasks, and each as it will be sent. Raises DataError, naming the task.

    Where they do not fit into a message a thread reads them, and stores each one that does not.
    """

    def read() -> tuple[list[dict[str, Any]], list[Parcel]]:
        tasks = check_tasks(unpack(parcel, live.payloads))
        return tasks, [pack(task, live.payloads) for task in tasks]

    small = parcel.inline is not None and len(parcel.inline) <= LIMIT
    found: tuple[list[dict[str, Any]], list[Parcel]] = read() if small else live.fetch("tasks", read)
    return found


def processed_before(log: EventLog, request_id: str) -> dict[str, float] | None:
    """Return the metrics of this request where an earlier coordinator did it, and its answer was lost.

    Who lost an answer asks again within minutes, so the newest are looked through.
    """
    for recorded in log.rare(["ExperiencesProcessed"], descending=True, limit=REMEMBERED_REQUESTS):
        event = recorded.event
        if isinstance(event, ev.ExperiencesProcessed) and event.request == request_id:
            return event.pipeline_metrics
    return None
