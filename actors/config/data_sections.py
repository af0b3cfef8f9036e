"""Sections of the config about data: tasksets, the pipeline and the queue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trinity_es.actors.config.section import Args, FileName, ImportName, Positive, Section
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.sampling_checks import with_options
from trinity_es.actors.plugin_lookup import registered
from trinity_es.events.errors import DataError

__all__ = [
    "SCORER", "BufferConfig", "DataSelectorConfig", "ExplorerInputConfig", "FormatConfig", "OperatorConfig",
    "PipelineConfig", "QueueConfig", "TasksetConfig",
]

SCORER = "trinity_es.tasksets.reasoning_gym:Score"
"""Default reward of tasksets of reasoning-gym."""


class FormatConfig(Section):
    """Which keys of a taskset's rows hold the prompt, the answer and so on."""

    prompt_key: str = "prompt"
    """Key of the prompt, which every row must have."""
    response_key: str = "answer"
    """Key of the reference answer."""
    system_prompt: str | None = None
    """System message put before the prompt; null: none."""
    reply_prefix: str | None = None
    """Beginning of every answer. It follows the prompt, and the model continues from there; null: none."""
    workflow_key: str | None = None
    """Key under which a row may name its own workflow; null: all rows use the taskset's."""
    reward_fn_key: str | None = None
    """Key under which a row may name its own reward function; null: all rows use the taskset's."""

    @classmethod
    def task_keys(cls) -> set[str]:
        """Return the keys of this section that `Task.format_args` may have."""
        return cls.model_fields.keys() - {"workflow_key", "reward_fn_key"}

    def task_format_args(self) -> dict[str, Any]:
        """Return the `Task.format_args` of the taskset's tasks."""
        return self.model_dump(include=self.task_keys(), exclude_none=True)


class DataSelectorConfig(Section):
    """Choice of the rows that come next, as in Trinity-RFT."""

    selector_type: Literal["sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"] = "sequential"
    """`sequential`: the order of the file; `shuffle`: another permutation in every epoch; `random`: a new draw for each
    step, so that some rows come often and some never; `offline_easy2hard`: by `feature_keys`, the largest first;
    `difficulty_based`: rows whose expected reward is nearest to a target, learnt from the finalized steps."""
    seed: int = Field(default=42, ge=0)
    """Seed of random choices."""
    feature_keys: list[str] = Field(default_factory=list)
    """Keys of numbers in each row: for `offline_easy2hard` one or more, for `difficulty_based` two, the pass rates of a
    weak and of a strong model."""
    kwargs: Args = Field(default_factory=dict)
    """Arguments of `difficulty_based`: `m` (16), `lamb` (0.2), `rho` (0.2), `target_reward` (1), `tau` (1; 0: the best
    rows), `do_sample` (false), `adaptive_rho` (false)."""

    @model_validator(mode="after")
    def _check_feature_keys(self) -> Self:
        count = len(self.feature_keys)
        if self.selector_type == "offline_easy2hard":
            fits, needed = count >= 1, "one or more"
        elif self.selector_type == "difficulty_based":
            fits, needed = count == 2, "two"
        else:
            fits, needed = count == 0, "no"
        if not fits:
            raise ValueError(f"has {count} feature_keys, but {self.selector_type} takes {needed}")
        return self


class TasksetConfig(Section):
    """A file of tasks, a dataset of the Hugging Face hub, or an environment such as a family of reasoning-gym."""

    name: FileName
    """Unique name of the taskset, in metrics and in the log."""
    path: Annotated[str, Field(min_length=1)]
    """JSONL file (a JSON object a line), parquet file, folder of such files, or Hugging Face dataset directory
    (`save_to_disk`). `hub:owner/name`: a dataset of the Hugging Face hub. `reasoning_gym:leg_counting`: the tasks of a
    family of reasoning-gym, scored by its own scorer. `verifiers:NAME`: the tasks of an installed environment, which
    also plays them. `NAME:REST`: the tasks of an environment that an installed package registers as NAME; if the
    package registers a workflow of this name too, it plays them."""
    split: str | None = None
    """Folder: read `<split>.jsonl`, `<split>.parquet`, or this split of the dataset. Dataset of the hub: its split,
    which is required."""
    subset: str | None = None
    """Subset of a dataset of the hub (the `name` of `datasets.load_dataset`); null: its default one."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the hub; null: its main branch. It is resolved when a run begins: the log
    holds the commit, which the run reads from then on."""
    args: Args = Field(default_factory=dict)
    """Arguments of an environment. A family of reasoning-gym takes its config, such as `size` (500) and `seed` (0);
    `reasoning_gym:composite` also takes `datasets`, a list of `{name, weight, config}`."""
    ratio: float = Field(default=1.0, gt=0.0)
    """Share of every step's tasks, relative to the ratios of the other tasksets. A taskset ends after `epochs` passes;
    then the others share the rest. The run ends when all tasksets have ended."""
    repeat_times: Positive = 1
    """Runs of every task (the group of GRPO; the n of mean@n)."""
    workflow: ImportName = "single_turn"
    """The workflow that plays the tasks: a registered name, or `module:Class`."""
    workflow_args: Args = Field(default_factory=dict)
    """Arguments for the workflow."""
    reward_fn: ImportName | None = None
    """The reward function or class: a registered name, or `module:name`; null: the default of the workflow."""
    reward_fn_args: Args = Field(default_factory=dict)
    """Arguments for the reward function."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    rollout_args: Args = Field(default_factory=dict)
    """Sampling of this taskset, which overrides `explorer.rollout_model`: temperature, top_p, top_k, max_tokens, ..."""
    shuffle: bool = False
    """Another order in every epoch, made from `seed`; false: the order of the file."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order."""
    data_selector: DataSelectorConfig | None = None
    """Choice of rows in place of `shuffle`; null: `shuffle` holds."""
    epochs: Positive | None = 1
    """Number of passes over the whole taskset; null: without end."""

    @model_validator(mode="before")
    @classmethod
    def _default_workflow(cls, data: Any) -> Any:
        """Set the default workflow of the environment in `path`, such as `verifiers` for `verifiers:NAME`."""
        path = data.get("path") if isinstance(data, dict) else None
        kind, rest = _kind_and_rest(path) if isinstance(path, str) else ("file", "")
        if kind not in registered("workflow"):
            return data
        args = data.get("workflow_args") or {}
        return {"workflow": kind, **data, "workflow_args": {"env": rest, **args} if isinstance(args, dict) else args}

    @field_validator("rollout_args")
    @classmethod
    def _check_sampling(cls, args: dict[str, Any]) -> dict[str, Any]:
        with_options(Sampling(), args, DataError, "is wrong")
        return args

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        kind, rest = _kind_and_rest(self.path)
        if self.shuffle and self.data_selector is not None:
            raise ValueError("has both shuffle and data_selector: keep one (data_selector: {selector_type: shuffle})")
        if kind == "hub" and not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", rest):
            raise ValueError(f"has the path {self.path!r}: write a dataset of the hub as hub:owner/name")
        if kind == "hub" and self.split is None:
            raise ValueError(f"has the path {self.path} and no split: set one, as in split: train")
        if kind == "reasoning_gym" and not re.fullmatch(r"\w+", rest):
            raise ValueError(f"has the path {self.path!r} without a family: write, say, reasoning_gym:leg_counting")
        if kind == "reasoning_gym" and self.split is not None:
            raise ValueError(f"has the path {self.path} and a split: remove it, and choose other tasks by args.seed")
        for key in ("subset", "revision"):
            if kind != "hub" and getattr(self, key) is not None:
                raise ValueError(f"has {key}, which is only for a dataset of the hub (path: hub:owner/name): remove it")
        if kind in ("file", "hub", "verifiers") and self.args:
            raise ValueError("has args, which only reasoning-gym takes (path: reasoning_gym:leg_counting): remove args")
        return self

    @property
    def kind(self) -> str:
        """Kind of source that `path` names: `file`, or a registered environment."""
        return _kind_and_rest(self.path)[0]

    @property
    def file(self) -> Path:
        """The file to read: `path`, or the file in it that `split` names. A folder if `path` is a dataset directory."""
        path = Path(self.path)
        if self.split is None or not path.is_dir() or (path / "state.json").is_file():
            return path
        names = (f"{self.split}.jsonl", f"{self.split}.parquet", self.split)
        return next((path / name for name in names if (path / name).exists()), path / names[0])

    @property
    def path_hint(self) -> str:
        """Hint for an error about a path that names no file: what the user may have meant."""
        if ":" in self.file.name:
            return f"; no installed package registers the environment {self.file.name.partition(':')[0]}"
        return "" if self.file.suffix else "; a dataset of the Hugging Face hub is written hub:owner/name"


def _kind_and_rest(path: str) -> tuple[str, str]:
    """Return a registered environment and the rest of `environment:rest`, or "file" and the whole path."""
    kind, colon, rest = path.partition(":")
    return (kind, rest) if colon and kind in registered("environment") else ("file", path)


class ExplorerInputConfig(Section):
    """Tasksets of the run."""

    tasksets: list[TasksetConfig] = Field(default_factory=list)
    """Tasksets to train on; a trainer that submits its own tasks needs none."""
    eval_tasksets: list[TasksetConfig] = Field(default_factory=list)
    """Tasksets to evaluate on, with entries like those of `tasksets`."""
    interleave: Literal["ratio", "shuffled"] = "ratio"
    """Choice of the taskset for the next task. `ratio`: by their ratios, as evenly as possible; `shuffled`: as in
    Trinity-RFT, each as often in an epoch as it has rows, in another random order every epoch, and all with the same
    `epochs`."""
    drop_last: bool = False
    """Leave out the last tasks of a run if they are fewer than `buffer.batch_size`, as in Trinity-RFT; false: they are
    a step."""

    @model_validator(mode="after")
    def _check_tasksets(self) -> Self:
        for group in (self.tasksets, self.eval_tasksets):
            names = [t.name for t in group]
            duplicate = next((n for n in names if names.count(n) > 1), None)
            if duplicate is not None:
                raise ValueError(f"has two tasksets with the name {duplicate!r}: rename one")
        for taskset in self.eval_tasksets:
            if taskset.data_selector is not None and taskset.data_selector.selector_type != "sequential":
                raise ValueError(
                    f"has an eval taskset {taskset.name!r} with a data_selector: remove it, as evals play all rows")
        if self.interleave == "shuffled" and len({t.epochs for t in self.tasksets}) > 1:
            raise ValueError("has interleave: shuffled, but its tasksets have different epochs: set the same number")
        if self.interleave == "shuffled" and any(t.ratio != 1.0 for t in self.tasksets):
            raise ValueError("has both interleave: shuffled, which takes every row once, and a ratio: remove one")
        return self


class OperatorConfig(Section):
    """One operator of the pipeline."""

    name: ImportName
    """The operator: a known name such as `grpo`, or `module:name`."""
    args: Args = Field(default_factory=dict)
    """Its arguments."""


class OutputConfig(Section):
    """Additional destination of delivered experiences."""

    name: ImportName
    """The output: `jsonl`, `parquet`, or `module:Class`."""
    args: Args = Field(default_factory=dict)
    """Its arguments. `jsonl` and `parquet` take a folder as `path` (default: `outputs/<name>` in `run_dir`)."""


class QueueConfig(Section):
    """Rules by which `RolloutClient.take_experiences` chooses. The queue is a view of the log, not a second store."""

    priority_fn: ImportName = "linear_decay"
    """Priority of experiences: `linear_decay` (newest weights first, lower after each use), `fifo`,
    `decay_limit_randomization`, or `module:Class`."""
    priority_fn_args: Args = Field(default_factory=dict)
    """Its arguments."""
    max_use_count: Positive = 1
    """Times that an experience may be taken."""
    reuse_cooldown_time: float = Field(default=0.0, ge=0.0)
    """Seconds before an experience may be taken again."""
    capacity: Positive = 100_000
    """Maximum number of experiences in the queue (16 bytes each). Beyond it the oldest batches leave the queue, taken
    or not; their experiences stay in the log and in the payload store."""


class PipelineConfig(Section):
    """Processing of the experiences of a finished train batch before the trainer gets them."""

    operators: list[OperatorConfig] = Field(default_factory=lambda: [OperatorConfig(name="grpo")])
    """Operators, applied in this order; an empty list: none."""
    outputs: list[OutputConfig] = Field(default_factory=list)
    """Destinations of delivered experiences besides the payload store."""


class BufferConfig(Section):
    """Tasks and experiences of the run."""

    batch_size: Positive = 32
    """Number of tasks in a step."""
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
