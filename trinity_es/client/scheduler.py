"""The scheduler under its known names: tasks in, statuses and raw experiences out, batch by batch.

It is a handle on the same coordinator that finalizes train batches: a scheduled batch is a stream of the log like any
other, `collect` by type, and no pipeline is run on it. So what was scheduled is durable when `schedule` returned, what
finished stays finished whatever dies, and what was not collected is there for the next Scheduler on the store, in this
process or another. Two of them on one store are the same scheduler.

Results are handed over in two steps: they are read, and then it is recorded that they were taken. A caller that is
killed or cancelled before that leaves them; two callers of one batch never get the same.
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
from trinity_es.client import validation
from trinity_es.client.connection import GRACE_SECONDS
from trinity_es.client.coordinator import RolloutCoordinator
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import DataError, LogUnavailable, NotRunning, TrinityError, WaitTimeout
from trinity_es.events.experience import Experience
from trinity_es.events.store.database.retry import patiently
from trinity_es.events.values import BatchId, Status, Task, require_batch_id
from trinity_es.projections.batch import BatchState

__all__ = ["Scheduler"]

A = TypeVar("A")
T = TypeVar("T")
Read = Callable[[BatchState, list[int]], dict[int, list[Experience]]]
"""Makes something of tasks of a batch, by their numbers."""

ALL_TASKS = 2**31 - 1
"""More tasks than a batch can have ready: who asks for so many waits until nothing runs."""
POLL_SECONDS = 4.0
"""How long one question after results stays open; less than a client waits before it asks where everybody is."""
RETRY_SECONDS = 0.5
"""Interval between two tries to ask while the log can't be written."""
THREADS = 512
"""Calls that wait at the same time; those beyond wait for one of them."""

_log = logging.getLogger("trinity_es.client.scheduler")


class _Done(Awaitable[None]):
    """What `schedule` returns: it is done already, and may be awaited all the same."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class Scheduler:
    """Runs tasks on the engines of this config's store. `start` it first; also an async context manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._rollouts: RolloutCoordinator | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock: asyncio.Lock | None = None
        self._stopping = False
        self._calls: set[asyncio.Future[None]] = set()
        self._mine: set[BatchId] = set()
        """Batches that were asked for here; those among them that are open, `stop` pauses."""

    # --- start and stop ---------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Connect to the running system of the store, or start one; returns when its engines serve. Idempotent.

        What an earlier scheduler left goes on: its results can be collected here. Raises StartupError.
        """
        async with self._alone():
            if self._rollouts is not None:
                return
            rollouts = RolloutCoordinator(self.config)
            try:
                await rollouts.prepare()
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="scheduler")
                await self._run(lambda: rollouts.client.log)  # opened once, not by each of many threads
                await self._run(rollouts.client.request, commands.ResumeBatches())
            except BaseException:
                self._close_pool()
                await rollouts.shutdown()
                raise
            self._rollouts, self._stopping = rollouts, False

    async def stop(self) -> None:
        """Wait for the tasks that are running, then let go of the system; end it if `start` started it.

        What this scheduler scheduled and no runner has yet waits in the log, for the next `start`; and so do results
        that nobody collected. Calls that wait for results get what there is. Idempotent.
        """
        async with self._alone():
            if self._rollouts is None:
                return
            self._stopping = True
            try:
                await self._settle()
            except TrinityError as e:  # the system is gone: what ran there will be run again
                _log.warning("stopped without its running tasks: %s", e)
            if self._calls:
                await asyncio.wait(self._calls)
            rollouts, self._rollouts = self._rollouts, None
            self._close_pool()
            await rollouts.shutdown()

    async def _settle(self) -> None:
        self._mine &= set((await self._ask(commands.PollAllBatches(settled=-1, seconds=0.0)))["batches"])
        await self._ask(commands.PauseBatches(batches=list(self._mine)))
        for batch_id in self._mine:
            while True:
                told = await self._poll(batch_id, ALL_TASKS, POLL_SECONDS, resume=False)
                if not told["running"] or not told["paused"]:  # or somebody else wants it to go on
                    break

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def _alone(self) -> asyncio.Lock:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    @property
    def client(self) -> RolloutClient:
        """The blocking client beneath. Raises NotRunning before `start` and after `stop`."""
        if self._rollouts is None:
            raise NotRunning("the scheduler is not started: `await scheduler.start()` first")
        return self._rollouts.client

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(call, *args))

    async def _ask(self, command: commands.Command[A], deadline: float = math.inf) -> A:
        """`deadline`: monotonic seconds. Raises TimeoutError."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic()) + GRACE_SECONDS
        return await self._run(self.client.request, command, left)

    async def _ask_patiently(self, command: commands.Command[A], deadline: float = math.inf) -> A:
        """Return the answer to a question that changes nothing, after a log that can't be written for a while."""
        until = time.monotonic() + self.config.store.retry_for
        while True:
            try:
                return await self._ask(command, deadline)
            except LogUnavailable:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _poll(
        self, batch_id: BatchId, at_least: int, seconds: float, *, resume: bool, deadline: float = math.inf
    ) -> commands.BatchProgress:
        command = commands.PollBatch(batch_id=batch_id, at_least=at_least, seconds=max(0.0, seconds), resume=resume)
        return await self._ask_patiently(command, deadline)

    # --- runners ----------------------------------------------------------------------------------------------------
    def get_runner_state(self, runner_id: int | str) -> dict[str, Any]:
        """Return what one runner does now, by its number or name. See `RolloutClient.get_runner_state`."""
        return self.client.get_runner_state(f"runner-{runner_id}" if isinstance(runner_id, int) else runner_id)

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return the same of every runner, by name."""
        return self.client.get_all_state()

    def get_key_state(self, key: str) -> dict[str, Any]:
        """Return one thing of every runner's state, by name."""
        return self.client.get_key_state(key)

    async def _known(self, call: Awaitable[T]) -> T:
        """Await a call that `stop` waits for."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.add(over)
        try:
            return await call
        finally:
            over.set_result(None)
            self._calls.discard(over)

    # --- tasks ------------------------------------------------------------------------------------------------------
    def schedule(self, tasks: Iterable[Task], batch_id: BatchId) -> Awaitable[None]:
        """Queue tasks: lower batch first, first in first out inside a batch. When it returned they are durable.

        Called again while the batch is open they join it, numbered on; after it was collected they begin it anew. All
        of the tasks are scheduled, or none. It blocks for the time of one commit; it may be awaited too. Raises
        BatchAlreadyActive for the id of a batch of `submit_batch`, TaskNotSerializable, UnknownWorkflow, DataError.
        """
        client, found = self.client, list(tasks)
        require_batch_id(batch_id)
        if self._stopping:
            raise NotRunning("the scheduler is being stopped: `await scheduler.start()` it again first")
        if found:
            first = client.request(commands.ScheduleTasks(batch_id=batch_id, tasks=client.pack(found)))
            self._mine.add(batch_id)
            for number, task in enumerate(found, first):
                task.batch_id, task.task_id = batch_id, number
        return _Done()

    def has_step(self, batch_id: BatchId) -> bool:
        """Return True if anything of the batch is pending, running or not collected."""
        told = self.client.request(
            commands.PollBatch(batch_id=require_batch_id(batch_id), at_least=0, seconds=0.0, resume=False)
        )
        return bool(told["open"] + told["ready"])

    async def get_results(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for results of the batch and take them: (statuses, experiences), in the order of its tasks.

        `min_num`: tasks to wait for (None: all; more than there are: all, with a warning); once they are there, those
        that finish within `explorer.over_rollout.wait_after_min` seconds come too. `timeout`: seconds, after which
        what is done is returned; None: no limit but those of each attempt. With `clear_timeout_tasks` the rest is
        cancelled then and its places are free; without, it goes on, and a later call returns those results and only
        those. `return_partial_tasks`: of the tasks that are cancelled, those with finished runs are returned too, with
        these (None: as `explorer.over_rollout.return_partial_tasks` says). A batch that nobody scheduled, or that was
        collected, gives nothing.
        Raises BatchTypeMismatch for a batch of `submit_batch`, DataError; PayloadNotFound, with nothing taken.
        """
        statuses, found = await self._results(
            self._experiences, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses, [e for experiences in found for e in experiences]

    async def get_payload_results(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> tuple[list[Status], list[bytes]]:
        """Wait for results as `get_results` and take them, the experiences serialized (`Experience.deserialize_many`).

        There is one payload a task, in the order of the tasks; a task without experiences has none.
        """
        statuses, found = await self._results(
            self._experiences, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses, [Experience.serialize_many(experiences) for experiences in found if experiences]

    async def get_statuses(
        self, batch_id: BatchId, min_num: int | None = None, timeout: float | None = None,
        clear_timeout_tasks: bool = True, return_partial_tasks: bool | None = None,
    ) -> list[Status]:
        """Wait for results as `get_results` and take them, but read no experiences; they stay in the log."""
        statuses, _ = await self._results(
            lambda state, numbers: {}, batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return statuses

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> None:
        """Cancel what of the batch is not done. What is done stays to be collected; an unknown id is no error.

        With `return_partial_tasks` also the tasks of which some runs finished. `restart_runners` changes nothing: what
        is cancelled frees its places at once, and a workflow that does not let itself be cancelled is ended by force.
        Raises BatchTypeMismatch for a batch of `submit_batch`.
        """
        require_batch_id(batch_id)
        await self._drop_rest(batch_id, "abort_batch was called", return_partial_tasks)

    async def _drop_rest(self, batch_id: BatchId | None, reason: str, partial: bool | None) -> None:
        keep = None if partial is None else bool(partial)
        await self._ask(commands.DropOpenTasks(batch_id=batch_id, reason=reason, return_partial=keep))

    async def _results(
        self, read: Read, batch_id: BatchId, min_num: int | None, timeout: float | None, clear: bool,
        partial: bool | None,
    ) -> tuple[list[Status], list[list[Experience]]]:
        """Wait and take: the statuses, and what `read` makes of the tasks that were taken, of each that it knows."""
        require_batch_id(batch_id)
        least = None if min_num is None else validation.whole("min_num", min_num)
        if least is not None and least < 0:
            raise DataError(f"min_num is {min_num}: None (all tasks) or 0 and more")
        limit = validation.seconds("timeout", timeout)
        deadline = math.inf if limit is None else time.monotonic() + limit
        self._mine.add(batch_id)
        return await self._known(self._take_results(read, batch_id, least, deadline, clear, partial))

    async def _take_results(
        self, read: Read, batch_id: BatchId, min_num: int | None, deadline: float, clear: bool, partial: bool | None
    ) -> tuple[list[Status], list[list[Experience]]]:
        warned = False
        while True:
            reason = await self._wait(batch_id, min_num, deadline, warned)
            if reason and clear and not self._stopping:
                await self._drop_rest(batch_id, reason, partial)
            state, numbers, found = await self._run(self._read, batch_id, read)
            if not numbers or state is None:
                return [], []
            mine = await self._take(batch_id, state.submission, numbers)
            if mine or reason:
                won = set(mine)
                statuses = [state.task_status(number) for number in numbers if number in won]
                return statuses, [found[number] for number in mine if number in found]
            warned = True  # another caller was faster: wait for what is left

    async def _wait(self, batch_id: BatchId, min_num: int | None, deadline: float, warned: bool) -> str:
        """Wait for enough; returns why no more is waited for, empty where nothing is open any more."""
        enough_since: float | None = None
        at_least = 0
        seconds = 0.0
        while True:
            told = await self._poll(batch_id, at_least, seconds, resume=not self._stopping, deadline=deadline)
            now, there_are = time.monotonic(), told["open"] + told["ready"]
            if min_num is not None and min_num > there_are and not warned:
                _log.warning(
                    "min_num is %d, and batch %r has %d tasks to be collected: waiting for all of them",
                    min_num, batch_id, there_are,
                )
            warned = True
            if told["open"] == 0:
                return ""
            if self._stopping and told["paused"] and told["running"] == 0:
                return "its scheduler was stopped"
            until, at_least = deadline, there_are if min_num is None else min(min_num, there_are)
            if told["ready"] >= at_least:  # enough: a little more for the rest
                enough_since = now if enough_since is None else enough_since
                grace = enough_since + self.config.explorer.over_rollout.wait_after_min
                if now >= min(grace, deadline):
                    return f"{told['ready']} tasks were ready, {at_least} were wanted"
                until, at_least = min(grace, deadline), there_are
            elif now >= deadline:
                return f"{told['ready']} tasks were ready when get_results timed out"
            seconds = min(POLL_SECONDS, until - now)

    def _read(self, batch_id: BatchId, read: Read) -> tuple[BatchState | None, list[int], dict[int, list[Experience]]]:
        """Return the batch from the log, its tasks that can be taken, and what `read` makes of these."""

        def work() -> tuple[BatchState | None, list[int], dict[int, list[Experience]]]:
            state = self.client.log.current(batch_id)
            if state is None or state.batch_type != "collect" or state.state.ended:
                return None, [], {}
            numbers = state.ready_tasks()
            return state, numbers, read(state, numbers)

        return patiently(work, seconds=self.config.store.retry_for)

    def _experiences(self, state: BatchState, numbers: list[int]) -> dict[int, list[Experience]]:
        """Return the experiences of each of these tasks, by run and step."""
        refs = [(number, ref) for number in numbers for ref in state.tasks[number].payloads]
        found = iter(self.client.read([ref for _, ref in refs]))
        experiences: dict[int, list[Experience]] = {number: [] for number in numbers}
        for number, ref in refs:
            experiences[number] += [next(found) for _ in range(ref.count)]
        for group in experiences.values():
            group.sort(key=lambda e: (e.eid.run, e.eid.step))
        return experiences

    async def _take(self, batch_id: BatchId, submission: str, numbers: list[int]) -> list[int]:
        """Have it recorded that these were taken; those that are ours. A cancellation that comes now comes too late."""
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
        """Wait until nothing of any scheduled batch is pending or running, without taking results.

        Returns at once when there is nothing. Raises WaitTimeout (TimeoutError) when no task finished for `timeout`
        seconds (None: no limit but those of each attempt); with `clear_timeout_tasks` what is open is cancelled then,
        of every scheduled batch of the store.
        """
        limit = validation.seconds("timeout", timeout)
        await self._known(self._all(limit, clear_timeout_tasks))

    async def _all(self, timeout: float | None, clear: bool) -> None:
        limit = math.inf if timeout is None else timeout
        settled, since, seconds = -1, time.monotonic(), 0.0
        while True:
            command = commands.PollAllBatches(settled=settled, seconds=max(0.0, seconds))
            try:
                told = await self._ask_patiently(command, since + limit)
            except TimeoutError as e:
                raise WaitTimeout(f"no answer within {timeout} s: the coordinator is away", batches=[]) from e
            now = time.monotonic()
            if told["open"] == 0:
                return
            if self._stopping:
                raise NotRunning(f"the scheduler was stopped, {told['open']} tasks are open: they wait in the log")
            if told["settled"] > settled >= 0:
                since = now
            settled = told["settled"]
            if now - since >= limit:
                break
            seconds = min(POLL_SECONDS, since + limit - now)
        text = f"no task finished within {timeout} s; {told['open']} were open, of batches {told['batches']}"
        if clear:
            await self._drop_rest(None, f"wait_all timed out: {text}", None)
            text += ": they were cancelled"
        raise WaitTimeout(text, batches=told["batches"])
