"""Handmade log of a run over several hosts: the head, b (lost once), c (leaves) and d (drains)."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.handmade import write
from trinity_es.events import vocabulary as ev
from trinity_es.projections.host_states import lost_reason

BROKE = "not heard of for 15 s: it ended the connection"


def _runner(name: str, incarnation: int, host: str = "vm") -> tuple[str, list[ev.Event]]:
    started = ev.RunnerStarted(runner=name, incarnation=incarnation, pid=7, host=host, engine="scripted")
    ready = ev.RunnerReady(runner=name, incarnation=incarnation, places=8, model_version=0, load_seconds=1.0)
    return f"runner/{name}", [started, ready]


def _lost(name: str, incarnation: int, reason: str) -> tuple[str, list[ev.Event]]:
    return f"runner/{name}", [ev.RunnerLost(runner=name, incarnation=incarnation, reason=reason)]


def _joined(host: str, epoch: int = 1) -> ev.HostJoined:
    return ev.HostJoined(host=host, epoch=epoch, life=f"{host}{epoch}", address=f"10.0.0.{ord(host) - 96}", pid=11,
                         places={"gpus": 2, "cores": 16})


def _sent(runner: str, incarnation: int, *tasks: int, attempt: int = 1) -> ev.TasksDispatched:
    units = [ev.Unit(task=t, run_id_base=0, runs=1, attempt=attempt) for t in tasks]
    return ev.TasksDispatched(runner=runner, incarnation=incarnation, units=units, model_version=0)


def _ended(runner: str, incarnation: int, *tasks: int, attempt: int = 1) -> list[ev.Event]:
    return [ev.TaskFinished(task=t, run_id_base=0, attempt=attempt, runner=runner, incarnation=incarnation,
                            runs=[ev.RunResult(run=0, metrics={"reward": 1.0}, experiences=1, response_tokens=5)],
                            payload=None, model_version=0, model_version_end=0, seconds=0.5) for t in tasks]


def _failed(task: int, runner: str, incarnation: int, reason: str, blamed: bool) -> ev.AttemptFailed:
    return ev.AttemptFailed(task=task, run_id_base=0, failed_runs=[0], attempt=1, runner=runner,
                            incarnation=incarnation, kind="runner_lost", message=reason, retry=True, blamed=blamed)


def several_hosts() -> list[tuple[str, list[ev.Event]]]:
    """Return events of batch 1 with 10 tasks: 2 end on the head, 1 on b, 4 on c, 1 on d; b and d have one each."""
    lost = lost_reason("b", BROKE)
    batch = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1] * 10, tasks=[{}] * 10, max_attempts=3)
    one = "batch/1"
    return [
        ("system", [ev.SystemConfigured(config={"hosts": {"timeout": 15.0}, "explorer": {"max_timeout": 60.0}}),
                    ev.CoordinatorStarted(epoch=1, pid=1, host="vm", version="0")]),
        _runner("runner-0", 1),
        ("hosts", [_joined("b"), _joined("c")]),
        _runner("runner-0@b", 2, "vb"), _runner("runner-1@b", 3, "vb"), _runner("runner-0@c", 4, "vc"),
        (one, [batch, _sent("runner-0", 1, 0, 1), _sent("runner-0@b", 2, 2, 3), _sent("runner-1@b", 3, 4),
               _sent("runner-0@c", 4, 5, 6), *_ended("runner-0", 1, 0, 1), *_ended("runner-0@c", 4, 5, 6)]),
        _lost("runner-1@b", 3, "exit status -9"),
        (one, [_failed(4, "runner-1@b", 3, "exit status -9", True), _sent("runner-0@c", 4, 4, attempt=2),
               *_ended("runner-0@c", 4, 4, attempt=2)]),
        _runner("runner-1@b", 5, "vb"),
        ("hosts", [ev.HostLost(host="b", epoch=1, reason=BROKE)]),
        _lost("runner-0@b", 2, lost), _lost("runner-1@b", 5, lost),
        (one, [_failed(2, "runner-0@b", 2, lost, False), _failed(3, "runner-0@b", 2, lost, False),
               _sent("runner-0@c", 4, 2, attempt=2), *_ended("runner-0@c", 4, 2, attempt=2)]),
        ("hosts", [_joined("b", 2), _joined("d")]),
        _runner("runner-0@b", 6, "vb"), _runner("runner-0@d", 7, "vd"),
        (one, [_sent("runner-0@b", 6, 3, 7, attempt=2), *_ended("runner-0@b", 6, 3, attempt=2),
               _sent("runner-0@d", 7, 8, 9), *_ended("runner-0@d", 7, 8)]),
        ("hosts", [ev.HostDraining(host="c", epoch=1, reason="SIGTERM")]),
        ("runner/runner-0@c", [ev.RunnerRetired(runner="runner-0@c", incarnation=4)]),
        ("hosts", [ev.HostLeft(host="c", epoch=1, reason="SIGTERM"),
                   ev.HostDraining(host="d", epoch=1, reason="its disk is replaced")]),
    ]


def write_several_hosts(path: Path) -> str:
    write(path, several_hosts())
    return str(path)
