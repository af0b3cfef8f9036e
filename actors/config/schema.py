"""The sections of the config: every key, its type, its default, its bounds, and what it means.

The docstring under a field is its line in docs/CONFIG.md. A key stands here only if code uses it. `buffer.py` and
`hosts.py` have their sections, `config.py` puts them together; `trinity_es.config` reads files.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from trinity_es.actors.addresses import checked_url, is_loopback
from trinity_es.actors.config.hosts import TlsConfig
from trinity_es.actors.config.section import (
    Args,
    ClassPath,
    FileName,
    ImportName,
    Positive,
    Seconds,
    Section,
    Text,
)
from trinity_es.actors.engines.interface import EngineConfig, LoRASettings
from trinity_es.actors.plugins import registered

__all__ = [
    "AuxiliaryModelConfig", "ExplorerConfig", "ModelConfig", "MonitorConfig",
    "OverRolloutConfig", "RolloutModelConfig", "ServersConfig", "StoreConfig", "SynchronizerConfig", "SystemConfig",
    "TrainerConfig",
]


def _engine(value: str) -> str:
    if value not in (engines := registered("engine")) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError(f'must be one of {", ".join(sorted(engines))}, "module:Class", not {value!r}')
    return value


def _concurrency(value: Any) -> Any:
    if value != "auto" and type(value) is not int:
        raise PydanticKnownError("int_type")  # by which a variable's text is taken for a number
    if value != "auto" and value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    return value


def _store_url(value: str) -> str:
    if not value:
        return value
    try:
        url = make_url(value)
    except ArgumentError:
        raise ValueError("is no database URL: write sqlite:///log.sqlite or postgresql+psycopg://host/name") from None
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ValueError(f"must begin with sqlite:/// or postgresql+psycopg://, not {backend}")
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError("must be a file: the log is shared by several processes; write sqlite:///log.sqlite")
    if backend == "sqlite" and "?" in value:
        raise ValueError(f"is {value}: a file has no options after a ?; where its name has that letter, write %3F")
    return value


class ModelConfig(Section):
    """The model that is trained."""

    model_path: str = ""
    """Folder of the model in Hugging Face format, or a hub id such as `Qwen/Qwen2.5-0.5B`. Its weights are model
    version 0. The scripted engine needs none."""


class OverRolloutConfig(Section):
    """Waiting for fewer tasks than were submitted."""

    ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a batch's tasks that need not be waited for: the explorer asks for ceil(batch_size * (1 - ratio))."""
    wait_after_min: float = Field(default=30.0, ge=0.0)
    """Seconds to wait for the rest once there are enough."""
    return_partial_tasks: bool = False
    """Deliver also tasks of which only some runs finished."""


class DynamicTimeoutConfig(Section):
    """A timeout that follows what tasks take."""

    enable: bool = False
    """Stop an attempt after `ratio` times the mean time of the attempts of the train steps so far (those that timed out
    count, evals don't), instead of after `max_timeout`, which stays the most."""
    ratio: float = Field(default=3.0, gt=0.0)
    """See `enable`."""
    warmup_min_steps: Positive = 3
    """Train steps that must have ended before: finalized train batches, and batches of a Scheduler with tasks that are
    no evals."""


class LoRAConfig(Section):
    """LoRA adapters that engines serve over their model: `client.sync_adapter` publishes them."""

    max_adapters: Positive = 1
    """Adapters at once. The engine keeps room for the versions before: answers end with the version they began with."""
    max_rank: int = Field(default=16, ge=1, le=512)
    """Highest rank of an adapter. Engines reserve memory for it, and compute as much for lower ones."""
    adapter: str = ""
    """The adapter that answers where a task's `rollout_args` name none; empty: the model itself."""


class ServersConfig(Section):
    """vLLM servers that others run, for `engine_type: http` (docs/ENGINES.md). One of the first three lists them."""

    urls: list[Annotated[str, AfterValidator(checked_url)]] = Field(default_factory=list)
    """Their URLs, as in `http://gpu-7:8000`, a server each: no load balancer before several. Without /v1, and
    without credentials."""
    file: str = ""
    """File with a URL a line (`#` begins a comment), read again and again: servers come and go with their lines. One
    that is empty, not there, or has a line that is no URL changes nothing."""
    command: Text = ""
    """Shell command that prints the same, run again and again in the working directory of the system's start."""
    poll_interval: Seconds = 2.0
    """Seconds between two looks at `file` or `command`."""
    key_variable: str = "TRINITY_ES_ENGINE_KEY"
    """Environment variable, where the system is started, with the servers' `--api-key`; unset: they ask for none."""
    restart_command: Text = ""
    """Shell command that ends a server and starts it again with other weights: `{url}`, `{path}` and `{version}` in it
    are replaced, quoted for the shell (write no quotes around them), and are TRINITY_ES_URL, TRINITY_ES_PATH and
    TRINITY_ES_VERSION in its environment. It is run for a server that does not answer, and to bring weights into one
    that can't load them while it runs. Empty: there is none."""
    restart_after: float = Field(default=60.0, ge=0.0)
    """Seconds that a runner waits for a server that does not answer, once, before it runs `restart_command`."""
    restart_timeout: Seconds = 600.0
    """Seconds that `restart_command` may take, and again the server until it answers."""
    drain_timeout: float = Field(default=600.0, ge=0.0)
    """Seconds that the units of a server which was taken away may go on; then they are attempted again elsewhere,
    blamed for nothing. Mode `serve`: seconds that its requests have to end."""

    @property
    def ways(self) -> list[str]:
        """The keys that say which servers there are."""
        return [name for name in ("urls", "file", "command") if getattr(self, name)]


class RolloutModelConfig(Section):
    """The engines that generate."""

    engine_type: Annotated[str, AfterValidator(_engine)] = "vllm"
    """`vllm`, `http` (vLLM servers that others run: see `servers`), `scripted` (completions from `script`, no GPU), or
    the `module:Class` of an engine of yours."""
    model_path: str = Field(default="", json_schema_extra={"shown": "model.model_path"})
    """Model that the engines start with, as in `model.model_path`."""
    engine_num: Positive = 1
    """Engines; each has a runner actor of its own. `http`: how many servers a start waits for, all of `servers.urls`
    where it names them."""
    servers: ServersConfig = Field(default_factory=ServersConfig)
    """Where the engines of `engine_type: http` are."""
    tensor_parallel_size: Positive = 1
    """GPUs an engine. Engines take those that are visible in line, from the first one on, the rollout model's before
    the auxiliary ones'; a trainer on the same machine is best given one behind them. With too few they share."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine takes."""
    max_model_len: Positive | None = None
    """Longest prompt plus response, in tokens; null: what the model allows."""
    dtype: str = "auto"
    """Type of the weights in the engine, such as `bfloat16`; `auto`: the model's own."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts faster, generates slower."""
    seed: int = Field(default=0, ge=0)
    """Seed of the engines."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature; 0 is greedy. A task's `rollout_args` go first, here and in the three below."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: the smallest set of tokens with this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest tokens; -1: all."""
    logprobs: bool = True
    """Keep the logprob of every sampled token (training needs it)."""
    max_response_tokens: Positive = 1024
    """Longest response, in tokens."""
    lora: LoRAConfig | None = None
    """LoRA adapters over the model; null: engines serve none."""
    engine_args: Args = Field(default_factory=dict)
    """Further arguments of the engine class as they are (vLLM: AsyncEngineArgs)."""
    server_args: Args = Field(default_factory=dict)
    """Options of the engine's HTTP server, as `vllm serve` has them: `{tool_call_parser: hermes}` (which lets clients
    say `tool_choice: auto`), `reasoning_parser`, ... Its address and its key are not among them. `chat_template` and
    `default_chat_template_kwargs` hold for `self.model.chat` in workflows, too."""
    script: Args = Field(default_factory=dict)
    """What the scripted engine plays (see trinity_es.testing)."""

    @model_validator(mode="after")
    def _servers_are_listed(self) -> Self:
        servers = self.servers
        if self.engine_type != "http":
            if servers.ways:
                raise ValueError(f"has servers.{servers.ways[0]} with engine_type {self.engine_type}: set it to http")
            return self
        if len(servers.ways) != 1:
            told = " and ".join(servers.ways) or "none"
            raise ValueError(f"of type http needs one of servers.urls, servers.file, servers.command, not {told}")
        if len(set(servers.urls)) < len(servers.urls):
            raise ValueError("names a server twice in servers.urls: each is one engine")
        if self.lora is not None:
            raise ValueError("of type http has lora: adapters are not brought to servers of others; use type vllm")
        if self.server_args:
            raise ValueError("of type http has server_args: they are for whoever starts the servers")
        if servers.urls:
            self.__dict__["engine_num"] = len(servers.urls)
        return self

    @property
    def engine_class(self) -> str:
        return registered("engine").get(self.engine_type, self.engine_type)

    def engine_config(self, initial_version: int = 0) -> EngineConfig:
        """Return what a runner builds its engine with.

        `options` are `script` for the scripted engine, those of `servers` for one by HTTP, else `engine_args`.
        """
        options = self.script if self.engine_type == "scripted" else self.engine_args
        if self.engine_type == "http":
            options = self.servers.model_dump(include={
                "key_variable", "restart_command", "restart_after", "restart_timeout",
            })
        lora = self.lora
        return EngineConfig(
            model_path=self.model_path, seed=self.seed, max_model_len=self.max_model_len, dtype=self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization, tensor_parallel_size=self.tensor_parallel_size,
            enforce_eager=self.enforce_eager, initial_version=initial_version, options=dict(options),
            server_args=dict(self.server_args),
            lora=None if lora is None else LoRASettings(max_adapters=lora.max_adapters, max_rank=lora.max_rank),
        )

    def rollout_args(self) -> dict[str, Any]:
        """Return the sampling that a task gets where it says nothing itself, under the names of `Task.rollout_args`."""
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "logprobs": self.logprobs,
            "max_tokens": self.max_response_tokens,
        } | ({"adapter": self.lora.adapter} if self.lora is not None and self.lora.adapter else {})


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model that workflows may ask: a judge, a reward model. Keys as in `explorer.rollout_model`.

    Its sampling is its own: a task's `rollout_args` are for the rollout model.
    """

    name: FileName
    """Its name, in the log, in `Workflow.auxiliary` and in its runners' names (`<name>-0`, ...); no two models have the
    same."""

    @model_validator(mode="after")
    def _serves_its_own(self) -> Self:
        if self.lora is not None:
            raise ValueError("has lora: adapters are published for the rollout model, this one serves its own weights")
        if self.servers.file or self.servers.command:
            raise ValueError("is an auxiliary model: give its servers by servers.urls, which stay as they are")
        return self


class ExplorerConfig(Section):
    """The loop that reads tasksets, submits batches and finalizes them."""

    name: str = "explorer"
    """Name of the explorer."""
    max_timeout: Seconds = 1800.0
    """Seconds that an attempt at a task may take; then it is stopped and counts as failed."""
    stall_after: Seconds = 120.0
    """An open batch in which nothing moves for so many seconds is stalled: the log says so, and what it waits for."""
    max_retry_times: int = Field(default=2, ge=0)
    """Further attempts after a failed one."""
    max_staleness: int | None = Field(default=None, ge=0)
    """After a restart, an open train batch that holds tokens of weights more than so many versions older than the
    current ones is aborted (an explorer submits its tasks again); null: never. It acts at that moment alone: while a
    system runs, nothing is dropped for its age."""
    max_repeat_times_per_runner: Positive | None = None
    """Runs of a task that go to one runner together; null: all of them."""
    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "asynchronous"
    """How the runs of one task go in a runner: one after the other, or all at once. Async workflows are on the engine's
    loop and sync ones in processes, as many as run at once, so that `multi-threading` is the same as `asynchronous`."""
    max_concurrency: Annotated[int | Literal["auto"], BeforeValidator(_concurrency)] = "auto"
    """Maximum number of units (a task, or a part of its runs) that an engine's runner runs at once: its places.
    `auto`: 64, then, for engines of type `vllm` alone, more, up to 256, while the engine has room for them, and fewer
    where it computes much again that it had no room for, or too many requests wait in it. Sync workflows play in so
    many processes at most, with `auto` 64. A limit of your own, on sandboxes say, is a number here."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: never."""
    eval_on_startup: bool = True
    """Evaluate before the first step too, where there are eval tasksets."""
    bench_on_latest_checkpoint: bool = False
    """Mode `bench`: evaluate the newest checkpoint only, instead of every one in order (and first the model as it was
    given, with `eval_on_startup`)."""
    runner_state_report_interval: float = Field(default=0.0, ge=0.0)
    """Seconds between two tables of what the runners do, in coordinator.log; 0: none."""
    listen_address: str = Field(default="127.0.0.1", min_length=1)
    """Mode `serve`: address that the OpenAI-compatible proxy listens on. It asks for the key on any address."""
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0: a free one."""
    proxy_tls: TlsConfig = Field(default_factory=TlsConfig)
    """Its certificate: with one it speaks HTTPS."""
    proxy_without_key: bool = False
    """Mode `serve`: no key is asked for, as clients of Trinity-RFT expect (they give "EMPTY", or none). Whoever has a
    process on this machine can ask then, and reward, so `listen_address` must be on loopback; web pages are refused."""
    min_running_model_num: Positive = 1
    """Mode `serve`: engines that go on answering while others load new weights."""
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    auxiliary_models: list[AuxiliaryModelConfig] = Field(default_factory=list)
    """Further models that workflows may ask."""

    @property
    def engine_num(self) -> int:
        return self.rollout_model.engine_num + sum(m.engine_num for m in self.auxiliary_models)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.proxy_without_key and not is_loopback(self.listen_address):
            raise ValueError(
                f"has proxy_without_key with listen_address {self.listen_address!r}, where others would be let in: "
                "leave it on 127.0.0.1, or give clients the key that `trinity-es serve` prints"
            )
        names = ["rollout", "runner", *(m.name for m in self.auxiliary_models)]  # runner-0 is of the rollout model
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ValueError(f"has two models with the name {twice!r} (rollout and runner are taken): rename one")
        return self


class SynchronizerConfig(Section):
    """How new weights reach the engines."""

    sync_method: Literal["checkpoint", "memory", "nccl"] = "checkpoint"
    """`checkpoint`: the trainer saves a folder in Hugging Face format, and the engines load it; `memory`: the same
    through shared memory (/dev/shm), without a disk; `nccl`: from GPU to GPU, by vLLM's own weight transfer (gloo on a
    CPU), and a copy in shared memory for engines that come back. For the last two a trainer has `state_dict()`."""
    sync_style: Literal["fixed", "trainer_driven", "fully_async"] = "fixed"
    """`fixed`: every `sync_interval` steps, before the next ones are generated; `fully_async`: as often, and generation
    does not wait for them; `trainer_driven`: that, and the trainer says when (`wants_sync(step)` of its class)."""
    sync_interval: Positive = 1
    """Steps between two syncs."""
    sync_offset: int = Field(default=0, ge=0)
    """`fixed`: so many steps are generated ahead, with older weights, while the trainer learns from earlier steps."""
    max_inflight_batches: Positive = 2
    """`fully_async`, `trainer_driven`: train batches that are in flight at a time: submitted, and not trained on yet
    (without `trainer.class`: not finalized yet)."""
    sync_timeout: Seconds = 3600.0
    """Seconds to wait for the weights: for engines to load them; in mode `explore` also for the trainer's next ones."""


class MonitorConfig(Section):
    """Metrics."""

    monitor_type: list[ImportName] = Field(default_factory=lambda: ["jsonl"])
    """Where metrics of steps and evals are written: `jsonl` (always on: `metrics.jsonl` in `run_dir`), `tensorboard`,
    `wandb`, `trackio`, `mlflow`, `swanlab` (each needs its extra), or `module:Class`."""
    monitor_args: dict[str, Args] = Field(default_factory=dict)
    """Arguments of each, by its name: `path` of `jsonl` and `tensorboard`, those of `init` of `wandb`, `trackio` and
    `swanlab`, `tracking_uri` and `experiment` of `mlflow`, or your own's."""
    otlp_endpoint: str | None = None
    """Where traces of batches, tasks and attempts are sent over OTLP/HTTP, as in `http://localhost:4318` (needs the
    extra `otel`); null: nowhere, unless OTEL_EXPORTER_OTLP_ENDPOINT is set. See docs/OBSERVABILITY.md."""
    detailed_stats: bool = False
    """Eval metrics with mean, max, min and std over the tasks; false: the mean only."""


class TrainerConfig(Section):
    """The trainer that runs beside the explorer."""

    trainer_class: ClassPath | None = Field(default=None, alias="class")
    """The trainer, `module:Class`, which runs here in mode `both`, in a process of its own in modes `explore` and
    `train`; null: nothing waits for a trainer, experiences are kept for one that connects when it likes."""
    args: Args = Field(default_factory=dict)
    """Its arguments."""
    keep_checkpoints: int = Field(default=3, ge=2)
    """Newest checkpoints that are kept (2 at least: an engine that can't load the newest goes back to the one before);
    older ones are deleted."""
    save_interval: Positive = 1
    """`sync_method` memory or nccl: steps between two checkpoints. A run that comes back after its shared memory was
    lost trains the steps since its last checkpoint again, on the experiences that the log has."""


class StoreConfig(Section):
    """The log and the payloads."""

    url: Annotated[str, AfterValidator(_store_url)] = Field(
        default="", repr=False, json_schema_extra={"shown": "sqlite:///runs/<project>/<name>/log.sqlite"}
    )
    """Database of the log: `sqlite:///file` or `postgresql+psycopg://user@host/name` (a password is best left to
    PGPASSWORD or ~/.pgpass; one that stands here is never shown). In mode `bench` the default is
    `bench/log.sqlite` in that folder."""
    durability: Literal["process", "power"] = "power"
    """What an acknowledgement survives: `power`: loss of power; `process`: kill -9 of any process, and is faster
    (on PostgreSQL both are the same)."""
    retry_for: Seconds = 300.0
    """Seconds that a database which is away (it restarts, a lock is held) is waited for before callers get an error."""
    # "keep" is what logs of the first release hold
    retention: Annotated[int | None, BeforeValidator(lambda v: None if v == "keep" else v)] = Field(default=None, ge=1)
    """Steps whose experiences are kept: those of a batch are deleted when so many later steps were acknowledged, its
    events stay. At least the steps between two checkpoints of the trainer, which starts again from one. null: nothing
    is deleted."""


class SystemConfig(Section):
    """The actor system."""

    address: str = Field(default="127.0.0.1", min_length=1)
    """Address that all of the actor system listens on. Without the key nobody is heard, on any address; but nothing is
    encrypted, so leave it on loopback unless the network is yours."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0: a free one."""
    log_dir: str = Field(default="", json_schema_extra={"shown": "logs/ beside the store"})
    """Folder of the processes' text logs."""
    key_file: str = Field(default="", json_schema_extra={"shown": "key in system.log_dir"})
    """File with the key that the system's processes and its clients share; made at the first start.
    The environment variable TRINITY_ES_KEY goes before it."""
    startup_timeout: Seconds = 600.0
    """Seconds that the actor system and its engines have to come up."""
    keeper: bool = True
    """A small process beside the actor system starts it again when its guardian or its admin died, or hangs."""
    detach: bool = False
    """A system that a Python process or `trinity-es run` starts stays up when that process ends; without, it ends with
    it, also with kill -9. What `trinity-es up` starts stays."""
    restarts: int = Field(default=3, ge=0)
    """Times within 600 s that a runner may end and is started again; then its slot is quarantined."""
    restart_pause: Seconds = 1.0
    """Seconds before the first of these starts; each pause is twice the one before it, up to 60, give or take 20 %."""
    heartbeat_timeout: Seconds = 20.0
    """A process that gave no sign of life for so many seconds is ended and started again."""
    hang_timeout: Seconds = 60.0
    """A runner whose engine's loop did not answer for so many seconds is ended and started again."""

