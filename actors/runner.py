"""A runner: one inference engine, and the workflows that play on it.

The actor's loop only passes things on. Engine and workflows live on an asyncio loop in a thread of this process; what
they finish is collected there, written to the payload store and reported in groups: while one group is written the
next one gathers, so a group is as large as the store is slow. A group is kept until the coordinator says that it is in
the log, and is sent again to whichever coordinator comes next.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import orjson

from actors.base import SafeActor
from actors.decisions import MESSAGE_LIMIT
from actors.door import FILE_VARIABLE, engine_token, read_key
from actors.engines import Engine, EngineConfig, ReceivesWeights
from actors.execution import AuxiliaryModel, Execution, WorkflowRunner, resolve
from actors.gpus import chosen, visible
from actors.messages import (
    LIMIT,
    Alive,
    CoordinatorUp,
    Endpoints,
    GroupJoined,
    Hello,
    JoinGroup,
    LoadWeights,
    Outcome,
    Outcomes,
    Retire,
    Revoke,
    RunnerState,
    RunnerUp,
    StartRunner,
    TellState,
    WeightsDone,
    Work,
    WorkItem,
)
from actors.remote import RemoteEngine, engine_routes, remote_models
from actors.serving import EngineServer
from actors.states import Played, runner_state
from actors.workers import WorkerPool
from events.errors import EngineError, SyncError, TrinityError
from events.experience import Experience
from events.payloads import PayloadStore, open_payloads, patient
from events.retrying import once, patiently
from events.values import BatchId, FailureKind, task_from_dict
from events.vocabulary import PayloadRef

__all__ = ["Runner"]

EXIT_ENGINE_DEAD = 5
"""Exit status of a runner whose engine, or engine's loop, died."""
BEAT_SECONDS = 2.0
"""Between two heartbeats."""
ANNOUNCE_BEATS = 5
"""So many beats between two RunnerUp messages, from which a coordinator sees what was lost on the way."""
RESEND_SECONDS = 5.0
"""Outcomes that were not acknowledged for so long are sent again."""
REMEMBERED_UNITS = 20_000
"""Units whose outcome is in the log and that would not be run again if they came again."""
STORE_SECONDS = 2.0
"""So long is the payload store waited for in each of many tries."""
LAST_WORDS_SECONDS = 1.0
"""So long may a runner with a dead engine take to hand in what is finished."""

Key = tuple[BatchId, str, int, int]
"""Which unit: batch, submission, task, first run."""


class Runner(SafeActor):
    """See the module. Started by the guardian with StartRunner."""

    # --- the actor's side -------------------------------------------------------------------------------------------
    def on_StartRunner(self, message: StartRunner, sender: Any) -> None:
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)  # engine and worker processes are ended with this one, as a group
        self.name, self.incarnation, self.config = message.name, message.incarnation, message.config
        self.model, self.how = message.model, self.config["auxiliary"].get(message.model) or {
            "engine_type": self.config["explorer"]["rollout_model"]["engine_type"],
            "engine_class": self.config["engine_class"],
            "engine": self.config["engine"],
            "rollout_args": self.config["rollout_args"],
        }
        gpus = chosen(visible(), message.first_gpu, self.how["engine"]["tensor_parallel_size"])
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self.guardian = sender
        self.open_log(self.config["system"]["log_dir"], self.name)
        self.start_watch()
        self.add_code_path(self.config["code_path"])
        self.coordinator: Any = None
        self.epoch = 0
        self.state, self.reason = "started", ""
        self.load_seconds = 0.0
        self.places = int(self.config["explorer"]["places"])
        self.unacked: dict[int, Outcomes] = {}
        self.sent: dict[int, float] = {}
        self.number = 0
        self.settled: OrderedDict[tuple[Key, int], None] = OrderedDict()
        self.loading: int | None = None
        self.beats = 0
        self.answered = self.now()
        self.units: dict[Key, asyncio.Task[None] | None] = {}
        self.attempts: dict[Key, int] = {}
        self.engine: Engine | None = None
        self.server: EngineServer | None = None
        self.workers: WorkerPool | None = None
        self.workflows: WorkflowRunner | None = None
        self.ending = False
        self.auxiliary: dict[str, RemoteEngine] = {}
        self.endpoints: dict[str, dict[str, str]] = {}
        self.loop = asyncio.new_event_loop()
        self.finished: asyncio.Queue[tuple[WorkItem, Execution]] = asyncio.Queue()
        self.send(self.guardian, Hello(self.name, self.incarnation, os.getpid()))
        threading.Thread(target=self.run_loop, name="engine", daemon=True).start()
        self.beat()

    def on_CoordinatorUp(self, message: CoordinatorUp, sender: Any) -> None:
        """A coordinator to report to: tell it who this is and what it has, and all that was never acknowledged."""
        self.coordinator, self.epoch = message.coordinator, message.epoch
        self.announce()
        for number, group in self.unacked.items():
            self.sent[number] = self.now()
            self.send(self.coordinator, group)

    def beat(self) -> None:
        """Tell that this process lives and whether its engine's loop does; send again what may have been lost."""
        self.after(BEAT_SECONDS, "beat", self.beat)
        now = self.now()

        def answered() -> None:
            self.answered = now

        self.loop.call_soon_threadsafe(lambda: self.post(answered))
        silent = max(0.0, now - self.answered - BEAT_SECONDS)
        alive = Alive(self.name, self.incarnation, silent, self.epoch)
        for to in (self.coordinator, self.guardian):
            if to is not None:
                self.send(to, alive)
        self.beats += 1
        if self.coordinator is None:
            return
        if self.beats % ANNOUNCE_BEATS == 0:
            self.announce()
        for number, group in self.unacked.items():
            if now - self.sent[number] > RESEND_SECONDS:
                self.sent[number] = now
                self.send(self.coordinator, group)

    def announce(self) -> None:
        running: dict[tuple[BatchId, str], list[tuple[int, int, int]]] = {}
        for (batch_id, submission, task, base), attempt in self.attempts.items():
            running.setdefault((batch_id, submission), []).append((task, base, attempt))
        up = RunnerUp(
            name=self.name,
            incarnation=self.incarnation,
            state=self.state,
            pid=os.getpid(),
            host=socket.gethostname(),
            engine=self.how["engine_type"],
            places=self.places,
            model_version=self.engine.model_version if self.engine is not None else 0,
            load_seconds=self.load_seconds,
            reason=self.reason,
            loading=self.loading,
            running=tuple((*key, tuple(units)) for key, units in running.items()),
            endpoint=self.server.url if self.server is not None and self.state == "ready" else "",
            model=self.model,
            engine_version=getattr(self.engine, "version", "") if self.state == "ready" else "",
        )
        for to in (self.coordinator, self.guardian):
            if to is not None:
                self.send(to, up)

    def on_Work(self, message: Work, sender: Any) -> None:
        if message.incarnation != self.incarnation:
            return
        for number in message.acks:
            self.sent.pop(number, None)
            group = self.unacked.pop(number, None)
            for outcome in group.outcomes if group is not None else []:
                self.settled[_key(outcome), outcome.unit.attempt] = None
                if self.attempts.get(_key(outcome)) == outcome.unit.attempt:
                    del self.attempts[_key(outcome)]
        while len(self.settled) > REMEMBERED_UNITS:
            self.settled.popitem(last=False)
        if self.state != "ready":
            return  # nothing could run it; what this runner says when it is ready brings it again
        for item in message.items:
            key = (item.batch_id, item.submission, item.unit.task, item.unit.run_id_base)
            if self.attempts.get(key, 0) >= item.unit.attempt or (key, item.unit.attempt) in self.settled:
                continue  # it was sent twice
            self.attempts[key] = item.unit.attempt
            self.loop.call_soon_threadsafe(self.begin, key, item)

    def on_Revoke(self, message: Revoke, sender: Any) -> None:
        if message.incarnation == self.incarnation:
            for task, base in message.units:
                key = (message.batch_id, message.submission, task, base)
                self.attempts.pop(key, None)
                self.loop.call_soon_threadsafe(self.stop_unit, key)

    def on_Endpoints(self, message: Endpoints, sender: Any) -> None:
        self.endpoints = message.models
        self.loop.call_soon_threadsafe(self.update_auxiliary)

    def on_TellState(self, message: TellState, sender: Any) -> None:
        if message.incarnation != self.incarnation:
            return
        state = runner_state(
            Played() if self.workflows is None else self.workflows.played,
            runner=self.name,
            incarnation=self.incarnation,
            model=self.model,
            state=self.state,
            model_version=self.engine.model_version if self.engine is not None else 0,
            units=len(self.attempts),
        )
        self.send(sender, RunnerState(self.name, self.incarnation, message.id, state))

    def on_LoadWeights(self, message: LoadWeights, sender: Any) -> None:
        if message.incarnation == self.incarnation and self.loading != message.version:  # else it was sent twice
            self.loading = message.version
            asyncio.run_coroutine_threadsafe(self.load_weights(message), self.loop)

    def on_JoinGroup(self, message: JoinGroup, sender: Any) -> None:
        if message.incarnation == self.incarnation:
            asyncio.run_coroutine_threadsafe(self.join_group(message), self.loop)

    def on_Retire(self, message: Retire, sender: Any) -> None:
        def retired() -> None:
            self.state = "retired"
            self.announce()

        async def stop() -> None:
            for key in list(self.units):
                self.stop_unit(key)  # what a closing engine or a killed worker would make of them is no outcome
            try:
                if self.workers is not None:
                    await self.workers.close()
                if self.server is not None:
                    await self.server.stop()
                if self.engine is not None:
                    await self.engine.stop()
            finally:
                self.post(retired)

        asyncio.run_coroutine_threadsafe(stop(), self.loop)

    def report(self, outcomes: list[Outcome]) -> None:
        """In the actor's loop: a group is safe in the payload store; now the coordinator may know."""
        self.number += 1
        group = Outcomes(self.name, self.incarnation, self.number, outcomes)
        self.unacked[self.number], self.sent[self.number] = group, self.now()
        if self.coordinator is not None:
            self.send(self.coordinator, group)

    # --- the engine's side: everything below runs on the loop's thread ---------------------------------------------
    def run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        # For the engine, and for async workflows that use threads; sync workflows have worker processes.
        self.loop.set_default_executor(ThreadPoolExecutor(self.places * 4 + 8, thread_name_prefix="workflow"))
        self.storing = ThreadPoolExecutor(1, thread_name_prefix="store")  # goes on where every workflow hangs
        self.starting = self.loop.create_task(self.start_engine())
        try:
            self.loop.run_forever()
        finally:  # nothing would ever be answered again: better a new runner
            os._exit(EXIT_ENGINE_DEAD)

    async def start_engine(self) -> None:
        started = time.monotonic()
        try:
            self.payloads: PayloadStore = await self.loop.run_in_executor(self.storing, self.open_payloads)
            if self.model == "rollout" and self.config["auxiliary"]:
                self.auxiliary = await self.loop.run_in_executor(None, self.remote_models)
                self.update_auxiliary()
            cls = resolve(self.how["engine_class"], {}, "engine")
            self.engine = cls(EngineConfig(**self.how["engine"]))
            await self.engine.start()
            self.server = await self.serve(self.engine)
        except BaseException as e:
            self.log.error("the engine did not start", exc_info=e)
            reason = str(e) if isinstance(e, TrinityError) else f"{type(e).__name__}: {e}"
            self.post(lambda: self.become("failed", reason, 0.0))
            return
        seconds = time.monotonic() - started
        if self.model != "rollout":
            self.places = 0
            self.post(lambda: self.become("ready", "", seconds))
            return
        log_file = os.path.join(self.config["system"]["log_dir"], f"{self.name}.log")
        self.workers = WorkerPool(self.places, log_file=log_file)
        self.workflows = WorkflowRunner(
            self.engine,
            clock=time.monotonic,
            registry={},  # clients send paths
            auxiliary=[AuxiliaryModel(name, engine, engine.defaults) for name, engine in self.auxiliary.items()],
            defaults=self.config["rollout_args"],
            concurrent_mode=self.config["explorer"]["concurrent_mode"],
            timeout=self.config["explorer"]["max_timeout"],
            workers=self.workers,
            server=self.server,
        )
        self.room = asyncio.Semaphore(self.places)
        self.reporting = self.loop.create_task(self.reporter())
        seconds = time.monotonic() - started
        self.post(lambda: self.become("ready", "", seconds))

    async def serve(self, engine: Engine) -> EngineServer:
        """The engine's HTTP endpoint. What can't be reached by it is no runner: the engine is stopped then."""
        try:
            server = EngineServer(
                engine,
                name=self.config["engine"]["model_path"] or "rollout" if self.model == "rollout" else self.model,
                token=self.token(),
                address=self.config["system"]["address"],
                defaults=self.how["rollout_args"],
                routes=engine_routes(engine, self.end_with_engine) if self.model != "rollout" else {},
                on_dead=self.end_with_engine,
            )
            await server.start()
        except BaseException:
            await engine.stop()
            raise
        return server

    @staticmethod
    def token() -> str:
        return engine_token(read_key(os.environ.get(FILE_VARIABLE, "")))

    def remote_models(self) -> dict[str, RemoteEngine]:
        return remote_models(self.config["auxiliary"], lambda name: resolve(name, {}, "engine"), self.token())

    def update_auxiliary(self) -> None:
        """Where the auxiliary models are asked, as the guardian told last."""
        for name, engine in self.auxiliary.items():
            engine.update(self.endpoints.get(name, {}))

    def become(self, state: str, reason: str, seconds: float) -> None:
        if self.state == "retired":
            return  # it was told to stop while its engine loaded
        self.state, self.reason, self.load_seconds = state, reason, seconds
        self.announce()

    def begin(self, key: Key, item: WorkItem) -> None:
        self.stop_unit(key)
        self.units[key] = self.loop.create_task(self.run_unit(key, item))

    def stop_unit(self, key: Key) -> None:
        running = self.units.pop(key, None)
        if running is not None:
            running.cancel()

    async def run_unit(self, key: Key, item: WorkItem) -> None:
        async with self.room:
            unit = item.unit
            runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
            try:
                data = item.task
                if data is None:
                    data = await self.loop.run_in_executor(self.storing, self.payloads.get, item.task_digest or "")
                task = task_from_dict(orjson.loads(data), batch_id=item.batch_id, task_id=unit.task)
                assert self.workflows is not None  # no unit comes before this runner is ready
                done = await self.workflows.execute(task, item.batch_id, runs, timeout=item.timeout or None)
            except asyncio.CancelledError:
                raise
            except BaseException as e:
                done = Execution(failures=[(run, "infra", f"{type(e).__name__}: {e}") for run in runs])
        self.units.pop(key, None)
        self.finished.put_nowait((item, done))
        dead = self.workflows.engine_dead if self.workflows is not None else None
        if dead is not None:
            self.end_with_engine(dead)

    def end_with_engine(self, reason: str) -> None:
        """The engine is gone for good: say so, hand in what is finished, and end; the guardian starts another."""
        if self.state != "ready" or self.ending:
            return
        self.ending = True
        self.log.error("the engine is dead: %s", reason)
        self.post(lambda: self.become("failed", f"engine died: {reason}", 0.0))
        self.loop.call_later(LAST_WORDS_SECONDS, os._exit, EXIT_ENGINE_DEAD)

    async def reporter(self) -> None:
        """Write and report what is finished, group by group."""
        while True:
            group = [await self.finished.get()]
            while not self.finished.empty():
                group.append(self.finished.get_nowait())
            try:
                outcomes = await self.loop.run_in_executor(self.storing, self.write, group)
            except BaseException as e:  # the payload store is full or gone for long: an attempt failed, nothing is lost
                self.log.error("payloads not written", exc_info=e)
                message = f"payload not written: {type(e).__name__}: {e}"
                outcomes = [_failed(item, "infra", message) for item, _ in group]
            for part in _in_parts(outcomes):
                self.post(lambda p=part: self.report(p))  # type: ignore[misc]  # binds the loop's value

    def open_payloads(self) -> PayloadStore:
        """The payload store; a database that is away is waited for, here and in each call: what is done is dear."""
        store = self.config["store"]
        opened = patiently(
            lambda: open_payloads(store["url"], durability=store["durability"], patience=STORE_SECONDS),
            seconds=store["retry_for"],
            tell=once(lambda e: self.log.warning("waiting for the payload store: %s", e)),
        )
        return patient(opened, store["retry_for"])

    def write(self, group: list[tuple[WorkItem, Execution]]) -> list[Outcome]:
        """One payload for all experiences of the group, and an outcome for each unit of it."""
        kept = [done.experiences if item.keep_experiences else [] for item, done in group]
        broken: dict[int, str] = {}
        try:
            data = Experience.serialize_many([e for part in kept for e in part])
        except TrinityError:  # one of them can't be written: find it, keep the others
            for index, part in enumerate(kept):
                try:
                    Experience.serialize_many(part)
                except TrinityError as e:
                    broken[index], kept[index] = str(e), []
            data = Experience.serialize_many([e for part in kept for e in part])
        digest = self.payloads.put(data) if any(kept) else ""
        first = 0
        outcomes = []
        for index, (item, done) in enumerate(group):
            if index in broken:
                outcomes.append(_failed(item, "data", broken[index]))
                continue
            outcome = Outcome(
                batch_id=item.batch_id,
                submission=item.submission,
                unit=item.unit,
                results=done.results,
                failures=_brief(done.failures),
                payload=PayloadRef(digest=digest, first=first, count=len(kept[index])) if kept[index] else None,
                model_version=done.model_version,
                model_version_end=done.model_version_end,
                seconds=done.seconds,
            )
            first += len(kept[index])
            try:
                if _size(outcome) > LIMIT:
                    outcome = _failed(item, "data", f"its metrics take {_size(outcome)} bytes: {LIMIT} is the most")
            except TypeError as e:
                outcome = _failed(item, "data", f"its metrics can't be recorded: {e}")
            outcomes.append(outcome)
        return outcomes

    async def load_weights(self, message: LoadWeights) -> None:
        started = time.monotonic()
        error = None
        try:
            assert self.engine is not None
            if message.from_group:
                receiving = cast(ReceivesWeights, self.engine)
                await receiving.receive_weights(message.version, message.path, self.patience)
            else:
                await self.engine.load_weights(message.version, message.path)
        except BaseException as e:
            self.log.error("weights not loaded", exc_info=e)
            error = str(e) if isinstance(e, TrinityError) else f"{type(e).__name__}: {e}"
            if isinstance(e, EngineError) and e.details.get("dead"):
                self.end_with_engine(error)
        done = WeightsDone(self.name, self.incarnation, message.version, time.monotonic() - started, error)
        self.post(lambda: self.weights_done(done))

    @property
    def patience(self) -> float:
        """Seconds that the trainer's weights are waited for."""
        return float(self.config["synchronizer"]["sync_timeout"])

    async def join_group(self, message: JoinGroup) -> None:
        error = None
        try:
            engine = cast(ReceivesWeights, self.engine)
            if not hasattr(engine, "join_weight_group"):
                raise SyncError(f"{type(engine).__name__} can't get weights from a group of processes")
            await engine.join_weight_group(
                message.address, message.port, message.rank_offset, message.world_size, self.patience
            )
        except BaseException as e:
            self.log.error("no group for weights", exc_info=e)
            error = str(e) if isinstance(e, TrinityError) else f"{type(e).__name__}: {e}"
            if isinstance(e, EngineError) and e.details.get("dead"):
                self.end_with_engine(error)
        joined = GroupJoined(self.name, self.incarnation, message.id, error)

        def tell() -> None:
            if self.coordinator is not None:
                self.send(self.coordinator, joined)

        self.post(tell)

    def weights_done(self, done: WeightsDone) -> None:
        """In the actor's loop."""
        if self.loading == done.version:
            self.loading = None
        if self.coordinator is not None:
            self.send(self.coordinator, done)


def _key(outcome: Outcome) -> Key:
    return (outcome.batch_id, outcome.submission, outcome.unit.task, outcome.unit.run_id_base)


def _failed(item: WorkItem, kind: Any, message: str) -> Outcome:
    runs = range(item.unit.run_id_base, item.unit.run_id_base + item.unit.runs)
    return Outcome(
        batch_id=item.batch_id,
        submission=item.submission,
        unit=item.unit,
        failures=_brief([(run, kind, message) for run in runs]),
    )


def _brief(failures: list[tuple[int, FailureKind, str]]) -> list[tuple[int, FailureKind, str]]:
    """The first message of each kind, which is the one that is recorded, fit for a message and the log."""
    told: set[FailureKind] = set()
    out = []
    for run, kind, message in failures:
        out.append((run, kind, "" if kind in told else message[:MESSAGE_LIMIT].encode(errors="replace").decode()))
        told.add(kind)
    return out


def _size(outcome: Outcome) -> int:
    return len(orjson.dumps([outcome.results, outcome.failures])) + 200


def _in_parts(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """Groups that stay under the limit of a message."""
    parts: list[list[Outcome]] = [[]]
    size = 0
    for outcome in outcomes:
        size += _size(outcome)
        if size > LIMIT and parts[-1]:
            parts.append([])
            size = _size(outcome)
        parts[-1].append(outcome)
    return parts
