"""The trainer's loop of a run: it trains on each step in order, once that is generated, and publishes weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, NotRunning, TasksetError
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchLifecycleState
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.reading.resume_point import is_over
from trinity_es.run.run_base import RunProcess
from trinity_es.run.trainer import learn
from trinity_es.run.writable_log_wait import when_written
from trinity_es.system import running_system
from trinity_es.tasksets.taskset import Cursor

__all__ = ["POLL_SECONDS", "TrainerProcess", "all_of", "follow", "train_in_order"]

POLL_SECONDS = 0.1
"""Interval between two reads of the log for events of the run's other process."""
CHECK_SECONDS = 5.0
"""Interval between two checks that the actor system still runs."""

_FOLLOWED_TYPES = ("BatchSubmitted", "TasksetResolved", "TasksetAdvanced", "BatchFinalized", "BatchAborted",
                   "BatchTrained", "WeightsPublished")


async def train_in_order(part: RunProcess, period_over: Callable[[int], Awaitable[None]]) -> None:
    """Train on every step of a run until it ends, and call `period_over(step)` when the weights of a step are due.

    Without a trainer a period is over when its steps are generated.
    """
    progress = part.progress
    while True:
        step = progress.trained + 1
        await _wait_generated(part, step)
        if progress.all_trained:
            await part.save_weights()
            return
        if part.trainer is not None:
            await _learn(part, step)
        progress.note(trained=step)
        if await _publishes(part, step):
            await _wait_generated(part, part.policy.generated_before(step))
            if part.trainer is not None:
                await progress.until(lambda: progress.evals_over)
            await period_over(step)
            progress.note(done=step)


async def _wait_generated(part: RunProcess, step: int) -> None:
    """Wait until this step is generated, or the last one if the run ends earlier."""
    progress = part.progress
    await progress.until(
        lambda: progress.generated >= step or (progress.ended and progress.generated >= progress.submitted)
    )


async def _learn(part: RunProcess, step: int) -> None:
    """Train on a step, unless a person aborted it."""
    assert part.trainer is not None
    if (await part.rollouts.batch(step)).state is BatchLifecycleState.ABORTED:
        return
    experiences = await part.rollouts.columns(step)
    metrics = await asyncio.to_thread(learn, part.trainer, step, experiences)
    await when_written(lambda: part.rollouts.acknowledge(step, step, metrics))


async def _publishes(part: RunProcess, step: int) -> bool:
    """Return whether the weights of this step are published: the trainer or the policy says so, or it is the last."""
    wants = getattr(part.trainer, "wants_sync", None)
    if part.policy.style == "trainer_driven" and wants is not None:
        due = bool(await asyncio.to_thread(wants, step))
    else:
        due = part.policy.publishes(step)
    return due or (part.progress.ended and step == part.progress.submitted)


async def follow(
    part: RunProcess, take: Callable[[Log, str, ev.Event], Awaitable[None]], *, idle: Callable[[], None] = lambda: None
) -> None:
    """Call `take(log, stream, event)` for each event of the other process after `part.position`, for ever.

    `idle` is called between reads. Raises NotRunning if the actor system is gone.
    """
    log, position = part.rollouts.client.log, part.position
    last_check = time.monotonic()
    while True:
        for recorded in await asyncio.to_thread(_new_events, log, position):
            await take(log, recorded.stream, recorded.event)
            position = recorded.position
        idle()
        if time.monotonic() - last_check > CHECK_SECONDS:
            await asyncio.to_thread(part.require_system)
            last_check = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)


def _new_events(log: Log, after: int) -> list[Recorded]:
    return list(log.read(types=_FOLLOWED_TYPES, after=after))


async def all_of(*needed: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None] | None = None) -> None:
    """Run these together until all of `needed` ended; then cancel `beside`.

    The first error cancels the others and is raised.
    """
    tasks = [asyncio.ensure_future(c) for c in needed]
    extra = [asyncio.ensure_future(beside)] if beside is not None else []
    try:
        pending = set(tasks)
        while pending:
            done, _ = await asyncio.wait([*pending, *extra], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
    finally:
        for task in [*tasks, *extra]:
            task.cancel()
        await asyncio.gather(*tasks, *extra, return_exceptions=True)


class TrainerProcess(RunProcess):
    """Trainer of mode `train`, beside an explorer of the same config in mode `explore`.

    It waits for the explorer's actor system, trains on the generated steps, and ends with the run. Each of the two
    processes may end and be started again at any time.
    """

    roles = ("trainer",)
    trains = True

    def _is_unfinished(self) -> bool:
        if not self.has_trainer:
            raise ConfigError("mode is train, and trainer.class is not set: name the trainer, as module:Class")
        unsaved = self._point.version > self._point.checkpoint_version
        return not self.resumed or not self.progress.all_trained or unsaved

    async def _prepare_system(self) -> None:
        """Wait for the actor system, which the explorer starts."""
        patience = self.config.system.startup_timeout
        deadline = time.monotonic() + patience
        while True:
            if await asyncio.to_thread(running_system.find, self.config) is not None:
                return
            if time.monotonic() > deadline:
                raise NotRunning(
                    f"no actor system came up on {self.config.masked()['store']['url']} in {patience} s: start the "
                    "explorer of this run (the same config, `--set mode=explore`)"
                )
            await asyncio.sleep(0.2)

    async def train(self) -> int:
        """Train until the run ends; returns the last step."""
        self._open = set(self._point.open)
        self._note_generated()
        await all_of(train_in_order(self, self.sync_weight), beside=follow(self, self._take))
        return self.progress.trained

    async def _take(self, log: Log, stream: str, event: ev.Event) -> None:
        match event:
            case ev.BatchSubmitted(batch_type="eval"):
                self.progress.note(evals={event.batch_id: False})
            case ev.BatchSubmitted(batch_type="train", batch_id=int(step)):
                self._open.add(step)
                # Only the cursors, which come with the next event, tell whether this is the last step.
                if step > self.step:
                    self.progress.note(submitted=step, ended=False)
            case ev.TasksetResolved():
                self._require_same(event.source)
            case ev.TasksetAdvanced():
                self.cursors[event.taskset] = Cursor(event.epoch, event.offset)
            case ev.BatchFinalized() | ev.BatchAborted():
                batch_id, kind = event.result["batch_id"], event.result["batch_type"]
                if kind == "eval":
                    self.progress.note(evals={batch_id: True})
                elif await asyncio.to_thread(lambda: is_over(log, log.batch_row(batch_id))):
                    self._open.discard(batch_id)
        self._note_generated()

    def _require_same(self, source: TasksetSource) -> None:
        """Raise TasksetError if this process resolved the taskset before the explorer, and differently."""
        own = next((s for s in self.unrecorded if (s.taskset, s.is_eval) == (source.taskset, source.is_eval)), source)
        if any(getattr(own, key) != getattr(source, key) for key in ("subset", "revision", "rows", "order")):
            raise TasksetError(
                f"taskset {source.taskset} is {own.path} at {own.revision} for this trainer, and at "
                f"{source.revision} for its explorer: start the trainer again, so that it takes the explorer's"
            )

    def _note_generated(self) -> None:
        """Note up to which step all are generated, from the steps that are still open."""
        generated = min(self._open, default=self.step + 1) - 1
        ended = not self.has_more(self.step, self.cursors)
        self.progress.note(generated=generated, ended=ended)
