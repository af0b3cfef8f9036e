"""Sections of the config about models and their engines.

The docstring under a field is its line in docs/CONFIG.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from trinity_es.actors.config.section import Args, FileName, Positive, Seconds, Section, Text
from trinity_es.actors.engines.interface import EngineConfig, LoRASettings
from trinity_es.actors.plugin_lookup import registered
from trinity_es.actors.server_addresses import checked_url

__all__ = ["AuxiliaryModelConfig", "LoRAConfig", "ModelConfig", "RolloutModelConfig", "ServersConfig"]


def _check_engine_type(value: str) -> str:
    engines = registered("engine")
    if value not in engines and not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError(f'must be one of {", ".join(sorted(engines))}, "module:Class", not {value!r}')
    return value


class ModelConfig(Section):
    """The model that is trained."""

    model_path: str = ""
    """Folder of the model in Hugging Face format, or a hub id such as `Qwen/Qwen2.5-0.5B`. Its weights are model
    version 0. The scripted engine needs none."""


class LoRAConfig(Section):
    """LoRA adapters that engines serve over their model; `client.sync_adapter` publishes them."""

    max_adapters: Positive = 1
    """Maximum number of adapters at once. Engines also keep room for earlier versions, in which open answers end."""
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
    """File with a URL a line (`#` begins a comment), read periodically. A new line adds a server, a deleted one removes
    it. A file that is missing, empty, or has an invalid URL changes nothing."""
    command: Text = ""
    """Shell command that prints such a list, run periodically in the directory where the system was started."""
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
    """Seconds that a removed server may take to finish its units. After that they are attempted again elsewhere, which
    does not count as a failure of theirs. Mode `serve`: seconds that its requests have to end."""

    @property
    def keys_in_use(self) -> list[str]:
        """The keys among `urls`, `file` and `command` that are set."""
        return [name for name in ("urls", "file", "command") if getattr(self, name)]


class RolloutModelConfig(Section):
    """The engines that generate."""

    engine_type: Annotated[str, AfterValidator(_check_engine_type)] = "vllm"
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
    def _check_servers(self) -> Self:
        """Check that the keys fit the engine type, and set `engine_num` to the number of `servers.urls`."""
        servers, keys_in_use = self.servers, self.servers.keys_in_use
        if self.engine_type != "http":
            if keys_in_use:
                raise ValueError(f"has servers.{keys_in_use[0]}, so engine_type must be http, not {self.engine_type}")
            return self
        if len(keys_in_use) != 1:
            keys = " and ".join(keys_in_use) or "none"
            raise ValueError(f"of type http needs one of servers.urls, servers.file, servers.command, not {keys}")
        if (duplicate := next((url for url in servers.urls if servers.urls.count(url) > 1), None)) is not None:
            raise ValueError(f"names {duplicate} more than once in servers.urls: name each server once")
        if self.lora is not None:
            raise ValueError("of type http has lora: external servers get no adapters; use type vllm")
        if self.server_args:
            raise ValueError("of type http has server_args: give them to the command that starts the servers")
        if servers.urls:
            self.__dict__["engine_num"] = len(servers.urls)  # a section is frozen
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
        """Return the default sampling arguments of a task, with the keys of `Task.rollout_args`."""
        adapter = self.lora.adapter if self.lora is not None else ""
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "logprobs": self.logprobs,
            "max_tokens": self.max_response_tokens, **({"adapter": adapter} if adapter else {}),
        }


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model that workflows may call: a judge, a reward model. Keys as in `explorer.rollout_model`.

    A task's `rollout_args` do not change its sampling.
    """

    name: FileName
    """Unique name of the model in the log, in `Workflow.auxiliary`, and in its runners' names (`<name>-0`, ...)."""

    @model_validator(mode="after")
    def _check_auxiliary(self) -> Self:
        if self.lora is not None:
            raise ValueError("has lora, which only the rollout model can have: remove it from this auxiliary model")
        if self.servers.file or self.servers.command:
            raise ValueError("is an auxiliary model, whose servers can't change: list them in servers.urls")
        return self
