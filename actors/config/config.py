"""The whole config, as a file has it and as a running system has it. `trinity_es.config` reads the file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from trinity_es.actors.config.data_sections import BufferConfig
from trinity_es.actors.config.hosts import HostsConfig
from trinity_es.actors.config.models import AuxiliaryModelConfig, ModelConfig, RolloutModelConfig
from trinity_es.actors.config.run_sections import (
    ExplorerConfig,
    MonitorConfig,
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
    """All keys of the config."""

    project: FileName = "trinity"
    """Name of the project, which is part of the run's folders, as is `name`."""
    name: FileName = "run"
    """Name of the run."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = "both"
    """`both`: explorer and trainer; `explore`: only the explorer, for a trainer in another process; `train`: only the
    trainer, for an explorer in another process; `bench`: evals of checkpoints, no experience pipeline; `serve`: an
    OpenAI-compatible proxy, no scheduler."""
    checkpoint_root_dir: str = "checkpoints"
    """Folder of all checkpoints. Those of a run are in `<checkpoint_root_dir>/<project>/<name>`."""
    run_dir: str = Field(default="", json_schema_extra={"shown": "the store's folder, or runs/<project>/<name>"})
    """Folder of the run's files: `metrics.jsonl`, `outputs/`, `tensorboard/`."""
    total_steps: Positive | None = None
    """Steps to run; null: until the tasksets end."""
    code_path: str = Field(default="", json_schema_extra={"shown": "the config file's folder"})
    """Folder from which your own modules are imported (`module:Class`), besides the working directory."""
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
        """All models by name, with the trained one as `rollout`."""
        return {"rollout": self.rollout, **self.auxiliary}

    def plain(self) -> dict[str, Any]:
        """Return the config as plain JSON. Secrets stay readable, each as a `Secret`, a marked text."""
        data: dict[str, Any] = marked(self.model_dump(by_alias=True))
        return data

    def masked(self) -> dict[str, Any]:
        """Return the config as plain JSON with `***` for every secret, to be shown and recorded."""
        plain = self.plain()
        data: dict[str, Any] = mask({key: plain[key] for key in RunConfig.model_fields})
        data["store"]["url"] = masked(self.store.url)
        return data


class HostIdentity(Section):
    """Identity of a host that joined."""

    name: str
    life: str
    """Id of this start of the host's system. The next start has another."""


class LaunchedConfig(RunConfig):
    """Config of a running system, with values that only the launching process can determine."""

    memory: str = ""
    """Folder in which this host records the ends of logs; empty: it does not record them."""
    started_in: str = ""
    """Working directory of the process that started the system."""
    host: HostIdentity | None = None
    """None on the head."""
    owner: dict[str, Any] | None = None
    """`pid` and `started` of the process whose end also ends the system; None: no such process."""
    payloads_place: str | None = None
    """Location of the payloads according to the log, read at the start; None: each process reads it from the log."""
    umask: int = 0o077
    """Umask of the user who started the system."""

    def engine_config(self, model: str) -> EngineConfig:
        """Return the config of this model's engines."""
        in_group = model == "rollout" and self.synchronizer.sync_method == "nccl"
        return replace(self.models[model].engine_config(), weight_transfer=in_group)

    @property
    def workflows(self) -> list[str]:
        """The user's own workflows in the tasksets. Runners import them when they start."""
        inputs = self.buffer.explorer_input
        names = {taskset.workflow for taskset in (*inputs.tasksets, *inputs.eval_tasksets)}
        return sorted(name for name in names if ":" in name and not name.startswith("trinity_es."))
