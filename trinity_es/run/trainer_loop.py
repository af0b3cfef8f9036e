"""The trainer's loop of a run: it trains on each step in order, once the step is generated, and publishes weights."""

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
from trinity_es.run.trainer import call_trainer, learn
from trinity_es.run.writable_log_wait import retry_until_written
from trinity_es.system import running_system
from trinity_es.tasksets.taskset import Cursor

__all__ = ["POLL_SECONDS", "TrainerProcess", "all_of", "follow", "train_in_order"]

POLL_SECONDS = 0.1
"""Interval between two reads of the log for events of the run's other process."""
CHECK_SECONDS = 5.0
"""Interval between two checks that the actor system still runs."""

_FOLLOWED_TYPES = ("BatchSubmitted", "TasksetResolved", "TasksetAdvanced", "BatchFinalized", "BatchAborted",
                   "BatchTrained", "WeightsPublished")


async def train_in_order(process: RunProcess, end_period: Callable[[int], Awaitable[None]]) -> None:
    """Train on every step of a run in order, and call `end_period(step)` whenever a step's weights are to be published.

    Without a trainer, a step only has to be generated.
    """
    progress = process.progress
    while True:
        step = progress.trained + 1
        await _wait_generated(process, step)
        if progress.all_trained:
            await process.save_weights()
            return
        if process.trainer is not None:
            await _learn(process, step)
        progress.note(trained=step)
        if await _is_publication_due(process, step):
            await _wait_generated(process, process.policy.generated_before(step))
            if process.trainer is not None:
                await progress.until(lambda: progress.evals_over)
            await end_period(step)
            progress.note(done=step)


async def _wait_generated(process: RunProcess, step: int) -> None:
    progress = process.progress
    await progress.until(
        lambda: progress.generated >= step or (progress.ended and progress.generated >= progress.submitted)
    )


async def _learn(process: RunProcess, step: int) -> None:
    assert process.trainer is not None
    if (await process.rollouts.batch(step)).state is BatchLifecycleState.ABORTED:
        return
    experiences = await process.rollouts.columns(step)
    trainer_metrics = await asyncio.to_thread(learn, process.trainer, step, experiences)
    await retry_until_written(lambda: process.rollouts.acknowledge(step, step, trainer_metrics))


async def _is_publication_due(process: RunProcess, step: int) -> bool:
    wants_sync = getattr(process.trainer, "wants_sync", None)
    if process.policy.style == "trainer_driven" and wants_sync is not None:
        is_due = bool(await asyncio.to_thread(call_trainer, wants_sync, step, step=step))
    else:
        is_due = process.policy.publishes(step)
    is_last = process.progress.ended and step == process.progress.submitted
    return is_due or is_last


async def follow(
    process: RunProcess, handle: Callable[[Log, str, ev.Event], Awaitable[None]], *,
    idle: Callable[[], None] = lambda: None,
) -> None:
    """Read the log until cancelled, and call `handle(log, stream, event)` for each of the run's new events.

    By these events the explorer's and the trainer's process learn of each other's steps. It begins after
    `process.position`, and calls `idle` between reads. Raises NotRunning if the actor system is gone.
    """
    log, position = process.rollouts.client.log, process.position
    last_check = time.monotonic()
    while True:
        for recorded in await asyncio.to_thread(_new_events, log, position):
            await handle(log, recorded.stream, recorded.event)
            position = recorded.position
        idle()
        if time.monotonic() - last_check > CHECK_SECONDS:
            await asyncio.to_thread(process.require_system)
            last_check = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)


def _new_events(log: Log, after: int) -> list[Recorded]:
    return list(log.read(types=_FOLLOWED_TYPES, after=after))


async def all_of(*needed: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None] | None = None) -> None:
    """Run these coroutines at the same time until all of `needed` have ended, then cancel `beside`.

    The first error cancels all others and is raised.
    """
    needed_tasks = [asyncio.ensure_future(coroutine) for coroutine in needed]
    beside_tasks = [asyncio.ensure_future(beside)] if beside is not None else []
    try:
        pending = set(needed_tasks)
        while pending:
            ended_tasks, _ = await asyncio.wait([*pending, *beside_tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in ended_tasks:
                task.result()  # raises the task's error
            pending -= ended_tasks
    finally:
        for task in [*needed_tasks, *beside_tasks]:
            task.cancel()
        await asyncio.gather(*needed_tasks, *beside_tasks, return_exceptions=True)


class TrainerProcess(RunProcess):
    """Trainer of mode `train`, beside an explorer of the same config in mode `explore`.

    It waits for the explorer's actor system, trains on what the explorer generates, and ends after the last
    step. Each of the two processes may end and be started again at any time.
    """

    roles = ("trainer",)
    trains = True

    def _is_unfinished(self) -> bool:
        """Return whether a step is not trained yet, or the last weights are not saved. Raises ConfigError."""
        if not self.has_trainer:
            raise ConfigError("mode is train, and trainer.class is not set: name the trainer, as module:Class")
        has_unsaved_weights = self._point.version > self._point.checkpoint_version
        return not self.resumed or not self.progress.all_trained or has_unsaved_weights

    async def _prepare_system(self) -> None:
        """Wait for the actor system, which the explorer starts."""
        patience = self.config.system.startup_timeout
        deadline = time.monotonic() + patience
        while await asyncio.to_thread(running_system.find, self.config) is None:
            if time.monotonic() > deadline:
                raise NotRunning(
                    f"no actor system came up on {self.config.masked()['store']['url']} in {patience} s: start the "
                    "explorer of this run (the same config, `--set mode=explore`)"
                )
            await asyncio.sleep(0.2)

    async def train(self) -> int:
        """Train until the run ends; returns the last step."""
        self._open_steps = set(self._point.open)
        self._note_generated()
        await all_of(train_in_order(self, self.sync_weight), beside=follow(self, self._handle_event))
        return self.progress.trained

    async def _handle_event(self, log: Log, stream: str, event: ev.Event) -> None:
        match event:
            case ev.BatchSubmitted(batch_type="eval"):
                self.progress.note(evals={event.batch_id: False})
            case ev.BatchSubmitted(batch_type="train", batch_id=int(step)):
                self._open_steps.add(step)
                # Only the cursors, which come with the next event, tell whether this is the last step.
                if step > self.step:
                    self.progress.note(submitted=step, ended=False)
            case ev.TasksetResolved():
                self._require_same_taskset(event.source)
            case ev.TasksetAdvanced():
                self.cursors[event.taskset] = Cursor(event.epoch, event.offset)
            case ev.BatchFinalized() | ev.BatchAborted():
                batch_id = event.result["batch_id"]
                if event.result["batch_type"] == "eval":
                    self.progress.note(evals={batch_id: True})
                elif await asyncio.to_thread(lambda: is_over(log, log.batch_row(batch_id))):
                    self._open_steps.discard(batch_id)
        self._note_generated()

    def _require_same_taskset(self, source: TasksetSource) -> None:
        """Raise TasksetError if this process resolved the taskset to other rows than the explorer did."""
        key = source.taskset, source.is_eval
        own_source = next((one for one in self.unrecorded if (one.taskset, one.is_eval) == key), source)
        compared_fields = ("subset", "revision", "rows", "order")
        if any(getattr(own_source, field) != getattr(source, field) for field in compared_fields):
            raise TasksetError(
                f"this trainer resolved taskset {source.taskset} ({own_source.path}) to {own_source.revision}, but its "
                f"explorer to {source.revision}: restart the trainer, so that it takes the explorer's"
            )

    def _note_generated(self) -> None:
        first_open_step = min(self._open_steps, default=self.step + 1)
        self.progress.note(generated=first_open_step - 1, ended=not self.has_more(self.step, self.cursors))
