"""What an inference engine is to a runner: a small async interface, and nothing about vLLM.

A runner finds its engine class by the name in its config (`"module:Class"`), builds it with an `EngineConfig`, awaits
`start()` once, then `generate` from many coroutines at a time, all on one event loop. Everything that knows vLLM is in
`actors/engines/vllm/engine.py`; `trinity_es.testing.ScriptedEngine` plays a script instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from trinity_es.events.errors import EngineError

__all__ = [
    "Completion", "Engine", "EngineConfig", "EngineLoad", "Generation", "LoRASettings", "ReceivesWeights", "Recording",
    "Sampling", "ServesAdapters", "TellsLoad", "Tokenizer",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. Names as in `Task.rollout_args`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    logprobs: bool = True
    """Return the logprob of every sampled token."""
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end of the answer before so many tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: str = ""
    """The answer is JSON of this schema (JSON text; `{}`: any object); empty: any text."""
    top_logprobs: int = 0
    """Return the logprobs of so many likeliest tokens beside each sampled one."""
    adapter: str = ""
    """The LoRA adapter that answers, in its version when the request comes; empty: the model itself."""

    def recorded(self) -> dict[str, Any]:
        """Return what is recorded to ask the same again: the first fields, and others that differ from the default."""
        asked = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "top_logprobs"}
        later = list(asked)[list(asked).index("ignore_eos") + 1 :]
        default = Sampling()
        return {
            name: list(value) if name == "stop" else value for name, value in asked.items()
            if name not in later or value != getattr(default, name)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """Logprob of each token of `token_ids` under the distribution that it was sampled from (after temperature)."""
    text: str
    finish_reason: str
    """`stop`, `length` or `abort`; empty in all items of a stream but the last."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """With `Sampling.top_logprobs`: of each token of `token_ids` the likeliest tokens there and their logprobs, the
    likeliest first."""
    adapter: tuple[str, int] | None = None
    """The LoRA adapter that made every token of it, and its version; None: the model itself did."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """`(model_version, start, end)`: the weights that made the tokens `[start, end)`; empty where nobody knows."""

    @staticmethod
    def joined(parts: Sequence[Completion]) -> Completion:
        """Return the whole answer that these parts of a stream are."""
        return replace(
            parts[-1], token_ids=[t for p in parts for t in p.token_ids], text="".join(p.text for p in parts),
            logprobs=None if parts[-1].logprobs is None else [lp for p in parts for lp in p.logprobs or ()],
            top_logprobs=[row for p in parts for row in p.top_logprobs or ()] if parts[-1].top_logprobs else None,
        )


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Generation:
    """One question to the engine for a request of a client, and its answers once they are all there."""

    text: str | None
    """The prompt, where the client gave a text."""
    sampling: Sampling
    further: dict[str, Any]
    """What was asked for beyond the fields of `Sampling`."""
    before: int
    """The version that was served when it was asked."""
    completions: list[Completion] | None = None


class Recording(Protocol):
    """The request of a client that the engine is asked for, as an engine's own HTTP server sees it."""

    @property
    def text(self) -> str | None:
        """The prompt, where the client gave a text."""

    @property
    def longest(self) -> int | None:
        """The longest answer, in tokens, where the client did not say: less where less room is left."""

    @property
    def unsaid(self) -> Mapping[str, Any]:
        """The run's sampling that the client's API has no field for, by the names of `Sampling`."""

    @property
    def adapter(self) -> str:
        """The LoRA adapter that is to answer; empty: the model itself."""

    @property
    def wanted(self) -> bool:
        """Somebody keeps what is generated. Else only failures are told, and the engine has nothing to do for it."""

    def exact_prompt(self, rendered: Callable[[], str], ids: list[int]) -> list[int]:
        """Return the ids of a prompt: those of a chat begin with what was sampled in it, where it goes on from that.

        `rendered` gives the chat's text as its template rendered it, `ids` are those of this text.
        """

    def begin(self, sampling: Sampling, further: dict[str, Any], text: str | None = None) -> Generation:
        """Take note that the engine is asked; `further`: what was asked for beyond the fields of `Sampling`."""

    def fail(self, error: EngineError) -> None:
        """Take note that the engine failed."""


class Engine(Protocol):
    """An inference engine. Raises EngineError for what it refuses; a dead engine raises it from every call.

    It may have a `version` once it is started: one line that says what computes (`vllm 0.32.0 on cpu`); `dead`: why it
    will never answer again, None while it does, looked at every few seconds; and a `max_model_len`, in tokens: longer
    conversations are cut to it. A `waits_for` says for what it waits that somebody else has to do before it can start,
    where it is not late then, or can answer; a `runs_wait`, in words, what a person has to see to before it answers
    again. One with an HTTP server of its own gives that by `async application(name, recording)`: an ASGI
    application of vLLM's API in which the model is called `name`, and which tells what it generates for a request to
    `recording()`, a `Recording`, or None where nobody asks.

    A class that is to serve an auxiliary model also has a static method `load_tokenizer(config: EngineConfig) ->
    Tokenizer`, which may block: processes that ask its engines from afar render and decode themselves.
    """

    model_version: int
    """The version whose weights it serves now."""
    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None: ...

    async def start(self) -> None:
        """Load the model and warm up; returns when the first real request would be fast. May take minutes."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions of one prompt (text, or token ids). Cancelling the call aborts the request."""

    def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """Yield one completion (`sampling.n` is taken as 1) as it is made: at least one item.

        Each item has the prompt's ids, and only what is new of `token_ids`, `logprobs` and `text`: put together they
        are what `generate` would have given. The last item alone has a finish_reason, and, where the engine knows them,
        the `version_spans` of the whole answer. Closing it, and cancelling who waits for it, aborts the request.
        """

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each of `token_ids[1:]` given what stands before it; length `len(token_ids) - 1`."""

    async def load_weights(self, version: int, path: str) -> None:
        """Serve the HF checkpoint at `path` as `version`. Requests in flight go on (paused, kept, resumed).

        Raises SyncError when it can't be loaded; the engine then serves what it served before, and is not paused.
        """

    async def stop(self) -> None:
        """End the engine and every process that it started. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How full an engine was in one of its steps."""

    running: int
    """Requests that it worked on."""
    waiting: int
    """Requests that it had no room for yet."""
    again: int
    """Tokens that it computes again: of requests that it put back for want of room and goes on with from here."""
    kv_share: float
    """Share of its KV cache that was taken."""
    most_running: int
    """Maximum of `running`."""

    @property
    def share(self) -> float:
        return max(self.kv_share, self.running / self.most_running)


class TellsLoad(Engine, Protocol):
    """An engine that tells how full it is, after each of its steps, on the event loop that it was started on.

    It need tell nothing where nobody was there to be told when it was started.
    """

    on_load: Callable[[EngineLoad], None] | None


class ServesAdapters(Engine, Protocol):
    """An engine that serves LoRA adapters over its model, several at once; `Sampling.adapter` says which answers.

    A request keeps the version that it began with. An unknown name is an EngineError (`refused=True`) that lists the
    known ones. Adapters stay over a change of the model's weights. `logprobs` takes `adapter` too.
    """

    adapters: Mapping[str, int]
    """The adapters that new requests may name, and the version that they get."""

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        """Serve the folder `path`, in PEFT's format, as this version of an adapter. Requests in flight go on.

        `digest`: of its files as they were published (`checked_adapter`); it is for an engine that may read them long
        after it was told to. Raises SyncError where it can't be served, or the files are others; the version before is
        then served on.
        """

    async def remove_adapter(self, name: str) -> None:
        """Refuse requests that name it from now on; those in flight go on."""


class ReceivesWeights(Engine, Protocol):
    """An engine that takes weights from the trainer's memory into its own, over a group of processes (nccl, gloo).

    Rank 0 is the trainer; it sends each tensor to all, in the order of their names.
    """

    async def join_weight_group(
        self, address: str, port: int, rank_offset: int, world_size: int, timeout: float
    ) -> None:
        """Join the group that rank 0 opens at `address:port`, with ranks from `rank_offset` on, one a worker.

        Raises SyncError when it did not come together. An engine whose worker hangs in it for `timeout` seconds is
        ended, and raises EngineError (`dead=True`).
        """

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        """Load weights as `load_weights`, with the group's tensors; `path` holds the same ones, and tells their names.

        It must stay there, as a checkpoint must: after a later change that failed it is loaded. Raises SyncError, and
        EngineError (`dead=True`) when they did not come within `timeout` seconds.
        """
