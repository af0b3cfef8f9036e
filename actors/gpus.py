"""Which GPUs an engine gets: the next ones in line, so that no two engines meet on one while there are enough.

A runner sets `CUDA_VISIBLE_DEVICES` for itself and what it starts, before anything of CUDA is imported. Where the
machine has none (no GPU, or an engine on the CPU) nothing is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["chosen", "placed", "visible"]


def placed(engines: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The place in line of each engine's first GPU. `engines`: (runner's name, GPUs that it takes), in their order."""
    first, places = 0, {}
    for name, count in engines:
        places[name] = first
        first += count
    return places


def visible() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    # CUDA counts what a container was given from 0, whatever the devices are called.
    count = sum(p.name.removeprefix("nvidia").isdigit() for p in Path("/dev").glob("nvidia*"))
    return [str(n) for n in range(count)]


def chosen(names: Sequence[str], first: int, count: int) -> str | None:
    """`CUDA_VISIBLE_DEVICES` for an engine of `count` GPUs; None: as it is.

    With fewer GPUs than engines ask for they share, from the first one on again (`gpu_memory_utilization` says how much
    each takes); an engine that asks for more than there are is left to say so itself.
    """
    if not names or count > len(names):
        return None
    return ",".join(names[(first + i) % len(names)] for i in range(count))
