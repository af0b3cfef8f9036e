"""Execution of a unit (some runs of one task) by the task's workflow on one engine. Needs no actor and no log.

An async workflow runs on the event loop and is cancelled at its timeout. If it swallows the cancellation, its run is
over after `GRACE_SECONDS`. If it blocks the loop, it can't be ended here. A sync workflow runs in a worker process,
which is killed at the timeout. Without a `WorkerPool` it runs in a thread, which can't be killed.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trinity_es.actors.engines.interface import Engine
from trinity_es.actors.plugin_lookup import load, resolve
from trinity_es.actors.rollout import result as outcome
from trinity_es.actors.rollout.leases import LeaseRecorder, RunLeases
from trinity_es.actors.rollout.model import Model, OpenAIServer
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.actors.rollout.shared_event_loop import Limits, unit_context
from trinity_es.actors.runner_activity import RunActivity, runner_state
from trinity_es.events import errors
from trinity_es.events.experience import Experience
from trinity_es.events.values import Args, BatchId, FailureKind, Status, Task, class_path, task_to_dict

if TYPE_CHECKING:
    from trinity_es.actors.rollout.workers.pool import WorkerPool

__all__ = ["AuxiliaryModel", "WorkflowRunner"]

GRACE_SECONDS = 2.0
"""How long a cancelled async workflow may take to end."""
START_SECONDS = 120.0
RUNS_AT_ONCE = 256
"""Maximum of a unit's async runs at once, like vLLM's of sequences. 100,000 would block the loop for half a minute."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuxiliaryModel:
    """Auxiliary model for workflows: its engine (or a `RemoteEngine` over several), and its own sampling."""

    name: str
    engine: Engine
    defaults: Mapping[str, Any] = field(default_factory=dict)


class WorkflowRunner:
    """Runs workflows on an engine. Times come from `clock` (monotonic seconds).

    `concurrent_mode`: the runs of a task are `sequential`, `asynchronous` (at once on the loop) or `multi-threading`.
    `timeout`: seconds for one attempt at a unit. Workflows with `can_reset` are reused. `workers` run sync workflows
    whose class another process can import; all others run in threads. `server`: the engine's endpoint for OpenAI
    clients. The caller closes `workers` and `server`.
    """

    def __init__(
        self, engine: Engine, *, clock: Callable[[], float] = time.monotonic,
        registry: Mapping[str, str] | None = None, auxiliary: Sequence[AuxiliaryModel] = (),
        defaults: Mapping[str, Any] | None = None, concurrent_mode: str = "asynchronous",
        timeout: float | None = None, workers: WorkerPool | None = None, server: OpenAIServer | None = None,
    ) -> None:
        self.engine, self.clock, self.registry = engine, clock, registry or {}
        self.auxiliary, self.defaults = auxiliary, dict(defaults or {})
        self.concurrent_mode, self.timeout, self.workers, self.server = concurrent_mode, timeout, workers, server
        self.engine_dead: str | None = None
        """Why the engine is dead, if a run noticed that it is."""
        self.activity = RunActivity()
        self.limits = Limits()
        self._classes: dict[str, type[Any]] = {}
        self._import_locks: dict[str, asyncio.Lock] = {}  # by module
        self._idle_workflows: dict[type[Any], list[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio keeps no task alive

    async def run_task(
        self, task: Task, batch_id: BatchId, repeat_times: int = 1, run_id_base: int = 0
    ) -> tuple[Status, list[Experience]]:
        """Run a task and return its status and experiences; evals return no experiences."""
        result = await self.execute(_copy_of(task), batch_id, range(run_id_base, run_id_base + repeat_times))
        message = None
        if result.failures:
            message = f"{len(result.results)}/{repeat_times} runs completed. First error: {result.failures[0][2]}"
        metrics = [dict(r.metrics) for r in result.results]
        status = Status(completed_runs=len(result.results), total_runs=repeat_times, metrics=metrics, message=message)
        return status, [] if task.is_eval else result.experiences

    async def get_runner_state(self) -> dict[str, Any]:
        """Return id, model version and times of the current or last run, and its workflow's state."""
        names = ("workflow_id", "model_version", "begin_time", "terminate_time")
        state = {"model_version": self.engine.model_version, **runner_state(self.activity)}
        return {**state["workflow_state"], **{name: state[name] for name in names}}

    async def execute(
        self, task: Task, batch_id: BatchId, runs: range, *, timeout: float | None = None,
        leases: LeaseRecorder | None = None, journal: Callable[[int], RunJournal] | None = None,
    ) -> UnitResult:
        """Execute these runs of a task, which they may change, within `timeout` seconds. Failures are in the result;
        only cancellation raises.

        `journal(run)` returns the journal of a run; the time of its lost attempts counts towards `timeout`.
        """
        task.batch_id = batch_id
        out = UnitResult(model_version=self.engine.model_version, timeout=timeout or self.timeout)
        begin_times: list[float] = []
        try:
            cls = await self._workflow_class(task)
            portable = self._portable_task(cls, task)
            repeats = getattr(cls, "can_repeat", False)
            parts = [runs] if repeats else [range(run, run + 1) for run in runs]

            async def play(part: range) -> None:
                """Execute one run (or all runs, for a workflow that repeats itself), and add the result to `out`."""
                name = f"{batch_id}/{task.task_id}/{part.start}"
                part_result = UnitResult(timeout=out.timeout)
                try:
                    with self.activity.show(name, len(part), self.engine.model_version) as row:
                        async with AsyncExitStack() as stack:
                            own_journal = None
                            if journal is not None:
                                own_journal = journal(part.start)
                                part_result.lost_seconds = own_journal.kept.seconds
                            models = [
                                self._model(self.engine, task, part.start, own_journal),
                                *self._auxiliary_models(task, own_journal),
                            ]
                            row["state"] = models[0].workflow_state
                            models[0].steps.seed = name
                            if leases is not None:
                                models[0].leases = RunLeases(leases, part.start)
                            stack.callback(models[0].leases.close)
                            for model in models:
                                await stack.enter_async_context(aclosing(model))
                            if portable is not None:
                                await self._run_in_worker(
                                    portable, task, part, repeats, models, part_result, begin_times
                                )
                            else:
                                begin_times.append(self.clock())
                                own_task = task if len(parts) == 1 else _copy_of(task)
                                await self._run_in_this_process(cls, own_task, part, repeats, models, part_result)
                            for experience in part_result.experiences if models[0].steps.possibly_delivered else ():
                                experience.info["possibly_delivered"] = models[0].steps.possibly_delivered
                except Exception as e:
                    self._fail(e, part, part_result)
                out.add(part_result)

            remaining_parts = iter(parts)

            async def play_remaining() -> None:
                for part in remaining_parts:
                    await play(part)

            at_once = RUNS_AT_ONCE if portable is None or self.workers is None else self.workers.places
            if self.concurrent_mode == "sequential" or len(parts) == 1:
                await play_remaining()
            else:
                await asyncio.gather(*(play_remaining() for _ in range(min(len(parts), at_once))))
        except Exception as e:
            self._fail(e, runs, out)
        out.results.sort(key=lambda r: r.run)
        out.failures.sort(key=lambda f: f[0])
        out.experiences.sort(key=lambda e: (e.eid.run, e.eid.step))
        out.model_version_end = self.engine.model_version
        # Starting a process or importing a module does not count as the task's time.
        out.seconds = self.clock() - begin_times[0] if begin_times else 0.0
        return out

    def _kind_and_message(self, error: Exception, out: UnitResult) -> tuple[FailureKind, str]:
        """Return the kind and message of an error. Note a dead engine in `engine_dead`, a missing module in `out`."""
        if isinstance(error, errors.EngineError) and error.details.get("dead"):
            self.engine_dead = str(error)
        out.lacks = out.lacks or isinstance(error, errors.UnknownWorkflow)
        return outcome.classify(error, out.timeout, "max_timeout" if out.timeout == self.timeout else "dynamic_timeout")

    def _fail(self, error: Exception, runs: range, out: UnitResult) -> None:
        """Add a failure to `out` for each of the runs that has no result and no failure yet."""
        kind, message = self._kind_and_message(error, out)
        if len(runs) == 1 and isinstance(error, errors.DataError) and str(error.details.get("eid")).startswith("//"):
            message = f"run {runs.start}: {message}"  # the experience had no ids yet
        ended_runs = {r.run for r in out.results} | {f[0] for f in out.failures}
        out.failures.extend((run, kind, message) for run in runs if run not in ended_runs)

    async def _workflow_class(self, task: Task) -> type[Any]:
        """Return the class of a task's workflow. Raises UnknownWorkflow if the task names none or it can't be found."""
        if task.workflow is None:
            raise errors.UnknownWorkflow(f"task {task.task_id} names no workflow: set Task.workflow")
        if not isinstance(task.workflow, str):
            return task.workflow
        if task.workflow not in self._classes:
            self._classes[task.workflow] = await self._import_class(task.workflow)
        return self._classes[task.workflow]

    async def _import_class(self, name: str) -> type[Any]:
        """Return the workflow class of this name. A template process imports a user's module first, then this one."""
        path = self.registry.get(name, name)
        module, _, attribute = path.partition(":")
        if self.workers is None or not attribute or module.partition(".")[0] == "trinity_es":
            return resolve(name, self.registry, "workflow")
        async with self._import_locks.setdefault(module, asyncio.Lock()):
            if module not in sys.modules:
                await self.workers.templates.prepare(path)
                # In a thread, since it may take seconds, and the loop must answer meanwhile.
                importing = asyncio.to_thread(resolve, name, self.registry, "workflow")
                try:
                    cls = await asyncio.wait_for(importing, START_SECONDS)
                except TimeoutError:
                    raise errors.WorkflowError(f"the import of {name} took more than {START_SECONDS:.0f} s: do slow "
                                               "work when a run needs it, not on import") from None
                if getattr(cls, "is_async", False):
                    self.workers.templates.forget(path)
                return cls
            return resolve(name, self.registry, "workflow")

    def _portable_task(self, cls: type[Any], task: Task) -> dict[str, Any] | None:
        """Return the task as a dict for a worker process; None if the task must run in this process."""
        if self.workers is None or getattr(cls, "is_async", False):
            return None
        try:
            # Prefer the name in the task, since a class made by a function can't be imported by its own name.
            name_or_path = class_path(task.workflow or cls)
            return {**task_to_dict(task), "workflow": self.registry.get(name_or_path, name_or_path)}
        except errors.TaskNotSerializable:
            return None

    async def _run_in_worker(
        self, portable: dict[str, Any], task: Task, runs: range, repeats: bool, models: Sequence[Model],
        out: UnitResult, begin_times: list[float],
    ) -> None:
        """Execute runs in a worker process, and add the result to `out`. Raises OutOfTime at the timeout."""
        assert self.workers is not None
        limit_number = 0

        def begin() -> None:
            """Start the time limit of the runs; called again if a worker ended before it took them."""
            nonlocal limit_number
            begin_times.append(self.clock())
            self.limits.end(limit_number)
            limit_number = self._begin_limit(out.seconds_left)

        try:
            result, engine_dead = await self.workers.run(
                portable, batch_id=task.batch_id, task_id=task.task_id, runs=runs, models=models,
                timeout=out.seconds_left, on_begin=begin,
            )
        except TimeoutError as e:
            raise outcome.OutOfTime from e
        finally:
            self.limits.end(limit_number)
        for experience in result.experiences:  # the worker knows only the version at its last request
            experience.info["model_version_drift"] = self.engine.model_version - experience.info["model_version"]
        if repeats:  # the worker knows only the tokens of requests over its pipe
            result.results, out.other_tokens = outcome.divide_usage(result.results, result.experiences, models[0].usage)
        else:
            result.results = [outcome.with_usage(r, models[0].usage) for r in result.results]
        self.engine_dead = engine_dead or self.engine_dead
        out.results.extend(result.results)
        out.experiences.extend(result.experiences)
        out.failures.extend(result.failures)
        out.lacks = out.lacks or result.lacks

    def _model(self, engine: Engine, task: Task, run: int, journal: RunJournal | None) -> Model:
        sampling = {**self.defaults, **task.rollout_args}
        if sampling.get("seed") is not None:
            sampling["seed"] += run  # runs of a task differ, and repeat with the same seed
        server = self.server if engine is self.engine else None
        graders = None if self.workers is None else self.workers.graders
        return Model(engine, defaults=sampling, server=server, graders=graders, journal=journal)

    def _auxiliary_models(self, task: Task, journal: RunJournal | None) -> list[Model]:
        task_key = f"{task.batch_id}/{task.task_id}"
        return [
            Model(a.engine, defaults=a.defaults, name=a.name, task=task_key, journal=journal) for a in self.auxiliary
        ]

    def _make_workflow(self, cls: type[Any], task: Task, models: Sequence[Model]) -> Any:
        """Return a workflow of this class for a task: an idle instance that is reset, or a new one."""
        model, *auxiliary = models
        try:
            if getattr(cls, "can_reset", False) and self._idle_workflows.get(cls):
                workflow = self._idle_workflows[cls].pop()
                workflow.model, workflow.auxiliary_model_wrappers = model, auxiliary or None
                workflow.reset(task)
                return workflow
            return cls(task=task, model=model, auxiliary_models=auxiliary or None)
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as e:
            raise outcome.error_of_exit(cls, e) from e

    async def _run_workflow(
        self, workflow: Any, model: Model, timeout: float | None, context: Context
    ) -> list[Experience]:
        """Return the experiences of a workflow's `run` or `run_async`. Raises WorkflowError for any other result."""
        run = self._run_on_loop if type(workflow).is_async else self._run_in_thread
        limit_number = self._begin_limit(timeout)
        try:
            returned = await run(workflow, timeout, context)
        except Exception as e:
            cause = model.cause(e)
            if cause is e:
                raise
            raise cause from e
        finally:
            self.limits.end(limit_number)
        if isinstance(returned, Experience):
            returned = [returned]
        name = type(workflow).__name__
        if not isinstance(returned, list):
            raise errors.WorkflowError(f"{name} returned {type(returned).__name__}: a list of Experience is expected")
        for i, item in enumerate(returned):
            if not isinstance(item, Experience):
                raise errors.WorkflowError(f"{name} returned a list whose item {i} is of type "
                                           f"{type(item).__name__}: a list of Experience is expected")
        if not returned and not getattr(workflow, "failed_runs", None):
            raise errors.WorkflowError(f"{name} completed without an experience: return at least one, or raise")
        return returned

    def _begin_limit(self, timeout: float | None) -> int:
        return self.limits.begin(math.inf if timeout is None else self.clock() + timeout + GRACE_SECONDS)

    async def _run_on_loop(self, workflow: Any, timeout: float | None, context: Context) -> Any:
        """Return the result of `run_async`. Cancel it at the timeout (raises OutOfTime), or if cancelled itself."""
        task = asyncio.create_task(_run_async(workflow), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._drop_task)
        try:
            await asyncio.wait({task}, timeout=timeout)
            if task.cancelled():
                raise outcome.error_of_exit(type(workflow), asyncio.CancelledError())
            if task.done():
                return task.result()
            raise outcome.OutOfTime
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_SECONDS)
            if not task.done():
                _log.warning("%s goes on after it was cancelled, though its run is over", type(workflow).__name__)

    def _drop_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved

    async def _run_in_thread(self, workflow: Any, timeout: float | None, context: Context) -> Any:
        """Call `run` in a thread and return its result. Raises OutOfTime at the timeout, while the thread goes on."""
        task = asyncio.create_task(asyncio.to_thread(self._run_sync, workflow), context=context)
        try:
            await asyncio.wait({task}, timeout=timeout)
            if not task.done():
                raise outcome.OutOfTime
            return task.result()
        finally:
            task.cancel()

    @staticmethod
    def _run_sync(workflow: Any) -> Any:
        """Return the result of `run`. Raises WorkflowError if `run` raises SystemExit or the like."""
        try:
            return workflow.run()
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as e:
            raise outcome.error_of_exit(type(workflow), e) from e

    async def _run_in_this_process(
        self, cls: type[Any], task: Task, runs: range, repeats: bool, models: Sequence[Model], out: UnitResult
    ) -> None:
        """Execute runs on the loop or in a thread, and add their results to `out`."""
        started_at, version, usage = self.clock(), self.engine.model_version, models[0].usage
        context = unit_context()
        n = len(runs) if repeats else task.rollout_args.get("n") or self.defaults.get("n") or 1
        # Workflows read the number of answers from `rollout_args.n`.
        args = Args({**task.rollout_args, "n": n})
        workflow_task = replace(task, rollout_args=args, reward_fn=_reward_class(task.reward_fn))
        workflow = context.run(self._make_workflow, cls, workflow_task, models)
        if repeats:
            context.run(workflow.set_repeat_times, len(runs), runs.start)
        experiences = await self._run_workflow(workflow, models[0], out.seconds_left, context)
        seconds = self.clock() - started_at
        errors_by_run: dict[int, Exception] = getattr(workflow, "failed_runs", {}) if repeats else {}
        by_run = {runs.start: experiences}
        if repeats:
            by_run = outcome.grouped_by_run(experiences, runs, cls.__name__, errors_by_run)
        failure_count = len(out.failures)
        for run, group in by_run.items():
            try:
                if run in errors_by_run:
                    raise errors_by_run.pop(run)
                if not group:
                    raise errors.WorkflowError(f"{cls.__name__} gave no experience for run {run}: give each run one")
                outcome.stamp_and_validate(group, task, run, version, self.engine.model_version)
                result = outcome.run_result(run, group, seconds)
            except Exception as e:
                out.failures.append((run, *self._kind_and_message(e, out)))
                continue
            out.results.append(result if repeats else outcome.with_usage(result, usage))
            out.experiences.extend(group)
        if repeats:
            out.results, out.other_tokens = outcome.divide_usage(out.results, out.experiences, usage)
        if cls.can_reset and (repeats or len(out.failures) == failure_count):
            self._idle_workflows.setdefault(cls, []).append(workflow)


def _copy_of(task: Task) -> Task:
    """Return a copy of a task with its own row and arguments, which a run may change in place."""
    values = ("raw_task", "workflow_args", "reward_fn_args", "format_args", "rollout_args", "index")
    return replace(task, **{name: _deep_copy(getattr(task, name)) for name in values})


def _deep_copy(value: Any) -> Any:
    """Return a deep copy. Four times as fast as `copy.deepcopy` for a task's JSON, which each run needs."""
    if type(value) in (dict, Args):
        return type(value)({k: _deep_copy(v) for k, v in value.items()})
    if type(value) is list:
        return [_deep_copy(v) for v in value]
    return value if type(value) is str else copy.deepcopy(value)


def _reward_class(reward: Any) -> Any:
    """Return the reward class that a task names, for workflows that instantiate it; `reward` itself if it is none."""
    try:
        cls = load(reward)
        return cls if isinstance(cls, type) and class_path(cls) == reward else reward
    except (Exception, SystemExit):
        return reward  # `reward_of` reports the error when the reward is needed


async def _run_async(workflow: Any) -> Any:
    """Await `run_async`. Raises WorkflowError for SystemExit or KeyboardInterrupt, which would end the loop."""
    try:
        return await workflow.run_async()
    except (SystemExit, KeyboardInterrupt) as e:
        raise outcome.error_of_exit(type(workflow), e) from e
