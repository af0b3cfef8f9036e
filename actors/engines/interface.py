"""The async interface between a runner and its inference engine. Nothing here knows vLLM.

A runner finds its engine class by the name in its config (`"module:Class"`), builds it with an `EngineConfig`, awaits
`start()` once, then calls `generate` from many coroutines at a time, all on one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from trinity_es.events.errors import EngineError

__all__ = [
    "REQUEST_NAME",
    "CallJournal", "Completion", "Engine", "EngineConfig", "EngineLoad", "Generation", "KeepsProgress", "LoRASettings",
    "ReceivesWeights", "Recording", "Sampling", "ServesAdapters", "TellsLoad", "Tokenizer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """Limits of the LoRA adapters that an engine serves at once."""

    max_adapters: int
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. `options` go to the engine's class unchanged (for vLLM: fields of AsyncEngineArgs)."""

    model_path: str
    seed: int = 0
    max_model_len: int | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    server_args: dict[str, Any] = field(default_factory=dict)
    """Options of the engine's own HTTP server, as for `vllm serve`."""
    initial_version: int = 0
    """The model version of the weights at `model_path`."""
    weight_transfer: bool = False
    """True if the engine may join a weight-transfer group with the trainer (`sync_method: nccl`)."""
    lora: LoRASettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of one request, under the names of `Task.rollout_args`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    logprobs: bool = True
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: str = ""
    """JSON schema, as text, that the answer must match (`{}`: any object); empty: any text."""
    top_logprobs: int = 0
    """Number of likeliest tokens whose logprobs are returned beside each sampled token."""
    adapter: str = ""
    """Name of the LoRA adapter to use, in the version served when the request arrives; empty: the model itself."""

    def recorded(self) -> dict[str, Any]:
        """Return what a repeated request needs: the fields up to `ignore_eos`, and others without their default."""
        values = {name: getattr(self, name) for name in _ALWAYS_RECORDED}
        values["stop"] = list(self.stop)
        return values | {name: value for name, default in _RECORDED_IF_SET if (value := getattr(self, name)) != default}


_NAMES = [f.name for f in fields(Sampling)]
_ALWAYS_RECORDED = _NAMES[: _NAMES.index("ignore_eos") + 1]
_RECORDED_IF_SET = [(f.name, f.default) for f in fields(Sampling) if f.name not in (*_ALWAYS_RECORDED, "top_logprobs")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """Logprob of each of `token_ids` under the distribution that it was sampled from (after temperature)."""
    text: str
    finish_reason: str
    """`stop`, `length` or `abort`; empty in every item of a stream except the last."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The `Sampling.top_logprobs` likeliest tokens at each position with their logprobs, likeliest first."""
    adapter: tuple[str, int] | None = None
    """Name and version of the LoRA adapter that generated the answer; None: the model itself did."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """`(model_version, start, end)`: the weights that generated the tokens `[start, end)`; empty if unknown."""
    splices: tuple[int, ...] = ()
    """Offsets in `token_ids` at which a new attempt continued the tokens of an earlier attempt."""

    @staticmethod
    def joined(parts: Sequence[Completion]) -> Completion:
        """Return the whole answer, joined from the parts of a stream."""
        last = parts[-1]  # the only part with finish_reason and version spans
        return replace(
            last, token_ids=[t for p in parts for t in p.token_ids], text="".join(p.text for p in parts),
            logprobs=None if last.logprobs is None else [lp for p in parts for lp in p.logprobs or ()],
            top_logprobs=None if last.top_logprobs is None else [row for p in parts for row in p.top_logprobs or ()],
        )


REQUEST_NAME: ContextVar[str] = ContextVar("request_name", default="")
"""Request id that the caller of `Engine.generate` chose. It is no argument, so that users' engines need not take it."""


class Tokenizer(Protocol):
    """The methods that trinity_es calls on a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Generation:
    """Record of one call to the engine for a client's request. `completions` is None until all of them are done."""

    text: str | None
    sampling: Sampling
    further: dict[str, Any]
    """Options of the request beyond the fields of `Sampling`."""
    model_version: int
    """Model version that was served when the call began."""
    completions: list[Completion] | None = None


class CallJournal(Protocol):
    """One call to the engine in a run's journal: answers of an earlier attempt, and recording of new ones."""

    @property
    def is_kept(self) -> bool:
        """True if the journal has at least one answer of this call, or the beginning of one."""

    async def answers(self, ask: Callable[[Any, Sampling, str], Awaitable[list[Completion]]]) -> list[Completion]:
        """Return all answers of the call. Call `ask(prompt, sampling, request)` for those missing in the journal."""

    def recording(self, request: str) -> AbstractContextManager[Any]:
        """Return a context that records the tokens of an engine request for all of the call's `n` answers."""

    async def record_end(self, recorded: Any, answers: list[Completion] | None) -> None:
        """Record the end of a request; `recorded` is its context's value. `answers` is None if the request failed."""


class Recording(Protocol):
    """A client's request to the engine's own HTTP server, and the record of the answers generated for it."""

    @property
    def text(self) -> str | None:
        """The prompt, if the client sent it as text."""

    @property
    def default_length(self) -> int | None:
        """Maximum tokens of an answer if the client set none; the engine lowers it to the context that is left."""

    @property
    def engine_only(self) -> Mapping[str, Any]:
        """The run's sampling settings that the client's API can't express, by the names of `Sampling`."""

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter to use; empty: the model itself."""

    @property
    def records_tokens(self) -> bool:
        """True if the generated tokens are kept. Otherwise the engine reports only failures."""

    def exact_prompt(self, rendered: Callable[[], str], ids: list[int]) -> list[int]:
        """Return the prompt's token ids: `ids`, or if a chat continues an earlier answer, that one's ids as sampled.

        `rendered` returns the chat as text, with its template applied; `ids` are the token ids of this text.
        """

    def begin(self, sampling: Sampling, further: dict[str, Any], text: str | None = None) -> Generation:
        """Record that a call to the engine begins. `further`: options beyond the fields of `Sampling`."""

    def begin_journaled_call(
        self, ids: list[int], sampling: Sampling, further: Mapping[str, Any], forbids: str
    ) -> CallJournal | None:
        """Begin a call in the run's journal and return it; None without a journal.

        `forbids`: name of a request option that lets the journal keep only whole answers; empty if none is set.
        """

    def fail(self, error: EngineError) -> None:
        """Record that the engine failed."""


class Engine(Protocol):
    """Inference engine. Its methods raise EngineError for a request that it refuses, and for all once it is dead.

    Optional attributes of a started engine:
    - `version`: engine and device in one line (`vllm 0.32.0 on cpu`);
    - `dead`: why it will never answer again, None while it does; read every few seconds;
    - `max_model_len`: in tokens; longer conversations are cut to it;
    - `waits_for`: external action that it waits for (meanwhile its start is not late);
    - `runs_wait`: action by a person that its requests wait for;
    - `async application(name, recording)`, if it has its own HTTP server: returns an ASGI application of vLLM's API
      with the model called `name`. `recording()` returns the `Recording` of the current request, if any.
    The class of an auxiliary model's engine has a static method `load_tokenizer(config: EngineConfig) -> Tokenizer`,
    which may block, because processes that call the engine over HTTP render and decode by themselves.
    """

    model_version: int
    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None: ...

    async def start(self) -> None:
        """Load the model and warm up. May take minutes."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """Return `sampling.n` completions of a prompt (text or token ids). Cancelling the call aborts the request."""

    def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """Yield one completion in at least one part; `sampling.n` is ignored.

        Each part has the prompt's ids and only the new `token_ids`, `logprobs` and `text`. `Completion.joined` makes of
        them what `generate` returns. Only the last part has a finish_reason and, if the engine knows them, the
        `version_spans` of the whole answer. Closing the generator, or cancelling its caller, aborts the request.
        """

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the logprob of each of `token_ids[1:]` given the tokens before it; length `len(token_ids) - 1`."""

    async def load_weights(self, version: int, path: str) -> None:
        """Serve the HF checkpoint at `path` as `version`. Pause requests in flight meanwhile, and keep them.

        Raises SyncError if the checkpoint can't be loaded; the engine then goes on with the previous weights.
        """

    async def stop(self) -> None:
        """End the engine and every process that it started; a second call does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How full an engine was in one of its steps."""

    running: int
    waiting: int
    recomputed: int
    """Tokens recomputed for requests that resumed in this step after they were preempted for lack of KV cache."""
    kv_share: float
    most_running: int
    """Maximum of `running`."""

    @property
    def share(self) -> float:
        """Used share of the KV cache, or of the maximum of running requests if that share is larger; 0 to 1."""
        return max(self.kv_share, self.running / self.most_running)


class KeepsProgress(Engine, Protocol):
    """Engine that shows the tokens of requests in flight, so that a later attempt can continue a lost answer.

    Its `generate` takes the request's id from `REQUEST_NAME`.
    """

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        """Return the new tokens of each answer to an open request, by the answer's index; {} for an unknown request.

        `start` has the number of tokens to leave out of each answer. `version_spans` are those of the whole answer.
        """

    def text_of(self, prompt: list[int], token_ids: list[int]) -> str:
        """Return the text of a whole answer, given as token ids, without special tokens."""


class TellsLoad(Engine, Protocol):
    """Engine that calls `on_load` with its load after each step, on its event loop, if it was set before `start`."""

    on_load: Callable[[EngineLoad], None] | None


class ServesAdapters(Engine, Protocol):
    """Engine that serves several LoRA adapters over its model; `Sampling.adapter` selects one.

    A request keeps the version that it began with. A request with an unknown name raises EngineError (`refused=True`)
    with a list of the known ones. Adapters survive a change of the model's weights. `logprobs` takes `adapter` too.
    """

    adapters: Mapping[str, int]
    """Version of each adapter that new requests get, by the adapter's name."""

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        """Serve the folder `path`, in PEFT's format, as this version of an adapter. Requests in flight go on.

        `digest`: that of the files when they were published (`checked_adapter`). Raises SyncError if the files can't be
        served or have changed; the previous version is then still served.
        """

    async def remove_adapter(self, name: str) -> None:
        """Refuse new requests that name the adapter; those in flight go on."""


class ReceivesWeights(Engine, Protocol):
    """Engine that receives weights by broadcast from the trainer, rank 0 of a process group (nccl, gloo)."""

    async def join_weight_group(
        self, address: str, port: int, rank_offset: int, world_size: int, timeout: float
    ) -> None:
        """Join the process group that rank 0 opens at `address:port`; the workers' ranks begin at `rank_offset`.

        Raises SyncError if the group does not form. If joining hangs for `timeout` seconds, the engine ends and raises
        EngineError (`dead=True`).
        """

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        """Load weights like `load_weights`, but from the group's broadcasts, in the order of the tensors' names.

        The folder `path` holds the same tensors and must stay: the engine loads it again if a later change fails.
        Raises SyncError, and EngineError (`dead=True`) if the tensors do not arrive within `timeout` seconds.
        """
