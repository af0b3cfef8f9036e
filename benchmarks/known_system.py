"""The system that `benchmarks.dispatch` compares with (the known system), in a process that plays a batch per request.

The environment variable `KNOWN_SYSTEM` names a folder with the known system in `venv` and its driver,
`bench_trinity.py`. The driver's lean pipeline puts experiences into a queue in memory and stores nothing. Its default
pipeline computes GRPO's advantages, and keeps a copy in SQLite and in a file. After each batch, outside the measured
time, the experiences are taken out of the queue and counted.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


class KnownSystem:
    def __init__(self, folder: Path, places: int, pipeline: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
        self.process = subprocess.Popen(
            [str(folder / "venv/bin/python"), "-c", CHILD, str(places), pipeline],
            cwd=folder, text=True, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,  # like trinity_es's system
        )
        if self._answer() != "ready":
            raise SystemExit(f"the known system in {folder} does not start")

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("said:"):
                return line.removeprefix("said:").strip()
        raise SystemExit(f"the known system ended with exit code {self.process.wait()}")

    def one(self, tasks: int, seconds: float, tokens: int, runs: int) -> float:
        """Play a batch, check its experiences, and return the seconds from submit to finalize."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tasks} {seconds} {tokens} {runs}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


@contextmanager
def known_system(places: int, pipeline: str = "lean") -> Iterator[KnownSystem | None]:
    """Run the known system with `places` runners; yield None if it is not installed. `pipeline`: "lean", "default"."""
    if not (name := os.environ.get("KNOWN_SYSTEM")):
        yield None
        return
    system = KnownSystem(Path(name).absolute(), places, pipeline)
    try:
        yield system
    finally:
        system.close()
