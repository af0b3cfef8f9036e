"""A Ray cluster of several nodes on this machine: the process that runs it, and commands to that process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ["ray==2.60.0", "msgpack==1.2.4"]
"""Ray, and its dependencies that our environment lacks."""


class RayNodes:
    """Ray cluster. `env` has the variables for processes that use it."""

    def __init__(self, env: Mapping[str, str], folder: str) -> None:
        self.folder = folder
        self.env = {**os.environ, **env, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.env)
        self.env["RAY_ADDRESS"] = self.ask("address")

    def ask(self, *words: str) -> Any:
        """Send a command to the cluster's process, and return the answer."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the cluster ended at {words}: exit {self._process.wait()}"
        return json.loads(answer)

    def add(self) -> str:
        return str(self.ask("add"))

    def remove(self, node: str) -> None:
        self.ask("remove", node)

    def close(self) -> None:
        self._process.communicate(json.dumps(["end"]) + "\n", timeout=60)


@contextmanager
def ray_nodes(env: Mapping[str, str]) -> Iterator[RayNodes]:
    """Yield a cluster with one node, and end it after the block."""
    folder = tempfile.mkdtemp(prefix="es-ray-")  # short, because the paths of sockets in it are limited
    nodes = RayNodes(env, folder)
    try:
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stdout
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray writes the cluster's address there
    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={
        **node, "temp_dir": sys.argv[1], "include_dashboard": False,
        "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}})
    others: dict[str, Any] = {}

    def do(what: str, *rest: str) -> Any:
        if what == "add":
            added = cluster.add_node(**node)
            others[added.node_id] = added
            return added.node_id
        if what == "remove":
            return cluster.remove_node(others.pop(rest[0]), allow_graceful=False)
        return cluster.address

    for line in sys.stdin:
        words = json.loads(line)
        if words == ["end"]:
            break
        answers.write(json.dumps(do(*words)) + "\n")
        answers.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main()
