"""Thread of a runner with the engine, the workflows that call it, and the asyncio event loop that both share.

Methods that the actor calls return at once: they read a value, or schedule the work on the loop (`_on_loop`).
Everything else runs on the loop and reports to the actor's own loop (`tell`).

Workflows share this loop (rules in `shared_event_loop.py`), so each heartbeat checks every task that the engine depends
on. A reporting task that ended is restarted. If the endpoint or the engine ended, the runner ends. A unit (runs of one
task) that ended without an outcome counts as failed. If a unit goes on after its timeout or blocks the loop, it counts
as failed too, and the runner ends without a strike for its other units.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, cast

import orjson

from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.engines.draining_engine import FinishingEngine
from trinity_es.actors.engines.http.auxiliary_engine import RemoteEngine, remote_models
from trinity_es.actors.engines.interface import Engine, EngineConfig, ReceivesWeights
from trinity_es.actors.messages import JoinGroup, LeaseChange, LoadAdapters, LoadWeights, UnitAssignment, UnitOutcome
from trinity_es.actors.plugin_lookup import resolve
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.actors.rollout.shared_event_loop import UNIT, EngineLoop, mark_as_runner
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import AuxiliaryModel, WorkflowRunner
from trinity_es.actors.runner.adapters import AdaptersLoaded, serve_adapters
from trinity_es.actors.runner.adaptive_places import Places
from trinity_es.actors.runner.journal_writer import Journal
from trinity_es.actors.runner.lease_reports import UnitLeases
from trinity_es.actors.runner.outbox import Key
from trinity_es.actors.runner.unit_reports import Reporter, run_numbers
from trinity_es.actors.runner_activity import RunActivity
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.events.errors import CorruptPayload, DataError, EngineError, PayloadNotFound, SyncError, TrinityError
from trinity_es.events.journal import KeptRun, Run, attempt, kept_runs
from trinity_es.events.secrets import SecretFile
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.values import task_from_dict

__all__ = ["EngineThread"]

FINISHING_SHARE = 0.5
"""Share of `sync_timeout` in which open requests may end; the rest is for loading the weights."""
EXIT_ENGINE_DEAD = 5
"""Exit status of a runner whose engine, or engine's loop, died."""
LAST_WORDS_SECONDS = 1.0
"""How long a runner with a dead engine may take to report finished units."""
LOST_SECONDS = 120.0
"""How long the journal of a unit that failed with kind `infra` is kept, so that the coordinator can read it."""
LATE_SECONDS = 5.0
"""How long a run may go on after its timeout, while the loop is not blocked, before the runner ends because of it."""

_P = ParamSpec("_P")


def _on_loop(work: Callable[Concatenate[EngineThread, _P], Any]) -> Callable[Concatenate[EngineThread, _P], None]:
    """Return a method that schedules `work` on the engine's loop, from any thread, and returns at once."""

    is_async = inspect.iscoroutinefunction(work)

    @functools.wraps(work)
    def scheduled(self: EngineThread, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if is_async:
            asyncio.run_coroutine_threadsafe(work(self, *args, **kwargs), self.loop)
        else:
            self.loop.call_soon_threadsafe(functools.partial(work, self, *args, **kwargs))

    return scheduled


class EngineOwner(Protocol):
    """Runner that an `EngineThread` reports to. `post` may be called from any thread, the others from its own loop."""

    state: str
    incarnation: int

    def post(self, call: Callable[[], None]) -> None: ...
    def become(self, state: str, reason: str, seconds: float) -> None: ...
    def announce(self) -> None: ...
    def give_up(self, key: Key, reason: str) -> None: ...
    def report(self, outcomes: list[UnitOutcome]) -> None: ...
    def lease_changed(self, change: LeaseChange, when_recorded: Future[Any]) -> None: ...
    def weights_done(self, version: int, seconds: float, error: str | None) -> None: ...
    def adapters_done(self, number: int, done: AdaptersLoaded) -> None: ...
    def group_joined(self, id: str, error: str | None) -> None: ...


class EngineThread:
    """Engine and workflows of a runner, on an event loop in a thread of its own.

    The thread reads the owner's state directly, and reports by calls on the owner's loop (`tell`).
    """

    def __init__(
        self, owner: EngineOwner, name: str, model: str, engine: EngineConfig, config: LaunchedConfig,
        log: logging.Logger
    ) -> None:
        self.owner, self.name, self.model, self.config, self.log = owner, name, model, config, log
        self.model_config, self.engine_config = config.models[model], engine
        self.places = Places(config.explorer.max_concurrency)
        self.engine: Engine | None = None
        self.server: EngineServer | None = None
        self.workers: WorkerPool | None = None
        self.workflows: WorkflowRunner | None = None
        self.is_ending = False
        self.patience = config.synchronizer.sync_timeout
        """Timeout in seconds for weights from the trainer."""
        self.secrets = SecretFile(config.system.log_dir)
        self.auxiliary: dict[str, RemoteEngine] = {}
        self.endpoints: dict[str, dict[str, str]] = {}
        self.units: dict[Key, asyncio.Task[None]] = {}
        mark_as_runner()
        self.loop = EngineLoop(self.places.count * 4 + 8)
        self.adapters_lock = asyncio.Lock()
        self.reporter = Reporter(config.store, functools.partial(self.tell, owner.report), log, config.payloads_place)
        self.report_task: asyncio.Task[None]
        self.journal: Journal | None = None

    # --- for the actor, in its own thread ---------------------------------------------------------------------------
    def start(self) -> None:
        threading.Thread(target=self.run_loop, name="engine", daemon=True).start()

    @property
    def model_version(self) -> int:
        return self.engine.model_version if self.engine is not None else 0

    @property
    def adapters(self) -> dict[str, int]:
        return dict(getattr(self.engine, "adapters", {}))

    @property
    def engine_version(self) -> str:
        return getattr(self.engine, "version", "")

    @property
    def waits_for(self) -> str:
        """External action that the engine waits for before it can start or answer again; empty if none."""
        return getattr(self.engine, "waits_for", "")

    @property
    def runs_wait(self) -> str:
        """Reason outside of this runner why its runs wait, as a run or the engine reports it; empty if none."""
        return self.activity.waiting_text() or getattr(self.engine, "runs_wait", "")

    @property
    def url(self) -> str:
        return self.server.url if self.server is not None else ""

    @property
    def activity(self) -> RunActivity:
        return RunActivity() if self.workflows is None else self.workflows.activity

    # --- on the loop ------------------------------------------------------------------------------------------------
    def tell(self, method: Callable[..., None], *args: Any) -> None:
        """Schedule a call of one of the actor's methods on the actor's own loop."""
        self.owner.post(functools.partial(method, *args))

    def run_loop(self) -> None:
        """Start the engine and run the loop until this process ends. If the loop breaks, end this process."""
        mark_as_runner()
        asyncio.set_event_loop(self.loop)
        self.start_task = self.loop.create_task(self.start_engine())
        try:
            self.loop.run()
        finally:  # nothing would ever be answered again, so a new runner is better
            os._exit(EXIT_ENGINE_DEAD)

    @_on_loop
    def ping(self, answer: Callable[[], None]) -> None:
        """Call `answer`, which shows that the loop is not blocked, then check the tasks that the engine depends on.

        Restart a report task that ended, end this runner if engine or endpoint is dead, and give up overdue units.
        """
        answer()
        if self.is_ending or self.workflows is None:
            return
        if self.report_task.done():
            self.log.error("the task that reports outcomes ended: it is started again")
            self.report_task = self.loop.create_task(self.reporter.run())
        death_reason = getattr(self.engine, "dead", None)
        if death_reason is None and self.server is not None and not self.server.serves():
            death_reason = "its HTTP endpoint ended"
        if death_reason is not None:
            self.end_with_engine(death_reason)
        for key in self.workflows.limits.overdue(time.monotonic(), LATE_SECONDS):
            self.tell(self.owner.give_up, key, "its workflow still runs after its timeout, and can't be cancelled")

    async def start_engine(self) -> None:
        """Start the engine, its HTTP endpoint and what runs need; then set the actor's state to "ready" or "failed"."""
        started_at = time.monotonic()
        if self.model == "rollout":
            self.workers = self.warm_workers()
        try:
            await self.reporter.in_thread(self.reporter.open)
            if self.model == "rollout" and self.config.auxiliary:
                token = engine_token(read_key())
                self.auxiliary = await self.loop.run_in_executor(None, remote_models, self.config.auxiliary, token)
                for name, engine in self.auxiliary.items():
                    engine.update(self.endpoints.get(name, {}))
            self.engine = resolve(self.model_config.engine_class, {}, "engine")(self.engine_config)
            if self.model == "rollout":
                self.places.watch(self.engine, lambda: self.tell(self.owner.announce), self.workers)
            await self.engine.start()
            if self.model == "rollout" and self.config.synchronizer.in_flight == "finish":
                self.engine = cast(Engine, FinishingEngine(self.engine, self.patience * FINISHING_SHARE))
            self.server = await self.serve(self.engine)
        except BaseException as e:
            self.log.error("the engine did not start", exc_info=e)
            self.tell(self.owner.become, "failed", _error_text(e), 0.0)
            return
        if self.model != "rollout":
            self.places.resize(0)
            self.tell(self.owner.become, "ready", "", time.monotonic() - started_at)
            return
        self.workflows = WorkflowRunner(
            self.engine, defaults=self.config.rollout.rollout_args(),
            auxiliary=[AuxiliaryModel(name, engine, engine.defaults) for name, engine in self.auxiliary.items()],
            concurrent_mode=self.config.explorer.concurrent_mode, timeout=self.config.explorer.max_timeout,
            workers=self.workers, server=self.server,
        )
        self.report_task = self.loop.create_task(self.reporter.run())
        progress, store = self.config.explorer.progress, self.config.store
        if progress.seconds:
            open_store = functools.partial(open_journals, store.url, durability=store.durability)
            self.journal = Journal(open_store, (self.name, self.owner.incarnation), progress, self.log)
            self.journal_task = self.loop.create_task(self.journal.run())
        self.tell(self.owner.become, "ready", "", time.monotonic() - started_at)

    def warm_workers(self) -> WorkerPool:
        """Return the pool of worker processes, which import the workflows' modules while the engine loads.

        With vLLM they import torch too: it takes seconds, and most rewards need it.
        """
        pool = WorkerPool(self.places.count, log_file=os.path.join(self.config.system.log_dir, f"{self.name}.log"))
        imports = [*(["torch:Tensor"] if self.model_config.engine_type == "vllm" else []), *self.config.workflows]
        if imports:
            self.warm_task = self.loop.create_task(pool.warm(imports))
        return pool

    async def serve(self, engine: Engine) -> EngineServer:
        """Start and return the engine's HTTP endpoint. If it fails, stop the engine, since no client could reach it."""
        try:
            name = (self.model_config.model_path if self.model == "rollout" else "") or self.model
            server = EngineServer(
                engine, name=name, token=engine_token(read_key()), address=self.config.system.address,
                defaults=self.model_config.rollout_args(), exact=self.model != "rollout", on_dead=self.end_with_engine,
            )
            await server.start()
        except BaseException:
            await engine.stop()
            raise
        return server

    @_on_loop
    def update_auxiliary(self, endpoints: dict[str, dict[str, str]]) -> None:
        self.endpoints = endpoints
        for name, engine in self.auxiliary.items():
            engine.update(endpoints.get(name, {}))

    @_on_loop
    async def stop(self, stopped: Callable[[], None]) -> None:
        """Stop all units and the engine; then have the actor call `stopped`."""
        self.is_ending = True
        for key in list(self.units):
            self._stop_unit(key)  # so that no unit reports errors of the closing engine or of a killed worker
        try:
            if self.workers is not None:
                await self.workers.close()
            if self.server is not None:
                await self.server.stop()
            if self.engine is not None:
                await self.engine.stop()
        finally:
            self.tell(stopped)

    @_on_loop
    def begin(self, key: Key, item: UnitAssignment) -> None:
        self._stop_unit(key)
        task = self.units[key] = self.loop.create_task(self.run_unit(key, item))
        task.add_done_callback(lambda task: self._fail_without_outcome(key, item, task))

    def _fail_without_outcome(self, key: Key, item: UnitAssignment, task: asyncio.Task[None]) -> None:
        """Report a unit (runs of one task) as failed if its asyncio task ended by itself, without an outcome."""
        self.loop.forget(key)
        if self.units.get(key) is not task:
            return
        del self.units[key]
        outcome = "was cancelled" if task.cancelled() else f"ended: {task.exception()!r}"
        self.log.error("the task of unit %s %s", key, outcome)
        message = f"the task that ran it {outcome}, by a workflow on the same loop"
        result = UnitResult(failures=[(run, "workflow", message) for run in run_numbers(item.unit)])
        self.reporter.finished.put_nowait((item, result))

    @_on_loop
    def stop_unit(self, key: Key) -> None:
        self._stop_unit(key)
        if self.journal is not None:
            self.journal.release(key)

    @_on_loop
    def free_journals(self, keys: list[Key], lost: list[Key]) -> None:
        """Delete the journal of units whose outcomes are in the log; that of `lost` units after LOST_SECONDS."""
        self._free_journal(keys)
        if lost:
            self.loop.call_later(LOST_SECONDS, self._free_journal, lost)

    def _free_journal(self, keys: list[Key]) -> None:
        """Delete the journal of these units (runs of one task each), except of those that run again here."""
        for key in keys:
            if self.journal is not None and key not in self.units:
                self.journal.release(key)

    def _stop_unit(self, key: Key) -> None:
        """Cancel a unit's asyncio task, if there is one, without an outcome."""
        task = self.units.pop(key, None)
        if task is not None:
            task.cancel()

    async def run_unit(self, key: Key, item: UnitAssignment) -> None:
        """Execute a unit (runs of one task) once a place is free; report its result. A dead engine ends the runner."""
        UNIT.set(key)
        async with self.places:
            runs = run_numbers(item.unit)
            try:
                data = item.task
                if data is None:
                    data = await self.reporter.in_thread(self.reporter.payloads.get, item.task_digest or "")
                revealed = self.secrets.reveal(orjson.loads(data))
                task = task_from_dict(revealed, batch_id=item.batch_id, task_id=item.unit.task)
                assert self.workflows is not None  # no unit comes before this runner is ready
                leases = UnitLeases(functools.partial(self.tell, self.owner.lease_changed), item, self.secrets)
                make_journal = await self.journal_maker(key, item)
                result = await self.workflows.execute(
                    task, item.batch_id, runs, timeout=item.timeout or None, leases=leases, journal=make_journal
                )
            except asyncio.CancelledError:
                raise
            except BaseException as e:
                lacks = isinstance(e, DataError)  # a secret that this host does not have
                text = f"{type(e).__name__}: {e}"
                result = UnitResult(failures=[(run, "infra", text) for run in runs], lacks=lacks)
        result.failures = [(run, kind, self.secrets.scrubbed(message)) for run, kind, message in result.failures]
        self.units.pop(key, None)
        self.reporter.finished.put_nowait((item, result))
        if self.workflows is not None and self.workflows.engine_dead is not None:
            self.end_with_engine(self.workflows.engine_dead)

    async def journal_maker(self, key: Key, item: UnitAssignment) -> Callable[[int], RunJournal] | None:
        """Return a function that makes the journal of a run with earlier attempts' records; None without a journal."""
        if (journal := self.journal) is None:
            return None
        kept: dict[int, KeptRun] = {}
        if item.kept:
            try:
                kept = kept_runs([await self.reporter.in_thread(self.reporter.payloads.get, item.kept)])
            except (PayloadNotFound, CorruptPayload) as e:
                self.log.warning("unit %s begins at its prompt, since earlier attempts' records are lost: %s", key, e)
        journal.begin(key)

        def identity(run: int) -> Run:
            return item.batch_id, item.submission, item.unit.task, run

        if item.unit.attempt > 1:
            await journal.write([attempt(identity(run), item.unit.attempt) for run in run_numbers(item.unit)])
        return lambda run: RunJournal(identity(run), journal, kept.get(run))

    def end_with_engine(self, reason: str) -> None:
        """End this runner because its engine is dead. Finished units are reported first; the guardian replaces it."""
        if self.owner.state != "ready" or self.is_ending:
            return
        self.is_ending = True
        self.log.error("the engine is dead: %s", reason)
        self.tell(self.owner.become, "failed", f"its engine ended: {reason}", 0.0)
        self.loop.call_later(LAST_WORDS_SECONDS, os._exit, EXIT_ENGINE_DEAD)

    @_on_loop
    async def load_weights(self, message: LoadWeights) -> None:
        """Load weights from a folder, or by the trainer's broadcast. The result goes to the runner's `weights_done`."""
        started_at = time.monotonic()
        error = None
        try:
            assert self.engine is not None
            if message.from_group:
                receiver = cast(ReceivesWeights, self.engine)
                await receiver.receive_weights(message.version, message.path, self.patience)
            else:
                await self.engine.load_weights(message.version, message.path)
        except BaseException as e:
            error = self.report_load_error("weights not loaded", e)
        self.tell(self.owner.weights_done, message.version, time.monotonic() - started_at, error)

    @_on_loop
    async def load_adapters(self, message: LoadAdapters) -> None:
        """Serve exactly the adapters that the message lists. The result goes to the runner's `adapters_done`."""
        async with self.adapters_lock:
            result = await serve_adapters(self.engine, message.adapters, self.report_load_error)
        self.tell(self.owner.adapters_done, message.number, result)

    @_on_loop
    async def join_group(self, message: JoinGroup) -> None:
        """Join the group in which the trainer broadcasts weights. The result goes to the runner's `group_joined`."""
        error = None
        try:
            engine = cast(ReceivesWeights, self.engine)
            if not hasattr(engine, "join_weight_group"):
                name = self.model_config.engine_class
                raise SyncError(f"{name} can't join a group for weights: use sync_method checkpoint or memory")
            await engine.join_weight_group(
                message.address, message.port, message.rank_offset, message.world_size, self.patience
            )
        except BaseException as e:
            error = self.report_load_error("the engine did not join the group for weights", e)
        self.tell(self.owner.group_joined, message.id, error)

    def report_load_error(self, what: str, error: BaseException) -> str:
        """Log that loading failed, and return the error's text. If the engine is dead, end this runner."""
        self.log.error(what, exc_info=error)
        text = _error_text(error)
        if isinstance(error, EngineError) and error.details.get("dead"):
            self.end_with_engine(text)
        return text


def _error_text(error: BaseException) -> str:
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
