"""LoRA adapters in a vLLM engine: each version is loaded beside the one before, which goes when no request uses it.

`AdapterServing` is the part of `VLLMEngine` that does it, on the engine's loop. What of vLLM it rests on (0.32):
- the prefix cache, and the set of adapters of one step, tell adapters apart by name: so each version has a name and a
  number of its own in vLLM, and neither tokens nor keys and values of two versions are ever mixed;
- an adapter that a request needs and that was removed is read from its folder again, and the engine dies where that is
  gone: so none is removed in use, nor pushed out (`max_cpu_loras` is never exceeded);
- a step computes with `max_loras` adapters at most; requests of others wait, so there is one place more than adapters:
  while a version takes over from the one before, answers of both go on;
- on a CPU a request without an adapter computes with whatever is in the last place (an index of -1 in torch): found as
  logprobs off by 1.1 once all places were taken. So the last one is kept empty there, which makes it right.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from trinity_es.actors.engines.adapters import checked_adapter, require_same
from trinity_es.actors.engines.interface import LoRASettings
from trinity_es.actors.engines.vllm.weights import short
from trinity_es.events.errors import EngineError, SyncError

__all__ = ["AdapterServing", "ServedAdapter", "lora_arguments"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `max_lora_rank`."""
_ROOM_SECONDS = 0.1
"""Interval between two looks whether a version that is in the way has ended."""
_log = logging.getLogger(__name__)


def lora_arguments(lora: LoRASettings | None, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments for these settings."""
    if lora is None:
        return {}
    rank, room = next(r for r in _RANKS if r >= lora.max_rank), 2 * lora.max_adapters + 1
    places = {"max_loras": lora.max_adapters + 1, "max_cpu_loras": room}
    if on_cpu:
        places = {"max_loras": room + 1, "max_cpu_loras": room + 1}
    return {"enable_lora": True, "max_lora_rank": rank, **places}


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One version of an adapter in vLLM."""

    name: str
    version: int
    request: Any
    """vLLM's LoRARequest."""
    uses: int = 0
    """Requests of ours that it answers."""


class AdapterServing:
    """See `ServesAdapters`. `adapters`, `load_adapter`, `remove_adapter`, and what requests need of them."""

    _llm: Any
    _on_cpu: bool
    _shapes: dict[str, list[int]] | None

    def __init__(self) -> None:
        self._current: dict[str, ServedAdapter] = {}
        self._old: list[ServedAdapter] = []
        """Versions that no new request gets."""
        self._numbers = itertools.count(1)
        self._ordering = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None

    def _alive(self) -> Any:
        raise NotImplementedError

    @property
    def adapters(self) -> dict[str, int]:
        """The adapters that new requests may name, and the version that they get."""
        return {name: served.version for name, served in self._current.items()}

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[ServedAdapter | None]:
        """Give the version of an adapter that a request gets, and keep it until that ends. None: no adapter."""
        if not name:
            yield None
            return
        served = self._current.get(name)
        if served is None:
            there = ", ".join(self._current) or "none"
            raise EngineError(f"there is no adapter {name!r}: this engine serves {there}", refused=True)
        served.uses += 1
        try:
            yield served
        finally:
            served.uses -= 1
            if not served.uses and served in self._old:
                self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        """See `ServesAdapters`. Waits while requests of earlier versions take all the room.

        vLLM reads the files itself, so they are looked at again after that.
        """
        llm = self._alive()
        from vllm.lora.request import LoRARequest

        async with self._ordering:
            config = llm.vllm_config.lora_config
            if config is None:
                raise SyncError("this engine serves no adapters: set explorer.rollout_model.lora and start again")
            check = partial(checked_adapter, path, max_rank=config.max_lora_rank, shapes=self._shapes)
            found = await asyncio.to_thread(check)
            await self._sweep()
            room = config.max_loras - 1 if self._on_cpu else config.max_cpu_loras
            while len(self._current) + len(self._old) >= room:
                if not self._old:
                    raise SyncError(
                        f"there is no room for adapter {name!r} beside {', '.join(self._current)}: remove one, or "
                        "raise explorer.rollout_model.lora.max_adapters"
                    )
                await asyncio.sleep(_ROOM_SECONDS)
                self._alive()
                await self._sweep()
            new = ServedAdapter(name, version, LoRARequest(f"{name}@{version}", next(self._numbers), path))
            try:
                if not await llm.add_lora(new.request):
                    raise RuntimeError("vLLM did not take it")
                try:
                    require_same(path, digest or found.digest, await asyncio.to_thread(check))
                except SyncError:
                    await self._remove(new)
                    raise
            except Exception as e:
                self._alive()
                had = self.adapters.get(name)
                kept = "it serves none of it" if had is None else f"still serving {had}"
                raise SyncError(f"version {version} of adapter {name!r} was not loaded: {short(e)}; {kept}") from e
            self._retire(name)
            self._current[name] = new
            await self._sweep()

    async def remove_adapter(self, name: str) -> None:
        """See `ServesAdapters`."""
        async with self._ordering:
            self._retire(name)
            await self._sweep()

    def _retire(self, name: str) -> None:
        served = self._current.pop(name, None)
        if served is not None:
            self._old.append(served)

    async def _sweep(self) -> None:
        """Remove versions that no request uses any more."""
        for served in list(self._old):
            if not served.uses and served in self._old:
                self._old.remove(served)
                await self._remove(served)

    async def _remove(self, served: ServedAdapter) -> None:
        try:
            await self._llm.remove_lora(served.request.lora_int_id)
        except Exception as e:  # it takes room in vLLM, and is never asked again
            _log.warning("adapter %s was not removed: %s", served.request.lora_name, short(e))
