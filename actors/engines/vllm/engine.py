"""The vLLM engine. vllm and torch are imported in `start`.

A runner calls it on one asyncio loop, which may run in any thread. vLLM spawns processes (EngineCore, and a worker per
GPU), and `stop()` ends them. If the runner dies once its engine is up, they end within a second.

Promises beyond the `Engine` interface:
- Prompts are sent as token ids, so `Completion.prompt_token_ids` is what the model read.
- `load_weights` compares the checkpoint's tensors with the model's before it pauses the engine, since vLLM 0.32 serves
  a mix of old and new weights if a tensor is missing. On a CPU vLLM's reload keeps a packed copy of the old head if
  head and embedding are tied, so this engine packs it again from the new weights. A reload that fails half-way breaks
  vLLM, so the checkpoint served before is loaded again and must stay on disk until another is loaded. If even that
  fails the engine is ended: it never serves unknown weights.
- Requests in flight survive a change of weights. Their KV cache, and the prefix cache, are dropped and recomputed from
  their tokens with the new weights, so no token is made from keys and values of the old ones. Tokens and logprobs made
  before the change stay: `version_spans` says which version made which.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from trinity_es.actors.engines.checkpoints import auto_tokenizer, model_dtype, reference_shapes, resolve_model
from trinity_es.actors.engines.interface import (
    REQUEST_NAME,
    Completion,
    EngineConfig,
    EngineLoad,
    Recording,
    Sampling,
    Tokenizer,
)
from trinity_es.actors.engines.long_text_tokenization import prompt_ids
from trinity_es.actors.engines.sampling_checks import logprob_at_temperature, needs_whole_distribution
from trinity_es.actors.engines.vllm import server as vllm_server
from trinity_es.actors.engines.vllm.adapters import AdapterServing, lora_arguments
from trinity_es.actors.engines.vllm.processes import (
    ProcessOutput,
    blames_other_process,
    engine_processes,
    last_error_in,
    silenced_logger,
    wait_for_silence,
    wait_or_kill,
    with_descendants,
)
from trinity_es.actors.engines.vllm.values import (
    add_texts,
    completion_of,
    load_reporting_llm,
    output_kind,
    partial_answers,
    prompt_of_ids,
    sampling_params,
    text_of,
    whole_answer_params,
)
from trinity_es.actors.engines.vllm.weights import WeightChanges, WorkerExtension, check_extension, short_error
from trinity_es.events.errors import ConfigError, EngineError
from trinity_es.events.processes import process_start_time

__all__ = ["VLLMEngine", "WorkerExtension"]

_log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the runner has threads: a fork could copy held locks
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # nothing leaves the machine by default
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_MAX_STOP_STRINGS": "1000",  # as many as a task may have
}

_STARTING = "it is starting"
CUT_OFF_SECONDS = 1.0
"""How long open requests may take to end by themselves after their engine ended."""
_MAX_SUM_ERROR = 0.1
"""Tolerance for a sum of probabilities that must be 1."""
_MAX_DISTRIBUTION = 20_000_000
"""Maximum (tokens x vocabulary) that `logprobs` fetches at a temperature other than 1: about 2 GB of Python floats."""


class VLLMEngine(WeightChanges, AdapterServing):
    """`Engine` over vLLM. The constructor raises ConfigError if there is no such model; methods raise EngineError."""

    model_version: int
    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model_version = config.initial_version
        self._model = resolve_model(config.model_path)
        WeightChanges.__init__(self, self._model)
        AdapterServing.__init__(self)
        self._llm: Any = None
        self._why_dead: str | None = "it was not started"
        """Why the engine serves nothing, as text for errors; None while it serves."""
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._cut_off_tasks: set[asyncio.Task[Any]] = set()  # cancelled by `_end`
        self._request_adapters: dict[str, tuple[str, int] | None] = {}
        """Name and version of each open request's adapter, by the request's name."""
        self._processes: list[psutil.Process] = []
        self._output_since_start: ProcessOutput | None = None
        self._printing_pids: list[int] = []
        self._pids_before: set[int] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._max_model_len = 0
        self.version = ""
        self.on_load: Callable[[EngineLoad], None] | None = None
        self._speculates = bool(config.options.get("speculative_config"))

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of prompt and response together; None before the model is loaded."""
        return self._max_model_len or None

    # --- life -------------------------------------------------------------------------------------------------------
    @staticmethod
    def load_tokenizer(config: EngineConfig) -> Tokenizer:
        """Return the tokenizer for an engine with this config, with the chat template of its server options."""
        names = ("trust_remote_code", "tokenizer_revision")
        options = {name.removeprefix("tokenizer_"): config.options[name] for name in names if name in config.options}
        tokenizer = auto_tokenizer(config.options.get("tokenizer", resolve_model(config.model_path)), **options)
        return vllm_server.with_template(tokenizer, config.server_args)  # type: ignore[no-any-return]

    async def start(self) -> None:
        """Load the model and warm up. Raises ConfigError for unknown arguments of vLLM, else EngineError."""
        if self._llm is not None:
            raise EngineError("the engine was started already: call start only once")
        self._pids_before = {p.pid for p in psutil.Process().children()}
        self._why_dead = _STARTING
        startup_output = ProcessOutput()
        try:
            # In a thread, since building an engine blocks for 10-60 s, and the loop must answer meanwhile.
            self._llm = await asyncio.to_thread(self._build)
            if self._why_dead != _STARTING:
                raise EngineError(f"the engine was stopped while it started: {self._why_dead}")
            self._processes = engine_processes(self._llm, self._pids_before)
            self.tokenizer = vllm_server.with_template(self._llm.get_tokenizer(), self.config.server_args)
            self._max_model_len = int(self._llm.model_config.max_model_len)
            self._shapes, self._has_tied_head = await asyncio.to_thread(reference_shapes, self._model)
            await self._in_workers("trinity_end_with", os.getpid(), process_start_time(os.getpid()))
            await self._label_version()
            self._why_dead = None
            await self._warm_up()
            self._output_since_start, self._printing_pids = ProcessOutput(), self.pids()
            self._watch_task = asyncio.create_task(self._watch())
            gc.freeze()  # like vLLM's server: the objects so far stay, and the garbage collector skips them
        except BaseException as e:
            await self._end(f"it did not start ({type(e).__name__}: {e})")
            if isinstance(e, ConfigError | EngineError) or not isinstance(e, Exception):
                raise
            output = startup_output.text()
            if output:
                _log.error("output while the engine for %s started:\n%s", self.config.model_path, output)
            reason = (blames_other_process(e) and last_error_in(output)) or short_error(e)
            raise EngineError(f"the engine for {self.config.model_path} did not start: {reason}") from e

    def _build(self) -> Any:
        """Build and return vLLM's AsyncLLM. Raises ConfigError for arguments that it does not know."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if Path(self._model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        gc.disable()  # saves a fifth of the ten seconds that these imports take
        try:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        finally:
            gc.enable()

        on_cpu = self._on_cpu = bool(current_platform.is_cpu())
        device = "cpu" if on_cpu else current_platform.get_device_name()
        self.version = f"vllm {vllm.__version__} on {device}"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments = self._arguments(on_cpu)
        if self.config.weight_transfer:
            from vllm.config import WeightTransferConfig

            arguments.setdefault("weight_transfer_config", WeightTransferConfig(backend="gloo" if on_cpu else "nccl"))
        unknown = sorted(set(arguments) - {f.name for f in dataclasses.fields(AsyncEngineArgs)})
        if unknown:
            raise ConfigError(
                f"vLLM's AsyncEngineArgs have no {', '.join(unknown)}: correct explorer.rollout_model.engine_args"
            )
        check_extension(arguments["worker_extension_cls"])
        arguments.setdefault("use_tqdm_on_load", False)  # else each change of weights prints a progress bar
        if self.on_load is None:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return load_reporting_llm(AsyncLLM, AsyncEngineArgs(**arguments), self.on_load)

    def _arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Return the arguments for vLLM's AsyncEngineArgs. Those in `config.options` override all others."""
        config = self.config
        dtype = config.dtype
        if dtype == "auto" and on_cpu and model_dtype(self._model) in ("float32", None):
            dtype = "float32"  # vLLM's "auto" would take 16 bits, which gains nothing on a CPU
        arguments: dict[str, Any] = {
            "model": self._model,
            "dtype": dtype,
            "seed": config.seed,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.enforce_eager or on_cpu,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "generation_config": "vllm",  # ignore the model's own sampling defaults
            "disable_log_stats": True,
            "worker_extension_cls": (
                "trinity_es.actors.engines.vllm.gloo_weight_transfer.GlooWorkerExtension"
                if config.weight_transfer and on_cpu else f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
            ),
        }
        if config.max_model_len is not None:
            arguments["max_model_len"] = config.max_model_len
        if "reasoning_parser" in config.server_args:  # structured output then does not bind the reasoning
            arguments["reasoning_parser"] = config.server_args["reasoning_parser"]
        return arguments | lora_arguments(config.lora, on_cpu) | config.options

    async def _warm_up(self) -> None:
        """Send one request of each kind, so that kernels are compiled before the first real request."""
        token = self.tokenizer.encode("a")[-1:] or [0]
        for sampling in (Sampling(n=4, max_tokens=4, ignore_eos=True), Sampling(temperature=0.0, max_tokens=2)):
            await self.generate(token * 4, sampling)
        await self.logprobs(token * 4)
        if self._speculates:
            await self._check_speculation(token * 4)

    async def _check_speculation(self, prompt: list[int]) -> None:
        """Raise ConfigError if speculative decoding gives logprobs of another distribution than the sampled one.

        The test request allows two tokens only. Then some drafts are accepted and some rejected, and both probabilities
        must add up to 1. vLLM 0.32 on a CPU gives NaN there, or values several nats off.
        """
        two_ids = sorted({*self.tokenizer.encode("a")[-1:], *self.tokenizer.encode("b")[-1:]})
        sampling = Sampling(temperature=2.0, max_tokens=64, ignore_eos=True, top_logprobs=2, seed=0)
        params = sampling_params(sampling, {"allowed_token_ids": two_ids})
        output, _ = await self._last_output(prompt, params)
        rows = completion_of(prompt, output.outputs[0], top=2).top_logprobs or []
        sums = [math.fsum(math.exp(p) for _, p in row) for row in rows]
        wrong_sum = next((total for total in sums if not abs(total - 1.0) < _MAX_SUM_ERROR), None)  # or NaN
        if wrong_sum is not None:
            raise ConfigError(
                f"engine_args.speculative_config: {self.version} gives wrong logprobs with it (probabilities of all "
                f"allowed tokens add up to {wrong_sum:.3g}), and training would be wrong too: leave it out"
            )

    async def stop(self) -> None:
        """End the engine and its processes. Requests in flight raise EngineError. A second call does nothing."""
        await self._end("it was stopped")

    async def _watch(self) -> None:
        """Wait until vLLM's process hangs, as it does when its input thread has ended; then mark the engine dead."""
        await wait_for_silence(self._llm.is_sleeping, self._weights_lock.locked)
        self._why_dead = self._why_dead or "its process is alive, but has not answered for ten minutes"

    def pids(self) -> list[int]:
        """Return the pids of this engine's live processes: EngineCore and its workers."""
        return [p.pid for p in with_descendants(self._processes or engine_processes(self._llm, self._pids_before))]

    async def _end(self, reason: str) -> None:
        """End vLLM and its processes, then cancel the requests that it left without an answer."""
        if self._why_dead in (None, _STARTING):
            self._why_dead = reason
        if self._watch_task is not None:
            self._watch_task.cancel()
        llm, self._llm = self._llm, None
        gc.unfreeze()
        processes = self._processes
        if not processes and self._pids_before:
            processes = engine_processes(llm, self._pids_before)
        processes = with_descendants(processes)
        if llm is not None:
            with contextlib.suppress(Exception), silenced_logger("vllm.v1.engine.async_llm"):
                await asyncio.to_thread(llm.shutdown)
                llm.shutdown = lambda: None  # __del__ calls it again, at exit even without its modules
        await asyncio.to_thread(wait_or_kill, processes)
        until = time.monotonic() + CUT_OFF_SECONDS
        while self._request_tasks - {asyncio.current_task()} and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for task in self._request_tasks - {asyncio.current_task()}:  # vLLM does not answer requests sent as it ended
            self._cut_off_tasks.add(task)
            task.cancel()

    @property
    def dead(self) -> str | None:
        if self._why_dead is None and self._llm is not None and self._llm.errored:
            self._why_dead = self._death_reason("") if self._llm.is_running else "vLLM's task on the event loop ended"
        return self._why_dead

    def _death_reason(self, reason: str) -> str:
        output = self._output_since_start
        error = last_error_in(output.text(), self._printing_pids) if output is not None else ""
        return f"its process ended ({error or reason})" if error or reason else "its process ended"

    def _live_llm(self) -> Any:
        """Return vLLM's AsyncLLM. Raises EngineError if the engine is dead."""
        self.dead  # noqa: B018  # updates `_why_dead`
        if self._why_dead is not None:
            raise EngineError(f"the engine is dead: {self._why_dead}", dead=True)
        return self._llm

    # --- requests ---------------------------------------------------------------------------------------------------
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """Return `sampling.n` completions. At temperature 0 they are equal, and logprobs are those of temperature 1.

        Raises EngineError, with `refused=True` if this engine can never serve the request (because it is too long,
        say), with `dead=True` if the engine is dead.
        """
        llm = self._live_llm()
        ids = await self._prompt_ids(prompt)
        copies = sampling.n if sampling.temperature == 0.0 else 1  # vLLM refuses n > 1 at temperature 0
        if copies > 1:
            sampling = dataclasses.replace(sampling, n=1)
        params = whole_answer_params(sampling)
        output, adapter = await self._last_output(ids, params, sampling.adapter, REQUEST_NAME.get())
        await add_texts(llm.get_tokenizer(), ids, params, output.outputs)
        outputs = sorted(output.outputs, key=lambda o: int(o.index))
        return [completion_of(ids, o, sampling.top_logprobs, adapter) for o in outputs] * copies

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        ids = await self._prompt_ids(prompt)
        params = sampling_params(dataclasses.replace(sampling, n=1))
        params.output_kind = output_kind("DELTA")
        async with contextlib.aclosing(self.outputs(ids, params, sampling.adapter)) as outputs:
            async for output, adapter in outputs:
                [part_output] = output.outputs
                part = completion_of(ids, part_output, sampling.top_logprobs, adapter)
                yield dataclasses.replace(part, finish_reason=part_output.finish_reason or "")

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0, adapter: str = "") -> list[float]:
        """Return log p(token_ids[i] | token_ids[:i]) for i >= 1, of logits / temperature; length `len(token_ids) - 1`.

        vLLM computes prompt logprobs at temperature 1 only. For any other the whole distribution is fetched, which is
        refused above 20 million values. Raises EngineError like `generate`.
        """
        ids = await self._prompt_ids(token_ids)
        vocabulary = int(self._live_llm().model_config.get_vocab_size())
        needs_all = needs_whole_distribution(len(ids), vocabulary, temperature, _MAX_DISTRIBUTION)
        if len(ids) == 1:
            return []
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=-1 if needs_all else 0, detokenize=False,
            output_kind=output_kind("FINAL_ONLY"),
        )
        output, _ = await self._last_output(ids, params, adapter)
        rows = zip(list(output.prompt_logprobs)[1:], ids[1:], strict=True)
        if not needs_all:
            return [float(row[token].logprob) for row, token in rows]
        return [logprob_at_temperature(row[t].logprob, (v.logprob for v in row.values()), temperature)
                for row, t in rows]

    async def _last_output(
        self, ids: list[int], params: Any, adapter: str = "", request: str = ""
    ) -> tuple[Any, tuple[str, int] | None]:
        """Return a request's finished output, and its adapter's name and version. Raises like `generate`."""
        async with contextlib.aclosing(self.outputs(ids, params, adapter, request)) as outputs:
            *_, last = [output async for output in outputs]
        return last

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        adapter = self._request_adapters.get(request)
        return {} if self._llm is None else partial_answers(self._llm, request, start, adapter)

    def text_of(self, prompt: list[int], token_ids: list[int]) -> str:
        return text_of(self._live_llm().get_tokenizer(), prompt, sampling_params(Sampling()), token_ids, None)

    async def application(self, name: str, recording: Callable[[], Recording | None]) -> Any:
        options = self.config.server_args
        return await vllm_server.application(self, self._live_llm(), self._model, name, options, recording)

    async def outputs(
        self, prompt: Any, params: Any, adapter: str = "", request: str = "", **more: Any
    ) -> AsyncGenerator[tuple[Any, tuple[str, int] | None]]:
        """Yield vLLM's outputs for a request, each with its adapter; the last is finished. Raises like `generate`."""
        llm = self._live_llm()
        if self._speculates and params.stop:
            raise EngineError("engine_args.speculative_config allows no stop texts, since vLLM also returns tokens "
                              "after them, which would be trained on: leave out one of the two", refused=True)
        output = None
        task = asyncio.current_task()
        assert task is not None
        tokens = prompt_of_ids(prompt) if isinstance(prompt, list) else prompt
        with self._using(adapter) as served_adapter:
            self._request_tasks.add(task)
            name_and_version = None if served_adapter is None else (served_adapter.name, served_adapter.version)
            more["lora_request"] = served_adapter and served_adapter.request
            if not request or request in self._request_adapters:  # a user's engine may send two calls for one request
                request = uuid4().hex
            self._request_adapters[request] = name_and_version
            stream: AsyncIterator[Any] = llm.generate(tokens, params, request, **more)
            try:
                # aclosing: if the caller is cancelled, the request must be aborted now, not at garbage collection
                async with contextlib.aclosing(stream) as outputs:  # type: ignore[type-var]  # vLLM's is a generator
                    async for output in outputs:
                        if self._why_dead is not None and any(o.finish_reason == "abort" for o in output.outputs):
                            raise EngineError("the request was cut off when the engine ended")  # see `_as_engine_error`
                        yield output, name_and_version
                if output is None or not output.finished:
                    raise RuntimeError("the request ended without an answer")
            except Exception as e:
                raise self._as_engine_error(e) from e
            except asyncio.CancelledError as e:
                if task not in self._cut_off_tasks:
                    raise
                task.uncancel()  # `_end` cancelled it, not the caller
                raise self._as_engine_error(RuntimeError("the request was cut off when the engine ended")) from e
            finally:
                self._request_adapters.pop(request, None)
                self._request_tasks.discard(task)
                self._cut_off_tasks.discard(task)

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        self._live_llm()
        remedy = "raise explorer.rollout_model.max_model_len"
        return await prompt_ids(self.tokenizer, prompt, self._max_model_len, remedy)

    def _as_engine_error(self, e: Exception) -> EngineError:
        """Return a request's exception as an EngineError. If vLLM is dead, mark the engine as dead."""
        if self._why_dead is not None:
            return EngineError(f"the engine is dead: {self._why_dead}", dead=True)
        if type(e).__name__ == "EngineDeadError" or (self._llm is not None and self._llm.errored):
            self._why_dead = self._death_reason(short_error(e))
            return EngineError(f"the engine died: {self._why_dead}", dead=True)
        if isinstance(e, ValueError | TypeError) or "VLLMClientError" in {c.__name__ for c in type(e).__mro__}:
            return EngineError(f"vLLM refused the request: {short_error(e)}", refused=True)
        return EngineError(f"vLLM failed: {short_error(e)}")
