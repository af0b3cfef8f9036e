"""The rules of `synchronizer.sync_style`: when steps are submitted, and when weights are published.

Steps are numbered from 1; weights have the number of the last step that they learnt from. `SyncPolicy` has only pure
functions of numbers that the log holds too, so a resumed run decides as the first one would have.

* `fixed`: step n is submitted when the engines have the weights of the last multiple of `sync_interval` that is at
  least `sync_offset` + 1 steps back. Weights are published only when all steps that must use the earlier ones are
  generated. So the weights of a step do not depend on timing.
* `fully_async`: up to `max_inflight_batches` steps are submitted and not trained on yet (without a trainer: not
  generated yet). Weights are published every `sync_interval` steps, whatever is being generated.
* `trainer_driven`: the same, but the trainer decides after which steps its weights are published (`wants_sync(step)`).

The weights of the last step are always published. Evals measure one version: no new one is published before they end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from trinity_es.config.config import Config
from trinity_es.events.values import BatchId

__all__ = ["SyncPolicy", "evals_due"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPolicy:
    """Rules of a run's `synchronizer` section: when a step may be submitted, and when weights are published."""

    style: Literal["fixed", "trainer_driven", "fully_async"] = "fixed"
    interval: int = 1
    offset: int = 0
    max_inflight: int = 2

    @classmethod
    def of(cls, config: Config) -> Self:
        sync = config.synchronizer
        return cls(style=sync.sync_style, interval=sync.sync_interval, offset=sync.sync_offset,
                   max_inflight=sync.max_inflight_batches)

    def may_submit(self, step: int, *, done: int, trained: int) -> bool:
        """Return whether this step may be submitted. `done`: last step published; `trained`: last step trained on."""
        if self.style == "fixed":
            return done >= self._multiple(step - 1 - self.offset)
        return step - trained <= self.max_inflight

    def always_generated(self, step: int) -> int:
        """Return the last step that is always generated, whatever the timing, when `step` may be submitted.

        So the choice of tasks for `step` may depend on its results.
        """
        return self._multiple(step - 1 - self.offset) if self.style == "fixed" else max(0, step - self.max_inflight)

    def publishes(self, step: int) -> bool:
        """Return whether the weights of this step are published, by `sync_interval`."""
        return step % self.interval == 0

    def generated_before(self, version: int) -> int:
        """Return the last step that must be generated before this version is published, unless the run ends earlier."""
        return version + self.offset if self.style == "fixed" else version

    def done_by(self, generated: int, *, ended: bool) -> int:
        """Return the last step that counts as published, without a trainer. `ended`: no further step is submitted."""
        if ended:
            return generated
        return self._multiple(generated - self.offset if self.style == "fixed" else generated)

    def _multiple(self, step: int) -> int:
        """Return the last multiple of `interval` up to this step, at least 0."""
        return max(0, step) // self.interval * self.interval


def evals_due(
    done: int, *, interval: int, on_startup: bool, names: Iterable[str], submitted: Iterable[BatchId]
) -> list[BatchId]:
    """Return the ids of the eval batches that are due on the weights of step `done`, without those in `submitted`.

    Evals are due before the first step (`on_startup`), and when a multiple of `interval` was passed since the last.
    """
    submitted_ids = set(submitted)
    prefixes = {str(batch_id).split("/", 1)[0] for batch_id in submitted_ids}
    evaluated_steps = {int(prefix) for prefix in prefixes if prefix.isdecimal()}
    passed_multiple = interval > 0 and done // interval > max(evaluated_steps, default=0) // interval
    # A step with some evals gets the missing ones, too: the process may have ended between two submissions.
    if not (passed_multiple or done in evaluated_steps or (done == 0 and on_startup)):
        return []
    return [batch_id for name in names if (batch_id := f"{done}/{name}") not in submitted_ids]


