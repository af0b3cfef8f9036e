"""LoRA adapters of a vLLM engine. A new version is loaded beside the old one, which is removed after its last request.

`AdapterServing` is the part of `VLLMEngine` that does it. It relies on these facts about vLLM 0.32:
- The prefix cache, and the set of adapters of one step, tell adapters apart by name. So each version has its own name
  and number in vLLM, and tokens, keys and values of two versions never mix.
- If a request needs an adapter that was removed, vLLM reads its folder again, and dies if the folder is gone. So no
  adapter in use is removed or evicted (`max_cpu_loras` is never exceeded).
- A step computes with at most `max_loras` adapters, and requests with others wait. One slot more than adapters lets
  answers of an old and a new version go on together.
- On a CPU a request without an adapter computes with the last slot (an index of -1 in torch): logprobs were off by 1.1
  once all slots were taken. So the last slot stays empty there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from trinity_es.actors.engines.adapter_checks import checked_adapter, require_unchanged
from trinity_es.actors.engines.interface import LoRASettings
from trinity_es.actors.engines.vllm.weights import short_error
from trinity_es.events.errors import EngineError, SyncError

__all__ = ["AdapterServing", "ServedAdapter", "lora_arguments"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `max_lora_rank` may have."""
_ROOM_SECONDS = 0.1
"""Interval between checks for a free slot."""
_log = logging.getLogger(__name__)


def lora_arguments(lora: LoRASettings | None, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for LoRA adapters; {} if `lora` is None. The module docstring has the reasons."""
    if lora is None:
        return {}
    rank = next(r for r in _RANKS if r >= lora.max_rank)
    version_count = 2 * lora.max_adapters + 1  # an old and a new one of each, and one more while it is loaded
    slots = {"max_loras": lora.max_adapters + 1, "max_cpu_loras": version_count}
    if on_cpu:
        slots = {"max_loras": version_count + 1, "max_cpu_loras": version_count + 1}
    return {"enable_lora": True, "max_lora_rank": rank, **slots}


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One version of an adapter in vLLM."""

    name: str
    version: int
    request: Any
    """LoRARequest with vLLM's name and number of this version."""
    uses: int = 0
    """Number of open requests that use this version."""


class AdapterServing:
    """The part of `VLLMEngine` that implements `ServesAdapters`."""

    _llm: Any
    _live_llm: Callable[[], Any]
    _on_cpu: bool
    _shapes: dict[str, list[int]] | None

    def __init__(self) -> None:
        self._current: dict[str, ServedAdapter] = {}
        self._replaced: list[ServedAdapter] = []
        """Replaced versions that requests still use."""
        self._numbers = itertools.count(1)
        self._adapters_lock = asyncio.Lock()
        self._removal_task: asyncio.Task[None] | None = None

    @property
    def adapters(self) -> dict[str, int]:
        return {name: adapter.version for name, adapter in self._current.items()}

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[ServedAdapter | None]:
        """Keep an adapter's current version loaded within this context, whose value it is; None for an empty name."""
        if not name:
            yield None
            return
        adapter = self._current.get(name)
        if adapter is None:
            names = ", ".join(self._current) or "none"
            raise EngineError(f"there is no adapter {name!r}: this engine serves {names}. Publish it first "
                              "(sync_adapter)", refused=True)
        adapter.uses += 1
        try:
            yield adapter
        finally:
            adapter.uses -= 1
            if not adapter.uses and adapter in self._replaced:
                self._removal_task = asyncio.get_running_loop().create_task(self._remove_unused())

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        """Serve a new version of an adapter, as `ServesAdapters` says, once there is a free slot for it."""
        llm = self._live_llm()
        from vllm.lora.request import LoRARequest

        async with self._adapters_lock:
            config = llm.vllm_config.lora_config
            if config is None:
                raise SyncError(f"adapter {name!r} needs explorer.rollout_model.lora: set it and start again")
            check = partial(checked_adapter, path, max_rank=config.max_lora_rank, shapes=self._shapes)
            files = await asyncio.to_thread(check)
            await self._remove_unused()
            room = config.max_loras - 1 if self._on_cpu else config.max_cpu_loras
            while len(self._current) + len(self._replaced) >= room:
                if not self._replaced:
                    raise SyncError(
                        f"there is no room for adapter {name!r} beside {', '.join(self._current)}: remove one, or "
                        "raise explorer.rollout_model.lora.max_adapters"
                    )
                await asyncio.sleep(_ROOM_SECONDS)
                self._live_llm()
                await self._remove_unused()
            new = ServedAdapter(name, version, LoRARequest(f"{name}@{version}", next(self._numbers), path))
            try:
                if not await llm.add_lora(new.request):
                    raise RuntimeError(f"vLLM refused to load {path} and gave no reason: see the runner's log")
                try:
                    require_unchanged(path, digest or files.digest, await asyncio.to_thread(check))
                except SyncError:
                    await self._remove(new)
                    raise
            except Exception as e:
                self._live_llm()
                current = self.adapters.get(name)
                state = "no version of it is served" if current is None else f"still serving version {current}"
                raise SyncError(
                    f"version {version} of adapter {name!r} was not loaded: {short_error(e)}; {state}"
                ) from e
            self._retire(name)
            self._current[name] = new
            await self._remove_unused()

    async def remove_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and remove it from vLLM once its last request has ended."""
        async with self._adapters_lock:
            self._retire(name)
            await self._remove_unused()

    def _retire(self, name: str) -> None:
        adapter = self._current.pop(name, None)
        if adapter is not None:
            self._replaced.append(adapter)

    async def _remove_unused(self) -> None:
        for adapter in list(self._replaced):
            if not adapter.uses and adapter in self._replaced:  # else another call has removed it meanwhile
                self._replaced.remove(adapter)
                await self._remove(adapter)

    async def _remove(self, adapter: ServedAdapter) -> None:
        try:
            await self._llm.remove_lora(adapter.request.lora_int_id)
        except Exception as e:  # it still takes a slot in vLLM, but no request uses it again
            _log.warning("adapter %s was not removed: %s", adapter.request.lora_name, short_error(e))
