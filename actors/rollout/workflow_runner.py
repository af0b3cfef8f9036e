"""Execution of one unit: some runs of one task, by its workflow, on one engine. No actor and no log is needed.

An async workflow plays on the event loop and is cancelled at its timeout. If it swallows the cancellation, its run is
over after `GRACE_SECONDS`; if it blocks the loop, it can't be ended here. A sync workflow plays in a worker process,
which is killed at the timeout, or without a `WorkerPool` in a thread, which can't be killed.
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
"""Maximum of a unit's async runs at once, as vLLM's. 100,000 together block the loop for half a minute."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuxiliaryModel:
    """An auxiliary model of workflows: its engine, or a `RemoteEngine` over several, and its own sampling."""

    name: str
    engine: Engine
    defaults: Mapping[str, Any] = field(default_factory=dict)


class WorkflowRunner:
    """Player of workflows on an engine. Times come from `clock` (monotonic seconds).

    `concurrent_mode`: the runs of a task are `sequential`, `asynchronous` (at once on the loop) or `multi-threading`.
    `timeout`: seconds for one attempt at a unit. Workflows with `can_reset` are reused. `workers` plays sync workflows
    whose class another process can import; all others play in threads. `server`: the engine's endpoint for OpenAI
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
        self.played = RunActivity()
        self.limits = Limits()
        self._classes: dict[str, type[Any]] = {}
        self._imports: dict[str, asyncio.Lock] = {}
        self._idle: dict[type[Any], list[Any]] = {}
        self._playing: set[asyncio.Task[Any]] = set()

    async def run_task(
        self, task: Task, batch_id: BatchId, repeat_times: int = 1, run_id_base: int = 0
    ) -> tuple[Status, list[Experience]]:
        """Run a task and return its status and experiences; evals return no experiences."""
        done = await self.execute(task, batch_id, range(run_id_base, run_id_base + repeat_times))
        message = None
        if done.failures:
            message = f"{len(done.results)}/{repeat_times} runs completed. First error: {done.failures[0][2]}"
        metrics = [dict(r.metrics) for r in done.results]
        status = Status(completed_runs=len(done.results), total_runs=repeat_times, metrics=metrics, message=message)
        return status, [] if task.is_eval else done.experiences

    async def get_runner_state(self) -> dict[str, Any]:
        """Return id, model version and times of the current or last workflow, and its `model.set_workflow_state`."""
        names = ("workflow_id", "model_version", "begin_time", "terminate_time")
        state = {"model_version": self.engine.model_version, **runner_state(self.played)}
        return {**state["workflow_state"], **{name: state[name] for name in names}}

    async def execute(
        self, task: Task, batch_id: BatchId, runs: range, *, timeout: float | None = None,
        leases: LeaseRecorder | None = None, journal: Callable[[int], RunJournal] | None = None,
    ) -> UnitResult:
        """Play these runs of a task, within `timeout` seconds. Failures are in the result; only cancellation raises.

        `journal` returns that of the run with this number; the time of its lost attempts counts in `timeout`.
        """
        task.batch_id = batch_id
        out = UnitResult(model_version=self.engine.model_version, timeout=timeout or self.timeout)
        begun: list[float] = []
        try:
            cls = await self._workflow_class(task)
            portable = self._portable_task(cls, task)
            repeats = getattr(cls, "can_repeat", False)
            parts = [runs] if repeats else [range(run, run + 1) for run in runs]

            async def play(part: range) -> None:
                name = f"{batch_id}/{task.task_id}/{part.start}"
                own = UnitResult(timeout=out.timeout)
                try:
                    with self.played.shown(name, len(part), self.engine.model_version) as row:
                        async with AsyncExitStack() as over:
                            own_journal = None
                            if journal is not None:
                                own_journal = journal(part.start)
                                own.spent = own_journal.kept.seconds
                            models = [
                                self._model(self.engine, task, part.start, own_journal),
                                *self._auxiliary_models(task, own_journal),
                            ]
                            row["state"] = models[0].workflow_state
                            models[0].steps.random.seed(name)
                            if leases is not None:
                                models[0].leases = RunLeases(leases, part.start)
                            over.callback(models[0].leases.close)
                            for model in models:
                                await over.enter_async_context(aclosing(model))
                            if portable is not None:
                                await self._in_worker(portable, task, part, repeats, models, own, begun)
                            else:
                                begun.append(self.clock())
                                await self._in_this_process(cls, _copied(task), part, repeats, models, own)
                            for experience in own.experiences if models[0].steps.possibly_delivered else ():
                                experience.info["possibly_delivered"] = models[0].steps.possibly_delivered
                except Exception as e:
                    self._fail(e, part, own)
                out.add(own)

            waiting = iter(parts)

            async def play_on() -> None:
                for part in waiting:
                    await play(part)

            at_once = RUNS_AT_ONCE if portable is None or self.workers is None else self.workers.places
            if self.concurrent_mode == "sequential" or len(parts) == 1:
                await play_on()
            else:
                await asyncio.gather(*(play_on() for _ in range(min(len(parts), at_once))))
        except Exception as e:
            self._fail(e, runs, out)
        out.results.sort(key=lambda r: r.run)
        out.failures.sort(key=lambda f: f[0])
        out.experiences.sort(key=lambda e: (e.eid.run, e.eid.step))
        out.model_version_end = self.engine.model_version
        # Starting a process or importing a module does not count as the task's time.
        out.seconds = self.clock() - begun[0] if begun else 0.0
        return out

    def _failed(self, error: Exception, out: UnitResult) -> tuple[FailureKind, str]:
        if isinstance(error, errors.EngineError) and error.details.get("dead"):
            self.engine_dead = str(error)
        out.lacks = out.lacks or isinstance(error, errors.UnknownWorkflow)
        return outcome.classify(error, out.timeout, "max_timeout" if out.timeout == self.timeout else "dynamic_timeout")

    def _fail(self, error: Exception, runs: range, out: UnitResult) -> None:
        kind, message = self._failed(error, out)
        if len(runs) == 1 and isinstance(error, errors.DataError) and str(error.details.get("eid")).startswith("//"):
            message = f"run {runs.start}: {message}"  # the experience had no ids yet
        done = {r.run for r in out.results} | {f[0] for f in out.failures}
        out.failures.extend((run, kind, message) for run in runs if run not in done)

    async def _workflow_class(self, task: Task) -> type[Any]:
        if task.workflow is None:
            raise errors.UnknownWorkflow(f"task {task.task_id} names no workflow: set Task.workflow")
        if not isinstance(task.workflow, str):
            return task.workflow
        if task.workflow not in self._classes:
            self._classes[task.workflow] = await self._import_class(task.workflow)
        return self._classes[task.workflow]

    async def _import_class(self, name: str) -> type[Any]:
        """Return the class of this name. A user's module is imported first in a template process, then here."""
        path = self.registry.get(name, name)
        module, _, attribute = path.partition(":")
        if self.workers is None or not attribute or module.partition(".")[0] == "trinity_es":
            return resolve(name, self.registry, "workflow")
        async with self._imports.setdefault(module, asyncio.Lock()):
            if module not in sys.modules:
                await self.workers.templates.prepare(path)
                # In a thread: it may take seconds, and the loop must answer meanwhile.
                importing = asyncio.to_thread(resolve, name, self.registry, "workflow")
                try:
                    cls = await asyncio.wait_for(importing, START_SECONDS)
                except TimeoutError:
                    raise errors.WorkflowError(f"{name} was not imported after {START_SECONDS:.0f} s") from None
                if getattr(cls, "is_async", False):
                    self.workers.templates.forget(path)
                return cls
            return resolve(name, self.registry, "workflow")

    def _portable_task(self, cls: type[Any], task: Task) -> dict[str, Any] | None:
        """Return the task in the form for a worker process; None if it plays in this process."""
        if self.workers is None or getattr(cls, "is_async", False):
            return None
        try:
            # The name in the task first: a class that a function made can't be imported by its own name.
            path = class_path(task.workflow or cls)
            return {**task_to_dict(task), "workflow": self.registry.get(path, path)}
        except errors.TaskNotSerializable:
            return None

    async def _in_worker(
        self, portable: dict[str, Any], task: Task, runs: range, repeats: bool, models: Sequence[Model],
        out: UnitResult, begun: list[float],
    ) -> None:
        assert self.workers is not None
        limit = 0

        def begin() -> None:
            nonlocal limit
            begun.append(self.clock())
            self.limits.end(limit)  # called again if a worker ended before it took the runs
            limit = self._limit(out.seconds_left)

        try:
            done, dead = await self.workers.run(
                portable, batch_id=task.batch_id, task_id=task.task_id, runs=runs, models=models,
                timeout=out.seconds_left, begun=begin,
            )
        except TimeoutError as e:
            raise outcome.OutOfTime from e
        finally:
            self.limits.end(limit)
        for experience in done.experiences:  # the worker knows only the version at its last request
            experience.info["model_version_drift"] = self.engine.model_version - experience.info["model_version"]
        if repeats:  # the worker knows only the tokens of requests over its pipe
            done.results, out.other_tokens = outcome.shared(done.results, done.experiences, models[0].usage)
        else:
            done.results = [outcome.with_all(result, models[0].usage) for result in done.results]
        self.engine_dead = dead or self.engine_dead
        out.results.extend(done.results)
        out.experiences.extend(done.experiences)
        out.failures.extend(done.failures)
        out.lacks = out.lacks or done.lacks

    def _model(self, engine: Engine, task: Task, run: int, journal: RunJournal | None) -> Model:
        sampling = {**self.defaults, **task.rollout_args}
        if sampling.get("seed") is not None:
            sampling["seed"] += run  # runs of a task differ, and repeat with the same seed
        server = self.server if engine is self.engine else None
        graders = None if self.workers is None else self.workers.graders
        return Model(engine, defaults=sampling, server=server, graders=graders, journal=journal)

    def _auxiliary_models(self, task: Task, journal: RunJournal | None) -> list[Model]:
        key = f"{task.batch_id}/{task.task_id}"
        return [
            Model(a.engine, defaults=a.defaults, name=a.name, task=key, journal=journal) for a in self.auxiliary
        ]

    def _build(self, cls: type[Any], task: Task, models: Sequence[Model]) -> Any:
        model, *auxiliary = models
        try:
            if getattr(cls, "can_reset", False) and self._idle.get(cls):
                workflow = self._idle[cls].pop()
                workflow.model, workflow.auxiliary_model_wrappers = model, auxiliary or None
                workflow.reset(task)
                return workflow
            return cls(task=task, model=model, auxiliary_models=auxiliary or None)
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as e:
            raise outcome.error_of_exit(cls, e) from e

    async def _call(self, workflow: Any, model: Model, timeout: float | None, context: Context) -> list[Experience]:
        play = self._on_loop if type(workflow).is_async else self._off_loop
        limit = self._limit(timeout)
        try:
            returned = await play(workflow, timeout, context)
        except Exception as e:
            cause = model.cause(e)
            if cause is e:
                raise
            raise cause from e
        finally:
            self.limits.end(limit)
        if isinstance(returned, Experience):
            returned = [returned]
        name = type(workflow).__name__
        if not isinstance(returned, list):
            raise errors.WorkflowError(f"{name} returned {type(returned).__name__}: a list of Experience is expected")
        for number, item in enumerate(returned):
            if not isinstance(item, Experience):
                raise errors.WorkflowError(f"{name} returned a list whose item {number} is of type "
                                           f"{type(item).__name__}: a list of Experience is expected")
        if not returned and not getattr(workflow, "failed_runs", None):
            raise errors.WorkflowError(f"{name} completed without an experience: return at least one, or raise")
        return returned

    def _limit(self, timeout: float | None) -> int:
        return self.limits.begin(math.inf if timeout is None else self.clock() + timeout + GRACE_SECONDS)

    async def _on_loop(self, workflow: Any, timeout: float | None, context: Context) -> Any:
        """Return the result of `run_async`. Raises OutOfTime; then, or if cancelled itself, it cancels the workflow."""
        playing = asyncio.create_task(_run_async(workflow), context=context)
        self._playing.add(playing)
        playing.add_done_callback(self._over)
        try:
            await asyncio.wait({playing}, timeout=timeout)
            if playing.cancelled():
                raise outcome.error_of_exit(type(workflow), asyncio.CancelledError())
            if playing.done():
                return playing.result()
            raise outcome.OutOfTime
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing}, timeout=GRACE_SECONDS)
            if not playing.done():
                _log.warning("%s goes on after it was cancelled: its run is over", type(workflow).__name__)

    def _over(self, playing: asyncio.Task[Any]) -> None:
        self._playing.discard(playing)
        if not playing.cancelled():
            playing.exception()  # else asyncio logs that it was never retrieved

    async def _off_loop(self, workflow: Any, timeout: float | None, context: Context) -> Any:
        playing = asyncio.create_task(asyncio.to_thread(self._run_sync, workflow), context=context)
        try:
            await asyncio.wait({playing}, timeout=timeout)
            if not playing.done():
                raise outcome.OutOfTime
            return playing.result()
        finally:
            playing.cancel()

    @staticmethod
    def _run_sync(workflow: Any) -> Any:
        try:
            return workflow.run()
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as e:
            raise outcome.error_of_exit(type(workflow), e) from e

    async def _in_this_process(
        self, cls: type[Any], task: Task, runs: range, repeats: bool, models: Sequence[Model], out: UnitResult
    ) -> None:
        started, before, usage = self.clock(), self.engine.model_version, models[0].usage
        context = unit_context()
        n = len(runs) if repeats else task.rollout_args.get("n") or self.defaults.get("n") or 1
        # Workflows read the number of answers from `rollout_args.n`.
        shown = replace(task, rollout_args=Args({**task.rollout_args, "n": n}), reward_fn=_reward_class(task.reward_fn))
        workflow = context.run(self._build, cls, shown, models)
        if repeats:
            context.run(workflow.set_repeat_times, len(runs), runs.start)
        experiences = await self._call(workflow, models[0], out.seconds_left, context)
        seconds = self.clock() - started
        lost: dict[int, Exception] = getattr(workflow, "failed_runs", {}) if repeats else {}
        by_run = outcome.grouped_by_run(experiences, runs, cls.__name__, lost) if repeats else {runs.start: experiences}
        failed = len(out.failures)
        for run, group in by_run.items():
            try:
                if run in lost:
                    raise lost.pop(run)
                if not group:
                    raise errors.WorkflowError(f"{cls.__name__} gave no experience for run {run}")
                outcome.stamp_and_validate(group, task, run, before, self.engine.model_version)
                result = outcome.run_result(run, group, seconds)
            except Exception as e:
                out.failures.append((run, *self._failed(e, out)))
                continue
            out.results.append(result if repeats else outcome.with_all(result, usage))
            out.experiences.extend(group)
        if repeats:
            out.results, out.other_tokens = outcome.shared(out.results, out.experiences, usage)
        if cls.can_reset and (repeats or len(out.failures) == failed):
            self._idle.setdefault(cls, []).append(workflow)


def _copied(task: Task) -> Task:
    """Return a copy of a task whose row and arguments a run may change in place."""
    values = ("raw_task", "workflow_args", "reward_fn_args", "format_args", "rollout_args", "index")
    return replace(task, **{name: copy.deepcopy(getattr(task, name)) for name in values})


def _reward_class(reward: Any) -> Any:
    """Return the class of the reward that a task names, for workflows that build it; if there is none, `reward`."""
    try:
        cls = load(reward)
        return cls if isinstance(cls, type) and class_path(cls) == reward else reward
    except (Exception, SystemExit):
        return reward  # `reward_of` reports the error when the reward is needed


async def _run_async(workflow: Any) -> Any:
    """Await `run_async`, and raise WorkflowError if it raises SystemExit or KeyboardInterrupt, which end the loop."""
    try:
        return await workflow.run_async()
    except (SystemExit, KeyboardInterrupt) as e:
        raise outcome.error_of_exit(type(workflow), e) from e
