"""The system that `benchmarks.dispatch` compares with (the known system), in a process that plays a batch per request.

The environment variable `KNOWN_SYSTEM` names a folder with the known system in `venv` and its driver,
`bench_trinity.py`. The driver's lean pipeline puts experiences into a queue in memory and stores nothing. Its default
pipeline computes GRPO's advantages, and keeps a copy in SQLite and in a file. After each batch, outside the measured
time, the experiences are taken out of the queue and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.child_processes import LineProcess, environment_without

CHILD = """
import shutil, sys
places, pipeline = sys.argv[1:]
sys.argv = ["bench_trinity.py", "--runners", places, "--pipeline", pipeline, "--mode", "latency"]
import bench_trinity as known
system = known.Peer()
print("said:ready", flush=True)
try:
    for line in sys.stdin:
        tasks, seconds, tokens, runs = line.split()
        known.A.tokens, known.A.repeat_times = int(tokens), int(runs)
        took, batch, result = system.one(int(tasks), float(seconds))
        assert system.check(batch, int(tasks), result), f"batch {batch} is not whole: {result}"
        print(f"said:{took}", flush=True)
    known.ray.get(system.coord.shutdown.remote(), timeout=30)
finally:
    known.ray.shutdown()
    shutil.rmtree(known.RUNDIR, ignore_errors=True)
"""


class KnownSystem(LineProcess):
    def __init__(self, folder: Path, places: int, pipeline: str) -> None:
        super().__init__(
            [str(folder / "venv/bin/python"), "-c", CHILD, str(places), pipeline], cwd=folder,
            env=environment_without("PYTHONDONTWRITEBYTECODE", "PYTHONPATH"), start_new_session=True)  # as our own
        assert self.answer() == "ready"

    def answer(self) -> str:
        while not (line := super().answer()).startswith("said:"):
            pass
        return line.removeprefix("said:")

    @property
    def pids(self) -> list[int]:
        return [self.process.pid]

    def one(self, tasks: int, seconds: float, tokens: int, runs: int) -> float:
        """Play a batch, check its experiences, and return the seconds from submit to finalize."""
        return float(self.ask(f"{tasks} {seconds} {tokens} {runs}"))


@contextmanager
def known_system(places: int, pipeline: str = "lean") -> Iterator[KnownSystem | None]:
    """Run the known system with `places` runners; yield None if it is not installed. `pipeline`: "lean", "default"."""
    if not (name := os.environ.get("KNOWN_SYSTEM")):
        yield None
        return
    with closing(KnownSystem(Path(name).absolute(), places, pipeline)) as system:
        yield system
