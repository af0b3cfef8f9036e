"""Trainer's end of a weight transfer: rank 0 of a group with all workers of all engines, over NCCL or gloo (CPU)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

__all__ = ["GlooGroup", "WeightSender"]

GLOO_SECONDS = 300.0
CHECK_SECONDS = 0.05


class GlooGroup:
    """Gloo group of otherwise independent processes; rank 0 hosts the rendezvous."""

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, given_up: threading.Event | None = None
    ) -> None:
        """Wait until all ranks have joined. Raises TimeoutError, also when `given_up` is set; then the port is free."""
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        store_timeout = timedelta(seconds=GLOO_SECONDS)
        is_master = rank == 0
        store = TCPStore(address, port, world_size, is_master=is_master, timeout=store_timeout, wait_for_workers=False)
        until, given_up = time.monotonic() + GLOO_SECONDS, given_up or threading.Event()
        if not is_master:
            store.set(f"there/{rank}", "")
        while is_master and not store.check([f"there/{other}" for other in range(1, world_size)]):
            if given_up.wait(CHECK_SECONDS) or time.monotonic() > until:
                del store  # frees the port, though the error's traceback keeps this frame
                raise TimeoutError(f"no engines joined the weight group at {address}:{port}: see the runners' logs")
        self.group = ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, store_timeout)

    def broadcast(self, tensor: Any) -> None:
        """Broadcast a CPU tensor from rank 0; on other ranks it is filled with the received values."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()


class WeightSender:
    """Rank 0 of a weight transfer. The constructor and `send` block on all engines: call them in a thread."""

    def __init__(
        self, address: str, port: int, world_size: int, *, device: int | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """Wait for all engines to join. `device`: GPU to send from, unused by engines; None: gloo, until `given_up`."""
        self.device = device
        self.group: Any
        if device is not None:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup

            rendezvous = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
            self.group = PyNcclCommunicator(rendezvous, device=device)
        else:
            self.group = GlooGroup(address, port, 0, world_size, given_up)

    def send(self, state: Mapping[str, Any]) -> None:
        """Send all tensors (torch or numpy) in the order of their names; return when every rank has them."""
        import torch

        def whole(value: Any) -> Any:
            """Return a value as a torch tensor; a tensor that is sharded over processes is gathered."""
            tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

        if self.device is None:
            for name in sorted(state):
                self.group.broadcast(whole(state[name]).to("cpu").contiguous())
            return
        with torch.cuda.device(self.device):  # a new thread starts on GPU 0
            for name in sorted(state):
                tensor = whole(state[name]).to(f"cuda:{self.device}").contiguous()
                self.group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            torch.cuda.current_stream().synchronize()
