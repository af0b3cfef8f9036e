"""Sections of the config about explorer, trainer, store and system. `config.py` combines all sections.

The docstring under a field is its line in docs/CONFIG.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from trinity_es.actors.config.hosts import TlsConfig
from trinity_es.actors.config.models import AuxiliaryModelConfig, RolloutModelConfig
from trinity_es.actors.config.section import Args, ClassPath, ImportName, Positive, Seconds, Section
from trinity_es.actors.server_addresses import is_loopback
from trinity_es.events.errors import ConfigError
from trinity_es.events.store.payloads.payload_place import require_place_url

__all__ = [
    "ExplorerConfig", "MonitorConfig", "OverRolloutConfig", "StoreConfig", "SynchronizerConfig", "SystemConfig",
    "TrainerConfig",
]


def _check_concurrency(value: Any) -> Any:
    if value != "auto" and type(value) is not int:
        raise PydanticKnownError("int_type")  # this type makes the caller convert a variable's text to a number
    if value != "auto" and value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    return value


def _check_store_url(value: str) -> str:
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


class OverRolloutConfig(Section):
    """End of a step before all of its tasks are settled."""

    ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a batch's tasks that may be missing: the explorer waits for ceil(batch_size * (1 - ratio)) of them."""
    wait_after_min: float = Field(default=30.0, ge=0.0)
    """Seconds to wait for the other tasks once there are enough of them."""
    return_partial_tasks: bool = False
    """Also deliver tasks with only some runs finished."""


class RefillConfig(Section):
    """Replacement of tasks that gave a train batch nothing to train on."""

    at_most: int = Field(default=0, ge=0)
    """Maximum number of replacements in a step; 0: none. A task is replaced by the next one of the tasksets if all its
    runs failed, or if the pipeline dropped its experiences (filters, `max_staleness`). This ends when the pipeline
    delivers experiences of as many tasks as the step waits for (`buffer.batch_size`, less with `over_rollout.ratio`).
    """


class DynamicTimeoutConfig(Section):
    """A timeout that adapts to the duration of attempts."""

    enable: bool = False
    """Stop an attempt after `ratio` times the mean duration of attempts in earlier train steps. The mean includes
    attempts that timed out, and no evals. `max_timeout` stays the maximum."""
    ratio: float = Field(default=3.0, gt=0.0)
    """Factor on the mean duration, see `enable`."""
    warmup_min_steps: Positive = 3
    """Train steps that must have ended before: finalized train batches, and batches of a Scheduler that hold more than
    evals."""


class ProgressConfig(Section):
    """Journal of unfinished runs, from which they go on after their runner died."""

    seconds: float = Field(default=1.0, ge=0.0)
    """Seconds between two records of the generated tokens. A lost run generates at most this much again. 0: no journal;
    lost runs begin again at their prompts."""
    max_bytes: Positive = 256 * 1024 * 1024
    """Maximum size of one runner's journal. Beyond it the oldest part (4 MiB) is dropped; the newest part always stays.
    """


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
    max_concurrency: Annotated[int | Literal["auto"], BeforeValidator(_check_concurrency)] = "auto"
    """Maximum number of units (a task, or a part of its runs) that a runner runs at once: its places. `auto` starts
    with 64. For engines of type `vllm`, and servers that tell their load in `/metrics`, it grows up to 256 while there
    is room, and shrinks if too many requests wait, or the engine recomputes many tokens for lack of room. Sync
    workflows play in at most this many processes, with `auto` 64. Set a number if something else limits the runs, such
    as sandboxes."""
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
    refill: RefillConfig = Field(default_factory=RefillConfig)
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)
    auxiliary_models: list[AuxiliaryModelConfig] = Field(default_factory=list)
    """Further models that workflows may call."""

    @property
    def engine_num(self) -> int:
        return self.rollout_model.engine_num + sum(m.engine_num for m in self.auxiliary_models)

    @model_validator(mode="after")
    def _check_proxy_and_names(self) -> Self:
        if self.proxy_without_key and not is_loopback(self.listen_address):
            raise ValueError(
                f"has proxy_without_key with listen_address {self.listen_address!r}, which other machines can reach: "
                "set it to 127.0.0.1, or give clients the key that `trinity-es serve` prints"
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
    in_flight: Literal["keep", "finish", "cut"] = "keep"
    """Requests that an engine is answering when new weights come. `keep`: they go on with the new weights, and
    `version_spans` says which weights made which tokens; `finish`: they end with the old weights before the new are
    loaded, and new requests wait meanwhile. Those still open after half of `sync_timeout` go on as with `keep`; `cut`:
    as `keep`, and the tasks that `over_rollout.ratio` leaves unfinished are cut and go on in the next step, from the
    tokens that they have (docs/HALF_AN_ANSWER.md)."""

    @property
    def steps_ahead(self) -> int:
        """Maximum distance, in steps and so in weights versions, from a step to the first one submitted after its end.
        """
        return self.sync_interval + self.sync_offset if self.sync_style == "fixed" else self.max_inflight_batches


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


def _check_payloads_url(url: str) -> str:
    try:
        return url and require_place_url(url)
    except ConfigError as e:
        raise ValueError(f"can't be used: {e.message}") from None


class StoreConfig(Section):
    """The log and the payloads."""

    url: Annotated[str, AfterValidator(_check_store_url)] = Field(
        default="", repr=False, json_schema_extra={"shown": "sqlite:///runs/<project>/<name>/log.sqlite"}
    )
    """Database of the log: `sqlite:///file` or `postgresql+psycopg://user@host/name`. Better give a password by
    PGPASSWORD or ~/.pgpass; one in the URL is never shown. In mode `bench` the default is `bench/log.sqlite` in the
    default folder."""
    payloads: Annotated[str, AfterValidator(_check_payloads_url)] = ""
    """Location of the experiences: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or a folder
    that all hosts share, `file:///folder`. Each log has a part of its own below it. Credentials come from the
    environment alone. Empty: the location in the log, which for a new log is beside its SQLite file, or in PostgreSQL.
    A log that has payloads keeps them where they are until `trinity-es payloads move`."""
    durability: Literal["process", "power"] = "power"
    """Faults that acknowledged data survives. `power`: also a loss of power; `process`: kill -9 of any process, and it
    is faster. On PostgreSQL both are the same."""
    retry_for: Seconds = 300.0
    """Seconds to wait for a database that is unavailable (it restarts, a lock is held) before callers get an error."""
    # logs of the first release hold "keep"
    retention: Annotated[int | None, BeforeValidator(lambda v: None if v == "keep" else v)] = Field(default=None, ge=1)
    """Number of steps whose experiences are kept; null: all. A batch's experiences are deleted once this many later
    steps are acknowledged; its events stay. Keep at least the steps between two checkpoints, since the trainer restarts
    from one."""


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
    """Maximum number of ends within 600 s after which a runner is started again. After one more it is quarantined."""
    restart_pause: Seconds = 1.0
    """Seconds before the first of these starts. Each pause is twice the one before, up to 60 s, plus or minus 20 %."""
    heartbeat_timeout: Seconds = 20.0
    """Seconds without a heartbeat after which a process is ended and started again."""
    hang_timeout: Seconds = 60.0
    """Seconds without an answer of its engine's loop after which a runner is ended and started again."""

    @property
    def beat_seconds(self) -> float:
        """Interval between two heartbeats, so that some may get lost within `heartbeat_timeout`."""
        return min(4.0, self.heartbeat_timeout / 5)

