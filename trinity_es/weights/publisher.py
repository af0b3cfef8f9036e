"""Publishing of new weights to the engines, for `RolloutClient.sync_weights`.

Tensors are first written to shared memory, so that engines that start later find them. Engines load the folder there
or, with `sync_method: nccl`, receive the tensors while requests are paused, which is faster.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trinity_es.actors import commands
from trinity_es.actors.engines.adapter_checks import checked_adapter
from trinity_es.actors.engines.checkpoints import mismatch, reference_shapes, why_unloadable
from trinity_es.actors.engines.vllm.weight_sender import WeightSender
from trinity_es.config.config import Config
from trinity_es.events.errors import SyncError, TrinityError
from trinity_es.projections.reading.log_reader import Log
from trinity_es.weights.shared_memory import free_shared_memory, memory_dir, write_to_shared_memory
from trinity_es.weights.weights_reader import current_weights

__all__ = ["Publisher", "gpu_of"]

A = TypeVar("A")
_log = logging.getLogger(__name__)


class SendCommand(Protocol):
    """Function that sends a command to the coordinator, and waits up to `timeout` seconds for the answer."""

    def __call__(self, command: commands.Command[A], timeout: float) -> A: ...


class Publisher:
    """Publisher of weights from this process. `open_log` returns the run's log."""

    def __init__(self, config: Config, send_command: SendCommand, open_log: Callable[[], Log]) -> None:
        self.config, self.send_command, self.open_log = config, send_command, open_log
        self._timeout = config.synchronizer.sync_timeout
        self.sender: WeightSender | None = None
        """This process's end of the NCCL group that sends tensors; None if there is no usable group."""

    def _send_command(self, command: commands.Command[A], timeout: float) -> A:
        """Send a command and return its answer. Raises SyncError if none comes in time."""
        try:
            return self.send_command(command, timeout)
        except TrinityError:
            raise
        except TimeoutError as e:
            raise SyncError(f"the coordinator did not answer {command.name} within {timeout} s: call again") from e

    def publish(self, version: int, weights: str | Path | Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Publish weights (a folder or named tensors) to the engines, and return the coordinator's answer."""
        if isinstance(weights, str | Path):
            return self._publish_folder(version, weights, timeout)
        over_group = self.config.synchronizer.sync_method == "nccl" and self._ensure_group(weights)
        # Also if they are sent over the group: an engine that is replaced later loads them from here.
        folder = write_to_shared_memory(self.config, version, weights)
        method = self.config.synchronizer.sync_method if over_group else "memory"
        command = commands.SyncWeights(version=version, path=str(folder), timeout=timeout, method=method)
        try:
            answer = self._send_over_group(command, weights) if over_group else self._send_command(command, timeout)
        except BaseException:
            if current_weights(self.open_log()).path != str(folder):
                shutil.rmtree(folder, ignore_errors=True)  # this version did not become the current one
            raise
        if self._all_engines_loaded(answer):
            free_shared_memory(self.config, keep=str(folder))  # no engine goes back to an older one
        return dict(answer)

    def publish_adapter(self, name: str, version: int, path: str | Path, timeout: float) -> dict[str, Any]:
        """Check the LoRA adapter in this folder, publish it to the engines, and return the coordinator's answer."""
        model = self.config.explorer.rollout_model
        folder = Path(path).absolute()
        shapes, _ = reference_shapes(model.model_path)
        adapter = checked_adapter(folder, max_rank=None if model.lora is None else model.lora.max_rank, shapes=shapes)
        answer = self._send_command(commands.SyncAdapter(
            adapter=name, version=version, path=str(folder), rank=adapter.rank, size=adapter.size,
            digest=adapter.digest, timeout=timeout,
        ), timeout)
        return dict(answer)

    def remove_adapter(self, name: str) -> None:
        self._send_command(commands.RemoveAdapter(adapter=name), self._timeout)

    def republish(self, version: int, path: str) -> None:
        """Publish a new path for the current version, whose folder was lost."""
        method = "memory" if memory_dir(self.config) in Path(path).parents else "checkpoint"
        command = commands.SyncWeights(version=version, path=path, timeout=self._timeout, method=method, again=True)
        self._send_command(command, self._timeout)

    def _publish_folder(self, version: int, path: str | Path, timeout: float) -> dict[str, Any]:
        """Publish a checkpoint's folder to the engines. Raises SyncError if an engine could not load it."""
        folder = Path(path).absolute()
        model = self.config.explorer.rollout_model
        if model.engine_type in ("vllm", "http"):
            if not (folder / "config.json").is_file():
                raise SyncError(f"{folder} is not a checkpoint in HF format: it has no config.json")
            problem = why_unloadable(str(folder), *reference_shapes(model.model_path))
            if problem:  # once published, every engine that starts would need it
                raise SyncError(f"weights version {version} was not published: {problem}")
        version_before = current_weights(self.open_log()).version
        method = "memory" if memory_dir(self.config) in folder.parents else "checkpoint"
        command = commands.SyncWeights(version=version, path=str(folder), timeout=timeout, method=method)
        answer = self._send_command(command, timeout)
        if version > version_before and self._all_engines_loaded(answer):  # or engines may go back to one in memory
            free_shared_memory(self.config, keep=str(folder))
        return dict(answer)

    def _all_engines_loaded(self, answer: commands.SyncedWeights) -> bool:
        rollout = self.config.explorer.rollout_model
        # Servers of others: any number may exist now, and a sync that one of them did not load has failed.
        engine_count = 1 if rollout.engine_type == "http" else rollout.engine_num
        return len(answer["runners"]) >= engine_count

    def clean_up(self) -> None:
        """After the system has ended, remove all weights from shared memory except the current version."""
        with contextlib.suppress(TrinityError):
            free_shared_memory(self.config, keep=current_weights(self.open_log()).path)

    # --- over a group -----------------------------------------------------------------------------------------------
    def _ensure_group(self, state: Mapping[str, Any]) -> bool:
        """Make an NCCL group of this process and the engines, unless there is one. Return False if that fails.

        Without a group, engines load from shared memory. `state`: tensors on the GPU from which this process sends.
        """
        if self.sender is None or not self._send_command(commands.CheckWeightGroup(), self._timeout):
            address = self.config.system.address
            with socket.socket() as free:
                free.bind((address, 0))
                port = int(free.getsockname()[1])
            try:
                self.make_group(address, port, device=gpu_of(state))
            except SyncError as e:
                _log.warning("weights go through shared memory: %s", e)
                return False
        return True

    def make_group(
        self, address: str, port: int, meta: Sequence[Any] | None = None, *, device: int | None
    ) -> dict[str, Any]:
        """Make an NCCL group of this process and the engines, and return the coordinator's answer. Raises SyncError.

        `meta`: (name, dtype, shape) of each tensor, to check against the model. `device`: this process's GPU.
        """
        model = self.config.explorer.rollout_model
        if self.config.synchronizer.sync_method != "nccl":
            raise SyncError("engines can't join a process group for weights with synchronizer.sync_method "
                            f"{self.config.synchronizer.sync_method}: set it to nccl")
        reference, tied = reference_shapes(model.model_path)
        if meta is not None and reference is not None:
            problem = mismatch({str(name): list(shape) for name, _, shape in meta}, reference, tied)
            if problem:
                raise SyncError(f"state_dict_meta does not fit the model: {problem}")
        self.sender = None
        workers, engines = model.tensor_parallel_size, model.engine_num
        given_up = threading.Event()
        opening = _ThreadedCall(
            lambda: WeightSender(address, port, 1 + engines * workers, device=device, given_up=given_up))
        command = commands.JoinWeightGroup(
            address=address, port=port, workers=workers, engines=engines, timeout=self._timeout
        )
        try:
            answer = self._send_command(command, self._timeout)  # meanwhile the thread opens this process's end
        except BaseException:
            given_up.set()
            opening.thread.join(1.0)  # so that its port is free again
            raise
        self.sender = opening.result(self._timeout)
        return {**answer, "world_size": 1 + engines * workers}

    def _send_over_group(self, command: commands.SyncWeights, state: Mapping[str, Any]) -> commands.SyncedWeights:
        """Send the tensors over the group while the engines execute the command, and return the command's answer."""
        sender = self.sender
        assert sender is not None
        sending = _ThreadedCall(lambda: sender.send(state))
        self.sender = None  # until all went well: a failed group may still have tensors on their way
        answer = self._send_command(command, command.timeout)
        if answer["from_group"]:  # otherwise an engine was just replaced, and all have loaded the folder
            sending.result(command.timeout)
            self.sender = sender
        return answer


def gpu_of(state: Mapping[str, Any] | None = None) -> int | None:
    """Return the GPU of the first CUDA tensor, else the GPU that this thread uses; None without a GPU."""
    torch = sys.modules.get("torch")  # a process with tensors has imported torch
    if torch is None or not torch.cuda.is_available():
        return None
    for value in (state or {}).values():
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return int(value.device.index)
    return int(torch.cuda.current_device())


class _ThreadedCall:
    """Call in its own daemon thread, so that a call that never returns does not keep the process from ending."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

        def call_in_thread() -> None:
            try:
                self.value = call()
            except BaseException as e:
                self.error = e

        self.thread = threading.Thread(target=call_in_thread, name="weights", daemon=True)
        self.thread.start()

    def result(self, timeout: float) -> Any:
        """Wait for the call and return its result. Raises SyncError if it failed or takes over `timeout` seconds."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise SyncError(f"the process group for weights did not form, or hangs: no result after {timeout:g} s. "
                            "Check that the engines reach the trainer's address")
        if self.error is not None:
            raise SyncError(f"the weights could not be sent: {type(self.error).__name__}: {self.error}") from self.error
        return self.value
