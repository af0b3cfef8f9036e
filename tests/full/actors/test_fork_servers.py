"""Workers are forked from templates that imported the workflow's module, whatever that module does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trinity_es.actors.base import process_start_time
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers import fork_servers as worker_templates
from trinity_es.actors.rollout.workers.fork_servers import Child
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workers.protocol import MOST
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.actors.system_key import KEY_VARIABLE
from trinity_es.events.errors import StartupError
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine, wait_until

Module = Callable[..., str]
_numbers = itertools.count()

WORKFLOW = """
import os, random, time
import numpy as np
from trinity_es import Experience, Workflow

with open({note!r}, "a") as f:
    f.write(str(os.getpid()) + "\\n")
RUNNER = {runner}
{at_import}

class W(Workflow):
    def run(self):
        metrics = {{}}
        {in_run}
        time.sleep({seconds})
        return [Experience(tokens=[1, 2], prompt_length=1, reward=0.5, metrics={{"pid": os.getpid(), **metrics}})]
"""


def kind(process: psutil.Process) -> str:
    """`worker` or `worker-template`; empty where it is gone."""
    try:
        return process.name()
    except psutil.Error:
        return ""


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(8)
    yield pool
    family = [p for p in psutil.Process().children(recursive=True) if kind(p).startswith("worker")]
    await pool.close()
    assert [p for p in family if process_start_time(p.pid) is not None] == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Write a module with a workflow, which notes who imports it; its name and the workflow's."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(at_import: str = "", in_run: str = "", seconds: float = 0.0) -> str:
        name = f"written_{os.getpid()}_{next(_numbers)}"
        note = str(tmp_path / f"{name}.note")
        text = WORKFLOW.format(note=note, runner=os.getpid(), at_import=at_import, in_run=in_run, seconds=seconds)
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:W"

    return write


def imports(tmp_path: Path, workflow: str) -> list[int]:
    note = tmp_path / f"{workflow.removesuffix(':W')}.note"
    return [int(line) for line in note.read_text().split()]


async def played(workflows: WorkflowRunner, workflow: str, runs: int = 1) -> UnitResult:
    return await workflows.execute(Task(workflow=workflow, task_id=4), 12, range(runs))


def runner(pool: WorkerPool, **options: Any) -> WorkflowRunner:
    return WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), workers=pool, **options)


def first_template(pool: WorkerPool) -> int:
    process = pool.templates._process
    return process.pid


async def test_a_module_is_imported_once_for_all_its_workers_and_they_come_as_they_are_needed(
    pool: WorkerPool, module: Module, tmp_path: Path
) -> None:
    workflows, workflow = runner(pool), module(seconds=0.3)
    assert len((await played(workflows, workflow, 2)).results) == 2
    assert len(pool.pids()) == 2
    done = await played(workflows, workflow, 8)
    assert len({r.metrics["pid"] for r in done.results}) == 8
    template, here = imports(tmp_path, workflow)
    assert here == os.getpid()
    assert {psutil.Process(pid).ppid() for pid in pool.pids()} == {template}
    assert {os.getpgid(pid) for pid in [template, *pool.pids()]} == {os.getpgid(0)}


async def test_a_warmed_pool_has_imported_everything_before_the_first_run(module: Module, tmp_path: Path) -> None:
    workflow = module("import sys\nTHERE = 'wave' in sys.modules", in_run="metrics['there'] = float(THERE)")
    pool = WorkerPool(8)
    try:
        await pool.warm(["no_such_module:W", "wave:Wave_read", workflow])
        [template] = imports(tmp_path, workflow)
        assert pool.pids() == []
        [result] = (await played(runner(pool), workflow)).results
        assert result.metrics["there"] == 1.0
        assert imports(tmp_path, workflow) == [template, os.getpid()]
    finally:
        await pool.close()


async def test_a_killed_worker_is_replaced_and_is_no_zombie(pool: WorkerPool, module: Module, tmp_path: Path) -> None:
    workflows, workflow = runner(pool), module()
    [first] = (await played(workflows, workflow)).results
    pid = int(first.metrics["pid"])
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: process_start_time(pid) is None, "its end")
    [second] = (await played(workflows, workflow)).results
    assert second.metrics["pid"] != pid
    await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(pid), "it to be reaped")
    assert len(imports(tmp_path, workflow)) == 2


async def test_a_run_whose_worker_ends_before_it_begins_is_played_by_another(pool: WorkerPool, module: Module) -> None:
    workflows, workflow = runner(pool), module()
    [first] = (await played(workflows, workflow)).results
    pid = int(first.metrics["pid"])
    os.kill(pid, signal.SIGSTOP)
    given = asyncio.create_task(played(workflows, workflow))
    await asyncio.sleep(0.2)
    assert not given.done()
    os.kill(pid, signal.SIGKILL)
    done = await given
    assert not done.failures
    assert done.results[0].metrics["pid"] != pid


async def test_what_a_template_and_an_import_take_is_not_the_attempt_s_time(pool: WorkerPool, module: Module) -> None:
    done = await played(runner(pool, timeout=1.0), module("time.sleep(1.5 if os.getpid() != RUNNER else 0)"), 4)
    assert len(done.results) == 4, done.failures
    assert done.seconds < 1.4


@pytest.mark.parametrize(("at_import", "kind", "says"), [
    ("if os.getpid() != RUNNER: os._exit(3)", "workflow", "exit status 3"),
    ("import ctypes\nif os.getpid() != RUNNER: ctypes.string_at(0)", "workflow", "SIGSEGV"),
    ("raise SystemExit(4)", "data", "SystemExit: 4"),
    ("raise RuntimeError('no')", "data", "RuntimeError: no"),
    ("raise KeyboardInterrupt", "workflow", "exit status 1"),
    ("time.sleep(600)", "workflow", "took more than 3 s"),
])
async def test_a_module_whose_import_ends_or_hangs_its_process_fails_its_unit_only(
    pool: WorkerPool, module: Module, monkeypatch: pytest.MonkeyPatch, at_import: str, kind: str, says: str
) -> None:
    workflows, good = runner(pool), module()
    await played(workflows, good)
    template = first_template(pool)
    monkeypatch.setattr(worker_templates, "START_SECONDS", 3.0)
    bad, fine = await asyncio.gather(played(workflows, module(at_import)), played(workflows, good))
    assert [f[1] for f in bad.failures] == [kind], bad.failures
    assert says in bad.failures[0][2]
    assert fine.results
    assert (await played(workflows, module())).results
    assert first_template(pool) == template


@pytest.mark.parametrize("at_import", [
    "import threading\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "import socket\nS = socket.socketpair()",
])
async def test_a_module_that_leaves_what_no_fork_takes_along_is_imported_by_each_worker(
    pool: WorkerPool, module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, at_import: str
) -> None:
    workflow = module(f"if os.getpid() != RUNNER:\n  {at_import.replace(chr(10), chr(10) + '  ')}", seconds=0.3)
    workflows = runner(pool)
    with caplog.at_level(logging.WARNING):
        done = await played(workflows, workflow, 2)
        assert len(done.results) == 2, done.failures
        await played(workflows, workflow, 3)
    tried, here, *others = imports(tmp_path, workflow)
    assert here == os.getpid()
    assert sorted(others) == pool.pids()
    assert tried not in pool.pids()
    assert len([r for r in caplog.records if "when it was imported" in r.message]) == 1


async def test_workers_draw_different_numbers(pool: WorkerPool, module: Module) -> None:
    draws = 'metrics = {"a": random.random(), "b": float(np.random.rand()), "c": float(OWN.random()), '
    draws += '"d": float(SEEDED.random())}'
    workflow = module("OWN = np.random.default_rng()\nSEEDED = np.random.default_rng(7)", draws, 0.3)
    done = await played(runner(pool), workflow, 4)
    drawn = {key: len({r.metrics[key] for r in done.results}) for key in "abcd"}
    assert drawn == {"a": 4, "b": 4, "c": 4, "d": 1}


async def test_a_dead_template_is_replaced_and_blames_no_run(pool: WorkerPool, module: Module, tmp_path: Path) -> None:
    go = tmp_path / "begun"
    in_run = f"open({str(go)!r}, 'a').close(); time.sleep(0 if os.path.exists({str(go)!r} + '2') else 60)"
    workflow = module(in_run=in_run)
    workflows = runner(pool)
    for which in ("first", "module's"):
        go.unlink(missing_ok=True)
        running = asyncio.create_task(played(workflows, workflow))
        await asyncio.to_thread(wait_until, go.exists, "the workflow to run")
        [worker] = pool.pids()
        os.kill(first_template(pool) if which == "first" else psutil.Process(worker).ppid(), signal.SIGKILL)
        [(_, kind, message)] = (await running).failures
        assert (kind, "the process that forked it ended" in message) == ("infra", True), message
        await asyncio.to_thread(wait_until, lambda pid=worker: process_start_time(pid) is None, "the end of the worker")
    (tmp_path / "begun2").touch()
    assert (await played(workflows, workflow)).results


async def test_a_fork_that_fails_is_infrastructure() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template, child = worker_templates._Template(ours, Child()), Child()

    def answer() -> None:
        socket.recv_fds(theirs, MOST, 1)
        theirs.send(worker_templates.note("failed", 1, "BlockingIOError: [Errno 11] Resource temporarily unavailable"))

    answering = asyncio.create_task(asyncio.to_thread(answer))
    with pytest.raises(StartupError, match="Resource temporarily unavailable"):
        await template.fork(child, theirs, "work")
    await answering
    template.close()
    theirs.close()


async def test_workers_inherit_nothing_of_us(pool: WorkerPool, module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 40)
    held = socket.socket()
    os.set_inheritable(held.fileno(), True)
    [done] = (await played(runner(pool), module(in_run=(
        f"metrics = {{'key': float({KEY_VARIABLE!r} in os.environ), 'sockets': float(sum("
        "os.readlink('/proc/self/fd/' + n).startswith('socket:') for n in os.listdir('/proc/self/fd') "
        "if os.path.islink('/proc/self/fd/' + n)))}")))).results
    held.close()
    assert done.metrics["key"] == 0.0
    assert done.metrics["sockets"] == 1.0, "its own end of the pipe to its runner"


async def test_cancelling_while_a_worker_comes_up_leaves_none(pool: WorkerPool, module: Module) -> None:
    workflows, workflow = runner(pool), module()
    await played(workflows, workflow)
    tasks = [asyncio.create_task(played(workflows, workflow, 6)) for _ in range(4)]
    for task in tasks:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    known = psutil.Process().children(recursive=True)
    await asyncio.to_thread(
        wait_until,
        lambda: {p.pid for p in known if kind(p) == "worker"} <= set(pool.pids()),
        "no other worker",
    )
    assert (await played(workflows, workflow, 8)).results
