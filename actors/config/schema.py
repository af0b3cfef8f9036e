"""Sections of the config about models, engines, explorer, trainer, store and system. `config.py` combines all sections.

The docstring under a field is its line in docs/CONFIG.md.
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
        raise PydanticKnownError("int_type")  # this type makes the caller convert a variable's text to a number
    if value != "auto" and value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    return value


def _in_flight(value: Any) -> Any:
    if value == "cut":
        raise ValueError("can't be 'cut', which would be the same as 'keep': a request goes on from its tokens, "
                         "computed again with the new weights. Write keep or finish")
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
        raise ValueError(f"is {value}: a file has no options after a ?. If its name has a ?, write %3F")
    return value


class ModelConfig(Section):
    """The model that is trained."""

    model_path: str = ""
    """Folder of the model in Hugging Face format, or a hub id such as `Qwen/Qwen2.5-0.5B`. Its weights are model
    version 0. The scripted engine needs none."""


class OverRolloutConfig(Section):
    """End of a step before all of its tasks are settled."""

    ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a batch's tasks that may be missing: the explorer waits for ceil(batch_size * (1 - ratio)) of them."""
    wait_after_min: float = Field(default=30.0, ge=0.0)
    """Seconds to wait for the others once there are enough."""
    return_partial_tasks: bool = False
    """Also deliver tasks with only some runs finished."""


class DynamicTimeoutConfig(Section):
    """A timeout that adapts to the duration of attempts."""

    enable: bool = False
    """Stop an attempt after `ratio` times the mean duration of attempts in earlier train steps. Attempts that timed out
    count, evals don't. `max_timeout` stays the maximum."""
    ratio: float = Field(default=3.0, gt=0.0)
    """Factor on the mean duration, see `enable`."""
    warmup_min_steps: Positive = 3
    """Train steps that must have ended first: finalized train batches, and batches of a Scheduler with tasks that are
    no evals."""


class LoRAConfig(Section):
    """LoRA adapters that engines serve over their model; `client.sync_adapter` publishes them."""

    max_adapters: Positive = 1
    """Adapters at once. Engines keep room for earlier versions, because an answer ends with the version it began with.
    """
    max_rank: int = Field(default=16, ge=1, le=512)
    """Highest rank of an adapter. Engines reserve memory for it, and compute as much for lower ranks."""
    adapter: str = ""
    """The adapter for tasks whose `rollout_args` name none; empty: the model itself."""


class ServersConfig(Section):
    """External vLLM servers, for `engine_type: http` (docs/ENGINES.md). One of the first three keys lists them."""

    urls: list[Annotated[str, AfterValidator(checked_url)]] = Field(default_factory=list)
    """One URL for each server, as in `http://gpu-7:8000`, without /v1 and without credentials. Several servers behind
    one load balancer do not work."""
    file: str = ""
    """File with a URL a line (`#` begins a comment), read periodically; servers are added and removed with their lines.
    A file that is missing, empty, or has an invalid URL changes nothing."""
    command: Text = ""
    """Shell command that prints the same, run periodically in the directory where the system was started."""
    poll_interval: Seconds = 2.0
    """Seconds between two reads of `file` or runs of `command`."""
    key_variable: str = "TRINITY_ES_ENGINE_KEY"
    """Environment variable with the servers' `--api-key`, read where the system is started; unset: no key."""
    restart_command: Text = ""
    """Shell command that ends a server and starts it again with other weights. `{url}`, `{path}` and `{version}` in it
    are replaced by values quoted for the shell, so write no quotes around them; its environment has them as
    TRINITY_ES_URL, TRINITY_ES_PATH and TRINITY_ES_VERSION. It runs for a server that does not answer, and for one that
    can't load new weights while it runs. Empty: no command."""
    restart_after: float = Field(default=60.0, ge=0.0)
    """Seconds that a runner waits for a server that does not answer, before it runs `restart_command` once."""
    restart_timeout: Seconds = 600.0
    """Seconds that `restart_command` may take, and after it the server until it answers."""
    drain_timeout: float = Field(default=600.0, ge=0.0)
    """Seconds that a removed server may take to finish its units. After that they are attempted again elsewhere, and
    this counts as no failure of theirs. Mode `serve`: seconds that its requests have to end."""

    @property
    def ways(self) -> list[str]:
        """The keys in use that list servers."""
        return [name for name in ("urls", "file", "command") if getattr(self, name)]


class RolloutModelConfig(Section):
    """The engines that generate."""

    engine_type: Annotated[str, AfterValidator(_engine)] = "vllm"
    """`vllm`, `http` (external vLLM servers, see `servers`), `scripted` (completions from `script`, no GPU), or
    `module:Class` of your own engine."""
    model_path: str = Field(default="", json_schema_extra={"shown": "model.model_path"})
    """Model that the engines start with, as in `model.model_path`."""
    engine_num: Positive = 1
    """Number of engines, each with a runner of its own. `http`: number of servers that a start waits for; with
    `servers.urls` all of them."""
    servers: ServersConfig = Field(default_factory=ServersConfig)
    """External servers of `engine_type: http`."""
    tensor_parallel_size: Positive = 1
    """GPUs for each engine. Engines take the visible GPUs in order from the first on, those of the rollout model before
    those of auxiliary models. Give a trainer on the same machine a GPU after them. If there are too few, engines share.
    """
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine takes."""
    max_model_len: Positive | None = None
    """Longest prompt plus response, in tokens; null: the model's limit."""
    dtype: str = "auto"
    """Type of the weights in the engine, such as `bfloat16`; `auto`: the model's own."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts faster, generates slower."""
    seed: int = Field(default=0, ge=0)
    """Seed of the engines."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature; 0 is greedy. A task's `rollout_args` override this, `top_p`, `top_k` and `logprobs`."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: the smallest set of tokens with this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest tokens; -1: all."""
    logprobs: bool = True
    """Keep the logprob of every sampled token, which training needs."""
    max_response_tokens: Positive = 1024
    """Longest response, in tokens."""
    lora: LoRAConfig | None = None
    """LoRA adapters over the model; null: none."""
    engine_args: Args = Field(default_factory=dict)
    """Further arguments of the engine class (vLLM: AsyncEngineArgs)."""
    server_args: Args = Field(default_factory=dict)
    """Options of the engine's HTTP server, as for `vllm serve`, except its address and key: `reasoning_parser`,
    `{tool_call_parser: hermes}` (which allows clients `tool_choice: auto`), ... `chat_template` and
    `default_chat_template_kwargs` also apply to `self.model.chat` in workflows."""
    script: Args = Field(default_factory=dict)
    """Script of the scripted engine (`trinity_es.testing`)."""

    @model_validator(mode="after")
    def _servers_are_listed(self) -> Self:
        servers = self.servers
        if self.engine_type != "http":
            if servers.ways:
                raise ValueError(f"has servers.{servers.ways[0]} with engine_type {self.engine_type}: set it to http")
            return self
        if len(servers.ways) != 1:
            keys = " and ".join(servers.ways) or "none"
            raise ValueError(f"of type http needs one of servers.urls, servers.file, servers.command, not {keys}")
        if len(set(servers.urls)) < len(servers.urls):
            raise ValueError("names a server twice in servers.urls: each is one engine")
        if self.lora is not None:
            raise ValueError("of type http has lora: external servers get no adapters; use type vllm")
        if self.server_args:
            raise ValueError("of type http has server_args: give them to the command that starts the servers")
        if servers.urls:
            self.__dict__["engine_num"] = len(servers.urls)
        return self

    @property
    def engine_class(self) -> str:
        return registered("engine").get(self.engine_type, self.engine_type)

    def engine_config(self, initial_version: int = 0) -> EngineConfig:
        """Return the config of this model's engines.

        Its `options` are `script` for type `scripted`, some keys of `servers` for type `http`, or else `engine_args`.
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
        """Return the default sampling of a task, under the names of `Task.rollout_args`."""
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "logprobs": self.logprobs,
            "max_tokens": self.max_response_tokens,
        } | ({"adapter": self.lora.adapter} if self.lora is not None and self.lora.adapter else {})


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model that workflows may call: a judge, a reward model. Keys as in `explorer.rollout_model`.

    A task's `rollout_args` do not change its sampling.
    """

    name: FileName
    """Unique name of the model in the log, in `Workflow.auxiliary`, and in its runners' names (`<name>-0`, ...)."""

    @model_validator(mode="after")
    def _serves_its_own(self) -> Self:
        if self.lora is not None:
            raise ValueError("has lora, which only the rollout model can have: remove it from this auxiliary model")
        if self.servers.file or self.servers.command:
            raise ValueError("is an auxiliary model, whose servers can't change: list them in servers.urls")
        return self


class ProgressConfig(Section):
    """Journal of unfinished runs: after the death of a runner they go on where they were."""

    seconds: float = Field(default=1.0, ge=0.0)
    """Seconds between two records of the tokens that are being generated, so at most that much is generated again. 0:
    no journal; lost runs begin again at their prompts."""
    max_bytes: Positive = 256 * 1024 * 1024
    """Maximum size of one runner's journal; beyond it the oldest part is dropped."""


class ExplorerConfig(Section):
    """The loop that reads tasksets, submits batches and finalizes them."""

    name: str = "explorer"
    """Name of the explorer."""
    max_timeout: Seconds = 1800.0
    """Seconds that an attempt at a task may take; then it is stopped and counts as failed."""
    stall_after: Seconds = 120.0
    """Seconds without progress after which an open batch counts as stalled, and the log records what it waits for."""
    max_retry_times: int = Field(default=2, ge=0)
    """Further attempts after a failed one."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum age of a delivered token, in versions of the weights or of its LoRA adapter. When a train batch is
    finalized, experiences with an older token are dropped before the operators (docs/PIPELINE.md). After a restart, an
    open train batch with tokens of older weights is aborted, and an explorer submits its tasks again. null: no maximum.
    """
    max_repeat_times_per_runner: Positive | None = None
    """Runs of a task that go to one runner together; null: all of them."""
    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "asynchronous"
    """Order of the runs of one task in a runner: `sequential`: one after the other; `asynchronous`: all at once. Async
    workflows run on the engine's loop, sync ones in one process for each concurrent run, so `multi-threading` is the
    same as `asynchronous`."""
    max_concurrency: Annotated[int | Literal["auto"], BeforeValidator(_concurrency)] = "auto"
    """Maximum number of units (a task, or a part of its runs) that a runner runs at once: its places. `auto` starts
    with 64. For engines of type `vllm` alone it grows up to 256 while the engine has room, and shrinks if the engine
    recomputes many tokens for lack of room, or too many requests wait in it. Sync workflows play in at most this many
    processes, with `auto` 64. Set a number if something else limits the runs, such as sandboxes."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: never."""
    eval_on_startup: bool = True
    """Evaluate before the first step too, if there are eval tasksets."""
    bench_on_latest_checkpoint: bool = False
    """Mode `bench`: evaluate the newest checkpoint only; false: all in order, and with `eval_on_startup` first the
    original model."""
    runner_state_report_interval: float = Field(default=0.0, ge=0.0)
    """Seconds between two tables of the runners' activity in coordinator.log; 0: none."""
    listen_address: str = Field(default="127.0.0.1", min_length=1)
    """Mode `serve`: address that the OpenAI-compatible proxy listens on. It requires the key on every address."""
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """Port of the proxy; 0: a free one."""
    proxy_tls: TlsConfig = Field(default_factory=TlsConfig)
    """Certificate of the proxy, which then speaks HTTPS."""
    proxy_without_key: bool = False
    """Mode `serve`: require no key, as clients of Trinity-RFT expect (they give "EMPTY", or none). Any process on this
    machine can then send requests and rewards, so `listen_address` must be on loopback; web pages are refused."""
    min_running_model_num: Positive = 1
    """Mode `serve`: number of engines that go on answering while others load new weights."""
    progress: ProgressConfig = Field(default_factory=ProgressConfig)
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    auxiliary_models: list[AuxiliaryModelConfig] = Field(default_factory=list)
    """Further models that workflows may call."""

    @property
    def engine_num(self) -> int:
        return self.rollout_model.engine_num + sum(m.engine_num for m in self.auxiliary_models)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.proxy_without_key and not is_loopback(self.listen_address):
            raise ValueError(
                f"has proxy_without_key with listen_address {self.listen_address!r}, which other machines can reach: "
                "leave it on 127.0.0.1, or give clients the key that `trinity-es serve` prints"
            )
        names = ["rollout", "runner", *(m.name for m in self.auxiliary_models)]  # runner-0 is of the rollout model
        duplicate = next((n for n in names if names.count(n) > 1), None)
        if duplicate is not None:
            raise ValueError(f"has two models with the name {duplicate!r} (rollout and runner are taken): rename one")
        return self


class SynchronizerConfig(Section):
    """Transfer of new weights to the engines."""

    sync_method: Literal["checkpoint", "memory", "nccl"] = "checkpoint"
    """`checkpoint`: the trainer saves a folder in Hugging Face format, and the engines load it; `memory`: the same
    through shared memory (/dev/shm), without a disk; `nccl`: from GPU to GPU by vLLM's own weight transfer (gloo on a
    CPU), with a copy in shared memory for engines that restart. `memory` and `nccl` need a trainer with `state_dict()`.
    """
    sync_style: Literal["fixed", "trainer_driven", "fully_async"] = "fixed"
    """`fixed`: sync every `sync_interval` steps, before the next ones are generated; `fully_async`: as often, but
    generation does not wait for the weights; `trainer_driven`: like `fully_async`, but `wants_sync(step)` of the
    trainer's class decides when."""
    sync_interval: Positive = 1
    """Steps between two syncs."""
    sync_offset: int = Field(default=0, ge=0)
    """`fixed`: number of steps generated ahead, with older weights, while the trainer learns from earlier steps."""
    max_inflight_batches: Positive = 2
    """`fully_async`, `trainer_driven`: maximum number of train batches that are submitted and not trained on yet
    (without `trainer.class`: not finalized yet)."""
    sync_timeout: Seconds = 3600.0
    """Seconds to wait until the engines have loaded the weights, and in mode `explore` for the trainer's next weights.
    """
    in_flight: Annotated[Literal["keep", "finish"], BeforeValidator(_in_flight)] = "keep"
    """Requests that an engine is answering when new weights come. `keep`: they go on with the new weights, and
    `version_spans` says which weights made which tokens; `finish`: they end with the old weights before the new are
    loaded, and new requests wait meanwhile. Those still open after half of `sync_timeout` go on as with `keep`."""


class MonitorConfig(Section):
    """Destinations of metrics and traces."""

    monitor_type: list[ImportName] = Field(default_factory=lambda: ["jsonl"])
    """Destinations of the metrics of steps and evals: `jsonl` (always on: `metrics.jsonl` in `run_dir`), `tensorboard`,
    `wandb`, `trackio`, `mlflow`, `swanlab` (each needs its extra), or `module:Class`."""
    monitor_args: dict[str, Args] = Field(default_factory=dict)
    """Arguments of each destination by its name: `path` of `jsonl` and `tensorboard`, those of `init` of `wandb`,
    `trackio` and `swanlab`, `tracking_uri` and `experiment` of `mlflow`, those of your own class."""
    otlp_endpoint: str | None = None
    """OTLP/HTTP endpoint for traces of batches, tasks and attempts, as in `http://localhost:4318` (needs the extra
    `otel`, docs/OBSERVABILITY.md); null: OTEL_EXPORTER_OTLP_ENDPOINT if it is set, otherwise none."""
    detailed_stats: bool = False
    """Eval metrics with mean, max, min and std over the tasks; false: the mean only."""


class TrainerConfig(Section):
    """The trainer that runs beside the explorer."""

    trainer_class: ClassPath | None = Field(default=None, alias="class")
    """The trainer, `module:Class`. In mode `both` it runs in the explorer's process, in modes `explore` and `train` in
    its own. null: nothing waits for a trainer, and experiences are kept until one connects."""
    args: Args = Field(default_factory=dict)
    """Its arguments."""
    keep_checkpoints: int = Field(default=3, ge=2)
    """Number of newest checkpoints to keep; older ones are deleted. At least 2, because an engine that can't load the
    newest goes back to the one before."""
    save_interval: Positive = 1
    """`sync_method` memory or nccl: steps between two checkpoints. If shared memory is lost, a resumed run trains the
    steps since the last checkpoint again, on the experiences in the log."""


class StoreConfig(Section):
    """The log and the payloads."""

    url: Annotated[str, AfterValidator(_store_url)] = Field(
        default="", repr=False, json_schema_extra={"shown": "sqlite:///runs/<project>/<name>/log.sqlite"}
    )
    """Database of the log: `sqlite:///file` or `postgresql+psycopg://user@host/name`. Better give a password by
    PGPASSWORD or ~/.pgpass; one in the URL is never shown. In mode `bench` the default is `bench/log.sqlite` in the
    default folder."""
    durability: Literal["process", "power"] = "power"
    """Faults that acknowledged data survives. `power`: also a loss of power; `process`: kill -9 of any process, and it
    is faster. On PostgreSQL both are the same."""
    retry_for: Seconds = 300.0
    """Seconds to wait for a database that is unavailable (it restarts, a lock is held) before callers get an error."""
    # logs of the first release hold "keep"
    retention: Annotated[int | None, BeforeValidator(lambda v: None if v == "keep" else v)] = Field(default=None, ge=1)
    """Number of steps whose experiences are kept. A batch's are deleted once this many later steps are acknowledged;
    its events stay. Give at least the steps between two checkpoints, since the trainer restarts from one. null: all."""


class SystemConfig(Section):
    """The actor system."""

    address: str = Field(default="127.0.0.1", min_length=1)
    """Address that all processes of the actor system listen on. Every message needs the key, but none is encrypted, so
    leave it on loopback unless the network is yours."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the actor system; 0: a free one."""
    log_dir: str = Field(default="", json_schema_extra={"shown": "logs/ beside the store"})
    """Folder of the processes' text logs."""
    key_file: str = Field(default="", json_schema_extra={"shown": "key in system.log_dir"})
    """File with the key that the system's processes and its clients share, created at the first start.
    The environment variable TRINITY_ES_KEY takes precedence over it."""
    startup_timeout: Seconds = 600.0
    """Seconds that the actor system and its engines may take to start."""
    keeper: bool = True
    """Run a small process beside the actor system, which restarts it if its guardian or admin dies or hangs."""
    detach: bool = False
    """Keep the system up after the Python process or the `trinity-es run` that started it; false: it ends with that
    process, also after kill -9. A system that `trinity-es up` started always stays up."""
    restarts: int = Field(default=3, ge=0)
    """Number of ends within 600 s after which a runner is started again; after one more its slot is quarantined."""
    restart_pause: Seconds = 1.0
    """Seconds before the first of these starts. Each pause is twice the one before, up to 60 s, plus or minus 20 %."""
    heartbeat_timeout: Seconds = 20.0
    """Seconds without a heartbeat after which a process is ended and started again."""
    hang_timeout: Seconds = 60.0
    """Seconds without an answer of its engine's loop after which a runner is ended and started again."""

