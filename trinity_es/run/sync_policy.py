"""What may happen when in a run, under each `synchronizer.sync_style`.

Steps are numbered from 1; weights are numbered after the last step that they learnt from. `SyncPolicy` is pure:
functions of numbers, which the log holds too, so a resumed run decides as the first one would have.

* `fixed`: step n is submitted when the weights are in that n may be generated with, those of the last multiple of
  `sync_interval` that is at least `sync_offset` + 1 steps back; and weights are brought in only when all steps that are
  to be generated with the ones before them are generated. So which weights a step is from does not depend on time.
* `fully_async`: `max_inflight_batches` steps are in flight: submitted and not trained on yet (where nobody trains: not
  generated yet). Weights are published every `sync_interval` steps, whatever is being generated.
* `trainer_driven`: the same, and the trainer says after which steps its weights are published (`wants_sync(step)`).

The weights of the last step are always published. Evals measure one version: no new one comes in before they ended.
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
    """When a step may be submitted, and when weights are published."""

    style: Literal["fixed", "trainer_driven", "fully_async"] = "fixed"
    interval: int = 1
    offset: int = 0
    inflight: int = 2

    @classmethod
    def of(cls, config: Config) -> Self:
        c = config.synchronizer
        return cls(style=c.sync_style, interval=c.sync_interval, offset=c.sync_offset, inflight=c.max_inflight_batches)

    def may_submit(self, step: int, *, done: int, trained: int) -> bool:
        """Return True if a step may be submitted with weights of step `done`, and `trained` as the last one trained."""
        if self.style == "fixed":
            return done >= self._multiple(step - 1 - self.offset)
        return step - trained <= self.inflight

    def surely_generated(self, step: int) -> int:
        """Return the last step that is surely generated when this one may be submitted: what its tasks may depend on.

        Later ones may be, too, but that depends on time.
        """
        return self._multiple(step - 1 - self.offset) if self.style == "fixed" else max(0, step - self.inflight)

    def publishes(self, step: int) -> bool:
        return step % self.interval == 0

    def generated_before(self, version: int) -> int:
        """Return the step that must be generated (or the last, if the run ends before) when these weights come in."""
        return version + self.offset if self.style == "fixed" else version

    def done_by(self, generated: int, *, ended: bool) -> int:
        """Return where nobody trains: the last step whose period is over when so many are generated."""
        if ended:
            return generated
        return self._multiple(generated - self.offset if self.style == "fixed" else generated)

    def _multiple(self, step: int) -> int:
        return max(0, step) // self.interval * self.interval


def evals_due(
    done: int, *, interval: int, on_startup: bool, names: Iterable[str], submitted: Iterable[BatchId]
) -> list[BatchId]:
    """Return the evals that belong to the weights of step `done` and were not submitted yet.

    There are some where a multiple of `interval` was passed since the last evals, and before the first step.
    """
    known = set(submitted)
    steps = {int(start) for batch_id in known if (start := str(batch_id).split("/", 1)[0]).isdecimal()}
    passed = interval > 0 and done // interval > max(steps, default=0) // interval
    if not (passed or done in steps or (done == 0 and on_startup)):
        return []
    return [batch_id for name in names if (batch_id := f"{done}/{name}") not in known]


