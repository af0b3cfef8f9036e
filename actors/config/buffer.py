"""The section `buffer` of the config: tasksets, the pipeline and the queue. See `schema.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trinity_es.actors.config.section import Args, FileName, ImportName, Positive, Section
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.sampling import merged
from trinity_es.actors.plugins import registered
from trinity_es.events.errors import DataError

__all__ = [
    "SCORER", "BufferConfig", "DataSelectorConfig", "ExplorerInputConfig", "FormatConfig", "OperatorConfig",
    "PipelineConfig", "QueueConfig", "TasksetConfig",
]

SCORER = "trinity_es.tasksets.reasoning_gym:Score"
"""The reward of a taskset of reasoning-gym that names none."""


class FormatConfig(Section):
    """Where in a row things are."""

    prompt_key: str = "prompt"
    """Key of the prompt; every row must have it."""
    response_key: str = "answer"
    """Key of the reference answer."""
    system_prompt: str | None = None
    """System message put before the prompt; null: none."""
    reply_prefix: str | None = None
    """Beginning of every answer: it is put after the prompt, and the model goes on from there; null: none."""
    workflow_key: str | None = None
    """Key under which a row may name its own workflow; null: all are played by the taskset's."""
    reward_fn_key: str | None = None
    """Key under which a row may name its own reward function; null: all get the taskset's."""

    @classmethod
    def of_tasks(cls) -> set[str]:
        """Return the keys that a task may have of it, in `Task.format_args`."""
        return cls.model_fields.keys() - {"workflow_key", "reward_fn_key"}

    def for_task(self) -> dict[str, Any]:
        """Return what a task is given of it, as `Task.format_args`."""
        return self.model_dump(include=self.of_tasks(), exclude_none=True)


class DataSelectorConfig(Section):
    """Which rows of a taskset come next, as in Trinity-RFT."""

    selector_type: Literal["sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"] = "sequential"
    """Instead of `shuffle`. `sequential`: the order of the file; `shuffle`: another permutation in every epoch;
    `random`: drawn anew for each step, so that some rows come often and some never; `offline_easy2hard`: by
    `feature_keys`, the largest first; `difficulty_based`: rows whose expected reward is nearest to a target, learnt
    from the steps that were finalized."""
    seed: int = Field(default=42, ge=0)
    """Seed of what is drawn."""
    feature_keys: list[str] = Field(default_factory=list)
    """Keys of numbers in each row: for `offline_easy2hard` one or more, for `difficulty_based` two, the pass rates of a
    weak and of a strong model."""
    kwargs: Args = Field(default_factory=dict)
    """Of `difficulty_based`: `m` (16), `lamb` (0.2), `rho` (0.2), `target_reward` (1), `tau` (1; 0: the best are
    taken), `do_sample` (false), `adaptive_rho` (false)."""

    @model_validator(mode="after")
    def _features_fit(self) -> Self:
        wanted = {"offline_easy2hard": "one or more", "difficulty_based": "two"}.get(self.selector_type, "no")
        count = len(self.feature_keys)
        if not {"no": count == 0, "two": count == 2, "one or more": count >= 1}[wanted]:
            raise ValueError(f"has {count} feature_keys: {self.selector_type} takes {wanted}")
        return self


class TasksetConfig(Section):
    """A file of tasks, a dataset of the Hugging Face hub, or a family of reasoning-gym."""

    name: FileName
    """Name of the taskset, in metrics and in the log; no two tasksets have the same."""
    path: Annotated[str, Field(min_length=1)]
    """JSONL file (a JSON object a line) or parquet file; or a folder of them, then `split` chooses; or a Hugging Face
    dataset directory (`save_to_disk`). `hub:owner/name`: a dataset of the Hugging Face hub.
    `reasoning_gym:leg_counting`: the tasks of a family of reasoning-gym, scored by its own scorer. `verifiers:NAME`:
    the tasks of an installed environment, which it plays. `NAME:REST`: the tasks of an environment that an installed
    package registers as NAME; if the package registers a workflow of this name too, it plays them."""
    split: str | None = None
    """In a folder: the file `<split>.jsonl` or `<split>.parquet`, or the dataset's split, is read. Of a dataset of the
    hub: its split, which is required."""
    subset: str | None = None
    """Of a dataset of the hub: its subset (the `name` of `datasets.load_dataset`); null: its default one."""
    revision: str | None = None
    """Of a dataset of the hub: branch, tag or commit; null: its main branch. What it names when a run begins is in the
    log as a commit, and what the run reads from then on."""
    args: Args = Field(default_factory=dict)
    """Of a family of reasoning-gym: its config, such as `size` (500), `seed` (0) and what else the family takes; of
    `reasoning_gym:composite` also `datasets`, a list of `{name, weight, config}`. Of another package's environment:
    what it takes."""
    ratio: float = Field(default=1.0, gt=0.0)
    """Where several tasksets are trained on: this one's share of every step's tasks, against the ratios of the
    others. One that was read `epochs` times is over, and the others share the rest; the run ends when all are over."""
    repeat_times: Positive = 1
    """Runs of every task (the group of GRPO; the n of mean@n)."""
    workflow: ImportName = "single_turn"
    """The workflow that plays the tasks: a registered name, or `module:Class`."""
    workflow_args: Args = Field(default_factory=dict)
    """Arguments for the workflow."""
    reward_fn: ImportName | None = None
    """The reward function or class: a registered name, or `module:name`; null: the workflow's own."""
    reward_fn_args: Args = Field(default_factory=dict)
    """Arguments for the reward function."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    rollout_args: Args = Field(default_factory=dict)
    """Sampling of this taskset, over that of `explorer.rollout_model`: temperature, top_p, top_k, max_tokens, ..."""
    shuffle: bool = False
    """Another order in every epoch, made from `seed`; false: the order of the file."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order."""
    data_selector: DataSelectorConfig | None = None
    """Instead of `shuffle`; null: as `shuffle` says."""
    epochs: Positive | None = 1
    """Times that the whole file is read; null: without end."""

    @model_validator(mode="before")
    @classmethod
    def _environments_own(cls, data: Any) -> Any:
        """Let the workflow that has an environment's name play its tasks."""
        path = data.get("path") if isinstance(data, dict) else None
        kind, rest = _kind_and_rest(path) if isinstance(path, str) else ("file", "")
        if kind not in registered("workflow"):
            return data
        args = data.get("workflow_args") or {}
        return {"workflow": kind, **data, "workflow_args": {"env": rest, **args} if isinstance(args, dict) else args}

    @field_validator("rollout_args")
    @classmethod
    def _samples(cls, args: dict[str, Any]) -> dict[str, Any]:
        merged(Sampling(), args, DataError, "is wrong")
        return args

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        kind, rest = _kind_and_rest(self.path)
        if self.shuffle and self.data_selector is not None:
            raise ValueError("has shuffle and data_selector: keep one (data_selector: {selector_type: shuffle})")
        if kind == "hub" and not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", rest):
            raise ValueError(f"has the path {self.path!r}: write a dataset of the hub as hub:owner/name")
        if kind == "hub" and self.split is None:
            raise ValueError(f"has the path {self.path}, and no split: choose one (split: train)")
        if kind == "reasoning_gym" and not re.fullmatch(r"\w+", rest):
            raise ValueError(f"has the path {self.path!r}: write a family as reasoning_gym:leg_counting")
        if kind == "reasoning_gym" and self.split is not None:
            raise ValueError(f"has the path {self.path} and a split, which it has not: give another args.seed")
        for key in ("subset", "revision"):
            if kind != "hub" and getattr(self, key) is not None:
                raise ValueError(f"has {key}, which only a dataset of the hub has (path: hub:owner/name)")
        if kind in ("file", "hub", "verifiers") and self.args:
            raise ValueError("has args, which only a family of reasoning-gym has (path: reasoning_gym:leg_counting)")
        return self

    @property
    def kind(self) -> str:
        """Kind of source that `path` names: `file`, or a registered environment."""
        return _kind_and_rest(self.path)[0]

    @property
    def file(self) -> Path:
        """The file to read: `path`, or in it, where it is a folder, what `split` names; for a dataset a folder."""
        path = Path(self.path)
        if self.split is None or not path.is_dir() or (path / "state.json").is_file():
            return path
        names = (f"{self.split}.jsonl", f"{self.split}.parquet", self.split)
        return next((path / name for name in names if (path / name).exists()), path / names[0])

    @property
    def other_meaning(self) -> str:
        """Other meaning of a path that names no file, as the end of an error."""
        if ":" in self.file.name:
            return f"; no installed package registers the environment {self.file.name.partition(':')[0]}"
        return "" if self.file.suffix else "; a dataset of the Hugging Face hub is written hub:owner/name"


def _kind_and_rest(path: str) -> tuple[str, str]:
    kind, colon, rest = path.partition(":")
    return (kind, rest) if colon and kind in registered("environment") else ("file", path)


class ExplorerInputConfig(Section):
    """What is read."""

    tasksets: list[TasksetConfig] = Field(default_factory=list)
    """Tasksets to train on; a trainer that submits its own tasks needs none."""
    eval_tasksets: list[TasksetConfig] = Field(default_factory=list)
    """Tasksets to evaluate on: entries like those of `tasksets`."""
    interleave: Literal["ratio", "shuffled"] = "ratio"
    """Which taskset gives the next task, of several: `ratio`: by their ratios, as evenly as can be; `shuffled`: as in
    Trinity-RFT, each as often in an epoch as it has rows, in an order that is drawn anew for each; all have the same
    `epochs` then."""
    drop_last: bool = False
    """The last tasks of a run, where they are fewer than `buffer.batch_size`, are left out, as in Trinity-RFT; false:
    they are a step."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for group in (self.tasksets, self.eval_tasksets):
            names = [t.name for t in group]
            twice = next((n for n in names if names.count(n) > 1), None)
            if twice is not None:
                raise ValueError(f"has two tasksets with the name {twice!r}: rename one")
        others = (t.name for t in self.eval_tasksets if (s := t.data_selector) and s.selector_type != "sequential")
        if (chosen := next(others, None)) is not None:
            raise ValueError(f"has an eval taskset {chosen!r} with a data_selector: an eval plays every row once")
        if self.interleave == "shuffled" and len({t.epochs for t in self.tasksets}) > 1:
            raise ValueError("has interleave: shuffled, and tasksets of different epochs: give all the same")
        if self.interleave == "shuffled" and any(t.ratio != 1.0 for t in self.tasksets):
            raise ValueError("has interleave: shuffled, which gives shares by size, and a ratio: remove one")
        return self


class OperatorConfig(Section):
    """One operator of the pipeline."""

    name: ImportName
    """The operator: a known name such as `grpo`, or `module:name`."""
    args: Args = Field(default_factory=dict)
    """Its arguments."""


class OutputConfig(Section):
    """One place where delivered experiences are also written."""

    name: ImportName
    """The output: `jsonl`, `parquet`, or `module:Class`."""
    args: Args = Field(default_factory=dict)
    """Its arguments; `path`, of `jsonl` and `parquet`: the folder (default: `outputs/<name>` in `run_dir`)."""


class QueueConfig(Section):
    """How `RolloutClient.take_experiences` chooses: a view of the log, not a second store."""

    priority_fn: ImportName = "linear_decay"
    """What goes first: `linear_decay` (newest weights, less for each use), `fifo`, `decay_limit_randomization`, or
    `module:Class`."""
    priority_fn_args: Args = Field(default_factory=dict)
    """Its arguments."""
    max_use_count: Positive = 1
    """Times that an experience may be taken."""
    reuse_cooldown_time: float = Field(default=0.0, ge=0.0)
    """Seconds after it was taken before it may be taken again."""
    capacity: Positive = 100_000
    """Experiences of the newest batches that the queue holds (16 bytes each); older ones leave it, taken or not. They
    stay in the log and in the payload store."""


class PipelineConfig(Section):
    """What is done to the experiences of a finished train batch before the trainer gets them."""

    operators: list[OperatorConfig] = Field(default_factory=lambda: [OperatorConfig(name="grpo")])
    """Operators, applied in this order; an empty list: none."""
    outputs: list[OutputConfig] = Field(default_factory=list)
    """Where delivered experiences are written besides the payload store."""


class BufferConfig(Section):
    """What goes in and what comes out."""

    batch_size: Positive = 32
    """Tasks a step."""
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
