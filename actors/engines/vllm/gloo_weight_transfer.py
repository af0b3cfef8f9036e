"""vLLM's weight transfer over gloo, for `sync_method: nccl` on a CPU. Only vLLM's workers import this module."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from trinity_es.actors.engines.vllm.weight_sender import GlooGroup
from trinity_es.actors.engines.vllm.weights import WorkerExtension

__all__ = ["GlooWeightTransfer", "GlooWorkerExtension"]


class GlooWeightTransfer(NCCLWeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Receiver in a vLLM worker for the tensors that rank 0 broadcasts over gloo, with the calls of vLLM's NCCL one."""

    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # no accelerator to wait for

    def receive_weights(self, update_info: Any) -> None:
        if self.group is None:
            raise RuntimeError("this worker is in no weight transfer group: call init_transfer_engine first")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weight)
            self.model.load_weights([(name, weight)])

    def shutdown(self) -> None:
        self.group = None


class GlooWorkerExtension(WorkerExtension):
    """WorkerExtension from this module: when vLLM's workers import it, the backend "gloo" is registered there."""


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransfer)
