"""`Scheduler`, with Trinity-RFT's names: it takes tasks, and returns statuses and raw experiences batch by batch.

A scheduled batch is a stream of the log, of type `collect`; no pipeline runs on it. Tasks are durable when `schedule`
returns, finished tasks stay finished whichever process dies, and results stay in the log until a Scheduler on the
store collects them. Two Schedulers on one store share all batches.

A call reads results first and then records that it took them. If the call is killed or cancelled in between, the
results can still be collected. Two callers never get the same results.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from trinity_es.actors import commands
from trinity_es.client import argument_checks
from trinity_es.client.async_client import RolloutCoordinator
from trinity_es.client.connection import GRACE_SECONDS
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import LogUnavailable, NotRunning, TrinityError, WaitTimeout
from trinity_es.events.experience import Experience
from trinity_es.events.store.database.retry import patiently
from trinity_es.events.values import BatchId, Status, Task, require_batch_id
from trinity_es.projections.batch import BatchState

__all__ = ["Scheduler"]

A = TypeVar("A")
T = TypeVar("T")
ReadResults = Callable[[BatchState, list[int]], dict[int, list[Experience]]]
"""Reads the experiences of the tasks with these numbers, by task number."""

ALL_TASKS = 2**31 - 1
"""More than any batch has: a poll for this many finished tasks waits until no task runs."""
POLL_SECONDS = 4.0
"""How long one poll for results stays open. A client repeats a request after PATIENCE_SECONDS, which is longer."""
RETRY_SECONDS = 0.5
"""Interval between two polls while the log can't be written."""
MAX_THREADS = 512
"""Maximum number of calls that wait at the same time."""

_log = logging.getLogger("trinity_es.client.scheduler")


class _Done(Awaitable[None]):
    """Completed awaitable that `schedule` returns, so that callers may await it or not."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class Scheduler:
    """Runs tasks on the engines of this config's store. `start` it first; also an async context manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._rollouts: RolloutCoordinator | None = None
        """Async client; None before `start` and after `stop`."""
        self._pool: ThreadPoolExecutor | None = None
        self._start_stop_lock = asyncio.Lock()
        self._is_stopping = False
        self._open_calls: set[asyncio.Future[None]] = set()
        """Calls that `stop` waits for."""
        self._own_batches: set[BatchId] = set()
        """Batches that this object scheduled or waited for; `stop` pauses the open ones."""

    # --- start and stop ---------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Connect to the running system of the store, or start one, and wait until its engines serve. Idempotent.

        Open batches of earlier Schedulers resume, and this one can collect their results. Raises StartupError.
        """
        async with self._start_stop_lock:
            if self._rollouts is not None:
                return
            rollouts = RolloutCoordinator(self.config)
            try:
                await rollouts.prepare()
                self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="scheduler")
                await self._in_thread(lambda: rollouts.client.log)  # opens the log before many threads use it
                await self._in_thread(rollouts.client.request, commands.ResumeBatches())
            except BaseException:
                self._close_pool()
                await rollouts.shutdown()
                raise
            self._rollouts, self._is_stopping = rollouts, False

    async def stop(self) -> None:
        """Wait for the running tasks, disconnect, and end the system if `start` started it. Idempotent.

        Pending tasks and uncollected results stay in the log for the next `start`. Calls that wait for results return
        the results that are ready.
        """
        async with self._start_stop_lock:
            if self._rollouts is None:
                return
            self._is_stopping = True
            try:
                await self._pause_own_batches()
            except TrinityError as e:  # the system is gone, and its running tasks will run again
                _log.warning("stopped without its running tasks: %s", e)
            if self._open_calls:
                await asyncio.wait(self._open_calls)
            rollouts, self._rollouts = self._rollouts, None
            self._close_pool()
            await rollouts.shutdown()

    async def _pause_own_batches(self) -> None:
        """Pause the batches that this scheduler began, and wait until none of their units runs."""
        store_progress = await self._ask(commands.PollAllBatches(settled=-1, seconds=0.0))  # -1: it answers at once
        self._own_batches &= set(store_progress["batches"])
        await self._ask(commands.PauseBatches(batches=list(self._own_batches)))
        for batch_id in self._own_batches:
            while True:
                progress = await self._poll_batch(batch_id, ALL_TASKS, POLL_SECONDS, resume=False)
                if not progress["running"] or not progress["paused"]:  # not paused: another scheduler resumed it
                    break

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    @property
    def client(self) -> RolloutClient:
        """The underlying blocking client. Raises NotRunning before `start` and after `stop`."""
        if self._rollouts is None:
            raise NotRunning("the scheduler is not started: call `await scheduler.start()` first")
        return self._rollouts.client

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(call, *args))

    async def _ask(self, command: commands.Command[A], deadline: float = math.inf) -> A:
        """Send a command and return its answer. Raises TimeoutError after `deadline` (of `time.monotonic`)."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic()) + GRACE_SECONDS
        return await self._in_thread(self.client.request, command, timeout)

    async def _ask_patiently(self, command: commands.Command[A], deadline: float = math.inf) -> A:
        """Send a read-only command and return its answer. On LogUnavailable, retry for `store.retry_for` seconds."""
        retry_until = time.monotonic() + self.config.store.retry_for
        while True:
            try:
                return await self._ask(command, deadline)
            except LogUnavailable:
                if time.monotonic() > retry_until:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _poll_batch(
        self, batch_id: BatchId, at_least: int, seconds: float, *, resume: bool, deadline: float = math.inf
    ) -> commands.BatchProgress:
        """Wait until `at_least` tasks of the batch can be collected, or for `seconds`; return the batch's progress.

        `resume`: resume the batch if another Scheduler paused it.
        """
        command = commands.PollBatch(batch_id=batch_id, at_least=at_least, seconds=max(0.0, seconds), resume=resume)
        return await self._ask_patiently(command, deadline)

    # --- runners ----------------------------------------------------------------------------------------------------
    def get_runner_state(self, runner_id: int | str) -> dict[str, Any]:
        """Return the current activity of one runner, by its number or name; {} if there is no such runner."""
        return self.client.get_runner_state(f"runner-{runner_id}" if isinstance(runner_id, int) else runner_id)

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return the current activity of every runner, by name."""
        return self.client.get_all_state()

    def get_key_state(self, key: str) -> dict[str, Any]:
        """Return the value of `key` in each runner's state, by runner. A runner without this key is left out."""
        return self.client.get_key_state(key)

    async def _await_tracked(self, call: Awaitable[T]) -> T:
        """Await a user's call, and make `stop` wait for it too."""
        call_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open_calls.add(call_ended)
        try:
            return await call
        finally:
            call_ended.set_result(None)
            self._open_calls.discard(call_ended)

    # --- tasks ------------------------------------------------------------------------------------------------------
    def schedule(self, tasks: Iterable[Task], batch_id: BatchId) -> Awaitable[None]:
        """Queue all of these tasks or, if one is invalid, none. They are durable when this returns.

        Lower batch ids run first, and inside a batch earlier tasks. Tasks for an open batch are added to it. If all its
        tasks were collected, it starts again. The call blocks for one commit and may be awaited. Raises
        BatchAlreadyActive for the id of a batch of `submit_batch`, TaskNotSerializable, UnknownWorkflow, DataError.
        """
        client, task_list = self.client, list(tasks)
        require_batch_id(batch_id)
        if self._is_stopping:
            raise NotRunning("the scheduler is stopping: call `await scheduler.start()` again first")
        if task_list:
            first = client.request(commands.ScheduleTasks(batch_id=batch_id, tasks=client.pack(task_list)))
            self._own_batches.add(batch_id)
            for number, task in enumerate(task_list, first):
                task.batch_id, task.task_id = batch_id, number
        return _Done()

    def has_step(self, batch_id: BatchId) -> bool:
        """Return True if the batch has a task that is pending, running, or finished and not collected."""
        progress = self.client.request(
            commands.PollBatch(batch_id=require_batch_id(batch_id), at_least=0, seconds=0.0, resume=False))
        return bool(progress["open"] + progress["ready"])

    async def get_results(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for results of the batch and take them. Returns (statuses, experiences) in the order of its tasks.

        `min_num`: number of tasks to wait for (None: all; if there are fewer: all, with a warning). Tasks that finish
        within `explorer.over_rollout.wait_after_min` seconds after that are taken too. `timeout`: seconds after which
        the finished tasks are returned; None: no limit but the timeout of each attempt. `clear_timeout_tasks`: cancel
        the unfinished tasks when the wait ends; otherwise they go on, and a later call returns their
        results. `return_partial_tasks`: also return the finished runs of cancelled tasks (None: as
        `explorer.over_rollout.return_partial_tasks`). A batch that was never scheduled, or was collected, returns
        nothing. Raises BatchTypeMismatch for a batch of `submit_batch`, DataError, and PayloadNotFound if an
        experience is not in the payload store (nothing is taken then).
        """
        statuses, groups = await self._results(
            self._read_experiences, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses, [e for experiences in groups for e in experiences]

    async def get_payload_results(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> tuple[list[Status], list[bytes]]:
        """Wait for results and take them like `get_results`, with a payload of serialized experiences per task.

        Read a payload with `Experience.deserialize_many`. A task without experiences has no payload.
        """
        statuses, groups = await self._results(
            self._read_experiences, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses, [Experience.serialize_many(experiences) for experiences in groups if experiences]

    async def get_statuses(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> list[Status]:
        """Wait for results and take them like `get_results`, but return the statuses only and read no experiences."""
        statuses, _ = await self._results(
            lambda state, numbers: {}, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> None:
        """Cancel the open tasks of the batch. Its finished tasks can still be collected. An unknown id is no error.

        With `return_partial_tasks` the finished runs of cancelled tasks can be collected too. `restart_runners` has no
        effect: runners stop cancelled tasks at once, and end a workflow that does not stop by force. Raises
        BatchTypeMismatch for a batch of `submit_batch`.
        """
        require_batch_id(batch_id)
        await self._cancel_open_tasks(batch_id, "abort_batch was called", return_partial_tasks)

    async def _cancel_open_tasks(self, batch_id: BatchId | None, reason: str, partial: bool | None) -> None:
        """Cancel the open tasks of a batch (None: of all scheduled batches). `partial`: see `return_partial_tasks`."""
        await self._ask(commands.DropOpenTasks(
            batch_id=batch_id, reason=reason, return_partial=None if partial is None else bool(partial)))

    async def _results(
        self, read: ReadResults, batch_id: BatchId, min_num: int | None, timeout: float | None, clear: bool,
        partial: bool | None,
    ) -> tuple[list[Status], list[list[Experience]]]:
        """Check the arguments, wait for results and take them. Returns the statuses, and each task's experiences."""
        require_batch_id(batch_id)
        if min_num is not None:
            min_num = argument_checks.whole_number("min_num", min_num)
        seconds = argument_checks.timeout_seconds(timeout)
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._own_batches.add(batch_id)
        return await self._await_tracked(self._take_results(read, batch_id, min_num, deadline, clear, partial))

    async def _take_results(
        self, read: ReadResults, batch_id: BatchId, min_num: int | None, deadline: float, clear: bool,
        partial: bool | None,
    ) -> tuple[list[Status], list[list[Experience]]]:
        """Wait for results and take them. If another caller took them first, wait for the remaining tasks.

        `clear`: `clear_timeout_tasks` of `get_results`; `partial`: its `return_partial_tasks`.
        """
        is_first_wait = True
        while True:
            reason = await self._wait_for_enough(batch_id, min_num, deadline, warn=is_first_wait)
            if reason and clear and not self._is_stopping:
                await self._cancel_open_tasks(batch_id, reason, partial)
            state, numbers, experiences = await self._in_thread(self._read_results, batch_id, read)
            if not numbers or state is None:
                return [], []
            taken = await self._take(batch_id, state.submission, numbers)
            if taken or reason:
                statuses = [state.task_status(number) for number in taken]
                return statuses, [experiences[number] for number in taken if number in experiences]
            is_first_wait = False  # another caller was faster: wait for the remaining tasks

    async def _wait_for_enough(self, batch_id: BatchId, min_num: int | None, deadline: float, *, warn: bool) -> str:
        """Wait for enough finished tasks. Returns why the wait ended, or "" if no task is open.

        `warn`: log a warning if the batch has fewer tasks than `min_num`.
        """
        enough_since: float | None = None
        at_least = 0
        seconds = 0.0
        while True:
            progress = await self._poll_batch(batch_id, at_least, seconds, resume=not self._is_stopping,
                                              deadline=deadline)
            now = time.monotonic()
            total = progress["open"] + progress["ready"]
            if min_num is not None and min_num > total and warn:
                _log.warning(
                    "min_num is %d, but batch %r has only %d tasks to collect: waiting for all of them",
                    min_num, batch_id, total,
                )
            warn = False
            if progress["open"] == 0:
                return ""
            if self._is_stopping and progress["paused"] and progress["running"] == 0:
                return "its scheduler was stopped"
            wait_until = deadline
            at_least = total if min_num is None else min(min_num, total)
            if progress["ready"] >= at_least:  # enough: wait a little longer for the rest
                enough_since = now if enough_since is None else enough_since
                wait_until = min(enough_since + self.config.explorer.over_rollout.wait_after_min, deadline)
                if now >= wait_until:
                    return f"{progress['ready']} tasks were ready, {at_least} were wanted"
                at_least = total
            elif now >= deadline:
                return f"{progress['ready']} tasks were ready when get_results timed out"
            seconds = min(POLL_SECONDS, wait_until - now)

    def _read_results(
        self, batch_id: BatchId, read: ReadResults
    ) -> tuple[BatchState | None, list[int], dict[int, list[Experience]]]:
        """Return the batch's state, the numbers of its tasks that can be collected, and their experiences by number."""

        def read_once() -> tuple[BatchState | None, list[int], dict[int, list[Experience]]]:
            state = self.client.log.current(batch_id)
            if state is None or state.batch_type != "collect" or state.state.ended:
                return None, [], {}
            numbers = state.ready_tasks()
            return state, numbers, read(state, numbers)

        return patiently(read_once, seconds=self.config.store.retry_for)

    def _read_experiences(self, state: BatchState, numbers: list[int]) -> dict[int, list[Experience]]:
        """Return the experiences of each of these tasks, sorted by run and step."""
        refs = [(number, ref) for number in numbers for ref in state.tasks[number].payloads]
        all_experiences = iter(self.client.read([ref for _, ref in refs]))
        by_task: dict[int, list[Experience]] = {number: [] for number in numbers}
        for number, ref in refs:
            by_task[number] += [next(all_experiences) for _ in range(ref.count)]
        for experiences in by_task.values():
            experiences.sort(key=lambda e: (e.eid.run, e.eid.step))
        return by_task

    async def _take(self, batch_id: BatchId, submission: str, numbers: list[int]) -> list[int]:
        """Record tasks as taken; return those that no other caller took before. A cancellation waits for the answer."""
        command = commands.TakeResults(batch_id=batch_id, submission=submission, tasks=numbers)
        taking = asyncio.ensure_future(self._ask(command))
        while not taking.done():
            try:
                await asyncio.shield(taking)
            except asyncio.CancelledError:
                if taking.cancelled():
                    raise
        return taking.result()

    async def wait_all(self, timeout: float | None = None, clear_timeout_tasks: bool = True) -> None:
        """Wait until no task of any scheduled batch is pending or running, without taking results.

        Raises WaitTimeout (TimeoutError) if no task finishes for `timeout` seconds (None: no limit but the timeout of
        each attempt). `clear_timeout_tasks`: before that, cancel the open tasks of all scheduled batches of the store.
        """
        seconds = argument_checks.timeout_seconds(timeout)
        await self._await_tracked(self._wait_all(seconds, clear_timeout_tasks))

    async def _wait_all(self, timeout: float | None, clear: bool) -> None:
        """Poll the coordinator until no task is open. `timeout` counts from the last task that settled."""
        limit = math.inf if timeout is None else timeout
        settled_count, progress_at, seconds = -1, time.monotonic(), 0.0
        while True:
            command = commands.PollAllBatches(settled=settled_count, seconds=max(0.0, seconds))
            try:
                progress = await self._ask_patiently(command, progress_at + limit)
            except TimeoutError as e:
                raise WaitTimeout(f"no answer from the coordinator within {timeout} s: wait again, or see "
                                  "`trinity-es status`", batches=[]) from e
            now = time.monotonic()
            if progress["open"] == 0:
                return
            if self._is_stopping:
                raise NotRunning(f"the scheduler was stopped, and {progress['open']} open tasks stay in the log: call "
                                 "`await scheduler.start()` to go on")
            if progress["settled"] > settled_count >= 0:
                progress_at = now
            settled_count = progress["settled"]
            if now - progress_at >= limit:
                break
            seconds = min(POLL_SECONDS, progress_at + limit - now)
        text = f"no task finished within {timeout} s; {progress['open']} were open, of batches {progress['batches']}"
        if clear:
            await self._cancel_open_tasks(None, f"wait_all timed out: {text}", None)
            text += ": they were cancelled"
        raise WaitTimeout(text, batches=progress["batches"])
