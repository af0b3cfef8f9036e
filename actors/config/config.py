"""The sections of the config together, and the config as a running system has it.

What keys mean is said once, under each; docs/CONFIG.md is printed from it. `trinity_es.config` reads a file, resolves
its variables and makes its paths absolute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from trinity_es.actors.config.buffer import BufferConfig
from trinity_es.actors.config.hosts import HostsConfig
from trinity_es.actors.config.schema import (
    AuxiliaryModelConfig,
    ExplorerConfig,
    ModelConfig,
    MonitorConfig,
    RolloutModelConfig,
    StoreConfig,
    SynchronizerConfig,
    SystemConfig,
    TrainerConfig,
)
from trinity_es.actors.config.section import FileName, Positive, Section
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.secrets import marked, mask
from trinity_es.events.store.database.urls import masked

__all__ = ["HostIdentity", "LaunchedConfig", "RunConfig"]


class RunConfig(Section):
    """Every key of the config."""

    project: FileName = "trinity"
    """Name of the project; with `name` it makes the run's folders."""
    name: FileName = "run"
    """Name of the run."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = "both"
    """`both`: explorer and trainer; `explore`: the trainer connects from elsewhere; `train`: the other half of that;
    `bench`: evals of checkpoints, no experience pipeline; `serve`: an OpenAI-compatible proxy, no scheduler."""
    checkpoint_root_dir: str = "checkpoints"
    """Folder of the checkpoints: they lie in `<checkpoint_root_dir>/<project>/<name>`."""
    run_dir: str = Field(default="", json_schema_extra={"shown": "the store's folder, or runs/<project>/<name>"})
    """Folder of the run's files: `metrics.jsonl`, `outputs/`, `tensorboard/`."""
    total_steps: Positive | None = None
    """Steps to run; null: until the tasksets end."""
    code_path: str = Field(default="", json_schema_extra={"shown": "the config file's folder"})
    """Folder in which modules of yours are looked for (`module:Class`), besides the working directory."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    explorer: ExplorerConfig = Field(default_factory=ExplorerConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    synchronizer: SynchronizerConfig = Field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    system: SystemConfig = Field(default_factory=SystemConfig)
    hosts: HostsConfig = Field(default_factory=HostsConfig)

    @property
    def rollout(self) -> RolloutModelConfig:
        return self.explorer.rollout_model

    @property
    def auxiliary(self) -> dict[str, AuxiliaryModelConfig]:
        return {model.name: model for model in self.explorer.auxiliary_models}

    @property
    def models(self) -> dict[str, RolloutModelConfig]:
        """All models by their names; `rollout` is the one that is trained."""
        return {"rollout": self.rollout, **self.auxiliary}

    def plain(self) -> dict[str, Any]:
        """Return plain JSON in which secrets are marked as such."""
        data: dict[str, Any] = marked(self.model_dump(by_alias=True))
        return data

    def masked(self) -> dict[str, Any]:
        """Return plain JSON with `***` for every secret (see `events.secrets`): what may be shown and recorded."""
        plain = self.plain()
        data: dict[str, Any] = mask({key: plain[key] for key in RunConfig.model_fields})
        data["store"]["url"] = masked(self.store.url)
        return data


class HostIdentity(Section):
    """What a host that joined calls itself."""

    name: str
    life: str
    """Of this start of its system."""


class LaunchedConfig(RunConfig):
    """The config of a system that runs, with what its processes would have to look up in a higher room."""

    memory: str = ""
    """Folder in which this host remembers the ends of logs; empty: it does not."""
    started_in: str = ""
    """The working directory of the process that started the system."""
    host: HostIdentity | None = None
    """None: this is the head."""
    owner: dict[str, Any] | None = None
    """The process with which the system ends: `pid`, `started`."""
    umask: int = 0o077
    """That of the user who started the system."""

    def engine_config(self, model: str) -> EngineConfig:
        """Return what a runner of this model builds its engine with."""
        in_group = model == "rollout" and self.synchronizer.sync_method == "nccl"
        return replace(self.models[model].engine_config(), weight_transfer=in_group)

    @property
    def workflows(self) -> list[str]:
        """The user's own workflows, which runners import before they are asked for."""
        inputs = self.buffer.explorer_input
        named = {taskset.workflow for taskset in (*inputs.tasksets, *inputs.eval_tasksets)}
        return sorted(name for name in named if ":" in name and not name.startswith("trinity_es."))
