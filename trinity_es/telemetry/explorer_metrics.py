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
"""Types of the events that are read."""


def step_of(batch_id: BatchId) -> int:
    """Return the step of a batch: its number, or the number that its id begins with; -1 if there is none."""
    number = re.match(r"\d+", str(batch_id))
    return -1 if number is None else int(number.group())


class ExplorerTimes:
    """Fold of the log, which takes every event of `TYPES` in order."""

    def __init__(self, interval: int, evals: str = "eval") -> None:
        self._interval, self._evals = interval, evals
        self._submitted: dict[BatchId, float] = {}
        self._began: dict[int, float] = {}
        self._open: dict[int, set[BatchId]] = {}
        self._last_finalized = 0.0
        self._version = 0

    def take(self, recorded: Recorded) -> dict[str, float]:
        """Return the explorer metrics to report with this event; most events have none."""
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
                metrics: dict[str, float] = {}
                if kind == "eval":
                    metrics = self._eval_ended(batch_id, at)
                elif kind == "train" and isinstance(batch_id, int):
                    metrics = self._step_ended(batch_id, at)
                return metrics if finalized else {}
        return {}

    def _step_ended(self, step: int, at: float) -> dict[str, float]:
        began = self._submitted.get(step, at)
        metrics = {
            "rollout/model_version": float(self._version),
            "explorer/time/wait_explore_step": max(0.0, at - max(began, self._last_finalized)),
        }
        first = step - self._interval + 1
        if step % self._interval == 0 and first in self._submitted:
            metrics["explore/time/sync_interval"] = max(0.0, at - self._submitted[first])
        for old in [s for s in self._submitted if isinstance(s, int) and s < first]:
            del self._submitted[old]
        self._last_finalized = at
        return metrics

    def _eval_ended(self, batch_id: BatchId, at: float) -> dict[str, float]:
        step = step_of(batch_id)
        open_evals = self._open.get(step, set())
        open_evals.discard(batch_id)
        if open_evals:
            return {}
        self._open.pop(step, None)
        return {f"time/{self._evals}": max(0.0, at - self._began.pop(step, at))}
