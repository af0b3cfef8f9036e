"""Train batches that were finalized with fewer groups than required (`explorer.refill`)."""

from __future__ import annotations

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import batch_stream
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = ["short_text"]


def short_text(log: Log, batch: BatchRow) -> str:
    """Describe a finalized batch that has fewer groups than required: how many, and why. Return "" if it has all."""
    stream = batch_stream(batch.batch_id)
    missing, added, again = (log.last(stream, name) for name in ("GroupsMissing", "TasksAdded", "TaskReopened"))
    if missing is None or missing.position < batch.first_position:
        return ""
    if any(later is not None and later.position > missing.position for later in (added, again)):
        return ""
    event = missing.event
    assert isinstance(event, ev.GroupsMissing)
    text = f"{event.usable} of {event.usable + event.missing} groups"
    at_most = log.config()[1].get("explorer", {}).get("refill", {}).get("at_most", 0)
    if not at_most:
        return text
    tasks = sum(len(item.event.repeat_times) for item in log.read_rare(["TasksAdded"], after=batch.first_position)
                if item.stream == stream and isinstance(item.event, ev.TasksAdded))
    return f"{text}; {'explorer.refill.at_most is spent' if tasks >= at_most else 'the tasksets have no more tasks'}"
