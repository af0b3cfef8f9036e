"""The explorer's own metrics, by the names that Trinity-RFT's users know, found in the log.

- `rollout/model_version`: the weights that were current when a step was finalized;
- `explorer/time/wait_explore_step`: seconds that the explorer waited for a step, its pipeline included: from when the
  step before it was finalized, or from when it was submitted where that is later;
- `explore/time/sync_interval`: seconds of a period of `synchronizer.sync_interval` steps, from when its first step was
  submitted to when its last one was finalized; with that last step;
- `time/eval` (in a benchmark `time/bench`): seconds from when the first eval of a step was submitted to when the last
  was finalized; with the last.

Times are those at which events were recorded, so the monitors of a run that goes on write the same again.
"""

from __future__ import annotations

import re

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId

__all__ = ["TYPES", "ExplorerTimes", "step_of"]

TYPES = ("BatchSubmitted", "BatchFinalized", "BatchAborted", "WeightsPublished")
"""The types of the events that are looked at."""


def step_of(batch_id: BatchId) -> int:
    """Return the step that a batch belongs to: its number, or that before the slash; -1: its id has none."""
    number = re.match(r"\d+", str(batch_id))
    return -1 if number is None else int(number.group())


class ExplorerTimes:
    """A fold of the log: give it every event of `TYPES`, in order."""

    def __init__(self, interval: int, evals: str = "eval") -> None:
        self._interval, self._evals = interval, evals
        self._submitted: dict[BatchId, float] = {}
        self._began: dict[int, float] = {}
        self._open: dict[int, set[BatchId]] = {}
        self._last_finalized = 0.0
        self._version = 0

    def take(self, recorded: Recorded) -> dict[str, float]:
        """Return the metrics that stand beside those of this event's own; most have none."""
        event, at = recorded.event, recorded.recorded_at
        match event:
            case ev.WeightsPublished():
                self._version = event.version
            case ev.BatchSubmitted(batch_type="train", batch_id=int(step)):
                self._submitted[step] = at
            case ev.BatchSubmitted(batch_type="eval"):
                self._began.setdefault(step_of(event.batch_id), at)
                self._open.setdefault(step_of(event.batch_id), set()).add(event.batch_id)
            case ev.BatchFinalized() | ev.BatchAborted():
                finalized = isinstance(event, ev.BatchFinalized)
                batch_id, kind = event.result["batch_id"], event.result["batch_type"]
                found: dict[str, float] = {}
                if kind == "eval":
                    found = self._eval_over(batch_id, at)
                elif kind == "train" and isinstance(batch_id, int):
                    found = self._step_over(batch_id, at)
                return found if finalized else {}
        return {}

    def _step_over(self, step: int, at: float) -> dict[str, float]:
        began = self._submitted.get(step, at)
        found = {
            "rollout/model_version": float(self._version),
            "explorer/time/wait_explore_step": max(0.0, at - max(began, self._last_finalized)),
        }
        first = step - self._interval + 1
        if step % self._interval == 0 and first in self._submitted:
            found["explore/time/sync_interval"] = max(0.0, at - self._submitted[first])
        for done in [s for s in self._submitted if isinstance(s, int) and s < first]:
            del self._submitted[done]
        self._last_finalized = at
        return found

    def _eval_over(self, batch_id: BatchId, at: float) -> dict[str, float]:
        step = step_of(batch_id)
        left = self._open.get(step, set())
        left.discard(batch_id)
        if left:
            return {}
        self._open.pop(step, None)
        return {f"time/{self._evals}": max(0.0, at - self._began.pop(step, at))}
