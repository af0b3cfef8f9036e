"""TRL's GRPOTrainer (trl 1.16) on our engines: `Rollouts` is its rollout function and a callback of it.

    rollouts = Rollouts("config.yaml", reward_fn="rewards:letters")
    trainer = GRPOTrainer(..., rollout_func=rollouts, callbacks=[rollouts], reward_funcs=rollout_reward)
    resume(trainer)

TRL requests completions of a step's prompts. Each group of equal prompts becomes a task, and all tasks one batch, whose
id contains the step, the mode and the number of the call within the step. So a trainer that resumes from its checkpoint
requests the same batches again and gets them from the log. Before a new batch is submitted, the engines get the weights
of its step. A run that failed after all its attempts becomes a row without training signal, which is left out of its
group's mean, so no technical failure becomes a reward. With several trainer processes the first makes the request and
distributes the rows.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_args
from uuid import uuid4

import torch
from accelerate.data_loader import get_sampler
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import has_length
from transformers.utils import logging as logs

from trinity_es.client.progress_lines import report_progress
from trinity_es.client.rollout_client import RolloutClient, connect
from trinity_es.config.config import Config, load_config
from trinity_es.events.errors import ConfigError, DataError, SyncError, UnknownWorkflow
from trinity_es.events.values import Task
from trinity_es.integrations.answers import ANSWERS, PROMPTS, require_no_format
from trinity_es.integrations.step_batches import Mode, PromptRows, find_batch, has_result, play_batch, prompt_key
from trinity_es.integrations.step_versions import missing_version, publish_tensors
from trinity_es.integrations.trl_result_rows import none_for_failed_runs, require_columns, result_rows
from trinity_es.integrations.trl_settings import sampling_args, template_args
from trinity_es.system.run_lock import hold
from trinity_es.workflows.registry import REWARD_FUNCTIONS
from trinity_es.workflows.rewards import has_trl_form

__all__ = ["Rollouts", "last_checkpoint", "resume", "rollout_reward"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


def rollout_reward(reward: Sequence[float | None], **columns: Any) -> list[float | None]:
    """Return the rewards that the workflow gave, None for failed runs. For GRPOTrainer's `reward_funcs`."""
    return list(reward)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of a trainer; None if there is none.

    TRL's `resume_from_checkpoint=True` would also take a checkpoint that a killed trainer left half written.
    """
    checkpoints = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        step = folder.name.partition("-")[2]
        try:
            json.loads((folder / "trainer_state.json").read_text())  # TRL writes it last
        except (OSError, ValueError):
            continue
        if step.isdecimal():
            checkpoints[int(step)] = str(folder)
    return checkpoints[max(checkpoints)] if checkpoints else None


def resume(trainer: Any) -> None:
    """Train to the end, from the newest complete checkpoint in the trainer's output folder or from the start.

    A trainer that was killed after its last step is only restored, since `train` would make one step more.
    """
    checkpoint = last_checkpoint(trainer.args.output_dir)
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        last_step = trainer.args.max_steps
        if last_step <= 0:
            last_step = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
        if state.global_step >= last_step:
            trainer._load_from_checkpoint(checkpoint)
            trainer.state = state
            report_progress(_log, f"the trainer is complete: its newest checkpoint is of step {state.global_step}, its "
                                  "last; raise max_steps or num_train_epochs to go on from it")
            return
    trainer.train(resume_from_checkpoint=checkpoint)


class Rollouts(TrainerCallback):  # type: ignore[misc]  # transformers is typed in part
    """Rollout function and callback of GRPOTrainer. Connects to the running system of the config's store.

    - `workflow`: registered name, or "module:Class", as in a taskset. By default one answer to the prompt, rewarded by
      `reward_fn`; without `reward_fn` TRL's own reward functions run. The default tokenizes prompts as TRL does:
      messages by the chat template with `chat_template_kwargs`, text as it is
    - `reward_fn`: "module:name", in TRL's form or that of trinity_es, called by the workflow; GRPOTrainer then needs
      `rollout_reward`
    - `columns`: columns of the data set that tasks get beside the prompt; None: all
    - `reward_fn_args, workflow_args, format_args, rollout_args`: as in `Task`. `rollout_args` override the trainer's
      sampling
    - `name`: name of this trainer in the ids of its batches

    Only the last experience of a run becomes a row: TRL takes one row for each completion.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        workflow: str | None = None,
        reward_fn: str | None = None,
        columns: Sequence[str] | None = None,
        reward_fn_args: Mapping[str, Any] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        format_args: Mapping[str, Any] | None = None,
        rollout_args: Mapping[str, Any] | None = None,
        name: str = "trl",
    ) -> None:
        self.config = config if isinstance(config, Config) else load_config(config)
        if workflow is None and reward_fn is None and self.config.buffer.pipeline.operators:
            raise ConfigError(
                "buffer.pipeline.operators needs rewards, but without a reward_fn or a workflow TRL computes them "
                "later: name a reward_fn, or set buffer.pipeline.operators to []"
            )
        self.name, self._columns = name, columns
        self._task: dict[str, Any] = {
            "workflow": workflow or (PROMPTS if reward_fn else ANSWERS), "reward_fn": reward_fn,
            "reward_fn_args": dict(reward_fn_args or {}), "workflow_args": dict(workflow_args or {}),
            "format_args": dict(format_args or {}),
        }
        require_no_format(self._task["workflow"], self._task["format_args"])
        self._reward: Any = None
        if reward_fn is not None:
            try:
                self._reward = REWARD_FUNCTIONS.get(reward_fn)
            except UnknownWorkflow as e:
                if isinstance(e.__cause__, AttributeError):  # the module exists but lacks the function
                    raise
                _log.warning("%s (looked for here, where the trainer runs: runners may find it)", e.message)
        self._rollout_args = dict(rollout_args or {})
        self._client: RolloutClient | None = None
        self._rows: dict[Mode, tuple[list[Any], PromptRows]] = {}
        """Current data sets, and the lookup of their rows."""
        self._calls: Counter[str] = Counter()
        """Number of calls by step and mode."""
        self._unacknowledged: list[str] = []
        """Ids of the batches of the current generation."""
        self._trainer: Any = None
        self._sampling: dict[str, Any] = {}
        self._has_warned = False
        """True after the warning about runs with several experiences was logged."""

    # --- the rollout function ---------------------------------------------------------------------------------------
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play the prompts of all processes, and return this process's rows in order. GRPOTrainer calls this."""
        self.check(trainer)
        mode: Mode = "train" if trainer.model.training else "eval"
        all_prompts = gather_object(prompts)
        step = int(trainer.state.global_step)
        call = self._calls[f"{step} {mode}"]
        self._calls[f"{step} {mode}"] += 1
        tasks: list[Task] = []
        batch_id = self._batch_id(step, mode, call)
        if mode == "eval":  # several data sets may be evaluated at one step
            batch_id += f"-{sha256(prompt_key(all_prompts)).hexdigest()[:8]}"

        def version() -> int | None:
            tasks.extend(self._tasks(all_prompts, mode, trainer))
            return None if find_batch(self.client, batch_id, tasks) else missing_version(self.client, step)

        self._publish_if_missing(version)
        rows = self._on_main(lambda: self._play(batch_id, tasks, mode))
        if mode == "train":
            self._unacknowledged.append(batch_id)
        first = trainer.accelerator.process_index * len(prompts)
        return {column: values[first : first + len(prompts)] for column, values in rows.items()}

    @property
    def client(self) -> RolloutClient:
        """Client of the system, in the first process; connects on first use.

        Raises NotRunning; AlreadyRunning if another process trains on this store, since engines serve the weights of
        one trainer.
        """
        if self._client is None:
            self._client = self._connect(None)
        return self._client

    def _batch_id(self, step: int, mode: Mode, call: int) -> str:
        return f"{step}/{self.name}-{mode}-{call}"

    def _connect(self, step: int | None) -> RolloutClient:
        hold(self.config, "trainer")
        return connect(self.config, resumed_at=step)

    def close(self) -> None:
        """Disconnect from the system, which keeps running."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def check(self, trainer: Any) -> None:
        """Check that these rollouts fit the trainer and its data. The first step checks it too; this fails earlier.

        Raises ConfigError, DataError; AlreadyRunning if another process trains on this store.
        """
        if self._trainer is trainer:
            return
        if trainer.use_vllm:
            raise ConfigError("GRPOConfig has use_vllm: TRL would start an engine of its own; leave it out")
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise ConfigError("the trainer's model has a PEFT adapter, but whole weights are published: train the "
                              "model without an adapter")
        if any(isinstance(fn, torch.nn.Module) for fn in trainer.reward_funcs):
            raise ConfigError(
                "reward_funcs has a model, which TRL would call for failed runs too: give a function that calls it, or "
                "make it an auxiliary model"
            )
        if getattr(trainer, "tools", None):
            raise ConfigError("the trainer has tools, which TRL itself would call: have a workflow call them")
        template, sampling = template_args(self._task["workflow"], trainer.args), sampling_args(trainer.args)
        for mode in get_args(Mode):
            self._rows_of(mode, trainer)
        self._require_columns(trainer)
        if trainer.accelerator.is_main_process:
            hold(self.config, "trainer")
        self._task["workflow_args"] |= template
        self._sampling = sampling
        trainer.reward_funcs = [none_for_failed_runs(fn) for fn in trainer.reward_funcs]
        self._trainer = trainer

    def _require_columns(self, trainer: Any) -> None:
        columns = getattr(trainer.train_dataset, "column_names", None)
        if columns is None:  # a stream may not know
            return
        for fn in trainer.reward_funcs:
            require_columns(fn, columns)
        reward, arguments = self._reward, self._task["reward_fn_args"]
        if self._task["workflow"] == PROMPTS and inspect.isfunction(reward) and has_trl_form(reward, arguments):
            require_columns(reward, columns, given=arguments, tasks_get=self._columns)

    def _on_main(self, work: Callable[[], T]) -> T:
        """Call `work` in the first process only. All processes return its result, or raise its error."""
        result_and_error: list[Any] = [None, None]
        if self._trainer.accelerator.is_main_process:
            try:
                result_and_error = [work(), None]
            except Exception as e:
                if self._trainer.accelerator.num_processes == 1:
                    raise
                result_and_error = [None, e]
        if self._trainer.accelerator.num_processes > 1:
            result_and_error = broadcast_object_list(result_and_error)
        result, error = result_and_error
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # it went through a broadcast

    def _tasks(self, prompts: list[Any], mode: Mode, trainer: Any) -> list[Task]:
        """Return a task for each group of equal prompts. Raises DataError if the prompts of a group differ."""
        group = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        different = next((i for i in range(len(prompts)) if prompts[i] != prompts[i - i % group]), None)
        if different is not None or len(prompts) % group:
            difference = f"prompt {different} differs from its group's first" if different is not None else (
                "the last group is incomplete")
            raise DataError(
                f"{len(prompts)} prompts do not form groups of {group} equal prompts: {difference}. TRL's own samplers "
                "repeat each prompt num_generations times"
            )
        rows = self._rows_of(mode, trainer)
        tasks = []
        for prompt in prompts[::group]:
            raw_task, index = rows.task_row(prompt)
            tasks.append(Task(
                **self._task, repeat_times=group, raw_task=raw_task, index=index,
                rollout_args={**self._sampling, **self._rollout_args},
            ))
        return tasks

    def _rows_of(self, mode: Mode, trainer: Any) -> PromptRows:
        """Return the rows of the trainer's current data set, which may differ in each eval."""
        data = trainer.train_dataset if mode == "train" else trainer.eval_dataset
        datasets = data if isinstance(data, dict) else {f"{self.name}-{mode}": data}
        datasets = {name: dataset for name, dataset in datasets.items() if dataset is not None}
        loaded = getattr(trainer.callback_handler.eval_dataloader, "dataset", None) if mode == "eval" else None
        if loaded is not None and not any(loaded is dataset for dataset in datasets.values()):
            datasets = {f"{self.name}-{mode}": getattr(loaded, "dataset", loaded)}  # a stream's part for this process
        known_datasets, prompt_rows = self._rows.get(mode, ([], None))
        if prompt_rows is None or [id(data) for data in known_datasets] != [id(data) for data in datasets.values()]:
            prompt_rows = PromptRows(datasets, self._columns)
            self._rows[mode] = list(datasets.values()), prompt_rows
        return prompt_rows

    def _play(self, batch_id: str, tasks: list[Task], mode: Mode) -> dict[str, list[Any]]:
        """Play a batch, unless the log has it, and return TRL's rows as {column: values}."""
        experiences = play_batch(self.client, batch_id, tasks, mode)
        runs = set(zip(experiences.tasks, experiences.runs.tolist(), strict=True))
        if not self._has_warned and len(runs) < len(experiences):
            self._has_warned = True
            _log.warning("batch %r: runs gave several experiences, and TRL gets the last of each", batch_id)
        eos = int(self._trainer.processing_class.eos_token_id)
        return result_rows(batch_id, experiences, len(tasks), int(tasks[0].repeat_times or 1), eos)

    # --- weights ----------------------------------------------------------------------------------------------------
    def _publish_if_missing(self, find_version: Callable[[], int | None]) -> None:
        """Publish the trainer's weights as the version that `find_version` returns; do nothing if it returns None.

        `find_version` is called in the first process. All processes call this method, since weights may be sharded.
        """
        version = self._on_main(find_version)
        if version is not None:
            state = self._trainer.accelerator.get_state_dict(self._trainer.model_wrapped)
            self._on_main(lambda: self._publish(version, state))

    def _publish(self, version: int, state: Mapping[str, Any]) -> None:
        if self.config.synchronizer.sync_method == "checkpoint":
            self.client.sync_weights(version, self._write_weights(version, state))
        else:
            publish_tensors(self.client, version, state)

    def _write_weights(self, version: int, state: Mapping[str, Any]) -> Path:
        """Write the weights into a folder and return it. Only the newest `trainer.keep_checkpoints` folders stay."""
        folder = Path(self.config.run_dir) / f"{self.name}-weights"
        target = folder / f"version_{version}"
        partial_folder = folder / f".version_{version}-{uuid4().hex[:8]}"
        for path in (target, *folder.glob(".version_*")):
            shutil.rmtree(path, ignore_errors=True)
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        try:
            with _no_progress_bar():
                model.save_pretrained(partial_folder, state_dict=dict(state))
            self._trainer.processing_class.save_pretrained(partial_folder)
            partial_folder.rename(target)
        except OSError as e:
            raise SyncError(
                f"weights version {version} was not published: {target} can't be written ({e}). If another trainer "
                f"named {self.name!r} writes there, end it, or give one of them another run_dir"
            ) from e
        versions = sorted(folder.glob("version_*"), key=lambda path: int(path.name.partition("_")[2]))
        for path in versions[: -self.config.trainer.keep_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)
        return target

    # --- the callback -----------------------------------------------------------------------------------------------
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Connect as a trainer at `state.global_step`, and advance the sampler to the epoch of that step."""
        batches_per_generation = args.steps_per_generation * args.num_iterations
        batches_per_step, step = args.gradient_accumulation_steps, int(state.global_step)
        _require_whole_generations(args, batches_per_generation, batches_per_step)
        loader = others["train_dataloader"]
        # A stream has no length: count it as an epoch that is not over.
        epoch_batches = len(loader) if has_length(loader) else (step + 1) * batches_per_step
        epoch_steps = max(math.ceil(epoch_batches / batches_per_step), 1)  # the last step of an epoch may be smaller
        trained_batches = step // epoch_steps * epoch_batches + step % epoch_steps * batches_per_step
        if trained_batches % batches_per_generation:
            raise ConfigError(
                f"the checkpoint of step {step} lies within a generation of {batches_per_generation} gradient batches, "
                "so it is unknown which of its samples were trained on: resume from an earlier checkpoint"
            )
        _reach_epoch(get_sampler(loader), step // epoch_steps)
        self._calls.clear()
        self._unacknowledged.clear()
        if state.is_world_process_zero:
            self.close()
            self._client = self._connect(step)
            self._report_start(step, batches_per_generation, batches_per_step)

    def _report_start(self, step: int, batches_per_generation: int, batches_per_step: int) -> None:
        """Log the step at which the trainer begins, and the step up to which the event log has its batches."""
        logged_calls: Counter[int] = Counter()
        """Number of generations that the log has, by step."""
        last_step = step
        while has_result(self.client, self._batch_id(last_step, "train", logged_calls[last_step])):
            logged_calls[last_step] += 1
            last_step = step + logged_calls.total() * batches_per_generation // batches_per_step
        start = f"goes on from checkpoint-{step}" if step else "begins with the model as it was given"
        logged_steps = f": up to step {last_step} it trains on what the log has" if last_step > step else ""
        report_progress(_log, f"trainer {self.name} {start}{logged_steps}")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """At the end of a generation (`steps_per_generation * num_iterations` steps), acknowledge its batches."""
        if self._trainer is None or self._trainer._step % (args.steps_per_generation * args.num_iterations):
            return
        batches, self._unacknowledged = self._unacknowledged, []
        if state.is_world_process_zero:
            for batch_id in batches:
                self.client.acknowledge(batch_id, int(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Publish the final weights."""
        if self._trainer is not None:
            self._publish_if_missing(lambda: missing_version(self.client, int(state.global_step)))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logs.enable_progress_bar()


def _require_whole_generations(args: Any, batches_per_generation: int, batches_per_step: int) -> None:
    """Raise ConfigError if `save_steps` puts checkpoints within a generation, from which TRL can't resume."""
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "steps" or args.save_steps < 1:
        return
    if args.save_steps * batches_per_step % batches_per_generation:
        raise ConfigError(
            f"save_steps is {args.save_steps}, but each generation lasts "
            f"{batches_per_generation / batches_per_step:g} steps, and a trainer that resumes within a generation "
            "trains on some samples twice: set save_steps to a multiple of "
            f"{batches_per_generation / batches_per_step:g}"
        )


def _reach_epoch(sampler: Any, epoch: int) -> None:
    """Advance a new sampler of TRL to this epoch, by drawing the orders of the epochs before.

    A sampler that was used already, or of another kind, stays unchanged.
    """
    generator = getattr(sampler, "generator", None)
    if generator is None or getattr(sampler, "seed", None) is None or hasattr(sampler, "set_epoch"):
        return
    if torch.equal(generator.get_state(), torch.Generator().manual_seed(sampler.seed).get_state()):
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=generator)
