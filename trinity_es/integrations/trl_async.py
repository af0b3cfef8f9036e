"""TRL's AsyncGRPOTrainer (trl 1.16) on our engines: `AsyncRollouts` is its worker, weight transfer and callback.

    rollouts = AsyncRollouts("config.yaml", dataset, reward_fn="rewards:letters")
    trainer = AsyncGRPOTrainer(..., rollout_worker=rollouts, weight_transfer=rollouts, callbacks=[rollouts])

Batches of prompts are submitted in the order of the data, some ahead of the trainer. Each experience becomes a sample,
with its advantage from the pipeline. A batch is acknowledged once its samples were certainly trained on. A trainer that
resumes from a checkpoint gets again every batch that was acknowledged later than the checkpoint or not at all. So no
sample is lost; samples that were in the trainer's own queues may be trained on twice.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import random
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from trinity_es.client.rollout_client import RolloutClient, connect
from trinity_es.config.config import Config, load_config
from trinity_es.events.errors import ConfigError, DataError, NotRunning
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.integrations.answers import PROMPTS, require_no_format
from trinity_es.integrations.step_batches import play_batch, submit_batch
from trinity_es.integrations.step_versions import missing_version, publish_tensors, step_of
from trinity_es.integrations.trl_settings import sampling_args, template_args
from trinity_es.system.run_lock import hold

__all__ = ["AsyncRollouts"]

STEPS_BEHIND = 2
"""Number of steps after which samples that the trainer took were certainly trained on, since it prefetches some."""
STOP_SECONDS = 10.0
"""Time limit for the worker's thread to end."""

_log = logging.getLogger(__name__)


class AsyncRollouts(TrainerCallback):  # type: ignore[misc]  # transformers is typed in part
    """`RolloutWorkerProtocol` and `WeightTransferProtocol` of AsyncGRPOTrainer. The store's system must run.

    - `dataset`: rows with a `prompt`; tasks get all of their columns
    - `batch_size`: prompts a batch; `num_generations`: runs of each; `ahead`: batches that are in flight at a time
    - `seed`: seed of the order, which differs in each epoch; None: the data set's order. Epochs repeat until the
      trainer ends
    - `name`: name of this trainer in the ids of its batches
    - `task`: further fields of `Task` (workflow, reward_fn, rollout_args, ...). Sampling and `chat_template_kwargs` are
      the trainer's, overridden by `rollout_args`; a text prompt is sent unchanged

    Raises ConfigError if `synchronizer.sync_method` is checkpoint: TRL sends weights as tensors.
    """

    def __init__(
        self, config: Config | str | Path, dataset: Any, *, batch_size: int = 8, num_generations: int = 8,
        ahead: int = 2, seed: int | None = 0, name: str = "trl-async", **task: Any,
    ) -> None:
        self.config = config if isinstance(config, Config) else load_config(config)
        if self.config.synchronizer.sync_method == "checkpoint":
            raise ConfigError("TRL sends weights as tensors: set synchronizer.sync_method to memory or nccl")
        self.dataset, self.batch_size, self.num_generations = dataset, batch_size, num_generations
        self.ahead, self.seed, self.name = ahead, seed, name
        self._task = {"workflow": PROMPTS, **task}
        require_no_format(self._task["workflow"], self._task.get("format_args") or {})
        self._rollout_args = dict(self._task.get("rollout_args") or {})
        self.rollout_buffer: queue.Queue[Any] = _Buffer(
            lambda sample: self._count_taken(sample.group_id // self.batch_size, 1))
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._changed = threading.Condition()
        self._samples_left: dict[int, int] = {}
        """{batch number: number of samples that the trainer still has to take}."""
        self._taken_batches: deque[list[str]] = deque([[]])
        """For each of the last steps the ids of batches whose last sample was taken; the current step is last."""
        self._done_count = 0
        """Number of batches taken completely since the start."""
        self._order = functools.lru_cache(maxsize=2)(self._epoch_order)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_stopping = False
        self._last_progress = 0.0
        """Monotonic time at which a sample was last delivered or taken."""
        self._resumed_at: int | None = None
        """Step at which the trainer began; None before `on_train_begin`."""
        self._step, self._sync_steps = 0, 1
        self._client: RolloutClient | None = None

    @property
    def client(self) -> RolloutClient:
        """Client, connected on first use. Raises NotRunning; AlreadyRunning if another process trains on the store."""
        if self._client is None:
            hold(self.config, "trainer")
            self._client = connect(self.config, resumed_at=self._resumed_at)
        return self._client

    # --- the rollout worker -----------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the worker's thread at the first batch after the checkpoint. Raises ConfigError, NotRunning."""
        if self._resumed_at is None:
            raise ConfigError("AsyncRollouts does not know the trainer's step: pass the AsyncRollouts to the trainer "
                              "in `callbacks`, too")
        step, log = self._resumed_at, self.client.log

        def is_trained(n: int) -> bool:
            state = log.current(self._batch_id(n))
            return state is not None and state.trained_step is not None and state.trained_step <= step

        # Batches are trained on in order, so the first that is not can be searched for by bisection.
        first = bisect_left(range(log.count_batches(batch_type="train")), True, key=lambda n: not is_trained(n))
        self._last_progress = time.monotonic()
        self._is_stopping, self._error = False, None
        self._thread = threading.Thread(target=self._work, args=(first,), name="trl-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the worker's thread. Batches in flight stay in the log."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self.destroy()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: a sample's version is computed from its weights (see `_version`)."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError, with the reason, if the worker failed or no sample came for `stale_after_s` seconds."""
        if self._error is not None:
            raise RuntimeError(f"the rollouts ended: {self._error}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the rollouts are not running: call start()")
        if time.monotonic() - self._last_progress > stale_after_s and self.rollout_buffer.empty():
            waiting = "\n".join(str(reason) for reason in self.client.log.why_open())
            raise RuntimeError(f"no rollout for {stale_after_s:g} s. {waiting}")

    def _work(self, first: int) -> None:
        """Submit and deliver batches from number `first` on, until `stop`. Runs in the worker's thread.

        At most `ahead` batches are submitted that the trainer has not taken.
        """
        try:
            next_submission = first
            for n in itertools.count(first):
                with self._changed:
                    while not self._is_stopping and n >= first + self._done_count + self.ahead:
                        self._changed.wait()
                if self._is_stopping:
                    return
                for later in range(next_submission, n + self.ahead):
                    submit_batch(self.client, self._batch_id(later), self._tasks(later), "train")
                next_submission = max(next_submission, n + self.ahead)
                self._deliver(n)
        except BaseException as e:
            if not (self._is_stopping and isinstance(e, NotRunning)):  # its client was closed
                _log.exception("the rollouts ended")
                self._error = e

    def _batch_id(self, n: int) -> str:
        return f"{n}/{self.name}"

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.seed is not None:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _tasks(self, n: int) -> list[Task]:
        """Return the tasks of batch `n`: `batch_size` rows from `n * batch_size` on, counted across epochs."""
        size, tasks = len(self.dataset), []
        for i in range(n * self.batch_size, (n + 1) * self.batch_size):
            row = self._order(i // size)[i % size]
            tasks.append(Task(
                **self._task, repeat_times=self.num_generations, raw_task=dict(self.dataset[row]),
                index={"taskset": self.name, "index": row},
            ))
        return tasks

    def _deliver(self, n: int) -> None:
        """Play batch `n`, report its failed runs, and put its samples with trained tokens into the buffer."""
        tasks = self._tasks(n)
        experiences = play_batch(self.client, self._batch_id(n), tasks, "train")
        samples = [
            _sample(
                experience, (tasks[task].raw_task or {})["prompt"], n * self.batch_size + task,
                self._version(experience),
            )
            for task, experience in zip(map(int, experiences.tasks), experiences, strict=True)
            if _trained_mask(experience).any()
        ]
        runs = set(zip(experiences.tasks, experiences.runs.tolist(), strict=True))
        self.metrics_queue.put({"rollout/failed_total": float(len(tasks) * self.num_generations - len(runs))})
        with self._changed:
            self._samples_left[n] = len(samples)
        for sample in samples:
            self.rollout_buffer.put(sample)
        if not samples:
            self._count_taken(n, 0)
        self._last_progress = time.monotonic()

    def _version(self, experience: Experience) -> int:
        """Return a sample's weights version as TRL counts: 1 is the version with which this process began."""
        step = step_of(int(experience.info.get("model_version", 0)))
        return 1 + (step - (self._resumed_at or 0)) // self._sync_steps

    def _count_taken(self, n: int, count: int) -> None:
        """Count this many samples of batch number `n` that the trainer took: 0 for a batch without samples."""
        with self._changed:
            self._samples_left[n] -= count
            self._last_progress = time.monotonic()
            if self._samples_left[n] == 0:
                del self._samples_left[n]
                self._done_count += 1
                self._taken_batches[-1].append(self._batch_id(n))
                self._changed.notify_all()

    # --- the weight transfer ----------------------------------------------------------------------------------------
    def init_weight_transfer(self) -> None:
        """Connect, and wait until the engines are ready. Raises NotRunning."""
        self.client.wait_ready()

    def pause(self) -> None:
        """Do nothing: engines pause themselves while they load, and keep their requests."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish these tensors as the weights of this step. Raises SyncError."""
        state = {name: tensor.detach().cpu() for name, tensor in iterator}
        version = missing_version(self.client, self._step)
        if version is not None:
            publish_tensors(self.client, version, state)

    def resume(self) -> None:
        """Do nothing: engines go on by themselves after they have loaded."""

    def destroy(self) -> None:
        """Disconnect from the system, which keeps running."""
        if self._client is not None:
            self._client.close()

    # --- the callback -----------------------------------------------------------------------------------------------
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Store the trainer's sampling settings and step, and reset the state of an earlier training.

        Raises ConfigError for settings that the engines don't have.
        """
        self._task["workflow_args"] = {
            **self._task.get("workflow_args", {}), **template_args(self._task["workflow"], args)}
        self._task["rollout_args"] = {**sampling_args(args), **self._rollout_args}
        self._step = self._resumed_at = int(state.global_step)
        self._sync_steps = int(getattr(args, "weight_sync_steps", 1))
        self._client = None
        self._samples_left, self._done_count = {}, 0
        self._taken_batches = deque([[]])
        with self.rollout_buffer.mutex:
            self.rollout_buffer.queue.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Acknowledge the batches that were certainly trained on."""
        self._step = int(state.global_step)
        if not state.is_world_process_zero:
            return
        with self._changed:
            self._taken_batches.append([])
            trained_batches = self._taken_batches.popleft() if len(self._taken_batches) > STEPS_BEHIND + 1 else []
        for batch_id in trained_batches:
            self.client.acknowledge(batch_id, int(state.global_step))


class _Buffer(queue.Queue[Any]):
    """Queue that calls `count_taken` with each item that `get` returns."""

    def __init__(self, count_taken: Any) -> None:
        super().__init__()
        self._count_taken = count_taken

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        sample = super().get(block, timeout)
        self._count_taken(sample)
        return sample


def _trained_mask(experience: Experience) -> np.ndarray[Any, Any]:
    """Return the mask of the response's tokens that are trained on: bool [R]."""
    count = len(experience.tokens) - experience.prompt_length
    return np.ones(count, bool) if experience.action_mask is None else np.asarray(experience.action_mask, bool)


def _sample(experience: Experience, prompt: Any, group: int, version: int) -> Any:
    """Return TRL's sample of an experience.

    Raises DataError if the experience lacks logprobs or advantages, or different advantages for its tokens.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    mask = _trained_mask(experience)
    if experience.advantages is None:
        raise DataError(f"experience {experience.eid.uid} has no advantages, which TRL needs: add an operator that "
                        "computes them, such as grpo, to buffer.pipeline.operators")
    if experience.logprobs is None:
        raise DataError(f"experience {experience.eid.uid} has no logprobs, which TRL needs: set logprobs to true in "
                        "rollout_args")
    advantages = np.unique(experience.advantages[mask])
    if len(advantages) != 1:
        raise DataError(f"experience {experience.eid.uid} has different advantages per token, but TRL takes one for "
                        "the whole response: use an operator that gives one, such as grpo")
    prompt_zeros = np.zeros(experience.prompt_length)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    return RolloutSample(
        prompt=messages, completion=[{"role": "assistant", "content": experience.response_text or ""}],
        input_ids=np.asarray(experience.tokens, np.int64),
        completion_mask=np.concatenate([prompt_zeros, mask]).astype(np.int64),
        old_log_probs=np.concatenate([prompt_zeros, np.where(mask, experience.logprobs, 0.0)]).astype(np.float32),
        advantage=float(advantages[0]), model_version=version,
        group_id=group, enqueued_at=time.time(),
        metrics={"reward": float("nan") if experience.reward is None else experience.reward},
    )
