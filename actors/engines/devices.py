"""Assignment of GPUs or CPU cores to engines. Each engine gets the next free ones; with too few, engines share.

A runner sets `CUDA_VISIBLE_DEVICES` before anything imports CUDA. Without a GPU it sets `VLLM_CPU_OMP_THREADS_BIND`,
since vLLM by itself binds the threads of all engines to the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

__all__ = [
    "core_share", "cuda_visible_devices", "device_counts", "device_environment", "engine_beyond_gpus", "first_gpus",
    "usable_cores", "visible_gpus",
]


def first_gpus(engines: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the index of each runner's first GPU, by name. `engines`: (runner's name, number of GPUs), in order."""
    first_gpu = 0
    first_by_name = {}
    for name, count in engines:
        first_by_name[name] = first_gpu
        first_gpu += count
    return first_by_name


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in `CUDA_VISIBLE_DEVICES`."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        return list(takewhile(lambda name: not name.startswith("-"), names))  # CUDA ignores all after an invalid name
    # CUDA numbers the GPUs of a container from 0, whatever their device files are called.
    count = sum(p.name.removeprefix("nvidia").isdigit() for p in Path("/dev").glob("nvidia*"))
    return [str(n) for n in range(count)]


def cuda_visible_devices(names: Sequence[str], first: int, count: int) -> str | None:
    """Return `CUDA_VISIBLE_DEVICES` for an engine of `count` GPUs, from index `first` of `names`; None if it has fewer.

    The index wraps around. So engines share GPUs if there are too few for all (`gpu_memory_utilization` limits each).
    """
    if not names or count > len(names):
        return None
    return ",".join(names[(first + i) % len(names)] for i in range(count))


def engine_beyond_gpus(engines: Iterable[tuple[str, int]], gpus: int) -> str:
    """Return the first engine that alone needs more than `gpus` GPUs; "" if none does, or if `gpus` is 0."""
    return next((name for name, count in engines if 0 < gpus < count), "")


def usable_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return the CPUs that this process may use, one per physical core; [] if the system can't tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpu_by_siblings: dict[str, int] = {}  # the CPUs of one physical core name the same siblings
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cpu_by_siblings.setdefault(siblings, cpu)
    return list(cpu_by_siblings.values())


def core_share(cpus: Sequence[int], number: int, engine_count: int) -> list[int]:
    """Return the cores for the threads of engine `number` (from 0) of `engine_count`; [] to let vLLM choose.

    One core of each engine's share is left to its scheduler process, as vLLM itself does. With fewer than two cores per
    engine vLLM chooses: when both cores of a machine were bound, two engines served a third as fast as on one.
    """
    if engine_count < 2 or len(cpus) < 2 * engine_count:
        return []
    begin, end = number * len(cpus) // engine_count, (number + 1) * len(cpus) // engine_count
    return list(cpus[begin : end - 1])


def device_counts() -> dict[str, int]:
    return {"gpus": len(visible_gpus()), "cores": len(usable_cores())}


def device_environment(first: int, count: int, device_count: int) -> dict[str, str]:
    """Return the environment variables that pin an engine to `count` of `device_count` devices, from `first` on."""
    names = visible_gpus()
    if names:
        gpus = cuda_visible_devices(names, first, count)
        return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    cpus = core_share(usable_cores(), first, device_count) if count == 1 else []
    if not cpus or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}
