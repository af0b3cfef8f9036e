"""The client's methods async, under the coordinator's known names; each call waits in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.client import validation
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import AlreadyRunning, ConfigError, NotALog
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, BatchType, Task
from trinity_es.projections.batch import BatchState
from trinity_es.system import discovery, lifecycle, watchdog_lock
from trinity_es.weights.publisher import gpu_of

__all__ = ["RolloutCoordinator"]


class RolloutCoordinator:
    """The coordinator under its known names, async (P24 to P29). `await RolloutCoordinator.get_actor(config)`."""

    def __init__(self, config: Config, *, resumed_at: int | None = None) -> None:
        """`resumed_at`: see `connect`."""
        self.config, self._resumed_at = config, resumed_at
        self._client: RolloutClient | None = None
        self._started = False
        self._pool = ThreadPoolExecutor(128, thread_name_prefix="rollout-coordinator")

    @classmethod
    async def get_actor(cls, config: Config, *, resumed_at: int | None = None) -> RolloutCoordinator:
        """Connect to the running system of this config's store, or start one. `resumed_at`: see `connect`."""
        coordinator = cls(config, resumed_at=resumed_at)
        await coordinator._run(coordinator._open)
        return coordinator

    async def _run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def _open(self) -> None:
        if self._client is None:
            try:
                running = discovery.find(self.config)
            except NotALog:  # somebody makes it right now; if not, `start` says so
                running = None
            if running is None:
                with contextlib.suppress(AlreadyRunning):  # somebody else was faster
                    lifecycle.start(self.config)
                    self._started = True
            try:
                self._client = RolloutClient(self.config, resumed_at=self._resumed_at)
            except BaseException:
                admin = discovery.find(self.config) if self._started else None
                if admin is not None:  # nobody else knows of it
                    watchdog_lock.stop(self.config)
                    lifecycle.stop(admin, lambda: None, timeout=0.0)
                raise

    @property
    def client(self) -> RolloutClient:
        """The blocking client beneath. Raises ConfigError before `prepare`."""
        if self._client is None:
            raise ConfigError("the coordinator is not connected: `await coordinator.prepare()` first")
        return self._client

    async def prepare(self) -> None:
        """Connect or start, and wait until the engines serve. Idempotent."""
        await self._run(self._open)
        await self._run(self.client.wait_ready)

    async def shutdown(self) -> None:
        """End the system if this object started it; otherwise only let go. Idempotent."""
        if self._client is not None:
            client, self._client = self._client, None
            await self._run(client.shutdown if self._started else client.close)
            self._started = False

    async def submit_batch(
        self,
        *,
        batch_id: BatchId,
        tasks: Sequence[Task],
        batch_type: BatchType,
        min_wait_num: int | None = None,
        cursor: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """See RolloutClient.submit_batch."""
        await self._run(
            self.client.submit_batch,
            batch_id=batch_id, tasks=tasks, batch_type=batch_type, min_wait_num=min_wait_num, cursor=cursor,
        )

    async def finalize_train_batch(self, batch_id: BatchId, *, timeout: float | None = None) -> dict[str, Any]:
        """See RolloutClient.finalize_train_batch."""
        return dict(await self._run(self.client.finalize_train_batch, batch_id, timeout=timeout))

    async def finalize_eval_batch(self, batch_id: BatchId, *, timeout: float | None = None) -> dict[str, Any]:
        """See RolloutClient.finalize_eval_batch."""
        return dict(await self._run(self.client.finalize_eval_batch, batch_id, timeout=timeout))

    async def abort_batch(self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False) -> None:
        """See RolloutClient.abort_batch."""
        await self._run(
            self.client.abort_batch, batch_id, reason=reason, keep_partial_results=keep_partial_results
        )

    async def redo(self, batch_id: BatchId, tasks: int | Sequence[int], *, reason: str = "") -> None:
        """See RolloutClient.redo."""
        await self._run(self.client.redo, batch_id, tasks, reason=reason)

    async def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """See RolloutClient.process_experiences."""
        return dict(await self._run(self.client.process_experiences, payloads))

    async def sync_weights(self, version: int, weights: str | Path | Mapping[str, Any]) -> dict[str, Any]:
        """See RolloutClient.sync_weights."""
        return dict(await self._run(self.client.sync_weights, version, weights))

    async def weights_written_anew(self, version: int, path: str) -> None:
        """Record that the current weights were lost from shared memory, and lie there again."""
        await self._run(self.client._publisher.republish, version, path)

    async def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        """See RolloutClient.get_weight."""
        found: np.ndarray[Any, Any] = await self._run(self.client.get_weight, name)
        return found

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """See RolloutClient.setup_weight_sync_group."""
        # Not the client's own: the GPU is that of this thread, not of one of the pool.
        port, make = validation.whole("master_port", master_port), self.client._publisher.make_group
        return dict(await self._run(make, master_address, port, state_dict_meta, device=gpu_of()))

    async def experiences(self, batch_id: BatchId) -> list[Experience]:
        """Return all experiences of a finalized batch. For large batches iterate over `client.experiences`."""
        return list(await self._run(lambda: list(self.client.experiences(batch_id))))

    async def take_experiences(
        self, n: int, *, timeout: float | None = None, step: int | None = None
    ) -> list[Experience]:
        """See RolloutClient.take_experiences."""
        return list(await self._run(self.client.take_experiences, n, timeout=timeout, step=step))

    async def acknowledge(self, batch_id: BatchId, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """See RolloutClient.acknowledge."""
        await self._run(self.client.acknowledge, batch_id, step, metrics)

    async def batch(self, batch_id: BatchId) -> BatchState:
        """See RolloutClient.batch."""
        state: BatchState = await self._run(self.client.batch, batch_id)
        return state

    async def why(self, batch_id: BatchId) -> str:
        """See RolloutClient.why."""
        return str(await self._run(self.client.why, batch_id))

    async def restart_runner(self, name: str, *, reason: str = "", timeout: float = 60.0) -> dict[str, Any]:
        """See RolloutClient.restart_runner."""
        return dict(await self._run(self.client.restart_runner, name, reason=reason, timeout=timeout))

    async def get_all_state(self) -> dict[str, dict[str, Any]]:
        """See RolloutClient.get_all_state."""
        return dict(await self._run(self.client.get_all_state))

    async def get_runner_state(self, name: str) -> dict[str, Any]:
        """See RolloutClient.get_runner_state."""
        return dict(await self._run(self.client.get_runner_state, name))

    async def get_key_state(self, key: str) -> dict[str, Any]:
        """See RolloutClient.get_key_state."""
        return dict(await self._run(self.client.get_key_state, key))

    async def status(self) -> dict[str, Any]:
        """See RolloutClient.status."""
        return dict(await self._run(self.client.status))
