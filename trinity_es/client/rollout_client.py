"""What a trainer holds (`connect`): blocking. `RolloutCoordinator` has the same, async.

Commands and answers are small and go through the coordinator; tasks that are large, and all experiences, go through
the payload store, which this process opens itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trinity_es.actors import commands
from trinity_es.actors.requests import Parcel, pack
from trinity_es.client import validation
from trinity_es.client.connection import GRACE_SECONDS
from trinity_es.client.system_client import SystemClient
from trinity_es.config.config import Config
from trinity_es.events import errors
from trinity_es.events.experience import Experience
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.values import (
    BatchId,
    BatchLifecycleState,
    BatchType,
    Task,
    require_batch_id,
    require_finite,
)
from trinity_es.events.vocabulary import ExperiencesProcessed, PayloadRef, TasksetSource
from trinity_es.projections.batch import BatchState
from trinity_es.projections.why.answer import unread
from trinity_es.weights.published import read_weight
from trinity_es.weights.publisher import Publisher, gpu_of

__all__ = ["RolloutClient", "connect"]

READ_SECONDS = 10.0
"""Maximum of the time that the log may take to answer `why`: its server may be frozen."""

A = TypeVar("A")


def connect(config: Config, *, resumed_at: int | None = None) -> RolloutClient:
    """Return a client of the running system of this config's store. A context manager. Raises NotRunning.

    A trainer that starts again from its checkpoint of step k says `resumed_at=k` (0: from the model as it was given):
    train batches acknowledged with a later step, and those never acknowledged, are its again, generated already. They
    are `client.redelivered`, and the first that `next_batch` gives. Raises PayloadNotFound where `store.retention`
    freed some of them.
    """
    return RolloutClient(config, resumed_at=resumed_at)


class RolloutClient(SystemClient):
    """The coordinator's methods, blocking; thread-safe. Use as a context manager, or `close()`."""

    def __init__(self, config: Config, *, resumed_at: int | None = None) -> None:
        """See `connect`."""
        super().__init__(config)
        self._publisher = Publisher(config, self._call_in_time, lambda: self.log)
        self.redelivered: list[BatchId] = []
        """In the order of the steps that they were trained in; then those never trained, as they were finalized."""
        self._known_up_to = 0
        self._taking = threading.Lock()
        self._untaken: dict[tuple[int, int | None], str] = {}
        """Requests for experiences that were not answered in time, by how many they were for and which step."""
        if resumed_at is not None:
            try:
                self._resume(validation.whole("resumed_at", resumed_at))
            except BaseException:
                self.close()
                raise
        self._to_come = deque(self.redelivered)

    def _resume(self, step: int) -> None:
        if step < 0:
            raise errors.DataError(f"resumed_at is {step}: the step of a checkpoint is expected, or 0")
        found = self._link.call(commands.ResumeTrainer(step=step))
        self.redelivered, self._known_up_to = found["batches"], found["position"]

    def read(self, refs: Sequence[PayloadRef]) -> list[Experience]:
        """Return the experiences that these refs of the log name. Raises PayloadNotFound, CorruptPayload."""
        found = validation.listed("refs", refs, "PayloadRef")
        if wrong := [ref for ref in found if not isinstance(ref, PayloadRef)]:
            raise errors.DataError(f"refs has a {type(wrong[0]).__name__}: a list of PayloadRef is expected")
        return read_experiences(self._payloads, found)

    def pack(self, tasks: Sequence[Task]) -> Parcel:
        """Return tasks, as requests carry them.

        Raises TaskNotSerializable, UnknownWorkflow, DataError, naming the task.
        """
        return pack(validation.encode_tasks(tasks, self.config), self._payloads)

    # --- batches ----------------------------------------------------------------------------------------------------
    def submit_batch(
        self, *, batch_id: BatchId, tasks: Sequence[Task], batch_type: BatchType, min_wait_num: int | None = None,
        cursor: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None, sources: Sequence[TasksetSource] = ()
    ) -> None:
        """Hand a batch in; when this returned, nothing loses it any more.

        `cursor` (`taskset, epoch, offset`; of several tasksets, a list) is recorded in the same transaction: how far
        tasksets were read for it; so is `sources`: what those that are no files were found to be.
        Raises BatchAlreadyActive, TaskNotSerializable, UnknownWorkflow, DataError.
        """
        if not isinstance(batch_type, str) or batch_type not in ("train", "eval"):
            raise errors.DataError(f"batch_type is {batch_type!r}: it is \"train\" or \"eval\"")
        require_batch_id(batch_id)
        cursors = validation.cursors(cursor)
        tasks = validation.listed("tasks", tasks, "tasks")
        parcel = self.pack(tasks)
        least = None if min_wait_num is None else validation.whole("min_wait_num", min_wait_num)
        self._link.call(commands.SubmitBatch(
            batch_id=batch_id, tasks=parcel, batch_type=batch_type, min_wait_num=least, cursor=cursors,
            sources=list(sources),
        ))
        for number, task in enumerate(tasks):
            task.batch_id, task.task_id = batch_id, number

    def finalize_train_batch(self, batch_id: BatchId, *, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the batch has what it needs, run the pipeline, and end it.

        Returns keys `batch_id, batch_type, finished_task_count, metrics`; asked again, the same. Tasks that failed for
        good are settled, and so in `finished_task_count`; `rollout/failed_task_count` counts them alone. Raises
        BatchNotFound (KeyError), BatchTypeMismatch (ValueError), FinalizeTimeout (TimeoutError; nothing is lost),
        PipelineError (the batch is RUNNING again).
        """
        return self._finalize(batch_id, "train", timeout)

    def finalize_eval_batch(self, batch_id: BatchId, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the same for an eval batch: no pipeline, metrics under `eval/<name>`."""
        return self._finalize(batch_id, "eval", timeout)

    def _finalize(
        self, batch_id: BatchId, batch_type: Literal["train", "eval"], timeout: float | None
    ) -> dict[str, Any]:
        command = commands.FinalizeBatch(
            batch_id=require_batch_id(batch_id), batch_type=batch_type, timeout=validation.seconds("timeout", timeout)
        )
        try:
            return self._link.call(command, _patience(timeout))
        except errors.TrinityError:
            raise
        except TimeoutError as e:  # the coordinator did not say it: it is away, or the pipeline is at work
            raise errors.FinalizeTimeout(
                f"batch {batch_id!r}: no answer within {timeout} s; nothing is lost, finalize it again to go on "
                "waiting, and `trinity-es why` tells what it waits for"
            ) from e

    def abort_batch(self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False) -> None:
        """Give a batch up: its running tasks are stopped. Unknown and ended ids are fine."""
        validation.text("reason", reason)
        self._link.call(commands.AbortBatch(
            batch_id=require_batch_id(batch_id), reason=reason, keep_partial_results=keep_partial_results
        ))

    def redo(self, batch_id: BatchId, tasks: int | Sequence[int], *, reason: str = "") -> None:
        """Let tasks of an open batch that have ended run again, all runs of each; what they had is set aside.

        For one whose payload was lost (`verify` names it), or that failed for a reason that was mended. Who asked is
        recorded with `reason`. Raises BatchNotFound; DataError for a task that has not ended or does not exist, and for
        a batch that has ended: its result stands.
        """
        numbers = [tasks] if isinstance(tasks, int) else validation.listed("tasks", tasks, "numbers of tasks")
        validation.text("reason", reason)
        asked = f"asked for by pid {os.getpid()} on {socket.gethostname()}"
        self._link.call(commands.RedoTasks(
            batch_id=require_batch_id(batch_id), tasks=[validation.whole("tasks", n) for n in numbers],
            reason=f"{reason} ({asked})" if reason else asked,
        ))

    def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """Run experiences (`Experience.serialize_many`) through the pipeline, outside any batch; [] gives {}."""
        found = validation.listed("payloads", payloads, "bytes, as Experience.serialize_many gives them,")
        if not found:
            return {}
        refs = []
        for data in found:
            count = len(Experience.deserialize_many(data))
            refs.append(PayloadRef(digest=self._payloads.put(data), first=0, count=count))
        return self._link.call(commands.ProcessExperiences(refs=refs))

    def experiences(self, batch_id: BatchId) -> Iterator[Experience]:
        """Yield the experiences of a finalized train batch as the pipeline left them, in order.

        They are read as they are asked for. Raises BatchNotFound; ValueError while the batch is not finalized;
        PayloadNotFound when they were freed.
        """
        state = self.batch(batch_id)
        if state.state is not BatchLifecycleState.FINALIZED:
            raise errors.DataError(f"batch {batch_id!r} is {state.state}: finalize_train_batch it first")
        for ref in state.experiences:
            try:
                found = read_experiences(self._payloads, [ref])
            except errors.PayloadNotFound as e:
                if not self.log.was_freed(batch_id):
                    raise
                raise errors.PayloadNotFound(
                    f"the experiences of batch {batch_id!r} were freed: store.retention keeps those of the newest "
                    "steps only; its events are in the log", digest=ref.digest,
                ) from e
            yield from found

    def take_experiences(self, n: int, *, timeout: float | None = None, step: int | None = None) -> list[Experience]:
        """Return the `n` experiences that go next, out of all finalized train batches; waits until there are so many.

        `buffer.queue` says what goes next, how often an experience may be taken and after how long again;
        `info["use_count"]` says how often it was, with this time. `step`: the trainer's step that they are for. A
        trainer that comes back with `resumed_at=k` can take again what it took for later steps, and nothing that it
        took for none. Acknowledge the batches when they are used up, or `store.retention` keeps them for ever.

        Raises TakeTimeout (TimeoutError; nothing was taken) after `timeout` seconds, PipelineError where the priority
        function fails, PayloadNotFound where an experience was freed between being taken and being read.
        """
        items = self._take(commands.TakeExperiences(
            n=validation.whole("n", n), timeout=validation.seconds("timeout", timeout),
            step=None if step is None else validation.whole("step", step),
        ))
        refs = [PayloadRef(**ref) for item in items for ref in item["refs"]]
        experiences = read_experiences(self._payloads, refs)
        counts = [item["use_count"] for item in items for ref in item["refs"] for _ in range(ref["count"])]
        for experience, use_count in zip(experiences, counts, strict=True):
            experience.info["use_count"] = use_count
        return experiences

    def _take(self, command: commands.TakeExperiences) -> list[commands.TakenExperiences]:
        """Return what the coordinator gives. A request that it did not answer in time is asked again, under its id, or
        what was given would be lost.
        """
        limit, of = _patience(command.timeout), (command.n, command.step)
        with self._taking:
            unanswered = self._untaken.pop(of, None)
        id = unanswered or uuid.uuid4().hex
        try:
            return self._link.call(command, limit, id=id)
        except errors.TakeTimeout:
            if unanswered is None:
                raise
            return self._take(command)  # it gave nothing then
        except errors.TrinityError:
            raise
        except TimeoutError as e:
            with self._taking:
                self._untaken[of] = id
            raise errors.TakeTimeout(
                f"{command.n} experiences: no answer within {command.timeout} s; ask again for as many, and what was "
                "perhaps given is given then"
            ) from e

    def processed_experiences(self, after: int = 0) -> Iterator[tuple[int, list[Experience]]]:
        """Yield (position, experiences) of what the pipeline was given outside any batch after log position `after`.

        That is what `process_experiences` was given, and what was committed to the proxy of mode `serve`.
        """
        for recorded in self.log.read(types=["ExperiencesProcessed"], after=validation.whole("after", after)):
            event = recorded.event
            assert isinstance(event, ExperiencesProcessed)
            yield recorded.position, read_experiences(self._payloads, event.experiences)

    def acknowledge(self, batch_id: BatchId, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Say that the trainer's step `step` used this batch; `metrics` (loss, ...) are recorded with it.

        Said again it changes nothing; after a redelivery (`resumed_at`) it is recorded again, since the batch was used
        again.
        """
        given = validation.mapping("metrics", metrics)
        plain = {str(name): validation.number(f"metrics[{name!r}]", value) for name, value in given.items()}
        require_finite(plain, "metrics")
        self._link.call(commands.AcknowledgeBatch(
            batch_id=require_batch_id(batch_id), step=validation.whole("step", step), metrics=plain
        ))

    def next_batch(self, after: int = 0, timeout: float | None = None) -> tuple[BatchId, int]:
        """Return the first train batch finalized after log position `after`, and its position; waits for it.

        To a trainer that said `resumed_at`, first the batches that are its again, whatever `after` is; those come with
        the position up to which all is known. Raises TimeoutError.
        """
        timeout, after = validation.seconds("timeout", timeout), validation.whole("after", after)
        with contextlib.suppress(IndexError):
            return self._to_come.popleft(), self._known_up_to
        after = max(after, self._known_up_to)
        found = self._link.call(commands.GetNextBatch(after=after, timeout=timeout), timeout)
        return found["batch_id"], found["position"]

    def batch(self, batch_id: BatchId) -> BatchState:
        """Return the batch's state, folded from the log. Raises BatchNotFound, LogRewound."""
        try:
            return self.log.replay(batch_id)
        except errors.BatchNotFound:
            self._require_log()  # or it is not there any more
            raise

    def why(self, batch_id: BatchId) -> str:
        """Return what the batch waits for, since when, on which runner and attempt, and what to do about it.

        It is a few lines, also where the system has died meanwhile. `client.log.why` gives the same as data, from the
        log alone. Raises BatchNotFound, LogRewound.
        """
        require_batch_id(batch_id)
        with contextlib.suppress(errors.LogUnavailable):  # told below
            within(READ_SECONDS, self._require_log)
        live, facts = self.facts()
        try:
            return str(within(READ_SECONDS, lambda: self.log.why(batch_id, live=live, system=facts)))
        except errors.LogUnavailable as e:
            for told in unread(live or {}, e.message, now=time.time()):
                if told.batch_id == batch_id and type(told.batch_id) is type(batch_id):
                    return str(told)
            raise

    # --- weights ------------------------------------------------------------------------------------------------------
    def sync_weights(
        self, version: int, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Have all engines serve these weights as `version`; returns when they do.

        `weights`: a checkpoint's folder in HF format, or a mapping from the names in it to tensors (torch or numpy),
        which reach the engines through shared memory, or by `sync_method: nccl` from GPU to GPU. Such a version may be
        given again as a checkpoint once it is saved: only then does it survive a restart of the machine.

        Raises SyncError: some engine could not load it, or not in time (seconds, default
        `synchronizer.sync_timeout`). The version is the current one all the same: engines that live go on with what
        they had, one that comes up loads it. Sync the same again, or a newer version.
        """
        seconds = validation.seconds("timeout", timeout) or self.config.synchronizer.sync_timeout
        return self._publisher.publish(validation.whole("version", version), weights, seconds)

    def weights_written_anew(self, version: int, path: str) -> None:
        """Record that the current weights were lost where they lay, and lie in `path` now."""
        self._publisher.republish(version, path)

    def sync_adapter(
        self, name: str, version: int, path: str | Path, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Have all engines serve the LoRA adapter at `path` as this version of `name`; returns when they do.

        `path`: a folder in PEFT's format (`model.save_pretrained(path)`), which must stay as it is while this version
        is the current one: an engine that comes up later loads it. Tasks choose it by `rollout_args["adapter"]`. A
        request keeps the version that it began with. The model's own weights stay as they are, and adapters stay over
        `sync_weights`.

        Raises SyncError: the folder can't be served (nothing was published then), the version is older than the current
        one, or some engine could not load it in time (seconds, default `synchronizer.sync_timeout`) and goes on with
        what it had.
        """
        seconds = validation.seconds("timeout", timeout) or self.config.synchronizer.sync_timeout
        number = validation.whole("version", version)
        return self._publisher.publish_adapter(validation.text("name", name), number, path, seconds)

    def remove_adapter(self, name: str) -> None:
        """Take a LoRA adapter back: requests that name it are refused. Raises SyncError for an unknown one."""
        self._publisher.remove_adapter(validation.text("name", name))

    def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        """Return the tensor of that name as the engines serve it now; bfloat16 and float8 as float32.

        Raises WeightNotFound (KeyError) that names similar ones, SyncError where the weights can't be read.
        """
        runners = [r for r in self.status()["runners"] if r["model"] == "rollout"]
        version = max((r["model_version"] for r in runners if r["state"] == "ready"), default=None)
        if version is None:
            raise errors.SyncError("no engine serves now, so no weights are served")
        return read_weight(self.config, self.log, version, name)

    def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Make the group over which `sync_method: nccl` sends weights; this process is its rank 0, at this address.

        `state_dict_meta`: `(name, dtype, shape)` of each tensor, compared with the model's. Needed only to choose the
        address: `sync_weights` makes a group where there is none. Raises SyncError.
        """
        port = validation.whole("master_port", master_port)
        return self._publisher.make_group(master_address, port, state_dict_meta, device=gpu_of())

    def shutdown(self) -> int:
        """End the whole system: engines, actors, all. Returns how many processes had to be killed."""
        killed = self._end()
        self._publisher.clean_up()
        self.close()
        return killed

    def _call_in_time(self, command: commands.Command[A], timeout: float) -> A:
        return self._link.call(command, timeout + GRACE_SECONDS)


def _patience(timeout: float | None) -> float | None:
    return None if timeout is None else timeout + GRACE_SECONDS
