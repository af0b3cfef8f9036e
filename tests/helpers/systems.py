"""Actor systems for tests: configs, start, kill and end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from trinity_es import Task
from trinity_es.actors.base import process_start_time
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.values import BatchId
from trinity_es.system import leftovers, lifecycle, running_system
from trinity_es.testing import SleepWorkflow, wait_until

StartSystem = Callable[..., RolloutClient]


def scripted(folder: Path, **sections: Any) -> trinity_es.Config:
    """Return a config with the ScriptedEngine in this folder. Keyword arguments replace keys in its sections."""
    data: dict[str, Any] = {
        "mode": "explore",
        "explorer": {"max_concurrency": 8, "rollout_model": {"engine_type": "scripted"}},
        "system": {"keeper": False},
    }
    for name, section in sections.items():
        data[name] = merge(data.get(name, {}), section)
    return trinity_es.Config.from_dict(data, folder=folder)


def started(folder: Path, *, wait: bool = True, **sections: Any) -> RolloutClient:
    config = scripted(folder, **sections)
    lifecycle.start(config)
    client = trinity_es.connect(config)
    if wait:
        try:
            client.wait_ready(60)
        except BaseException:
            end(client)
            raise
    return client


def is_whole(client: RolloutClient) -> bool:
    """Abort open batches. Return True if another test may use the system."""
    try:
        status = client.status()
        for batch in status["batches"]:
            client.abort_batch(batch["batch_id"], reason="its test has ended")
        return all(runner["state"] == "ready" for runner in status["runners"])
    except (TrinityError, TimeoutError):
        return False


def name_as_ours(folder: Path) -> None:
    """Write modules named like our packages into a folder, as a user may have."""
    for file in ("events.py", "projections.py", "actors/__init__.py", "trinity_es_user.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("OWNER = 'the user'\n")


def merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {k: merge(base.get(k), v) for k, v in over.items()}
    return over


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill these processes with SIGKILL. Some may have ended already because another one died."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_system(client: RolloutClient) -> None:
    """Kill all processes of a system with SIGKILL at once, and wait until its admin is gone."""
    admin = client._link.admin
    kill_all(running_system.processes(admin))
    wait_until(lambda: process_start_time(admin["pid"]) != admin["started"], "the system to be gone")


def end(client: RolloutClient) -> None:
    """Stop a system in any state, and check that no process of it is left."""
    admin = client._link.admin
    family = running_system.processes(admin)
    try:
        client.shutdown()
    except Exception:
        kill_all(family)
    assert not running_system.wait_gone(family, 15), "a process of the system is left"


def pid_of(client: RolloutClient, name: str) -> int:
    def look() -> int:
        children = client._link.where().status.get("children", [])
        pid = next((int(c["pid"]) for c in children if c["name"] == name and c["pid"]), 0)
        return pid if pid and process_start_time(pid) is not None else 0  # 0 also if the guardian does not know it yet

    return int(wait_until(look, f"the pid of {name}, alive"))


def ran(path: Path) -> Counter[str]:
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def tasks(n: int, path: Path, seconds: float) -> list[Task]:
    return [Task(workflow=SleepWorkflow, workflow_args={"seconds": seconds, "count_file": str(path)}) for _ in range(n)]


def finalize_in_thread(client: RolloutClient, batch: int, timeout: float = 60) -> Future[dict[str, Any]]:
    return ThreadPoolExecutor(1).submit(client.finalize_train_batch, batch, timeout=timeout)


def sleepers(n: int, seconds: float = 0.0, **args: Any) -> list[Task]:
    args = {"seconds": seconds, **args}
    return [Task(workflow=SleepWorkflow, workflow_args=args, raw_task={"i": i}) for i in range(n)]


def play_batch(client: RolloutClient, batch: BatchId, tasks: list[Task], timeout: float = 60) -> dict[str, Any]:
    """Run tasks as a train batch to the end, and return the batch's result."""
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
    result = client.finalize_train_batch(batch, timeout=timeout)
    assert result["finished_task_count"] == len(tasks)
    return result


def limit_file_size(client: RolloutClient, size: int) -> None:
    """Simulate a full disk for the coordinator alone: it can write no file beyond `size` bytes."""
    pid = next(c["pid"] for c in client._link.where().status["children"] if c["name"] == "coordinator")
    psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def child(client: RolloutClient, name: str) -> dict[str, Any]:
    children = client._link.where().status.get("children", [])
    return next((dict(c) for c in children if c["name"] == name), {})


def events(client: RolloutClient, kind: type[ev.Event]) -> list[Any]:
    return [r.event for r in client.log.events() if isinstance(r.event, kind)]


def kill_everybody(client: RolloutClient) -> None:
    """Kill all processes of the system with SIGKILL at once."""
    processes = leftovers.leftovers(client.config)
    kill_all(processes)
    psutil.wait_procs(processes, timeout=30)


def guardian(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(client._link.admin["guardian"])]


def admin(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(client._link.admin["pid"])]


def everything(client: RolloutClient) -> list[psutil.Process]:
    return running_system.processes(client._link.admin)


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "code was run"))
