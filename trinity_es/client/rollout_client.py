"""The blocking client of a trainer (`connect`); `RolloutCoordinator` is its async twin.

Commands and answers are small and go through the coordinator. Large tasks and all experiences go through the payload
store, which the client's process opens itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trinity_es.actors import commands
from trinity_es.actors.requests import Parcel, pack
from trinity_es.client import argument_checks
from trinity_es.client.connection import GRACE_SECONDS
from trinity_es.client.system_client import SystemClient
from trinity_es.config.config import Config
from trinity_es.events import errors
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.payloads.experiences import read_columns, read_experiences
from trinity_es.events.values import (
    BatchId,
    BatchLifecycleState,
    BatchType,
    Task,
    batch_stream,
    require_batch_id,
    require_finite,
)
from trinity_es.events.vocabulary import BatchFinalized, ExperiencesProcessed, PayloadRef, TasksetSource
from trinity_es.projections.batch import BatchState
from trinity_es.projections.why.answer import why_without_log
from trinity_es.weights.publisher import Publisher, gpu_of
from trinity_es.weights.weights_reader import read_weight

__all__ = ["RolloutClient", "connect"]

READ_SECONDS = 10.0
"""Timeout of a read of the log for `why`, as its database server may hang."""

A = TypeVar("A")


def connect(config: Config, *, resumed_at: int | None = None) -> RolloutClient:
    """Connect to the running system of this config's store. Raises NotRunning. The client is a context manager too.

    A trainer that resumes from its checkpoint of step k passes `resumed_at=k` (0: from the initial model). The train
    batches that were acknowledged with a later step, or never, are then delivered again without being generated again.
    `client.redelivered` lists them, and `next_batch` returns them first. Raises PayloadNotFound if `store.retention`
    freed some of them.
    """
    return RolloutClient(config, resumed_at=resumed_at)


class RolloutClient(SystemClient):
    """Blocking, thread-safe client of the coordinator. Use as a context manager, or `close()`."""

    def __init__(self, config: Config, *, resumed_at: int | None = None) -> None:
        super().__init__(config)
        self._publisher = Publisher(config, self._call_with_grace, lambda: self.log)
        self.redelivered: list[BatchId] = []
        """Batches that a resumed trainer gets again: trained batches by step, then others in order of finalizing."""
        self._redelivered_up_to = 0
        """Log position: each train batch finalized up to here is redelivered, or was acknowledged for an old step."""
        self._take_lock = threading.Lock()
        self._unanswered_take_ids = defaultdict[tuple[int, int | None], list[str]](list)
        """Ids of requests for experiences that timed out without an answer, by number of experiences and step."""
        if resumed_at is not None:
            try:
                command = commands.ResumeTrainer(step=argument_checks.whole_number("resumed_at", resumed_at))
                answer = self._link.call(command)
                self.redelivered, self._redelivered_up_to = answer["batches"], answer["position"]
            except BaseException:
                self.close()
                raise
        self._pending_redeliveries = deque(self.redelivered)

    def read(self, refs: Sequence[PayloadRef]) -> ExperienceColumns:
        """Read the experiences that these references of the log name. Raises PayloadNotFound, CorruptPayload."""
        ref_list = argument_checks.list_of("refs", refs, "PayloadRef")
        for ref in ref_list:
            if not isinstance(ref, PayloadRef):
                raise errors.DataError(f"refs has a {type(ref).__name__}: a list of PayloadRef is expected")
        return read_columns(self._payloads, ref_list, mapped=True)

    def pack(self, tasks: Sequence[Task]) -> Parcel:
        """Encode tasks for a request. Tasks too large for a message are stored as a payload.

        Raises TaskNotSerializable, UnknownWorkflow and DataError, each with the task's number.
        """
        return pack(argument_checks.encode_tasks(tasks, self.config), self._payloads)

    # --- batches ----------------------------------------------------------------------------------------------------
    def submit_batch(
        self, *, batch_id: BatchId, tasks: Sequence[Task], batch_type: BatchType, min_wait_num: int | None = None,
        cursor: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None, sources: Sequence[TasksetSource] = (),
        continues: Mapping[int, tuple[BatchId, int]] | None = None,
    ) -> None:
        """Submit a batch; it is durable when this returns.

        `cursor`: how far the taskset was read for this batch (`taskset, epoch, offset`; a list for several tasksets).
        `sources`: the identities of tasksets that are not files. Both are recorded in the batch's transaction.
        `continues`: for tasks that go on from the tokens of a task cut off by an earlier finalize
        (`synchronizer.in_flight: cut`). It maps the task's index to (earlier batch, number of the task there).
        Raises BatchAlreadyActive, TaskNotSerializable, UnknownWorkflow, DataError.
        """
        if not isinstance(batch_type, str) or batch_type not in ("train", "eval"):
            raise errors.DataError(f"batch_type is {batch_type!r}: 'train' or 'eval' is expected")
        require_batch_id(batch_id)
        cursors = argument_checks.cursors(cursor)
        tasks = argument_checks.list_of("tasks", tasks, "tasks")
        parcel = self.pack(tasks)
        if min_wait_num is not None:
            min_wait_num = argument_checks.whole_number("min_wait_num", min_wait_num)
        self._link.call(commands.SubmitBatch(
            batch_id=batch_id, tasks=parcel, batch_type=batch_type, min_wait_num=min_wait_num, cursor=cursors,
            sources=list(sources), continues=argument_checks.cut_tasks(continues or {}),
        ))
        for number, task in enumerate(tasks):
            task.batch_id, task.task_id = batch_id, number

    def add_tasks(
        self, batch_id: BatchId, tasks: Sequence[Task],
        cursor: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Add tasks to an open train batch and return the number of the first. `cursor`: see `submit_batch`.

        The batch's `min_wait_num`, if set, grows by as many. Raises BatchNotFound (KeyError), BatchTypeMismatch
        (ValueError), TaskNotSerializable, UnknownWorkflow, DataError (also if the batch is in the pipeline or ended).
        """
        tasks, cursors = argument_checks.list_of("tasks", tasks, "tasks"), argument_checks.cursors(cursor)
        first = self._link.call(commands.AddTasks(
            batch_id=require_batch_id(batch_id), tasks=self.pack(tasks), cursor=cursors))
        for number, task in enumerate(tasks, first):
            task.batch_id, task.task_id = batch_id, number
        return first

    def finalize_train_batch(
        self, batch_id: BatchId, *, timeout: float | None = None, groups: int | None = None
    ) -> dict[str, Any]:
        """Wait until enough tasks of the batch are settled, run the pipeline, and end the batch.

        Returns keys `batch_id, batch_type, finished_task_count, metrics`; a second call returns the same.
        `finished_task_count` includes tasks that failed for good; `rollout/failed_task_count` counts only these. Raises
        BatchNotFound (KeyError), BatchTypeMismatch (ValueError), FinalizeTimeout (TimeoutError; nothing is lost),
        PipelineError (the batch is RUNNING again).

        `groups`: how many tasks must have experiences after the pipeline. If a filter left fewer (it may drop groups
        of equal rewards), TooFewGroups is raised, nothing is delivered, and the batch stays open for `add_tasks`.
        """
        return self._finalize(batch_id, "train", timeout, groups)

    def finalize_eval_batch(self, batch_id: BatchId, *, timeout: float | None = None) -> dict[str, Any]:
        """Wait for an eval batch and end it, like a train batch but without pipeline. Metrics begin `eval/<name>`."""
        return self._finalize(batch_id, "eval", timeout)

    def _finalize(
        self, batch_id: BatchId, batch_type: Literal["train", "eval"], timeout: float | None,
        groups: int | None = None,
    ) -> dict[str, Any]:
        """Have the coordinator finalize a batch of this type, and return the result. Raises as the public methods."""
        command = commands.FinalizeBatch(
            batch_id=require_batch_id(batch_id), batch_type=batch_type,
            timeout=argument_checks.timeout_seconds(timeout),
            groups=None if groups is None else argument_checks.whole_number("groups", groups),
        )
        try:
            return self._link.call(command, _with_grace(timeout))
        except errors.TrinityError:
            raise
        except TimeoutError as e:  # from this process: the coordinator is away, or its pipeline is at work
            raise errors.FinalizeTimeout(
                f"batch {batch_id!r}: no answer within {timeout} s. Nothing is lost: finalize it again to go on "
                "waiting; `trinity-es why` says what the batch waits for") from e

    def abort_batch(self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False) -> None:
        """Abort a batch and stop its running tasks. Does nothing for an unknown id or a batch that has ended."""
        self._link.call(commands.AbortBatch(
            batch_id=require_batch_id(batch_id), reason=reason, keep_partial_results=keep_partial_results))

    def redo(self, batch_id: BatchId, tasks: int | Sequence[int], *, reason: str = "") -> None:
        """Run all runs of ended tasks of an open batch again, and ignore the tasks' earlier results.

        Use this for a task whose payload was lost (`verify` names it), or that failed for a reason that you have fixed.
        `reason` and the pid and host of this process are recorded. Raises BatchNotFound. Raises DataError for an open
        or unknown task, and for a batch that has ended, because its result is final.
        """
        numbers = [tasks] if isinstance(tasks, int) else argument_checks.list_of("tasks", tasks, "numbers of tasks")
        self._link.call(commands.RedoTasks(
            batch_id=require_batch_id(batch_id), tasks=[argument_checks.whole_number("tasks", n) for n in numbers],
            reason=argument_checks.reason_with_caller(reason),
        ))

    def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """Run experiences (`Experience.serialize_many`) through the pipeline, without a batch. Returns its metrics."""
        blobs = argument_checks.list_of("payloads", payloads, "bytes, as Experience.serialize_many gives them,")
        if not blobs:
            return {}
        refs = [PayloadRef(count=len(Experience.deserialize_many(data)), digest=self._payloads.put(data), first=0)
                for data in blobs]
        return self._link.call(commands.ProcessExperiences(refs=refs))

    def experiences(self, batch_id: BatchId) -> Iterator[Experience]:
        """Read the experiences that the pipeline delivered for a finalized train batch, one by one and in order.

        Raises BatchNotFound; DataError for an eval, and while the batch is not finalized; PayloadNotFound if the
        experiences were freed.
        """
        for ref in self._delivered_refs(batch_id):
            yield from self._columns(batch_id, [ref])

    def columns(self, batch_id: BatchId) -> ExperienceColumns:
        """Return the experiences of a finalized train batch as columns, in order. Raises as `experiences`."""
        return self._columns(batch_id, self._delivered_refs(batch_id))

    def _delivered_refs(self, batch_id: BatchId) -> list[PayloadRef]:
        """Return references to a finalized batch's experiences. Reads one event, where a fold would read the batch."""
        try:
            row = self.log.batch_row(batch_id)
        except errors.BatchNotFound:
            self._require_log()  # the log may have lost it
            raise
        if row.batch_type == "eval":
            raise errors.DataError(f"batch {batch_id!r} is an eval, whose experiences are not kept: read its metrics, "
                                   "or submit it as a train batch")
        finalized = self.log.last(batch_stream(batch_id), BatchFinalized.__name__)
        if row.state != BatchLifecycleState.FINALIZED or finalized is None:
            raise errors.DataError(f"batch {batch_id!r} is {row.state}, not FINALIZED: call finalize_train_batch first")
        assert isinstance(finalized.event, BatchFinalized)
        return finalized.event.experiences

    def _columns(self, batch_id: BatchId, refs: Sequence[PayloadRef]) -> ExperienceColumns:
        try:
            return read_columns(self._payloads, refs, mapped=True)
        except errors.PayloadNotFound as e:
            if not self.log.was_freed(batch_id):
                raise
            raise errors.PayloadNotFound(
                f"the experiences of batch {batch_id!r} were freed: store.retention keeps those of the newest steps "
                "only. Its events stay in the log", digest=e.details["digest"]) from e

    def take_experiences(self, n: int, *, timeout: float | None = None, step: int | None = None) -> list[Experience]:
        """Wait for the next `n` experiences of all finalized train batches, and take them.

        `buffer.queue` sets their order, how often an experience may be taken, and how soon it may be taken again. An
        experience's `info["use_count"]` counts its uses, this one included. `step`: the trainer's step that will use
        them. A trainer that resumes with `resumed_at=k` can take experiences of its steps after k again, but none that
        it took without a step. `store.retention` keeps experiences until their batch is acknowledged.

        Raises TakeTimeout (TimeoutError; nothing was taken) after `timeout` seconds, PipelineError if the priority
        function fails, PayloadNotFound if an experience was freed after it was taken and before it was read.
        """
        return self.take_columns(n, timeout=timeout, step=step).experiences()

    def take_columns(self, n: int, *, timeout: float | None = None, step: int | None = None) -> ExperienceColumns:
        """Take experiences as `take_experiences` does, and return them as columns."""
        items = self._take(commands.TakeExperiences(
            n=argument_checks.whole_number("n", n), timeout=argument_checks.timeout_seconds(timeout),
            step=None if step is None else argument_checks.whole_number("step", step),
        ))
        taken = [(PayloadRef(**ref), item["use_count"]) for item in items for ref in item["refs"]]
        columns = read_columns(self._payloads, [ref for ref, _ in taken], mapped=True)
        return columns.with_info("use_count", [count for ref, count in taken for _ in range(ref.count)])

    def _take(self, command: commands.TakeExperiences) -> list[commands.TakenExperiences]:
        """Request experiences from the coordinator, and return references to them.

        If an earlier request like this one got no answer, that request is sent again under its id. The coordinator may
        have assigned experiences to it, which would otherwise be lost.
        """
        key = (command.n, command.step)
        with self._take_lock:
            unanswered_ids = self._unanswered_take_ids[key]
            unanswered_id = unanswered_ids.pop() if unanswered_ids else None
        request_id = unanswered_id or uuid.uuid4().hex
        try:
            return self._link.call(command, _with_grace(command.timeout), id=request_id)
        except errors.TakeTimeout:
            if unanswered_id is None:
                raise
            return self._take(command)  # the earlier request took nothing
        except errors.TrinityError:
            raise
        except TimeoutError as e:
            with self._take_lock:
                unanswered_ids.append(request_id)
            raise errors.TakeTimeout(
                f"the coordinator did not deliver {command.n} experiences within {command.timeout} s. Take as many "
                "again: if it took some for this request, you get them then") from e

    def processed_experiences(self, after: int = 0) -> Iterator[tuple[int, list[Experience]]]:
        """Yield (position, experiences) for each use of the pipeline outside any batch after log position `after`.

        Such experiences come from `process_experiences`, and from commits to the proxy of mode `serve`.
        """
        after = argument_checks.whole_number("after", after)
        for recorded in self.log.read(types=["ExperiencesProcessed"], after=after):
            event = recorded.event
            assert isinstance(event, ExperiencesProcessed)
            yield recorded.position, read_experiences(self._payloads, event.experiences)

    def acknowledge(self, batch_id: BatchId, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Record that the trainer used this batch in its step `step`, with the step's `metrics` (loss, ...).

        A second call changes nothing, unless the batch was delivered again (`resumed_at`): then both uses are recorded.
        """
        numbers = {str(name): argument_checks.number(f"metrics[{name!r}]", value)
                   for name, value in argument_checks.mapping("metrics", metrics).items()}
        require_finite(numbers, "metrics")
        self._link.call(commands.AcknowledgeBatch(
            batch_id=require_batch_id(batch_id), step=argument_checks.whole_number("step", step), metrics=numbers))

    def next_batch(self, after: int = 0, timeout: float | None = None) -> tuple[BatchId, int]:
        """Wait for the first train batch finalized after log position `after`. Returns its id and position.

        Pass the position as the next call's `after`. A trainer that resumed (`resumed_at`) gets the redelivered batches
        first, whatever `after` is. Raises TimeoutError.
        """
        timeout = argument_checks.timeout_seconds(timeout)
        after = argument_checks.whole_number("after", after)
        with contextlib.suppress(IndexError):
            return self._pending_redeliveries.popleft(), self._redelivered_up_to
        after = max(after, self._redelivered_up_to)
        batch = self._link.call(commands.GetNextBatch(after=after, timeout=timeout), timeout)
        return batch["batch_id"], batch["position"]

    def batch(self, batch_id: BatchId) -> BatchState:
        """Return the batch's state, folded from the log. Raises BatchNotFound, LogRewound."""
        try:
            return self.log.replay(batch_id)
        except errors.BatchNotFound:
            self._require_log()  # the log may have lost it
            raise

    def why(self, batch_id: BatchId) -> str:
        """Describe in a few lines what the batch waits for, since when, on which runner and attempt, and what to do.

        This also works after the system died. `client.log.why` returns data in place of text, from the log alone.
        Raises BatchNotFound, LogRewound.
        """
        require_batch_id(batch_id)
        with contextlib.suppress(errors.LogUnavailable):  # reported below
            within(READ_SECONDS, self._require_log)
        live, processes = self.facts()
        try:
            return str(within(READ_SECONDS, lambda: self.log.why(batch_id, live=live, system=processes)))
        except errors.LogUnavailable as e:
            for answer in why_without_log(live or {}, e.message, now=time.time()):
                if answer.batch_id == batch_id and type(answer.batch_id) is type(batch_id):
                    return str(answer)
            raise

    # --- weights ------------------------------------------------------------------------------------------------------
    def sync_weights(
        self, version: int, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Have all engines serve these weights as `version`; returns when they do.

        `weights`: a checkpoint's folder in HF format, or a mapping from the checkpoint's names to tensors (torch or
        numpy). Tensors reach the engines through shared memory, or from GPU to GPU with `sync_method: nccl`. They are
        lost when the machine restarts, until the version is synced again from a saved checkpoint.

        Raises SyncError if an engine can't load the weights within `timeout` (seconds, default
        `synchronizer.sync_timeout`). `version` is the current one all the same: running engines keep their old weights,
        and an engine that starts later loads it. Sync the same version again, or a newer one.
        """
        seconds = argument_checks.timeout_seconds(timeout) or self.config.synchronizer.sync_timeout
        return self._publisher.publish(argument_checks.whole_number("version", version), weights, seconds)

    def weights_written_anew(self, version: int, path: str) -> None:
        """Record the folder `path` as the new location of the current weights, after they were lost or moved."""
        self._publisher.republish(version, path)

    def sync_adapter(
        self, name: str, version: int, path: str | Path, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Have all engines serve the LoRA adapter at `path` as this version of `name`; returns when they do.

        `path`: a folder in PEFT's format (`model.save_pretrained(path)`). Keep it unchanged while this version is the
        current one, because an engine that starts later loads it. Tasks choose the adapter by
        `rollout_args["adapter"]`. A request keeps the version that it began with. The model's own weights do not
        change, and `sync_weights` keeps adapters.

        Raises SyncError if the folder can't be served (nothing was published then), or if the version is older than the
        current one. Also raises it if an engine can't load the adapter within `timeout` (seconds, default
        `synchronizer.sync_timeout`); that engine keeps its earlier version.
        """
        seconds = argument_checks.timeout_seconds(timeout) or self.config.synchronizer.sync_timeout
        number = argument_checks.whole_number("version", version)
        return self._publisher.publish_adapter(argument_checks.text("name", name), number, path, seconds)

    def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Later requests that name it are refused. Raises SyncError for an unknown name."""
        self._publisher.remove_adapter(argument_checks.text("name", name))

    def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        """Return one tensor of the weights that the engines serve now; bfloat16 and float8 become float32.

        Raises WeightNotFound (KeyError) with similar names, SyncError if the weights can't be read.
        """
        runners = [r for r in self.status()["runners"] if r["model"] == "rollout"]
        version = max((r["model_version"] for r in runners if r["state"] == "ready"), default=None)
        if version is None:
            raise errors.SyncError("no engine is ready, so there are no current weights to read: wait until "
                                   "`trinity-es status` shows one that is ready")
        return read_weight(self.config, self.log, version, name)

    def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Create the process group of `sync_method: nccl`, with this process as rank 0 at this address.

        Needed only to choose the address: `sync_weights` creates a group if there is none. `state_dict_meta`:
        `(name, dtype, shape)` of each tensor, to be compared with the model's. Raises SyncError.
        """
        port = argument_checks.whole_number("master_port", master_port)
        return self._publisher.make_group(master_address, port, state_dict_meta, device=gpu_of())

    def shutdown(self) -> int:
        """End the whole system. Returns the number of processes that had to be killed."""
        killed_count = self._end()
        self._publisher.clean_up()
        self.close()
        return killed_count

    def _call_with_grace(self, command: commands.Command[A], timeout: float) -> A:
        return self._link.call(command, timeout + GRACE_SECONDS)


def _with_grace(timeout: float | None) -> float | None:
    """Return `timeout` plus time for the coordinator's own timeout error to arrive first, as it says more."""
    return None if timeout is None else timeout + GRACE_SECONDS
