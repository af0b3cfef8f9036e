"""`RolloutCoordinator`: the methods of `RolloutClient` for asyncio. Each call runs in a thread.

If a call is cancelled, it goes on in its thread, and its request still takes effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from trinity_es.client import argument_checks
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import AlreadyRunning, ConfigError
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId
from trinity_es.system import lifecycle, running_system
from trinity_es.weights.publisher import gpu_of

__all__ = ["RolloutCoordinator"]


P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    method: Callable[Concatenate[RolloutClient, P], R],
) -> Callable[Concatenate[RolloutCoordinator, P], Coroutine[Any, Any, R]]:
    """Return an async method that calls this method of the client in a thread."""

    @functools.wraps(method, assigned=("__name__",))
    async def call(self: RolloutCoordinator, /, *args: P.args, **kwargs: P.kwargs) -> R:
        client_method: Callable[P, R] = getattr(self.client, method.__name__)
        return await self._run(client_method, *args, **kwargs)

    call.__qualname__, call.__doc__ = f"RolloutCoordinator.{method.__name__}", f"See RolloutClient.{method.__name__}."
    return call


class RolloutCoordinator:
    """Async client with Trinity-RFT's names. Create it by `await RolloutCoordinator.get_actor(config)`.

    It has the methods that a trainer needs. `client` is the blocking RolloutClient, which has all methods.
    """

    def __init__(self, config: Config, *, resumed_at: int | None = None) -> None:
        self.config = config
        self._resumed_at = resumed_at
        self._client: RolloutClient | None = None
        self._owns_system = False
        self._pool = ThreadPoolExecutor(128, thread_name_prefix="rollout-coordinator")

    @classmethod
    async def get_actor(cls, config: Config, *, resumed_at: int | None = None) -> RolloutCoordinator:
        """Connect to the running system of this config's store, or start one. `resumed_at`: see `connect`."""
        coordinator = cls(config, resumed_at=resumed_at)
        await coordinator._run(coordinator._connect)
        return coordinator

    async def _run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def _connect(self) -> None:
        """Start a system if none runs, and connect. If the connection fails, end the system that was started."""
        if self._client is None:
            if not running_system.is_up(self.config):
                with contextlib.suppress(AlreadyRunning):  # another process was faster
                    lifecycle.start(self.config)
                    self._owns_system = True
            try:
                self._client = RolloutClient(self.config, resumed_at=self._resumed_at)
            except BaseException:
                admin = running_system.find(self.config) if self._owns_system else None
                self._owns_system = False
                if admin is not None:  # no other process would end this system
                    running_system.stop_keeper(self.config)
                    lifecycle.stop(admin, lambda: None, timeout=0.0)
                raise

    @property
    def client(self) -> RolloutClient:
        """The underlying blocking client. Raises ConfigError before `prepare`."""
        if self._client is None:
            raise ConfigError("the coordinator is not connected: `await coordinator.prepare()` first")
        return self._client

    async def prepare(self) -> None:
        """Connect to the system, or start one, and wait until its engines serve. Idempotent."""
        await self._run(self._connect)
        await self._run(self.client.wait_ready)

    async def shutdown(self) -> None:
        """End the system if this object started it; otherwise only disconnect. Idempotent."""
        if self._client is not None:
            client, self._client = self._client, None
            await self._run(client.shutdown if self._owns_system else client.close)
            self._owns_system = False

    submit_batch = _in_thread(RolloutClient.submit_batch)
    add_tasks = _in_thread(RolloutClient.add_tasks)
    finalize_train_batch = _in_thread(RolloutClient.finalize_train_batch)
    finalize_eval_batch = _in_thread(RolloutClient.finalize_eval_batch)
    abort_batch = _in_thread(RolloutClient.abort_batch)
    redo = _in_thread(RolloutClient.redo)
    process_experiences = _in_thread(RolloutClient.process_experiences)
    columns = _in_thread(RolloutClient.columns)
    take_columns = _in_thread(RolloutClient.take_columns)
    take_experiences = _in_thread(RolloutClient.take_experiences)
    acknowledge = _in_thread(RolloutClient.acknowledge)
    next_batch = _in_thread(RolloutClient.next_batch)
    batch = _in_thread(RolloutClient.batch)
    why = _in_thread(RolloutClient.why)
    sync_weights = _in_thread(RolloutClient.sync_weights)
    weights_written_anew = _in_thread(RolloutClient.weights_written_anew)
    sync_adapter = _in_thread(RolloutClient.sync_adapter)
    remove_adapter = _in_thread(RolloutClient.remove_adapter)
    get_weight = _in_thread(RolloutClient.get_weight)
    status = _in_thread(RolloutClient.status)
    restart_runner = _in_thread(RolloutClient.restart_runner)
    scale_servers = _in_thread(RolloutClient.scale_servers)
    drain_host = _in_thread(RolloutClient.drain_host)
    get_all_state = _in_thread(RolloutClient.get_all_state)
    get_runner_state = _in_thread(RolloutClient.get_runner_state)
    get_key_state = _in_thread(RolloutClient.get_key_state)
    wait_ready = _in_thread(RolloutClient.wait_ready)

    async def experiences(self, batch_id: BatchId) -> list[Experience]:
        """Return all experiences of a finalized batch. For a large batch, iterate over `client.experiences`."""
        return await self._run(lambda: list(self.client.experiences(batch_id)))

    async def processed_experiences(self, after: int = 0) -> list[tuple[int, list[Experience]]]:
        """Return everything that RolloutClient.processed_experiences yields."""
        return await self._run(lambda: list(self.client.processed_experiences(after)))

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """See RolloutClient.setup_weight_sync_group."""
        # Not by `_in_thread`: `gpu_of` returns the GPU of the calling thread, which a thread of the pool has not set.
        port = argument_checks.whole_number("master_port", master_port)
        make_group = self.client._publisher.make_group
        return await self._run(make_group, master_address, port, state_dict_meta, device=gpu_of())
