"""Which GPUs or cores an engine gets: the next ones in line, so that no two engines meet while there are enough.

A runner sets `CUDA_VISIBLE_DEVICES` for itself and what it starts, before anything of CUDA is imported. Where the
machine has no GPU it sets `VLLM_CPU_OMP_THREADS_BIND`, since vLLM by itself binds the threads of each engine to the
same cores. What the environment says already stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["chosen", "cores", "counted", "lacking", "place", "placed", "share", "visible"]


def placed(engines: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the place in line of each engine's first GPU.

    `engines`: (runner's name, GPUs that it takes), in their order.
    """
    first, places = 0, {}
    for name, count in engines:
        places[name] = first
        first += count
    return places


def visible() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA takes."""
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


def lacking(engines: Iterable[tuple[str, int]], gpus: int) -> str:
    """Return which of these engines, each with the GPUs that it takes, can't be on a machine with so many; "" if none.

    Nor without any GPU: there an engine is one of cores, or says itself what it lacks.
    """
    return next((name for name, count in engines if 0 < gpus < count), "")


def cores(cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return the CPUs that this process may use, one a physical core; [] where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        first.setdefault(siblings, cpu)
    return list(first.values())


def share(cpus: Sequence[int], number: int, of: int) -> list[int]:
    """Return the cores for the threads of engine `number` of so many; [] where it is to choose itself.

    One of its cores is left to the process that schedules, as vLLM does where it chooses. So with fewer than two cores
    an engine nothing is shared out: with both cores of a machine bound, two engines served a third as fast as on one.
    """
    if of < 2 or len(cpus) < 2 * of:
        return []
    return list(cpus[number * len(cpus) // of : (number + 1) * len(cpus) // of - 1])


def counted() -> dict[str, int]:
    return {"gpus": len(visible()), "cores": len(cores())}


def place(first: int, count: int, of: int) -> dict[str, str]:
    """Return the environment variables that pin an engine to devices `first` .. `first + count - 1` of `of`."""
    names = visible()
    if names:
        gpus = chosen(names, first, count)
        return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    mine = share(cores(), first, of) if count == 1 else []
    if not mine or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}
