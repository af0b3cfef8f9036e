"""What the processes of a system read of its config, under the config's names (docs/CONFIG.md).

Made once, where the system is started, and handed on in the messages that start a process. A key that no process reads
is not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

__all__ = [
    "EngineConfig", "ExplorerSettings", "HostSettings", "HostsSettings", "LoRASettings",
    "ModelSettings", "QueueSettings", "ServersSettings", "Settings",
    "checked_url", "settings_from",
]

_PORTS = {"http": 80, "https": 443}


def checked_url(value: str) -> str:
    """Return the URL of a server, however it is spelled: in lower case, with its port, without a slash at its end.

    Raises ValueError, which says what a URL must be, and holds nothing that may be a secret.
    """
    if "@" in value:
        raise ValueError("has credentials in it, which would stand in the log: give a key by servers.key_variable")
    shown = re.split(r"[\s?#]", value, maxsplit=1)[0]
    strange = ValueError(f"must be like http://host:8000, not {shown if shown == value else shown + '...'!r}")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise strange from None
    if not host or port == 0 or parts.scheme not in _PORTS or re.search(r"[\s?#\x00-\x1f\x7f]", value):
        raise strange
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"must be like http://host:8000: leave /v1 out of {shown!r}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or _PORTS[parts.scheme]}{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """How many LoRA adapters engines serve at once, and of which rank at most."""

    max_adapters: int
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to build an engine. `options` go to the engine class as they are (AsyncEngineArgs for vLLM)."""

    model_path: str
    seed: int = 0
    max_model_len: int | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    server_args: dict[str, Any] = field(default_factory=dict)
    """Options of the engine's own HTTP server (those of `vllm serve`)."""
    initial_version: int = 0
    """The model version that `model_path` is."""
    weight_transfer: bool = False
    """Be ready to join a group with the trainer (`sync_method: nccl`)."""
    lora: LoRASettings | None = None
    """None: it serves no adapters."""


@dataclass(frozen=True, slots=True)
class ServersSettings:
    """Which servers of others are the engines of a model: `urls`, or what `file` or `command` lists."""

    urls: list[str]
    file: str
    command: str
    poll_interval: float
    drain_timeout: float


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model and its engines: the rollout model, or an auxiliary one."""

    engine_num: int
    engine_type: str
    engine_class: str
    """As "module:Class"."""
    engine: EngineConfig
    rollout_args: dict[str, Any]
    """Its sampling, under the names of `Task.rollout_args`."""
    servers: ServersSettings | None = None
    """Of engines by HTTP."""


@dataclass(frozen=True, slots=True)
class SystemSettings:
    address: str
    log_dir: str
    startup_timeout: float
    restarts: int
    restart_pause: float
    heartbeat_timeout: float
    hang_timeout: float


@dataclass(frozen=True, slots=True)
class HostsSettings:
    """Where the head takes other hosts in, by which key, and how long it waits for one that it does not hear."""

    address: str
    listen: str
    timeout: float
    key_file: str
    weights_dir: str = ""
    """Where a host keeps what it pulls; empty: shared memory."""
    engines_on_head: bool = True


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host that joined calls itself."""

    name: str
    life: str
    """Of this start of its system."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    url: str = field(repr=False)  # may hold a password
    durability: Literal["process", "power"]
    retry_for: float
    retention: int | None


@dataclass(frozen=True, slots=True)
class DynamicTimeoutSettings:
    enable: bool
    ratio: float
    warmup_min_steps: int


@dataclass(frozen=True, slots=True)
class OverRolloutSettings:
    wait_after_min: float
    return_partial_tasks: bool


@dataclass(frozen=True, slots=True)
class ExplorerSettings:
    max_timeout: float
    stall_after: float
    max_retry_times: int
    max_staleness: int | None
    max_repeat_times_per_runner: int | None
    concurrent_mode: str
    max_concurrency: int | Literal["auto"]
    runner_state_report_interval: float
    min_running_model_num: int
    dynamic_timeout: DynamicTimeoutSettings
    over_rollout: OverRolloutSettings


@dataclass(frozen=True, slots=True)
class QueueSettings:
    priority_fn: str
    priority_fn_args: dict[str, Any]
    max_use_count: int
    reuse_cooldown_time: float
    capacity: int


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    operators: list[dict[str, Any]]
    """`name` and `args` of each."""
    outputs: list[dict[str, Any]]
    """As `operators`."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    pipeline: PipelineSettings
    queue: QueueSettings


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    detailed_stats: bool


@dataclass(frozen=True, slots=True)
class SynchronizerSettings:
    sync_timeout: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections of the config, and what processes would have to look up in a higher room."""

    mode: str
    run_dir: str
    system: SystemSettings
    store: StoreSettings
    explorer: ExplorerSettings
    buffer: BufferSettings
    monitor: MonitorSettings
    synchronizer: SynchronizerSettings
    rollout: ModelSettings
    auxiliary: dict[str, ModelSettings]
    """By their names."""
    recorded: dict[str, Any]
    """The whole config as the log gets it, without secrets."""
    memory: str
    """Folder in which this host remembers the ends of logs; empty: it does not."""
    code_path: list[str]
    """Folders in which the user's modules are looked for."""
    workflows: list[str]
    """The user's own workflows, which runners import before they are asked for."""
    hosts: HostsSettings
    host: HostSettings | None = None
    """None: this is the head."""
    owner: dict[str, Any] | None = None
    """The process with which the system ends: `pid`, `started`."""
    umask: int = 0o077
    """That of the user who started the system."""

    def model(self, name: str) -> ModelSettings:
        """Return the settings of the model `rollout`, or of an auxiliary one."""
        return self.auxiliary.get(name, self.rollout)

    def model_paths(self) -> dict[str, str]:
        """Return the model path of each model, by its name."""
        return {name: how.engine.model_path for name, how in {"rollout": self.rollout, **self.auxiliary}.items()}


def settings_from(plain: Mapping[str, Any]) -> Settings:
    """Return the settings of these plain values. Keys that no process reads are left out."""
    from pydantic import TypeAdapter  # here, not above: a client that only sends messages needs none

    return TypeAdapter(Settings).validate_python(plain)
