"""Tasks that train batches cut (stopped unfinished) for a later batch to continue (`synchronizer.in_flight: cut`)."""

from __future__ import annotations

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId
from trinity_es.projections.history.task_history import TaskEvent
from trinity_es.projections.reading.log_reader import Log

__all__ = ["CutTasks", "continuations"]

_TYPES = ["BatchSubmitted", "TaskDropped", "TaskReopened", "BatchFinalized"]


class CutTasks:
    """Reader of a log's cut tasks, which reads only new events at each call."""

    def __init__(self) -> None:
        self._position = 0
        self._open: dict[str, dict[int, None]] = {}
        """Stream of each batch that is not finalized -> its cut tasks."""
        self._waiting: dict[tuple[BatchId, int], None] = {}
        """(batch, task) of each cut task that no batch continues, as ordered keys."""

    def waiting(self, log: Log) -> list[tuple[BatchId, int]]:
        """Return (batch, task) of each cut task that no batch continues, in the order in which the batches ended.

        A batch that is submitted again plays its tasks itself, so they are left out.
        """
        for recorded in log.read(types=_TYPES, after=self._position):
            self._position, stream = recorded.position, recorded.stream
            match recorded.event:
                case ev.BatchSubmitted() as event:
                    self._open[stream] = {}
                    continued = {(task.batch_id, task.cut_task) for task in event.continues}
                    self._waiting = {cut_task: None for cut_task in self._waiting
                                     if cut_task not in continued and cut_task[0] != event.batch_id}
                case ev.TaskDropped() as event:
                    self._open[stream] |= dict.fromkeys(event.cut)
                case ev.TaskReopened() as event:
                    self._open[stream].pop(event.task, None)
                case ev.BatchFinalized() as event:
                    batch_id = event.result["batch_id"]
                    self._waiting |= {(batch_id, task): None for task in self._open.pop(stream, {})}
        return list(self._waiting)


def continuations(log: Log, batch_id: BatchId, task: int) -> list[TaskEvent]:
    """Return an event of this cut task for each submission of a batch that continues it."""
    return [
        TaskEvent(recorded.recorded_at, recorded.position,
                  f"goes on as task {continued.task} of batch {event.batch_id}")
        for recorded in log.read(types=["BatchSubmitted"]) if isinstance(event := recorded.event, ev.BatchSubmitted)
        for continued in event.continues if (continued.batch_id, continued.cut_task) == (batch_id, task)
    ]
