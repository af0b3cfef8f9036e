"""How fast do the processes of sync workflows start, and how much memory do they use?

Compares a runner's `WorkerPool` with the usual alternative, a `ProcessPoolExecutor` that spawns, without warm-up. Both
play the same tasks in turn. Each task notes its process and waits for the others, so a batch of n needs n processes.
The workflows import numpy; numpy and torch; and the same beside vLLM, where a runner imports torch for its workers
while the engine loads. It measures:

- cold: from the first task of a new pool without processes to the end of the last task, for 2, 16 and 64 tasks;
- the part of it that counts as the attempt's time, which excludes the first import of the workflow's module;
- memory: PSS of all processes together, and of the templates that they are forked from;
- replacement: from the death of an idle process to the end of the next task in another process.

`python -m benchmarks.workers [--json FILE] [--quick]`. Ratios compare both pools on the same machine at the same time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compared import Spread, Watch, about, load_text, options_of, write_json
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine

MODULES = {"numpy": "import numpy", "torch": "import numpy, torch", "torch beside vLLM": "import numpy, torch"}
"""{case: imports of its workflow}."""
WARMED = {"torch beside vLLM": ["torch:Tensor"]}
"""{case: modules imported before the first task}; in other cases no process starts before the first task."""
COUNTS = {2: 5, 16: 3, 64: 2}
"""{number of workers: number of repeats}."""
SPAWNED_MOST = {"numpy": 64, "torch": 16, "torch beside vLLM": 0}
"""{case: maximum number of spawned processes}: 64 that import torch take minutes on two cores, and 11 GB."""

_MODULE = """
import os, time
from pathlib import Path
{imports}
from trinity_es import Experience, Workflow


def meet(folder, count, index):
    folder = Path(folder)
    (folder / str(index)).touch()
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    return os.getpid()


class Meets(Workflow):
    def run(self):
        args = self.task.workflow_args
        pid = meet(args["folder"], args["count"], os.getpid())
        return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0, metrics={{"pid": pid}})]
"""


def megabytes(pids: list[int]) -> float:
    """Return the total PSS of these processes, in MiB."""
    return float(sum(psutil.Process(pid).memory_full_info().pss for pid in pids)) / 1024**2


class Here:
    """Pool of a runner, `WorkerPool`."""

    def __init__(self, module: str, places: int) -> None:
        self.pool = WorkerPool(places)
        self.workflows = WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), workers=self.pool)
        self.module = module

    async def play(self, folder: Path, count: int) -> tuple[list[int], float]:
        """Play `count` tasks, and return the pids of their processes and the seconds that count for the attempt."""
        task = Task(workflow=f"{self.module}:Meets", workflow_args={"folder": str(folder), "count": count}, task_id=1)
        done = await self.workflows.execute(task, 1, range(count))
        assert not done.failures, done.failures[0]
        return [int(r.metrics["pid"]) for r in done.results], done.seconds

    async def close(self) -> None:
        await self.pool.close()


class Spawned:
    """Pool that users might take instead: a ProcessPoolExecutor that spawns."""

    def __init__(self, module: str, places: int) -> None:
        self.pool = concurrent.futures.ProcessPoolExecutor(places, mp_context=multiprocessing.get_context("spawn"))
        self.module = __import__(module)

    async def play(self, folder: Path, count: int) -> tuple[list[int], float]:
        started = time.perf_counter()
        futures = [self.pool.submit(self.module.meet, str(folder), count, index) for index in range(count)]
        pids = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return list(pids), time.perf_counter() - started

    async def close(self) -> None:
        await asyncio.to_thread(self.pool.shutdown)


async def measure_cold(
    kind: type[Here] | type[Spawned], module: str, count: int, folder: Path, warm: Sequence[str]
) -> dict[str, float]:
    pool = kind(module, count)
    try:
        if warm and isinstance(pool, Here):
            await pool.pool.warm(warm)
        started = time.perf_counter()
        pids, counted = await pool.play(folder, count)
        seconds = time.perf_counter() - started
        assert len(set(pids)) == count
        templates = [p.pid for p in psutil.Process().children(recursive=True) if p.name() == "worker-template"]
        return {"s": seconds, "counted_s": counted, "mb": megabytes(pids), "templates_mb": megabytes(templates)}
    finally:
        await pool.close()


async def measure_replacement(module: str, folder: Path, rounds: int) -> list[float]:
    """Return the seconds from a worker's death to the end of the next task. (A spawned pool breaks when one dies.)"""
    pool = Here(module, 2)
    found = []
    try:
        [pid], _ = await pool.play(_new_folder(folder), 1)
        for _ in range(rounds):
            os.kill(pid, signal.SIGKILL)
            while psutil.pid_exists(pid):
                await asyncio.sleep(0.001)
            started = time.perf_counter()
            [pid], _ = await pool.play(_new_folder(folder), 1)
            found.append(time.perf_counter() - started)
    finally:
        await pool.close()
    return found


def _new_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


async def measure(folder: Path, quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, imports in MODULES.items():
        module, warm = f"bench_{name.replace(' ', '_')}", WARMED.get(name, [])
        (folder / f"{module}.py").write_text(_MODULE.format(imports=imports))
        __import__(module)  # so that neither pays for this process's own import
        figures[name] = {"cold": {}}
        print(f"workers of a workflow that imports {name}: median (range)", flush=True)
        for count, rounds in COUNTS.items():
            found: dict[type[Here] | type[Spawned], list[dict[str, float]]] = {Here: [], Spawned: []}
            for number in range(1 if quick else rounds):
                for kind in found if number % 2 else reversed(found):
                    if kind is Here or count <= (2 if quick else SPAWNED_MOST[name]):
                        found[kind].append(await measure_cold(kind, module, count, _new_folder(folder), warm))
            here, spawned = found.values()
            names = {"here_s": "s", "counted_s": "counted_s", "here_mb": "mb", "templates_mb": "templates_mb"}
            row = {name: Spread.of([h[key] for h in here]) for name, key in names.items()}
            if spawned:
                row |= {f"spawned_{key}": Spread.of([s[key] for s in spawned]) for key in ("s", "mb")}
                row["ratio"] = Spread.of([h["s"] / s["s"] for h, s in zip(here, spawned, strict=True)])
            figures[name]["cold"][count] = row
            show(count, row)
        replaced = Spread.of(await measure_replacement(module, folder, 5 if quick else 20))
        figures[name]["replaced_s"] = replaced
        print(f"  a killed one replaced within {replaced.as_text('.3f')} s", flush=True)
    return figures


def main() -> int:
    options = options_of(__doc__)
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        sys.path.insert(0, folder)
        measured = asyncio.run(measure(Path(folder), options.quick))
    figures = about(watch) | measured
    print(f"  checked: each task had a process of its own. {load_text(figures['beside'])}")
    write_json(options.json, figures)
    return 0


def show(count: int, row: dict[str, Spread]) -> None:
    told = {name: spread.as_text(".0f" if name.endswith("mb") else ".2f") for name, spread in row.items()}
    print(f"  {count:>2} cold   here {told['here_s']} s, counted {told['counted_s']} s; "
          f"PSS {told['here_mb']} MB, templates {told['templates_mb']} MB", flush=True)
    if "ratio" in row:
        print(f"       spawned {told['spawned_s']} s; PSS {told['spawned_mb']} MB; here / spawned {told['ratio']}",
              flush=True)


if __name__ == "__main__":
    sys.exit(main())
