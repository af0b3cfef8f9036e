"""Explorer metrics, computed from the log, with the names of Trinity-RFT.

- `rollout/model_version`: the current weights when a step was finalized
- `explorer/time/wait_explore_step`: seconds that the explorer waited for a step and its pipeline, from the end of the
  previous step or, if later, from the submission of the step
- `explore/time/sync_interval`: seconds of a period of `synchronizer.sync_interval` steps, from the submission of its
  first step to the end of its last, reported with the last
- `time/eval` (in a benchmark `time/bench`): seconds from the submission of a step's first eval to the end of its last,
  reported with the last

Times are those of recorded events, so a resumed run writes the same values again.
"""

from __future__ import annotations

import re

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId

__all__ = ["TYPES", "ExplorerTimes", "step_of"]

TYPES = ("BatchSubmitted", "BatchFinalized", "BatchAborted", "WeightsPublished")
"""Types of the events that `ExplorerTimes` needs."""


def step_of(batch_id: BatchId) -> int:
    """Return the step of a batch: the number with which its id begins, -1 if it begins with none."""
    number = re.match(r"\d+", str(batch_id))
    return -1 if number is None else int(number.group())


class ExplorerTimes:
    """Fold of the log that computes the explorer's metrics. It takes every event of `TYPES`, in order."""

    def __init__(self, interval: int, evals: str = "eval") -> None:
        self._interval, self._eval_name = interval, evals
        self._step_starts: dict[int, float] = {}
        """Submission times of the last `interval` steps."""
        self._eval_starts: dict[int, float] = {}
        """Submission time of the first eval of each step that has open evals."""
        self._open_evals: dict[int, set[BatchId]] = {}
        self._last_step_end = 0.0
        self._version = 0

    def take(self, recorded: Recorded) -> dict[str, float]:
        """Fold an event, and return the metrics to report with it; {} for most events."""
        event, at = recorded.event, recorded.recorded_at
        match event:
            case ev.WeightsPublished():
                self._version = event.version
            case ev.BatchSubmitted(batch_type="train", batch_id=int(step)):
                self._step_starts[step] = at
            case ev.BatchSubmitted(batch_type="eval"):
                self._eval_starts.setdefault(step_of(event.batch_id), at)
                self._open_evals.setdefault(step_of(event.batch_id), set()).add(event.batch_id)
            case ev.BatchFinalized() | ev.BatchAborted():
                batch_id, batch_type = event.result["batch_id"], event.result["batch_type"]
                metrics: dict[str, float] = {}
                if batch_type == "eval":
                    metrics = self._end_eval(batch_id, at)
                elif batch_type == "train" and isinstance(batch_id, int):
                    metrics = self._end_step(batch_id, at)
                return metrics if isinstance(event, ev.BatchFinalized) else {}
        return {}

    def _end_step(self, step: int, at: float) -> dict[str, float]:
        """Record the end of a step, forget steps of earlier sync periods, and return the step's metrics."""
        start = self._step_starts.get(step, at)
        metrics = {
            "rollout/model_version": float(self._version),
            "explorer/time/wait_explore_step": max(0.0, at - max(start, self._last_step_end)),
        }
        first_step = step - self._interval + 1
        if step % self._interval == 0 and first_step in self._step_starts:
            metrics["explore/time/sync_interval"] = max(0.0, at - self._step_starts[first_step])
        for earlier_step in [s for s in self._step_starts if s < first_step]:
            del self._step_starts[earlier_step]
        self._last_step_end = at
        return metrics

    def _end_eval(self, batch_id: BatchId, at: float) -> dict[str, float]:
        """Record the end of an eval. If its step has no other open eval, return the duration of the step's evals."""
        step = step_of(batch_id)
        open_evals = self._open_evals.get(step, set())
        open_evals.discard(batch_id)
        if open_evals:
            return {}
        self._open_evals.pop(step, None)
        return {f"time/{self._eval_name}": max(0.0, at - self._eval_starts.pop(step, at))}
