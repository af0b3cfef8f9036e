"""The explorer: the loop that reads tasksets, submits each step as a batch, finalizes it and publishes new weights.

A step is a train batch whose id is its number, from 1. An eval of taskset `gsm8k` with the weights of step 12 is batch
"12/gsm8k"; before the first step, "0/gsm8k". How far each taskset was read is recorded in the batch's transaction.

`sync_policy.py` decides when steps are submitted and weights published, `run_base.py` how a run resumes. Steps are
finalized in order, and the trainer takes each at once, so it learns from one step while the next is generated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, LogNotFound, SyncError, TooFewGroups, WorkflowError
from trinity_es.events.values import BatchId, BatchLifecycleState, Task
from trinity_es.projections.batch import BatchState
from trinity_es.projections.reading.cut_tasks import CutTasks
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.resume_point import ResumePoint, resume_point, was_dropped_stale
from trinity_es.projections.reading.task_mean_rewards import pass_rates, submitted_tasks
from trinity_es.projections.why.answer import resume_after_fix, resume_command
from trinity_es.run.checkpoint_eval import BenchRow, batch_id_of, read_results, steps_wanted
from trinity_es.run.checkpointing import Checkpoints
from trinity_es.run.run_base import RunProcess
from trinity_es.run.sync_policy import evals_due
from trinity_es.run.trainer import Trainer
from trinity_es.run.trainer_loop import POLL_SECONDS, all_of, follow, train_in_order
from trinity_es.run.writable_log_wait import retry_until_written
from trinity_es.safe_text import error_line
from trinity_es.system.run_lock import RunLock
from trinity_es.tasksets.taskset import Cursor

if TYPE_CHECKING:
    from trinity_es.serve.proxy import Proxy

__all__ = ["Explorer", "Trainer"]


class Explorer(RunProcess):
    """Explorer of a config's run: `prepare`, `explore`, `shutdown`.

    `on_step(step, result)` is called after each finalized train batch, with the result of finalize. A resumed run calls
    it again for the steps since the last checkpoint.
    """

    def __init__(self, config: Config, *, on_step: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        super().__init__(config)
        self.on_step = on_step
        self.trains = config.mode == "both" and self.has_trainer
        self.roles = ("explorer", "trainer") if self.trains else ("explorer",)
        self._learnt_up_to = 0
        """Last step whose pass rates the tasksets' selectors have learnt."""
        self.checkpoints = Checkpoints(config)
        self._aborted: set[int] = set()
        """Steps that a person aborted, which are not trained on."""
        self._submitted_here: set[int] = set()
        """Steps that this process submitted, so the current code and config caused their failures."""
        self._read_lock = asyncio.Lock()
        """Lock for reading tasksets, which cache the part of a file that they read last."""
        self._last_progress = time.monotonic()
        self._cut_tasks = CutTasks()

    def _is_unfinished(self) -> bool:
        progress, point = self.progress, self._point
        if not self.resumed or not progress.ended or self.step > self.done or not progress.evals_over:
            return True
        if self.trains and point.version > point.checkpoint_version:
            return True  # the last weights are on no disk yet
        return bool(self._evals_due(self.done))

    # --- the benchmark ----------------------------------------------------------------------------------------------
    def _locate(self) -> bool:
        """Read the run's state, as the config's mode needs it. Returns False if nothing is left to do."""
        if self.config.mode == "serve":
            return True  # reads no taskset, trains nothing, and is never complete
        return self._locate_benchmark() if self.config.mode == "bench" else super()._locate()

    def _locate_benchmark(self) -> bool:
        """Read from the benchmark's log which checkpoints are not evaluated yet; return False if all are."""
        config = self.config
        steps = steps_wanted(config, self.checkpoints)
        url = config.masked()["store"]["url"]
        try:
            with open_log(config.store.url) as log:
                if any(b.batch_type == "train" for b in log.batches()):
                    raise ConfigError(
                        f"the log {url} holds a run, but a benchmark needs a log of its own: leave store.url out of "
                        "the config, or give another, as in `--set store.url=sqlite:///bench.sqlite`"
                    )
                self._point = resume_point(log, [])
        except LogNotFound:
            self._point = ResumePoint()
        point = self._point
        self.eval_sets = self._open_tasksets(config.buffer.explorer_input.eval_tasksets, point, is_eval=True)
        names = [taskset.config.name for taskset in self.eval_sets]
        self.steps_to_evaluate = [
            step for step in steps if not all(point.evals.get(batch_id_of(step, name)) for name in names)
        ]
        if self.steps_to_evaluate and point.path and not Path(point.path).is_dir():
            raise ConfigError(
                f"the benchmark in {url} is at weights {point.version}, and their checkpoint {point.path} is gone: "
                "engines start from it. Begin another with `--set store.url=...`"
            )
        self.resumed, self.version = bool(point.evals), point.version
        self.progress.note(submitted=point.version, ended=True, done=point.version, evals=point.evals)
        return bool(self.steps_to_evaluate)

    async def benchmark(self) -> list[BenchRow]:
        """Evaluate the newest checkpoint of the run, or each in order, on every eval taskset.

        Returns a row per checkpoint, from the log, also for those that were evaluated earlier.
        """
        names = [t.config.name for t in self.eval_sets]
        problems: dict[int, str] = {}
        for step in self.steps_to_evaluate:
            if step < self.version:
                problems[step] = f"not evaluated: the engines serve weights {self.version}, and never go back"
                continue
            try:
                if step > 0:  # also if it is the current version: engines that could not load it try again
                    await self.rollouts.sync_weights(step, self.checkpoints.path(step))
                    self.version = step
            except SyncError as e:
                problems[step] = f"not evaluated: {e}"
                continue
            await self._run_evals([batch_id_of(step, name) for name in names])
        with open_log(self.config.store.url) as log:
            return await asyncio.to_thread(
                read_results, log, steps_wanted(self.config, self.checkpoints), names, problems
            )

    # --- the proxy --------------------------------------------------------------------------------------------------
    async def serve(self, on_ready: Callable[[Proxy], None] | None = None) -> None:
        """Serve an OpenAI-compatible API with the engines until cancelled (mode `serve`).

        `on_ready` is called with the proxy (`base_url`, `api_key`) when it accepts requests. Raises StartupError.
        """
        from trinity_es.serve.proxy import Proxy  # here, since only this mode needs its imports

        proxy = Proxy(self.config, self.rollouts.client)
        try:
            await proxy.start()
            if on_ready is not None:
                on_ready(proxy)
            await proxy.wait_finished()
        finally:
            await proxy.stop()

    # --- the loop ---------------------------------------------------------------------------------------------------
    async def explore(self) -> str:
        """Generate steps until the tasksets or `total_steps` end; returns the explorer's name.

        With a trainer, here or in a process in mode `train`, the run ends when the last step's weights are published.
        """
        if self.config.mode not in ("both", "explore"):
            raise ConfigError(f"mode is {self.config.mode}, but explore() needs both or explore: set one of them")
        trainer_is_elsewhere = self.has_trainer and not self.trains
        if trainer_is_elsewhere:
            self.progress.note(trained=max(self.done, self._point.trained))
        self._last_progress = time.monotonic()
        await self._submit_evals(self.done)
        loops = [self._submit_steps(), self._finish_steps(), self._finish_evals()]
        if trainer_is_elsewhere:
            await all_of(*loops, beside=follow(self, self._handle_event, idle=self._require_weights))
            deadline = time.monotonic() + self.config.synchronizer.sync_timeout
            while RunLock.is_held(self.config, "trainer") and time.monotonic() < deadline:
                await asyncio.sleep(0.1)  # the trainer's last weights need the system
        else:
            await all_of(*loops, train_in_order(self, self._end_period))
        return self.config.explorer.name

    async def _submit_steps(self) -> None:
        progress, size = self.progress, self.config.buffer.batch_size
        while self.has_more(self.step, self.cursors):
            await progress.until(lambda: progress.ended or self.policy.may_submit(
                self.step + 1, done=progress.done, trained=max(progress.trained, progress.done)))
            async with self._read_lock:
                if not self.has_more(self.step, self.cursors):
                    return  # refills took the rest
                await asyncio.to_thread(self._teach_selectors, self.step + 1)
                cut_tasks = await asyncio.to_thread(self._read_cut_tasks, size)
                tasks, cursors = await asyncio.to_thread(self.mix.read, self.cursors, size - len(cut_tasks))
                changed_cursors = self._changed_cursors(cursors, every=not tasks)
                self.cursors = cursors
                await self._submit(self.step + 1, [*cut_tasks.values(), *tasks], changed_cursors,
                                   continues=dict(enumerate(cut_tasks)))
            # `_finish_steps` has to know that this step is the last one before it finishes it.
            progress.note(submitted=self.step + 1, ended=not self.has_more(self.step + 1, cursors))

    def _changed_cursors(self, cursors: Mapping[str, Cursor], *, every: bool = False) -> list[dict[str, Any]]:
        """Return the cursors that differ from the current ones (`every`: all), as dicts for `submit_batch`."""
        return [
            {"taskset": name, "epoch": cursor.epoch, "offset": cursor.offset}
            for name, cursor in cursors.items() if every or cursor != self.cursors.get(name, Cursor())
        ]

    def _read_cut_tasks(self, limit: int) -> dict[tuple[BatchId, int], Task]:
        """Return up to `limit` tasks, the oldest first, that their step left unfinished and no later step continues.

        Keys are (step, task number). Empty unless `synchronizer.in_flight` is cut.
        """
        if self.config.synchronizer.in_flight != "cut":
            return {}
        log = self.rollouts.client.log
        tasks = {}
        for step, number in self._cut_tasks.waiting(log)[:limit]:
            row = log.task(step, number)["index"]
            tasks[step, number] = self.mix.task(row["taskset"], row["index"])
        return tasks

    def _teach_selectors(self, step: int) -> None:
        """Pass the tasksets' selectors the pass rates from which they choose the tasks of this step.

        They get the rates of the steps that are surely finished before this one (`SyncPolicy.always_generated`), and of
        no later step, so their choice depends neither on timing nor on interruptions.
        """
        if self.mix.learns:
            for generated in range(self._learnt_up_to + 1, self.policy.always_generated(step) + 1):
                self.mix.learn(pass_rates(self.rollouts.client.log, generated))
                self._learnt_up_to = generated

    async def _submit(
        self, step: int, tasks: list[Task], cursors: list[dict[str, Any]],
        continues: Mapping[int, tuple[BatchId, int]] | None = None,
    ) -> None:
        """Submit a step. `continues`: {index in `tasks`: (step, number) of the unfinished task that it continues}."""
        # Rounded first: floats like 9.000000000000002 must not become 10.
        min_task_count = math.ceil(round(len(tasks) * (1 - self.config.explorer.over_rollout.ratio), 9))
        if self.config.synchronizer.in_flight == "cut" and not self.has_more(step, self.cursors):
            min_task_count = len(tasks)  # no later step could continue the tasks of the last one
        sources = [source for source in self.unrecorded if not source.is_eval]
        await retry_until_written(lambda: self.rollouts.submit_batch(
            batch_id=step,
            tasks=tasks,
            batch_type="train",
            min_wait_num=None if min_task_count == len(tasks) else min_task_count,
            cursor=cursors,
            sources=sources,
            continues=continues,
        ))
        self._submitted_here.add(step)
        self.unrecorded = [source for source in self.unrecorded if source not in sources]

    async def _finish_steps(self) -> None:
        progress = self.progress
        while not (progress.ended and progress.generated >= progress.submitted):
            await progress.until(lambda: progress.submitted > progress.generated or progress.ended)
            if progress.submitted > progress.generated:
                await self._finish(progress.generated + 1)
                self._last_progress = time.monotonic()
                progress.note(generated=progress.generated + 1)

    async def _finish(self, step: int) -> None:
        """Finalize a step and call `on_step`. A step that was dropped as stale is submitted again.

        A step that a person aborted is skipped. If there is a trainer and all runs of the step failed, this raises
        WorkflowError, or submits the step again if an earlier process had submitted it.
        """
        while True:
            result = await self._finalize(step)
            batch = await self.rollouts.batch(step)
            if batch.state is BatchLifecycleState.ABORTED:
                if not await asyncio.to_thread(was_dropped_stale, self.rollouts.client.log, step):
                    self._aborted.add(step)
                    self._note_trained(self.progress.trained)
                    return
            elif not (self.has_trainer and batch.failed_whole and batch.trained_step is None):
                break
            elif step in self._submitted_here:
                resume = resume_command(self.config.masked()["store"]["url"])
                raise _failed_step_error(batch, resume, system_goes_on=not self.owns_system)
            async with self._read_lock:
                tasks = await asyncio.to_thread(self._remade_tasks, step)
            await self._submit(step, tasks, [])  # on the current weights
        if self.on_step is not None:
            self.on_step(step, result)

    async def _finalize(self, step: int) -> dict[str, Any]:
        """Finalize a step; return its result. With `explorer.refill`, first replace tasks that gave no experiences."""
        tasks_left = self.config.explorer.refill.at_most
        while tasks_left > 0:
            batch = await self.rollouts.batch(step)
            awaited_tasks = batch.expected_task_count if batch.min_wait_num is None else batch.min_wait_num
            groups = min(awaited_tasks - batch.added_task_count, self.config.buffer.batch_size)
            try:
                return await retry_until_written(lambda: self.rollouts.finalize_train_batch(step, groups=groups))  # noqa: B023
            except TooFewGroups as e:
                tasks_left = self.config.explorer.refill.at_most - batch.added_task_count
                if tasks_left <= 0 or not await self._add_tasks(step, min(e.details["missing"], tasks_left)):
                    break
        return await retry_until_written(lambda: self.rollouts.finalize_train_batch(step))

    async def _add_tasks(self, step: int, count: int) -> bool:
        """Add up to `count` further tasks of the tasksets to a step. Returns False if none are left."""
        async with self._read_lock:
            tasks, cursors = await asyncio.to_thread(self.mix.read, self.cursors, count)
            if tasks:
                changed_cursors = self._changed_cursors(cursors)
                await retry_until_written(lambda: self.rollouts.add_tasks(step, tasks, changed_cursors))
                self.cursors = cursors
                self.progress.note(ended=not self.has_more(self.step, cursors))
        return bool(tasks)

    def _remade_tasks(self, step: int) -> list[Task]:
        submitted = submitted_tasks(self.rollouts.client.log, step)
        return [self.mix.task(task["index"]["taskset"], task["index"]["index"]) for task in submitted]

    async def _end_period(self, step: int) -> None:
        await self.sync_weight(step)
        await self._submit_evals(step)

    # --- a trainer in another process -------------------------------------------------------------------------------
    async def _handle_event(self, log: Log, stream: str, event: ev.Event) -> None:
        """Update `progress` from an event of the trainer's process: a step trained or weights published."""
        match event:
            case ev.BatchTrained():
                self._note_trained(max(self.progress.trained, event.step))
            case ev.WeightsPublished() if event.version > self.done:
                await self._wait_until_served(event.version)
                self.version = event.version
                await self._submit_evals(event.version)
                self.progress.note(done=event.version)
            case _:
                return
        self._last_progress = time.monotonic()

    def _note_trained(self, step: int) -> None:
        """Set `progress.trained` to this step of the trainer's process; aborted steps after it count as trained."""
        if self.trains or not self.has_trainer:
            return  # a trainer in this process skips aborted steps itself
        while step + 1 in self._aborted:
            step += 1
        self.progress.note(trained=step)

    async def _wait_until_served(self, version: int) -> None:
        """Wait until each serving runner has loaded these weights or failed to, since an eval measures one version."""
        deadline = time.monotonic() + self.config.synchronizer.sync_timeout
        while time.monotonic() < deadline:
            runners = (await self.rollouts.status())["runners"]
            outdated = {r["runner"] for r in runners if r["state"] == "ready" and r["model_version"] < version}
            if outdated <= await asyncio.to_thread(self._runners_failing_to_load, version):
                return
            await asyncio.sleep(POLL_SECONDS)

    def _runners_failing_to_load(self, version: int) -> set[str]:
        """Return the runners that failed to load this version since this process began, from the log."""
        events = (r.event for r in self.rollouts.client.log.read(types=["WeightsFailed"], after=self.position))
        return {e.runner for e in events if isinstance(e, ev.WeightsFailed) and e.version == version}

    def _require_weights(self) -> None:
        """Raise SyncError if only the trainer has work left and it made no progress for `sync_timeout`."""
        patience = self.config.synchronizer.sync_timeout
        waits_for_trainer = self.progress.generated >= self.progress.submitted and self.progress.evals_over
        if waits_for_trainer and time.monotonic() - self._last_progress > patience:
            raise SyncError(
                f"steps up to {self.step} are generated, but the trainer published no weights newer than step "
                f"{self.done}'s within {patience:g} s (synchronizer.sync_timeout): start the trainer (the same config, "
                "`--set mode=train`), then this explorer again"
            )

    # --- evals ------------------------------------------------------------------------------------------------------
    def _evals_due(self, done: int) -> list[BatchId]:
        explorer = self.config.explorer
        names = [taskset.config.name for taskset in self.eval_sets]
        return evals_due(done, interval=explorer.eval_interval, on_startup=explorer.eval_on_startup, names=names,
                         submitted=self.progress.evals)

    async def _submit_evals(self, done: int) -> None:
        for batch_id in self._evals_due(done):
            await self._submit_eval(batch_id)

    async def _submit_eval(self, batch_id: BatchId) -> None:
        name = str(batch_id).rsplit("/", 1)[1]
        taskset = next(t for t in self.eval_sets if t.config.name == name)
        sources = [source for source in self.unrecorded if source.is_eval and source.taskset == name]
        tasks = await asyncio.to_thread(taskset.all)
        await retry_until_written(lambda: self.rollouts.submit_batch(
            batch_id=batch_id, tasks=tasks, batch_type="eval", sources=sources
        ))
        self.unrecorded = [source for source in self.unrecorded if source not in sources]
        self.progress.note(evals={batch_id: False})

    async def _finish_evals(self) -> None:
        progress = self.progress
        while not (self._is_over and progress.evals_over):
            await progress.until(lambda: self._is_over or not progress.evals_over)
            for batch_id in [batch_id for batch_id, ended in progress.evals.items() if not ended]:
                await self._finish_eval(batch_id)

    @property
    def _is_over(self) -> bool:
        """True if the engines have the weights of the last step, and their evals are submitted."""
        return self.progress.ended and self.done >= self.step

    async def _finish_eval(self, batch_id: BatchId) -> dict[str, float]:
        result = await retry_until_written(lambda: self.rollouts.finalize_eval_batch(batch_id))
        metrics: dict[str, float] = result["metrics"]
        self.progress.note(evals={batch_id: True})
        return metrics

    async def evaluate(self) -> dict[str, float]:
        """Run every eval taskset on the current weights, unless it ran on them already; returns their metrics."""
        return await self._run_evals([f"{self.done}/{taskset.config.name}" for taskset in self.eval_sets])

    async def _run_evals(self, batch_ids: Sequence[BatchId]) -> dict[str, float]:
        """Submit those of these evals that are not submitted yet; wait for all, and return their metrics."""
        metrics: dict[str, float] = {}
        for batch_id in batch_ids:
            if batch_id not in self.progress.evals:
                await self._submit_eval(batch_id)
        for batch_id in batch_ids:
            metrics |= await self._finish_eval(batch_id)
        return metrics


def _failed_step_error(batch: BatchState, resume: str, *, system_goes_on: bool) -> WorkflowError:
    """Return the error for a step whose runs all failed. `resume`: command that continues the run."""
    errors = [error_line(message, 200) for task in batch.tasks for message in task.failed.values()]
    [(error, times)] = Counter(errors).most_common(1)
    hint = " (`trinity-es restart-runner` first, where runners have your code loaded)" if system_goes_on else ""
    return WorkflowError(
        f"step {batch.batch_id} gave nothing to train on: each of its {len(errors)} runs failed, {times} of them with "
        f"{error}. See `trinity-es why {batch.batch_id}`, fix it, and {resume_after_fix(resume)} generates the step "
        f"again{hint}"
    )
